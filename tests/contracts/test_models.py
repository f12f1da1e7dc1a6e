"""Contracts of models and of the patch engine over one model per family, each also run on a broken member."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from notelens.cache.kv import KVCache
from notelens.errors import UnsupportedModelError
from notelens.intervene.engine import Reader, Site, SwapEffects, swap_effects
from notelens.intervene.kernel import Batch
from notelens.intervene.patch import hook_isolated_swap
from notelens.models import FAMILIES
from notelens.models.base import Prefill
from tests.contracts import models as contract
from tests.oracle.swap import loop_isolated_swap
from tests.tiny import new_tokenizer, wrapped

READERS = (1, 4)


def ids_of(model: Any) -> tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]]:
    recipient, donors = contract.contract_ids(model.name)
    return recipient, donors, contract.contract_answers(model.name)


def test_every_family_is_under_contract() -> None:
    assert {kind for kind, _ in contract.RANDOM.values()} == set(FAMILIES.names())


# --- every member -----------------------------------------------------------------------------------------------------


def test_cached_decode_equals_full_forward(any_model: Any) -> None:
    assert contract.decode_problems(any_model, ids_of(any_model)[0]) == []


@pytest.mark.parametrize("n_reader", READERS)
def test_engine_equals_the_slow_loop(any_model: Any, n_reader: int) -> None:
    recipient, donors, answers = ids_of(any_model)
    assert contract.swap_problems(any_model, recipient, donors, answers, n_reader=n_reader) == []


@pytest.mark.parametrize("n_reader", READERS)
def test_in_forward_swap_equals_a_patched_forward(any_model: Any, n_reader: int) -> None:
    recipient, donors, answers = ids_of(any_model)
    assert contract.in_forward_problems(any_model, recipient, donors, answers, n_reader=n_reader) == []


def test_several_readers_are_several_calls(any_model: Any) -> None:
    recipient, donors, answers = ids_of(any_model)
    caches = [any_model.prefill(ids).cache for ids in (recipient, *donors)]
    readers = [Reader.last(caches[0], answers), Reader.last(caches[0], answers[::-1], 3), Reader(9, (4, 5), answers)]
    some = [Site((p,), layers=band) for p in (3, 6, 8) for band in (None, (1, 2))]
    mixed = [replace(s, reader=r) for s in some for r in range(3)]
    for mode in ("isolated", "in_forward"):
        together = swap_effects(any_model, caches[0], caches[1:], mixed, readers, mode=mode)
        for r, reader in enumerate(readers):
            alone = swap_effects(any_model, caches[0], caches[1:], some, reader, mode=mode)
            assert torch.equal(together.baselines[r], alone.baseline)
            assert float((together.logits[r::3] - alone.logits).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", contract.SLIDING)
def test_engine_equals_the_slow_loop_far_beyond_the_window(name: str) -> None:
    model, n = contract.note_model(name), 6 * contract.WINDOW
    for n_reader in (1, contract.WINDOW + 3):
        end = n - n_reader
        recipient, donor = contract.random_ids(n), contract.random_ids(n, changed=[1, end - 9, end - 3])
        sites = [Site((p,)) for p in range(0, end, 3)] + [Site(tuple(range(end)))]
        found = contract.swap_problems(model, recipient, [donor], contract.ANSWERS, sites=sites, n_reader=n_reader)
        assert found == []


def test_rows_outside_every_window_do_not_count() -> None:
    """All layers of the Mistral config slide: a reader at n sees rows back to n - 7 in each layer, and no other."""
    model = contract.note_model("mistral")
    recipient, donor = contract.random_ids(), contract.random_ids(changed=range(1, contract.N_TOKENS - 1))
    caches = [model.prefill(ids).cache for ids in (recipient, donor)]
    last = contract.N_TOKENS - 1
    sites = [Site((p,)) for p in range(1, last)]
    effects = swap_effects(model, caches[0], caches[1:], sites, Reader.last(caches[0], contract.ANSWERS))
    moved = (effects.logits - effects.baseline).abs().amax(-1)
    seen = torch.tensor([last - s.positions[0] < contract.WINDOW for s in sites])
    assert float(moved[~seen].max()) <= 1e-6 and float(moved[seen].min()) > 1e-4


def test_equal_rows_are_nothing_bit_for_bit(any_model: Any) -> None:
    recipient, _, answers = ids_of(any_model)
    assert contract.noop_problems(any_model, recipient, answers) == []


def test_nothing_is_left_behind(any_model: Any) -> None:
    recipient, donors, _ = ids_of(any_model)
    assert contract.side_effect_problems(any_model, recipient, donors[0]) == []


def test_bridge_equals_plain_forward_on_the_same_tensors(any_model: Any) -> None:
    assert contract.bridge_problems(any_model, ids_of(any_model)[0]) == []


def test_chunks_do_not_change_results(any_model: Any) -> None:
    recipient, donors, answers = ids_of(any_model)
    caches = [any_model.prefill(ids).cache for ids in (recipient, *donors)]
    sites = contract.contract_sites(len(recipient), any_model.geometry.n_layers, 2, 1)
    reader = Reader.last(caches[0], answers)
    whole = swap_effects(any_model, caches[0], caches[1:], sites, reader)
    for budget in (1, 20_000, 200_000):
        parts = swap_effects(any_model, caches[0], caches[1:], sites, reader, budget_bytes=budget)
        assert float((parts.logits - whole.logits).abs().max()) <= 1e-5
        assert parts.n_readers == whole.n_readers


def test_hooks_reach_the_same_swap(any_model: Any) -> None:
    recipient, donors, answers = ids_of(any_model)
    n, n_layers = len(recipient), any_model.geometry.n_layers
    caches = [any_model.prefill(ids).cache for ids in (recipient, donors[0])]
    cases: list[tuple[Sequence[int], tuple[int, int] | None]] = [
        ((3,), None),
        ((n - 2,), None),
        (range(3, n - 1), None),
        ((n - 2, n - 4), (1, 2)),
        (range(n - 1), (0, n_layers - 1)),
    ]
    sites = [Site(tuple(p), layers=band) for p, band in cases]
    effects = swap_effects(any_model, caches[0], caches[1:], sites, Reader.last(caches[0], answers))
    for (positions, band), logits in zip(cases, effects.logits, strict=True):
        hooked = hook_isolated_swap(any_model, recipient, donors[0], positions, answers, layers=band)
        assert float((hooked - logits).abs().max()) <= contract.SWAP_TOLERANCE, (positions, band)
    assert float((effects.logits - effects.baseline).abs().max()) > 1e-2


@pytest.mark.parametrize("name", contract.RANDOM)
def test_half_precision_stays_finite_and_close(name: str) -> None:
    """bfloat16 keeps 8 bits: logits of size 5 are right to about 0.2 after four layers; nothing overflows.

    A mixture of experts may route a token elsewhere, which moves logits by whole units: there only finiteness is asked.
    """
    exact = contract.note_model(name)
    model = wrapped(contract.random_hf(name, dtype=torch.bfloat16), name, gate=False)
    recipient, donors = contract.contract_ids(name)
    sites = [Site((p,)) for p in range(3, len(recipient) - 1)] + [Site(tuple(range(3, len(recipient) - 1)))]
    found = []
    for m in (exact, model):
        caches = [m.prefill(ids).cache for ids in (recipient, donors[0])]
        found.append(swap_effects(m, caches[0], caches[1:], sites, Reader.last(caches[0], contract.ANSWERS)))
    assert model.prefill(recipient).cache.dtype == torch.bfloat16
    assert bool(torch.isfinite(found[1].logits).all())
    if name not in contract.MIXTURES:
        scale = max(1.0, float(found[0].logits.abs().max()))
        assert float((found[0].logits - found[1].logits).abs().max()) <= 0.1 * scale
        slow = loop_isolated_swap(model.hf, recipient, donors[0], sites[-1].positions, contract.ANSWERS)
        assert float((found[1].logits[-1] - slow).abs().max()) <= 0.05 * scale


@pytest.mark.parametrize("name", ["tiny", "llama", "mistral"])
def test_both_kernels_give_the_same_numbers(name: str) -> None:
    from tests.tiny import tiny_hf

    build = tiny_hf if name == "tiny" else lambda: contract.random_hf(name)
    recipient, donors = contract.contract_ids(name)
    answers = contract.contract_answers(name)
    found = []
    for attention in ("sdpa", "eager"):
        model = wrapped(build(), name, gate=False, attention=attention)
        assert model.attention_kernel == attention
        caches = [model.prefill(ids).cache for ids in (recipient, donors[0])]
        sites = [Site((p,)) for p in range(len(recipient) - 1)]
        found.append(swap_effects(model, caches[0], caches[1:], sites, Reader.last(caches[0], answers)).logits)
        assert model.attention_kernel == attention
    assert float((found[0] - found[1]).abs().max()) <= contract.SWAP_TOLERANCE


# --- broken members ---------------------------------------------------------------------------------------------------


class Wrapped:
    """A model that passes everything on to another one; subclasses break one thing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Forgetful(Wrapped):
    """Ignores the cache it is given."""

    def prefill(self, token_ids: Sequence[int], past: KVCache | None = None, **options: Any) -> Prefill:
        return self.inner.prefill(token_ids, **options)


