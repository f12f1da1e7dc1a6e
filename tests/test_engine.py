"""The patch engine: known values on the hand-set decoder, refusals with numbers in them, and clean-up."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from notelens.cache.kv import KVCache
from notelens.cache.ops import replace_rows, slice_rows
from notelens.errors import InputError, NonFiniteError, PatchError, UnsupportedModelError
from notelens.intervene.engine import Reader, Site, SwapEffects, swap_effects
from notelens.intervene.kernel import KERNEL
from notelens.intervene.patch import hook_isolated_swap
from tests.contracts import models as contract
from tests.tiny import READ_KV_HEAD, READ_LAYER, TOKEN_IDS, tiny_hf, tiny_margin, tiny_pair, wrapped

ANSWERS = (TOKEN_IDS["deny"], TOKEN_IDS["approve"])
PAIR = tiny_pair(n_notes=1)
NOTE = PAIR.old.tokens.index(";")
OLD = tiny_margin(1.0 if PAIR.old.answer == "approve" else -1.0)
NEW = tiny_margin(1.0 if PAIR.new.answer == "approve" else -1.0)


def caches(model: Any) -> tuple[KVCache, KVCache]:
    return model.prefill(PAIR.old.token_ids).cache, model.prefill(PAIR.new.token_ids).cache


def effects(model: Any, sites: Sequence[Site], reader: Reader | None = None) -> SwapEffects:
    recipient, donor = caches(model)
    return swap_effects(model, recipient, [donor], sites, reader or Reader.last(recipient, ANSWERS))


def margins(found: SwapEffects) -> list[float]:
    return (found.logits[:, 1] - found.logits[:, 0]).tolist()


# --- known values -----------------------------------------------------------------------------------------------------


def test_known_values_of_the_hand_set_decoder(tiny: Any) -> None:
    other = 1 - READ_KV_HEAD
    field, behind = PAIR.old.positions("field"), PAIR.old.after("field")
    expected = {
        Site(()): OLD,
        Site(field): OLD,
        Site(behind): NEW,
        Site((NOTE,)): NEW,
        Site(tuple(p for p in behind if p != NOTE)): OLD,
        Site((NOTE,), layers=(0, READ_LAYER)): OLD,
        Site((NOTE,), layers=(READ_LAYER, 2)): NEW,
        Site((NOTE,), parts="k"): OLD,
        Site((NOTE,), parts="v"): NEW,
        Site((NOTE,), kv_heads=(other,)): OLD,
        Site((NOTE,), kv_heads=(READ_KV_HEAD,)): NEW,
        Site((NOTE, NOTE)): NEW,
    }
    found = effects(tiny, list(expected))
    assert margins(found) == pytest.approx(list(expected.values()), abs=1e-4)
    assert float(found.baseline[1] - found.baseline[0]) == pytest.approx(OLD, abs=1e-4)
    assert found.mode == "isolated"
    assert found.logits.dtype == torch.float32 and found.baseline.dtype == torch.float32


def test_rows_that_carry_nothing_have_exactly_no_effect(tiny: Any) -> None:
    rows = [p for p in range(PAIR.old.decision) if p != NOTE]
    found = effects(tiny, [Site((p,)) for p in rows] + [Site(tuple(rows))])
    gap = (found.logits - found.baseline).abs().amax(-1)
    assert float(gap.max()) <= 1e-6


def test_order_of_answers_and_sites_is_kept(tiny: Any) -> None:
    sites = [Site((NOTE,), layers=(1, 2)), Site(()), Site((NOTE,)), Site((NOTE,), layers=(0, 1)), Site((3,))]
    recipient, _ = caches(tiny)
    a = effects(tiny, sites)
    b = effects(tiny, sites[::-1], Reader.last(recipient, ANSWERS[::-1]))
    torch.testing.assert_close(a.logits, b.logits.flip(0).flip(1), atol=1e-5, rtol=0)
    assert margins(a) == pytest.approx([NEW, OLD, NEW, OLD, OLD], abs=1e-4)


def test_sites_that_change_nothing_are_not_run(tiny: Any) -> None:
    before_field = tuple(range(PAIR.old.positions("field")[0]))
    found = effects(tiny, [Site(()), Site(before_field), Site((NOTE,), parts="k", layers=(0, 1)), Site((NOTE,))])
    assert found.n_readers == 2
    assert torch.equal(found.logits[:3], found.baseline.expand(3, -1))


def test_a_reader_in_front_of_the_end_sees_only_earlier_rows(tiny: Any) -> None:
    """The decision token run right behind the note: nothing after the note is needed."""
    recipient, donor = caches(tiny)
    reader = Reader(NOTE + 1, (TOKEN_IDS["?"],), ANSWERS)
    found = swap_effects(tiny, recipient, [donor], [Site((NOTE,)), Site((3,))], reader)
    assert margins(found) == pytest.approx([NEW, OLD], abs=1e-4)


def test_no_donor_and_no_site_gives_the_baseline(tiny: Any) -> None:
    recipient, _ = caches(tiny)
    found = swap_effects(tiny, recipient, [], [], Reader.last(recipient, ANSWERS))
    assert found.logits.shape == (0, 2) and found.n_readers == 1
    assert float(found.baseline[1] - found.baseline[0]) == pytest.approx(OLD, abs=1e-4)


def test_sweep_over_heads_has_one_entry_per_stored_head(any_model: Any) -> None:
    """Four query heads share two stored heads: a sweep has two entries, and query head 3 is refused before any run."""
    assert {layer.n_kv_heads for layer in any_model.geometry.layers} == {2}
    recipient, donors = contract.contract_ids(any_model.name)
    base, donor = any_model.prefill(recipient).cache, any_model.prefill(donors[0]).cache
    with pytest.raises(PatchError, match=r"key-value head 3 does not exist: the model stores 2 key-value heads"):
        swap_effects(any_model, base, [donor], [Site((3,), kv_heads=(0, 3))], Reader.last(base, (1, 2)))


# --- the other kind of swap -------------------------------------------------------------------------------------------


def test_a_field_row_is_nothing_isolated_and_everything_in_forward(tiny: Any) -> None:
    """The note is computed from the field row while the prompt runs, and never looks at it again."""
    recipient, donor = caches(tiny)
    sites = [Site(PAIR.old.positions("field")), Site((NOTE,)), Site((NOTE,), layers=(0, 1)), Site((NOTE + 1,))]
    reader = Reader.last(recipient, ANSWERS)
    isolated = swap_effects(tiny, recipient, [donor], sites, reader)
    in_forward = swap_effects(tiny, recipient, [donor], sites, reader, mode="in_forward")
    assert margins(isolated) == pytest.approx([OLD, NEW, OLD, OLD], abs=1e-4)
    assert margins(in_forward) == pytest.approx([NEW, NEW, OLD, OLD], abs=1e-4)
    assert (isolated.mode, in_forward.mode) == ("isolated", "in_forward")


def test_in_forward_rows_are_held_also_where_they_equal_the_recipients(tiny: Any) -> None:
    """The donor has another field and the recipient's note. Swapping both rows must hold the note, not recompute it."""
    recipient, fresh = caches(tiny)
    field = PAIR.old.positions("field")
    donor = replace_rows(recipient, fresh, field)
    reader = Reader.last(recipient, ANSWERS)
    sites = [Site(field), Site((*field, NOTE)), Site(tuple(range(N - 1)))]
    found = swap_effects(tiny, recipient, [donor], sites, reader, mode="in_forward")
    assert margins(found) == pytest.approx([NEW, OLD, OLD], abs=1e-4)


