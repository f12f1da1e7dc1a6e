"""Rows run again in the stale cache: known values on the hand-set decoder, equality with a row-by-row loop, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from notelens.cache.kv import KVCache
from notelens.errors import NonFiniteError, PatchError
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.intervene.recompute import recompute_effects
from tests.contracts import models as contract
from tests.oracle.recompute import loop_recompute
from tests.oracle.swap import full_logits, prefill_rows
from tests.tiny import TOKEN_IDS, broken_direct, tiny_margin, tiny_pair

ANSWERS = (TOKEN_IDS["deny"], TOKEN_IDS["approve"])
PAIR = tiny_pair(n_notes=1)
N = len(PAIR.old)
NOTE = PAIR.old.tokens.index(";")
FIELD = PAIR.old.positions("field")
OLD, NEW = (tiny_margin(1.0 if p.answer == "approve" else -1.0) for p in (PAIR.old, PAIR.new))


def margins(logits: torch.Tensor) -> list[float]:
    return (logits[:, 1] - logits[:, 0]).tolist()


def stale(model: Any) -> KVCache:
    return model.prefill(PAIR.old.token_ids).cache


# --- known values -----------------------------------------------------------------------------------------------------


def test_known_values_of_the_hand_set_decoder(tiny: Any) -> None:
    """The field row alone is nothing; the note, run behind the new field, is everything; other rows are nothing."""
    others = [p for p in range(N - 1) if p not in (NOTE, *FIELD)]
    sites = [(), (NOTE,), tuple(others), (*others, NOTE), *((p,) for p in others)]
    found = recompute_effects(tiny, stale(tiny), PAIR.new.token_ids, sites, ANSWERS, edited=FIELD)
    expected = [OLD, NEW, OLD, NEW, *[OLD] * len(others)]
    assert margins(found) == pytest.approx(expected, abs=1e-4)
    assert found.dtype == torch.float32


def test_a_decision_that_reads_the_field_needs_no_note() -> None:
    model = broken_direct()
    found = recompute_effects(model, stale(model), PAIR.new.token_ids, [(), (NOTE,)], ANSWERS, edited=FIELD)
    fresh = full_logits(model.hf, PAIR.new.token_ids, ANSWERS)
    assert torch.allclose(found, fresh.expand(2, -1), atol=1e-5)


def test_recompute_reads_what_the_stale_cache_holds_and_a_transplant_does_not(tiny: Any) -> None:
    """The trigger's row has lost its value. A note copied from a fresh prefill is right all the same; a note run again in
    this cache concludes nothing, until the trigger's row is run again too."""
    fresh = tiny.prefill(PAIR.new.token_ids).cache
    trigger = PAIR.old.positions("trigger")
    values = [v.clone() for v in stale(tiny).values]
    values[0][:, list(trigger)] = 0.0
    damaged = stale(tiny).replace_tensors(stale(tiny).keys, values, history=("trigger lost",))
    sites = [(NOTE,), (*trigger, NOTE), trigger]
    again = recompute_effects(tiny, damaged, PAIR.new.token_ids, sites, ANSWERS, edited=FIELD)
    assert margins(again) == pytest.approx([tiny_margin(0.0), NEW, OLD], abs=1e-4)
    copied = swap_effects(tiny, damaged, [fresh], [Site((NOTE,))], Reader.last(damaged, ANSWERS))
    assert margins(copied.logits) == pytest.approx([NEW], abs=1e-4)


def test_rows_that_did_not_change_give_the_stale_answer(any_model: Any) -> None:
    """The same prompt, nothing edited: whatever is run again, the answer stays."""
    ids, _ = contract.contract_ids(any_model.name)
    answers = contract.contract_answers(any_model.name)
    cache = any_model.prefill(ids).cache
    found = recompute_effects(any_model, cache, ids, [(), (3, 9), tuple(range(len(ids) - 1))], answers, edited=())
    plain = full_logits(any_model.hf, ids, answers)
    assert float((found - plain).abs().max()) <= contract.ROW_TOLERANCE * 5


# --- against the slow loop --------------------------------------------------------------------------------------------