class Restarting(Wrapped):
    """Lets every chunk start at the wrong position, one behind where it belongs."""

    def prefill(self, token_ids: Sequence[int], past: KVCache | None = None, **options: Any) -> Prefill:
        start = past.next_position + 1 if past is not None else None
        return self.inner.prefill(token_ids, past, start=start, **options)


class Writing(Wrapped):
    """Writes into the cache it runs from."""

    def prefill(self, token_ids: Sequence[int], past: KVCache | None = None, **options: Any) -> Prefill:
        out = self.inner.prefill(token_ids, past, **options)
        if past is not None:
            past.values[0][:, 0] += 1.0
        return out


class Unwindowed(Wrapped):
    """Claims that all layers see everything."""

    @property
    def geometry(self) -> Any:
        geometry = self.inner.geometry
        return replace(geometry, layers=tuple(replace(layer, window=None) for layer in geometry.layers))


@pytest.mark.parametrize("broken", [Forgetful, Restarting])
def test_the_decode_contract_notices(broken: type[Wrapped]) -> None:
    problems = contract.decode_problems(broken(contract.note_model("llama")), contract.random_ids())
    assert any("logits at" in p for p in problems)


def test_the_decode_contract_notices_rows_that_depend_on_the_cut() -> None:
    class Drifting(Wrapped):
        def prefill(self, token_ids: Sequence[int], past: KVCache | None = None, **options: Any) -> Prefill:
            out = self.inner.prefill(token_ids, past, **options)
            if past is None:
                return out
            values = [v + 1e-3 for v in out.cache.values]
            return replace(out, cache=out.cache.replace_tensors(out.cache.keys, values, history=()))

    problems = contract.decode_problems(Drifting(contract.note_model("llama")), contract.random_ids())
    assert any("rows differ" in p for p in problems)