# --- refusals ---------------------------------------------------------------------------------------------------------

N = len(PAIR.old)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (Site((N - 1,)), rf"position {N - 1} is outside the rows that the reader sees \(0..{N - 2}\)"),
        (Site((2, N + 5)), rf"position {N + 5} is outside"),
        (Site((-1,)), r"position -1 is outside"),
        (Site((3,), layers=(1, 1)), r"layer band \[1, 1\) of 2 layers is empty or out of range"),
        (Site((3,), layers=(2, 1)), r"layer band \[2, 1\)"),
        (Site((3,), layers=(0, 3)), r"layer band \[0, 3\) of 2 layers"),
        (Site((3,), layers=(-1, 1)), r"layer band \[-1, 1\)"),
        (Site((3,), kv_heads=(2,)), r"key-value head 2 does not exist: the model stores 2"),
        (Site((3,), kv_heads=(-1,)), r"key-value head -1 does not exist"),
        (Site((3,), kv_heads=()), r"key-value head \(\) does not exist"),
        (Site((3,), donor=1), r"donor 1 of 1"),
        (Site((3,), donor=-1), r"donor -1 of 1"),
        (Site((3,), parts="keys"), r"parts 'keys'"),  # type: ignore[arg-type]  # what a typo looks like
        (Site((3,), parts=""), r"parts ''"),  # type: ignore[arg-type]  # the same
    ],
)
def test_sites_that_do_not_exist_are_refused(tiny: Any, site: Site, message: str) -> None:
    with pytest.raises(PatchError, match=message) as caught:
        effects(tiny, [Site((NOTE,)), site])
    assert isinstance(caught.value, InputError) and isinstance(caught.value, ValueError)
    assert tiny.attention_kernel == "sdpa"


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (Reader(N + 1, (1,), ANSWERS), rf"starts behind {N + 1} rows of a cache that has {N}"),
        (Reader(0, (1,), ANSWERS), rf"starts behind 0 rows of a cache that has {N}"),
        (Reader(5, (), ANSWERS), "at least one token"),
        (Reader(5, (1,), ()), "one answer id"),
    ],
)
def test_readers_that_do_not_fit_are_refused(tiny: Any, reader: Reader, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        effects(tiny, [], reader)


def test_sites_and_modes_that_do_not_fit_are_refused(tiny: Any) -> None:
    recipient, donor = caches(tiny)
    reader = Reader.last(recipient, ANSWERS)

    def refused(message: str, sites: Sequence[Site], readers: Any = reader, **options: Any) -> None:
        with pytest.raises(PatchError, match=message):
            swap_effects(tiny, recipient, [donor], sites, readers, **options)

    refused(r"reader 1 of 1", [Site((3,), reader=1)])
    refused(r"reader -1 of 1", [Site((3,), reader=-1)])
    refused(r"at least one reader", [], [])
    refused(r"the same number of answers", [], [reader, Reader(5, (1,), (1, 2, 3))])
    refused(r"unknown mode 'forward'; known: isolated, in_forward", [], mode="forward")
    refused(r"in-forward swaps replace whole rows", [Site((3,), parts="v")], mode="in_forward")
    refused(r"in-forward swaps replace whole rows", [Site((3,), kv_heads=(0,))], mode="in_forward")
    gap = replace(recipient, positions=recipient.positions + 3)
    with pytest.raises(PatchError, match="must hold every row from position 0"):
        swap_effects(tiny, gap, [], [], Reader(5, (1,), ANSWERS), mode="in_forward")


@pytest.mark.parametrize("n", [0, N, N + 3, -1])
def test_a_reader_longer_than_the_cache_is_refused(tiny: Any, n: int) -> None:
    with pytest.raises(PatchError, match=rf"reader of {n} tokens on a cache of {N} rows leaves nothing to read"):
        Reader.last(caches(tiny)[0], ANSWERS, n)


def test_donors_that_do_not_align_are_refused(tiny: Any) -> None:
    recipient, donor = caches(tiny)
    reader = Reader.last(recipient, ANSWERS)
    with pytest.raises(PatchError, match=rf"recipient has {N} rows, donor {N - 1}; .*equal token length"):
        swap_effects(tiny, recipient, [donor, slice_rows(donor, 0, N - 1)], [], reader)
    moved = replace(donor, positions=donor.positions + 1)
    with pytest.raises(PatchError, match="different positions"):
        swap_effects(tiny, recipient, [moved], [], reader)
    short = replace(donor, keys=donor.keys[:1], values=donor.values[:1])
    with pytest.raises(PatchError, match="recipient has 2 layers, donor 1"):
        swap_effects(tiny, recipient, [short], [], reader)
    half = donor.replace_tensors([k.half() for k in donor.keys], [v.half() for v in donor.values], history=())
    with pytest.raises(PatchError, match=r"torch.float32 on cpu, donor torch.float16"):
        swap_effects(tiny, recipient, [half], [], reader)


def test_a_cache_of_another_model_is_refused(tiny: Any) -> None:
    foreign = contract.note_model("llama").prefill(PAIR.old.token_ids).cache
    with pytest.raises(PatchError, match="the cache has 3 layers, the model 2"):
        swap_effects(tiny, foreign, [], [], Reader.last(foreign, ANSWERS))


@pytest.mark.parametrize("where", ["recipient", "donor"])
def test_rows_that_are_not_finite_are_noticed(tiny: Any, where: str) -> None:
    recipient, donor = caches(tiny)
    values = [v.clone() for v in recipient.values]
    values[READ_LAYER][READ_KV_HEAD, NOTE, 0] = float("nan")
    bad = recipient.replace_tensors(recipient.keys, values, history=("poisoned",))
    base, other = (bad, donor) if where == "recipient" else (recipient, bad)
    with pytest.raises(NonFiniteError, match="not finite"):
        swap_effects(tiny, base, [other], [Site((NOTE,))], Reader.last(base, ANSWERS))
    assert tiny.attention_kernel == "sdpa"


def test_infinite_keys_are_noticed(tiny: Any) -> None:
    recipient, _ = caches(tiny)
    keys = [k.clone() for k in recipient.keys]
    keys[READ_LAYER][READ_KV_HEAD, NOTE, 2] = float("inf")
    bad = recipient.replace_tensors(keys, recipient.values, history=("poisoned",))
    with pytest.raises(NonFiniteError):
        swap_effects(tiny, recipient, [bad], [Site((NOTE,))], Reader.last(recipient, ANSWERS))


# --- clean-up ---------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised in the middle of a run."""


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("layer", [0, 1])
def test_attention_and_hooks_are_restored_after_an_exception(kernel: str, layer: int) -> None:
    model = wrapped(tiny_hf(), "tiny", gate=False, attention=kernel)
    before = effects(model, [Site((NOTE,)), Site((NOTE,), layers=(1, 2))])

    def stop(*_: Any) -> None:
        raise Stop

    handle = model.hf.model.layers[layer].mlp.register_forward_pre_hook(stop)
    for sites in ([Site((NOTE,))], [Site((NOTE,), layers=(1, 2))]):
        recipient = before_caches = None
        with pytest.raises(Stop):
            handle.remove()
            recipient, donor = before_caches = caches(model)
            handle = model.hf.model.layers[layer].mlp.register_forward_pre_hook(stop)
            swap_effects(model, recipient, [donor], sites, Reader.last(recipient, ANSWERS))
        assert before_caches is not None
        assert model.attention_kernel == kernel
    handle.remove()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.hf.modules())
    after = effects(model, [Site((NOTE,)), Site((NOTE,), layers=(1, 2))])
    assert torch.equal(before.logits, after.logits)


