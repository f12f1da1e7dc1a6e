"""Hybrids: attention rows move, the recurrent state is never reused without being that of its prefix."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from notelens.attention.move import move_rows
from notelens.cache.ops import concat, replace_rows, select_rows, slice_rows
from notelens.errors import CacheError, UnsupportedModelError
from notelens.intervene.recompute import recompute_effects
from notelens.intervene.rescan import rescan
from tests.contracts import attention as moves
from tests.contracts import models as contract
from tests.oracle.swap import full_logits

ANSWERS = contract.ANSWERS


@pytest.fixture(scope="module")
def model() -> Any:
    return contract.note_model("falcon_h1")


def logits(model: Any, ids: Any, past: Any) -> torch.Tensor:
    return model.answer_logits(model.prefill(ids, past).hidden, ANSWERS)


def test_a_prefix_is_reused_with_its_own_state_only(model: Any) -> None:
    """Prompt A, then B behind the same prefix: B equals a fresh run, and the stored prefix is as it was."""
    prefix, a, b = contract.random_ids(9), (3, 4, 5), (6, 7)
    stored = model.prefill(prefix).cache
    digest = stored.digest()
    for tail in (a, b, a):
        fresh = full_logits(model.hf, (*prefix, *tail), ANSWERS)
        assert float((logits(model, tail, stored) - fresh).abs().max()) <= contract.SWAP_TOLERANCE
    assert stored.digest() == digest and set(stored.states) == {9}
    longer = model.prefill(a, stored).cache
    assert set(longer.states) == {9, 12} and set(slice_rows(longer, 0, 10).states) == {9}


@pytest.mark.parametrize("change", ["cut", "moved", "joined", "selected"])
def test_rows_without_their_state_are_refused(model: Any, change: str) -> None:
    cache = model.prefill(contract.random_ids(12)).cache
    stateless = {
        "cut": lambda: slice_rows(cache, 0, 7),
        "moved": lambda: move_rows(model, cache, 5),
        "joined": lambda: concat(slice_rows(cache, 0, 5), slice_rows(cache, 5, 12), history=("joined",)),
        "selected": lambda: select_rows(cache, [0, 1, 5]),
    }[change]()
    with pytest.raises(
        CacheError, match=r"keeps a recurrent state, and the cache has none behind its \d+ rows.*rescan"
    ):
        model.prefill([3], stateless)


def test_a_scan_of_exact_rows_is_the_state_of_a_prefill(model: Any) -> None:
    ids = contract.random_ids(12)
    cache = model.prefill(ids).cache
    again = rescan(model, replace(cache, states={}), [5, 12])
    assert (again.n_tokens_run, again.n_tokens_saved) == (12, 0) and "in full" in again.reason
    for n in (5, 12):
        wanted = model.prefill(ids[:n]).cache.states[n]
        for a, b in zip(
            (*again.cache.states[n].conv, *again.cache.states[n].scan), (*wanted.conv, *wanted.scan), strict=True
        ):
            assert float((a - b).abs().max()) <= 1e-5
    assert again.cache.keys is cache.keys and again.cache.exact


def test_moved_rows_are_scanned_again(model: Any) -> None:
    """A block moved as a whole and scanned again decodes like the same tokens prefilled there."""
    ids = contract.random_ids(12)
    moved = move_rows(model, model.prefill(ids).cache, 200)
    assert moved.states == {} and "recurrent state left behind" in moved.history[-1]
    found = logits(model, [5], rescan(model, moved).cache)
    there = logits(model, [5], model.prefill(ids, start=200).cache)
    assert float((found - there).abs().max()) <= contract.SWAP_TOLERANCE
    assert moves.span_problems(model) == []


def test_a_scan_reads_patched_rows(model: Any) -> None:
    """The state behind patched rows is not that of the unpatched prompt: lower layers' attention feeds the mixers above."""
    ids, other = contract.random_ids(12), contract.random_ids(12, changed=[3])
    base, donor = (model.prefill(i).cache for i in (ids, other))
    patched = replace_rows(base, donor, range(3, 8))
    assert set(patched.states) == {12}, "an isolated swap leaves the recipient's state in place"
    state = rescan(model, patched).cache.states[12]
    gaps = [float((a - b).abs().max()) for a, b in zip(state.scan, base.states[12].scan, strict=True)]
    assert gaps[0] <= 1e-6 < 1e-4 < gaps[-1]


def test_what_has_no_meaning_is_refused(model: Any) -> None:
    cache = model.prefill(contract.random_ids(12)).cache
    with pytest.raises(UnsupportedModelError, match="scattered rows cannot be run again"):
        recompute_effects(model, cache, cache.token_ids, [[5]], ANSWERS, edited=[3])
    with pytest.raises(UnsupportedModelError, match="no recurrent layers; nothing needs"):
        llama = contract.note_model("llama")
        rescan(llama, llama.prefill([1, 2]).cache)
    for bad in ([0], [13], []):
        with pytest.raises(CacheError, match="states behind"):
            rescan(model, cache, bad)
    with pytest.raises(UnsupportedModelError, match="three writers"):
        model.family.writers(None)
