"""Caches: invariants at construction, pure operations, the bridge to transformers, running without changing them."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from notelens.cache import KVCache
from notelens.cache.hf import ReadOnlyCache, empty_cache, from_transformers, to_transformers
from notelens.cache.ops import concat, equal_within, max_difference, replace_rows, select_rows, slice_rows
from notelens.errors import CacheError, NonFiniteError, PatchError, UnsupportedModelError
from tests.contracts import models as contract
from tests.tiny import TOKEN_IDS, ids_of, tiny_hf, tiny_pair, wrapped

N, LAYERS, HEADS, WIDTH = 6, 2, 2, 4


def make(seed: int = 0, n: int = N, *, start: int = 0) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (tuple(torch.randn(HEADS, n, WIDTH, generator=generator) for _ in range(LAYERS)) for _ in range(2))
    return KVCache(keys, values, torch.arange(start, start + n), tuple(range(10, 10 + n)))


# --- the value --------------------------------------------------------------------------------------------------------


def test_a_cache_is_a_value() -> None:
    cache = make()
    assert (len(cache), cache.n_layers, cache.exact, cache.next_position) == (N, LAYERS, True, N)
    assert cache.nbytes == LAYERS * 2 * HEADS * N * WIDTH * 4
    assert cache.digest() == make().digest() != make(1).digest()
    assert repr(cache) == f"KVCache({N} tokens, {LAYERS} layers, torch.float32, 0.0 MiB, exact)"
    with pytest.raises(FrozenInstanceError):
        cache.history = ("changed",)  # type: ignore[misc]  # that is the point


def test_the_digest_sees_every_part() -> None:
    cache = make()
    keys, values = list(cache.keys), list(cache.values)
    keys[1], values[0] = keys[1].clone(), values[0].clone()
    keys[1][1, 5, 3] += 1e-6
    values[0][0, 0, 0] += 1e-6
    others = [
        replace(cache, keys=tuple(keys)),
        replace(cache, values=tuple(values)),
        replace(cache, positions=cache.positions + 1),
        replace(cache, token_ids=(11, *cache.token_ids[1:])),
    ]
    assert len({c.digest() for c in (cache, *others)}) == 5


def test_rows_and_positions_are_two_numbers() -> None:
    """Three rows of twenty positions: the next token goes to position 20, slicing counts rows."""
    cache = replace(make(n=3), positions=torch.tensor([0, 7, 19]))
    assert (len(cache), cache.next_position) == (3, 20)
    assert slice_rows(cache, 1, 3).positions.tolist() == [7, 19]


def test_length_comes_from_ids_not_from_content() -> None:
    cache = make()
    zeroed = cache.replace_tensors([torch.zeros_like(k) for k in cache.keys], cache.values, history=("zeroed",))
    assert len(zeroed) == N and zeroed.next_position == N
    assert "approximate (zeroed)" in repr(zeroed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": ()}, "got 0 and 2"),
        ({"values": make().values[:1]}, "got 2 and 1"),
        ({"token_ids": (1, 2)}, r"2 token ids but positions \(6,\)"),
        ({"positions": torch.arange(N + 1)}, r"6 token ids but positions \(7,\)"),
        ({"positions": torch.arange(N, dtype=torch.int32)}, "torch.int32"),
        ({"positions": torch.tensor([0, 1, 1, 2, 3, 4])}, "strictly increase"),
        ({"positions": torch.arange(N).flip(0)}, "strictly increase"),
        ({"positions": torch.arange(-1, N - 1)}, "start at -1"),
        ({"keys": (make().keys[0], make(n=4).keys[1])}, r"layer 1: keys have shape \(2, 4, 4\); expected \[kv_head, 6"),
        ({"values": (make().values[0][None], make().values[1])}, r"layer 0: values have shape \(1, 2, 6, 4\)"),
        (
            {"keys": (make().keys[0], make().keys[1].double())},
            "layer 1: keys are torch.float64 on cpu, layer 0 is torch.float32",
        ),
        ({"values": (make().values[0][:1], make().values[1])}, "layer 0: 2 key heads but 1 value heads"),
        ({"keys": (make().keys[0].requires_grad_(), make().keys[1])}, "layer 0: keys carry gradients"),
    ],
)
def test_what_is_not_a_cache_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        replace(make(), **change)


def test_non_finite_rows_are_located() -> None:
    cache = make()
    assert cache.check_finite() is cache
    for name, value in (("keys", float("nan")), ("values", float("-inf"))):
        tensors = [t.clone() for t in getattr(cache, name)]
        tensors[1][0, 4, 2] = value
        with pytest.raises(NonFiniteError, match=rf"layer 1: {name} of row 4 are not finite"):
            replace(cache, **{name: tuple(tensors)}).check_finite()


# --- operations -------------------------------------------------------------------------------------------------------


def test_slices_keep_ids_and_positions() -> None:
    cache = make(start=3)
    part = slice_rows(cache, 2, 5)
    assert part.token_ids == (12, 13, 14) and part.positions.tolist() == [5, 6, 7]
    assert torch.equal(part.keys[1], cache.keys[1][:, 2:5]) and torch.equal(part.values[0], cache.values[0][:, 2:5])
    assert slice_rows(cache, 0, 4).exact and not part.exact and part.history == ("rows 2..5 of 6",)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 3), (4, 2), (-1, 3), (0, N + 1), (N, N)])
def test_empty_and_outside_slices_are_refused(start: int, stop: int) -> None:
    """No negative-index wrap and no silent truncation."""
    with pytest.raises(CacheError, match=rf"rows \[{start}, {stop}\) of a cache with 6 rows"):
        slice_rows(make(), start, stop)


@pytest.mark.parametrize("rows", [[0, 0], [2, 1], [-1], [N], [0, N + 3]])
def test_selecting_rows_that_are_not_ascending_is_refused(rows: list[int]) -> None:
    with pytest.raises(CacheError, match=r"must ascend within 0..5"):
        select_rows(make(), rows)


def test_selected_rows() -> None:
    cache = make()
    part = select_rows(cache, [0, 2, 5])
    assert part.token_ids == (10, 12, 15) and part.positions.tolist() == [0, 2, 5]
    assert torch.equal(part.values[1], cache.values[1][:, [0, 2, 5]])
    assert not part.exact and select_rows(cache, [0, 1, 2]).exact


def test_replaced_rows() -> None:
    base, donor = make(0), make(1)
    before = base.digest(), donor.digest()
    out = replace_rows(base, donor, [4, 1, 4], layers=(1, 2), kv_heads=[1], parts="v")
    expected = base.values[1].clone()
    expected[1, [1, 4]] = donor.values[1][1, [1, 4]]
    assert torch.equal(out.values[1], expected) and not torch.equal(out.values[1], base.values[1])
    assert all(torch.equal(a, b) for a, b in zip(out.keys, base.keys, strict=True)) and torch.equal(
        out.values[0], base.values[0]
    )
    assert not out.exact and out.history == ("rows 1..4 (2) from a donor",)
    assert (base.digest(), donor.digest()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": []}, "no rows"),
        ({"rows": [N]}, r"row 6 is outside the cache \(0..5\)"),
        ({"rows": [-1]}, "row -1 is outside"),
        ({"rows": [1], "layers": (1, 1)}, r"layer band \[1, 1\) of 2 layers"),
        ({"rows": [1], "layers": (0, 3)}, r"layer band \[0, 3\) of 2 layers"),
        ({"rows": [1], "kv_heads": [2]}, r"layer 0 has key-value heads 0..1, asked for \[2\]"),
    ],
)
def test_rows_that_do_not_exist_cannot_be_replaced(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        replace_rows(make(0), make(1), **options)


def test_caches_that_do_not_align_are_refused() -> None:
    with pytest.raises(PatchError, match="recipient has 6 rows, donor 5"):
        replace_rows(make(), make(n=5), [1])
    with pytest.raises(PatchError, match="different positions"):
        max_difference(make(), make(start=1))
    narrow = make()
    narrow = replace(narrow, keys=tuple(k[..., :2] for k in narrow.keys))
    with pytest.raises(PatchError, match="layer 0: recipient and donor rows differ in shape"):
        replace_rows(make(), narrow, [1])


def test_joined_caches() -> None:
    a, b = make(0, 4), make(1, 3, start=6)
    joined = concat(a, b, history=("spliced",))
    assert joined.positions.tolist() == [0, 1, 2, 3, 6, 7, 8] and joined.history == ("spliced",)
    assert torch.equal(joined.keys[1], torch.cat([a.keys[1], b.keys[1]], 1))
    with pytest.raises(CacheError, match="strictly increase"):
        concat(a, make(1, 3, start=3), history=())
    with pytest.raises(CacheError, match="caches of 2 and 1 layers"):
        concat(a, replace(b, keys=b.keys[:1], values=b.values[:1]), history=())


def test_differences() -> None:
    a = make()
    values = [v.clone() for v in a.values]
    values[1][0, 3, 1] += 0.25
    b = a.replace_tensors(a.keys, values, history=())
    assert max_difference(a, b) == pytest.approx(0.25) and max_difference(a, a) == 0.0
    assert equal_within(a, b, 0.3) and not equal_within(a, b, 0.2)
    assert not equal_within(a, replace(a, token_ids=(99, *a.token_ids[1:])), 1.0)


# --- transformers -----------------------------------------------------------------------------------------------------


def test_to_transformers_and_back() -> None:
    cache = make()
    for batch in (1, 3):
        store = to_transformers(cache, batch=batch)
        assert store.get_seq_length() == N and store.layers[0].keys.shape == (batch, HEADS, N, WIDTH)
        assert from_transformers(store, cache.token_ids, batch_index=batch - 1).digest() == cache.digest()


def test_the_transformers_cache_is_a_copy() -> None:
    cache = make()
    before = cache.digest()
    store = to_transformers(cache)
    store.layers[0].keys += 1.0
    store.update(torch.ones(1, HEADS, 1, WIDTH), torch.ones(1, HEADS, 1, WIDTH), 0)
    assert cache.digest() == before


def test_a_cache_read_from_transformers_does_not_change_with_it() -> None:
    """The store keeps growing when the model runs on; what was read before must not move."""
    store = to_transformers(make())
    read = from_transformers(store, make().token_ids)
    before = read.digest()
    for layer in range(LAYERS):
        store.update(torch.ones(1, HEADS, 1, WIDTH), torch.ones(1, HEADS, 1, WIDTH), layer)
    assert read.digest() == before


def test_a_cache_that_was_ignored_is_refused() -> None:
    with pytest.raises(CacheError, match="the cache is empty after 3 tokens: the model ignored it"):
        from_transformers(empty_cache(), (1, 2, 3))


def test_a_cache_that_dropped_rows_is_refused() -> None:
    hf = contract.random_hf("mistral")
    ids = contract.random_ids()
    store = DynamicCache(config=hf.config)
    with torch.no_grad():
        hf(torch.tensor([ids]), past_key_values=store)
    with pytest.raises(
        CacheError, match=r"layer 0 of the cache .* holds 7 rows for 20 tokens; pass a DynamicCache\(\)"
    ):
        from_transformers(store, ids)


def test_a_static_cache_is_read_up_to_what_it_holds() -> None:
    hf = tiny_hf()
    store = StaticCache(config=hf.config, max_cache_len=32)
    ids = tiny_pair().old.token_ids
    with torch.no_grad():
        hf(torch.tensor([ids]), past_key_values=store)
    found = from_transformers(store, ids)
    assert len(found) == len(ids) < 32 and found.exact


def test_a_quantised_cache_is_refused() -> None:
    class Quantised:
        keys = values = None

    store = DynamicCache()
    store.layers = [Quantised()]
    with pytest.raises(
        UnsupportedModelError, match="layer 0 of the cache is a Quantised without plain keys and values"
    ):
        from_transformers(store, (1,))


def test_the_read_only_cache_stores_nothing() -> None:
    cache = ReadOnlyCache(7)
    key, value = torch.ones(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    assert cache.update(key, value, 1) == (key, value)
    assert cache.get_seq_length() == 7 and cache.get_mask_sizes(3, 0) == (10, 0) and not cache.layers


# --- running from a cache ---------------------------------------------------------------------------------------------


def test_two_suffixes_from_one_stored_cache(any_model: Any) -> None:
    stored = any_model.prefill([3, 4, 5, 6, 7]).cache
    before = stored.digest()
    a, b = any_model.prefill([8, 9], stored), any_model.prefill([10, 11, 12], stored)
    assert len(stored) == 5 and stored.digest() == before
    for out, ids in ((a, (3, 4, 5, 6, 7, 8, 9)), (b, (3, 4, 5, 6, 7, 10, 11, 12))):
        whole = any_model.prefill(ids)
        assert equal_within(out.cache, whole.cache, contract.ROW_TOLERANCE) and out.cache.exact
        torch.testing.assert_close(out.hidden, whole.hidden, atol=2e-5, rtol=1e-5)


def test_later_runs_do_not_change_earlier_results(tiny: Any) -> None:
    first = tiny.prefill([3, 4, 5])
    digest, hidden = first.cache.digest(), first.hidden.clone()
    second = tiny.prefill([6], first.cache)
    tiny.prefill([7], second.cache)
    assert first.cache.digest() == digest and torch.equal(first.hidden, hidden)


def test_rows_are_detached_without_no_grad() -> None:
    hf = tiny_hf()
    hf.requires_grad_(True)
    model = wrapped(hf, "trainable", gate=False)
    with torch.enable_grad():
        out = model.prefill([3, 4, 5])
    assert not any(t.requires_grad for t in (*out.cache.keys, *out.cache.values, out.hidden))
    assert out.cache.replace_tensors([k.clone() for k in out.cache.keys], out.cache.values, history=()).exact


def test_an_erratum_at_once_or_one_by_one(any_model: Any) -> None:
    base = any_model.prefill(contract.random_ids(6)).cache
    at_once = any_model.prefill([4, 5, 6], base)
    past = base
    for token in (4, 5, 6):
        step = any_model.prefill([token], past)
        past = step.cache
    assert equal_within(past, at_once.cache, contract.ROW_TOLERANCE)
    torch.testing.assert_close(step.hidden, at_once.hidden, atol=2e-5, rtol=1e-5)


def test_positions_are_used_as_given(tiny: Any) -> None:
    base = tiny.prefill(ids_of(["start", "w1", "w2"])).cache
    near, far = tiny.prefill([TOKEN_IDS["w3"]], base), tiny.prefill([TOKEN_IDS["w3"]], base, start=40)
    assert far.cache.positions.tolist() == [0, 1, 2, 40] and far.cache.next_position == 41
    assert not torch.allclose(near.cache.keys[0][:, 3], far.cache.keys[0][:, 3], atol=1e-2)
    assert near.cache.exact and far.cache.history == ("tokens at 40.. behind a gap of 37",)
    moved = tiny.prefill(ids_of(["start", "w1"]), start=5)
    assert moved.cache.positions.tolist() == [5, 6] and not moved.cache.exact


def test_what_cannot_be_run_is_refused(tiny: Any) -> None:
    base = tiny.prefill([3, 4, 5]).cache
    with pytest.raises(CacheError, match="step back one token"):
        tiny.prefill([], base)
    with pytest.raises(CacheError, match=r"position 2 would stand before the cached rows \(up to 2\)"):
        tiny.prefill([6], base, start=2)
    with pytest.raises(CacheError, match="513 tokens exceed the 512 positions of tiny"):
        tiny.prefill([3] * 513)
    with pytest.raises(CacheError, match="513 tokens exceed the 512"):
        tiny.prefill([3], base, start=512)
    with pytest.raises(CacheError, match="the cache has 3 layers, tiny has 2"):
        tiny.prefill([3], contract.note_model("llama").prefill([3, 4]).cache)


def test_overflow_is_noticed() -> None:
    hf = tiny_hf()
    hf.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    model = wrapped(hf, "poisoned", gate=False)
    with pytest.raises(NonFiniteError, match=r"poisoned: the output behind 3 tokens is not finite \(torch.float32\)"):
        model.prefill([3, 4, 5])