def test_the_kernel_refuses_to_run_outside_the_engine() -> None:
    hf = tiny_hf()
    hf.set_attn_implementation(KERNEL)
    with pytest.raises(PatchError, match="only runs inside the patch engine"):
        hf(torch.tensor([PAIR.old.token_ids]))


def test_a_model_whose_attention_bypasses_the_interface_is_refused() -> None:
    """A model that calls its own attention would be measured without any patch; the engine counts its calls."""
    hf = tiny_hf()
    hf.set_attn_implementation("eager")
    attention = hf.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)  # stays eager whatever the model is set to
    model = wrapped(hf, "bypass", gate=False, attention="eager")
    with pytest.raises(UnsupportedModelError, match=r"called \[1, 0\] times per layer instead of once"):
        effects(model, [Site((NOTE,))])
    assert model.attention_kernel == "eager"


# --- the same swap through hooks --------------------------------------------------------------------------------------


def test_hooked_swap_has_the_known_values(tiny: Any) -> None:
    old, new = PAIR.old.token_ids, PAIR.new.token_ids

    def hooked(positions: Sequence[int], layers: tuple[int, int] | None = None) -> float:
        logits = hook_isolated_swap(tiny, old, new, positions, ANSWERS, layers=layers)
        return float(logits[1] - logits[0])

    assert hooked(PAIR.old.positions("field")) == pytest.approx(OLD, abs=1e-4)
    assert hooked(PAIR.old.after("field")) == pytest.approx(NEW, abs=1e-4)
    assert hooked([NOTE], (1, 2)) == pytest.approx(NEW, abs=1e-4)
    assert hooked([NOTE], (0, 1)) == pytest.approx(OLD, abs=1e-4)