def test_single_rows_and_sets_equal_the_loop(any_model: Any) -> None:
    old, donors = contract.contract_ids(any_model.name)
    new, answers = donors[1], contract.contract_answers(any_model.name)
    edited = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    n = len(old)
    sites: list[tuple[int, ...]] = [(), (2,), (edited[0],), *((p,) for p in range(edited[-1] + 1, n - 1, 3))]
    sites += [(n - 2, edited[-1] + 1), (0, 9, 10, n - 2), tuple(range(n // 2, n - 1)), (9, 9)]
    cache, rows = any_model.prefill(old).cache, prefill_rows(any_model.hf, old)
    found = recompute_effects(any_model, cache, new, sites, answers, edited=edited)
    for site, logits in zip(sites, found, strict=True):
        slow = loop_recompute(any_model.hf, rows, new, (*edited, *site), answers)
        assert float((logits - slow).abs().max()) <= contract.SWAP_TOLERANCE, site
    assert float((found - found[0]).abs().max()) > 1e-3


def test_everything_behind_the_field_is_a_fresh_prefill(any_model: Any) -> None:
    old, donors = contract.contract_ids(any_model.name)
    new, answers = donors[0], contract.contract_answers(any_model.name)
    edited = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    cache = any_model.prefill(old).cache
    behind = tuple(range(edited[0], len(old) - 1))
    found = recompute_effects(any_model, cache, new, [behind], answers, edited=edited)
    assert float((found[0] - full_logits(any_model.hf, new, answers)).abs().max()) <= 2e-5


def test_chunks_and_order_do_not_change_results() -> None:
    model = contract.note_model("mistral")
    old, donors = contract.contract_ids("mistral")
    cache = model.prefill(old).cache
    sites = [(p,) for p in range(4, 19)] + [(), (5, 9), (9, 5, 9)]
    whole = recompute_effects(model, cache, donors[0], sites, contract.ANSWERS, edited=(3,))
    for options in ({"budget_bytes": 1}, {"budget_bytes": 40_000}, {"max_chunk": 2}):
        parts = recompute_effects(model, cache, donors[0], sites, contract.ANSWERS, edited=(3,), **options)
        assert float((parts - whole).abs().max()) <= 1e-5
    turned = recompute_effects(model, cache, donors[0], sites[::-1], contract.ANSWERS, edited=(3,))
    assert float((turned.flip(0) - whole).abs().max()) <= 1e-5
    assert torch.equal(whole[-1], whole[-2])


def test_the_stale_cache_and_the_model_stay_as_they_are(tiny: Any) -> None:
    cache = stale(tiny)
    digest, kernel = cache.digest(), tiny.attention_kernel
    recompute_effects(tiny, cache, PAIR.new.token_ids, [(NOTE,)], ANSWERS, edited=FIELD)
    assert cache.digest() == digest and tiny.attention_kernel == kernel
    assert recompute_effects(tiny, cache, PAIR.new.token_ids, [], ANSWERS, edited=FIELD).shape == (0, 2)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(tiny: Any) -> None:
    cache, new = stale(tiny), PAIR.new.token_ids

    def refused(message: str, ids: Any = new, sites: Any = ((),), answers: Any = ANSWERS, edited: Any = FIELD) -> None:
        with pytest.raises(PatchError, match=message):
            recompute_effects(tiny, cache, ids, sites, answers, edited=edited)
        assert tiny.attention_kernel == "sdpa"

    refused(rf"the stale cache has {N} rows, the new prompt {N - 1} tokens", new[:-1])
    refused(rf"differs from the cached one at {FIELD[0]}, which is not among the edited rows", edited=())
    refused(rf"row {N - 1} is outside the rows that the decision reads \(0..{N - 2}\)", sites=[(N - 1,)])
    refused(r"row -1 is outside", sites=[(-1,)])
    refused(rf"row {N} is outside", edited=(*FIELD, N))
    refused(r"at least one answer id", answers=())
    foreign = contract.note_model("llama").prefill(PAIR.old.token_ids).cache
    with pytest.raises(PatchError, match="the cache has 3 layers, the model 2"):
        recompute_effects(tiny, foreign, new, [()], ANSWERS, edited=FIELD)


def test_rows_that_are_not_finite_are_noticed(tiny: Any) -> None:
    cache = stale(tiny)
    values = [v.clone() for v in cache.values]
    values[1][1, NOTE, 0] = float("nan")
    bad = replace(cache, values=tuple(values), history=("poisoned",))
    with pytest.raises(NonFiniteError, match="not finite"):
        recompute_effects(tiny, bad, PAIR.new.token_ids, [()], ANSWERS, edited=FIELD)
    assert tiny.attention_kernel == "sdpa"