def shifted_band(site: Site, n_layers: int) -> Site:
    low, high = site.layers or (0, n_layers)
    return replace(site, layers=(low - 1, high - 1)) if low > 0 else site


BROKEN_SITES = {
    "keys only": lambda s, _: replace(s, parts="k"),
    "values only": lambda s, _: replace(s, parts="v"),
    "all heads": lambda s, _: replace(s, kv_heads=None),
    "other head": lambda s, _: replace(s, kv_heads=None if s.kv_heads is None else (1 - s.kv_heads[0],)),
    "all layers": lambda s, _: replace(s, layers=None),
    "one layer off": shifted_band,
    "first donor only": lambda s, _: replace(s, donor=0),
    "next row": lambda s, _: replace(s, positions=tuple(max(p - 1, 0) for p in s.positions)),
    "one row only": lambda s, _: replace(s, positions=s.positions[:1]),
}


@pytest.mark.parametrize("fault", BROKEN_SITES)
def test_the_swap_contract_notices(fault: str) -> None:
    model = contract.note_model("llama")

    def broken(m: Any, recipient: KVCache, donors: Any, sites: Any, reader: Reader, **options: Any) -> SwapEffects:
        changed = [BROKEN_SITES[fault](s, m.geometry.n_layers) for s in sites]
        return swap_effects(m, recipient, donors, changed, reader, **options)

    recipient, donors = contract.contract_ids("llama")
    assert any("off by" in p for p in contract.swap_problems(model, recipient, donors, contract.ANSWERS, swap=broken))


@pytest.mark.parametrize("name", contract.SLIDING)
def test_the_swap_contract_notices_a_missing_window(name: str) -> None:
    recipient, donors = contract.contract_ids(name)
    problems = contract.swap_problems(Unwindowed(contract.note_model(name)), recipient, donors, contract.ANSWERS)
    assert any(p.startswith("baseline: off by") for p in problems)