@pytest.mark.parametrize(
    ("positions", "layers", "message"),
    [
        ([N - 1], None, rf"position {N - 1} is outside"),
        ([-1], None, "position -1 is outside"),
        ([], None, r"position \(none\)"),
        ([3], (1, 1), r"layer band \[1, 1\)"),
        ([3], (0, 3), r"layer band \[0, 3\) of 2 layers"),
    ],
)
def test_hooked_swap_refuses_what_does_not_exist(tiny: Any, positions: Any, layers: Any, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        hook_isolated_swap(tiny, PAIR.old.token_ids, PAIR.new.token_ids, positions, ANSWERS, layers=layers)


def test_hooked_swap_refuses_unequal_lengths(tiny: Any) -> None:
    with pytest.raises(PatchError, match=rf"recipient has {N} tokens, donor {N - 1}"):
        hook_isolated_swap(tiny, PAIR.old.token_ids, PAIR.new.token_ids[1:], [3], ANSWERS)


def test_hooks_come_off_after_a_hooked_swap(tiny: Any) -> None:
    ids = torch.tensor([PAIR.old.token_ids])
    with torch.no_grad():
        before = tiny.bridge(ids)
        hook_isolated_swap(tiny, PAIR.old.token_ids, PAIR.new.token_ids, [NOTE], ANSWERS)
        assert torch.equal(tiny.bridge(ids), before)