def test_the_swap_contract_notices_a_wrong_head_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query heads 0, 1 read stored head 0 and 2, 3 read 1; reading 0, 1, 0, 1 instead must not pass."""
    real = Batch.attend

    def interleaved(self: Any, layer: int, query: Any, *rest: Any) -> Any:
        return real(self, layer, query[:, [0, 2, 1, 3]], *rest)[:, [0, 2, 1, 3]]

    monkeypatch.setattr(Batch, "attend", interleaved)
    recipient, donors = contract.contract_ids("llama")
    problems = contract.swap_problems(contract.note_model("llama"), recipient, donors, contract.ANSWERS)
    assert any(p.startswith("baseline: off by") for p in problems)


def test_the_swap_contract_notices_a_missing_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Batch.attend

    def uncapped(self: Any, layer: int, q: Any, k: Any, v: Any, scaling: Any, softcap: Any, sinks: Any) -> Any:
        assert softcap == 2.0
        return real(self, layer, q, k, v, scaling, None, sinks)

    monkeypatch.setattr(Batch, "attend", uncapped)
    recipient, donors = contract.contract_ids("gemma2")
    problems = contract.swap_problems(contract.note_model("gemma2"), recipient, donors, contract.ANSWERS)
    assert any(p.startswith("baseline: off by") for p in problems)


def test_the_swap_contract_notices_that_nothing_happens() -> None:
    def idle(m: Any, recipient: KVCache, donors: Any, sites: Any, reader: Reader, **options: Any) -> SwapEffects:
        return swap_effects(m, recipient, donors, [Site(())] * len(sites), reader, **options)

    recipient, donors = contract.contract_ids("llama")
    problems = contract.swap_problems(contract.note_model("llama"), recipient, donors, contract.ANSWERS, swap=idle)
    assert "no site had an effect" in problems


def test_the_in_forward_contract_notices_an_isolated_swap() -> None:
    def isolated(*args: Any, mode: str, **options: Any) -> SwapEffects:
        return swap_effects(*args, mode="isolated", **options)

    recipient, donors = contract.contract_ids("llama")
    model = contract.note_model("llama")
    problems = contract.in_forward_problems(model, recipient, donors, contract.ANSWERS, swap=isolated)
    assert len(problems) > 10 and problems[-1] == "mode is 'isolated'"


def test_the_noop_contract_notices_rounding() -> None:
    def rounding(*args: Any, **options: Any) -> SwapEffects:
        found = swap_effects(*args, **options)
        return replace(found, logits=found.logits + 1e-6 * torch.arange(len(found.logits))[:, None])

    model = contract.note_model("llama")
    problems = contract.noop_problems(model, contract.random_ids(), contract.ANSWERS, swap=rounding)
    assert len(problems) == 4


def test_the_side_effect_contract_notices() -> None:
    ids, donor = contract.random_ids(), contract.random_ids(changed=[3])
    model = wrapped(contract.random_hf("llama"), "llama", gate=False)
    assert contract.side_effect_problems(model, ids, donor) == []
    assert contract.side_effect_problems(Writing(model), ids, donor) == ["a stored cache was changed"]

    def careless(m: Any, *args: Any, **options: Any) -> SwapEffects:
        m.hf.set_attn_implementation("eager")
        m.hf.model.layers[0].register_forward_hook(lambda *_: None)
        m.hf.lm_head.weight.data += 1.0
        return swap_effects(m, *args, **options)

    problems = contract.side_effect_problems(model, ids, donor, swap=careless)
    assert problems == ["attention is 'eager', was 'sdpa'", "weights were changed", "1 hooks were left behind"]


def test_the_bridge_contract_notices_other_weights() -> None:
    class OtherBridge(Wrapped):
        @property
        def bridge(self) -> Any:
            return contract.note_model("llama3").bridge

    problems = contract.bridge_problems(OtherBridge(contract.note_model("llama")), contract.random_ids())
    assert problems[0].startswith("logits differ by") and problems[1].startswith("parameter ")


# --- what users rely on -----------------------------------------------------------------------------------------------


def test_the_bridge_leaves_the_tokenizer_alone() -> None:
    """TransformerLens changes the tokenizer it is given; it must be given one of its own."""
    tokenizer = new_tokenizer()
    from notelens.models.load import wrap

    before = (
        dict(tokenizer.init_kwargs),
        tokenizer.bos_token,
        tokenizer.pad_token,
        tokenizer.eos_token,
        len(tokenizer),
    )
    for _ in range(2):
        model = wrap(contract.random_hf("llama"), tokenizer, name="twice", gate=False)
        assert model.bridge is model.bridge
    after = (dict(tokenizer.init_kwargs), tokenizer.bos_token, tokenizer.pad_token, tokenizer.eos_token, len(tokenizer))
    assert after == before


@pytest.mark.parametrize("name", contract.RANDOM)
def test_the_bridge_knows_a_model_made_in_memory(name: str) -> None:
    """Configs made in memory do not name their architecture; the class of the model does."""
    hf = contract.random_hf(name)
    hf.config.architectures = None
    if name in ("qwen2_5_vl", "qwen3_vl") and importlib.util.find_spec("torchvision") is None:
        with pytest.raises(UnsupportedModelError, match="torchvision"):
            _ = wrapped(hf, name, gate=False).bridge
        return
    assert contract.bridge_problems(wrapped(hf, name, gate=False), contract.random_ids()) == []
