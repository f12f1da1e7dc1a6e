"""In-forward swaps against prefilling the prefix and running the rest token by token; what they cost; where they differ."""

from typing import Any

import pytest
import torch

from notelens.intervene.engine import Reader, Site, swap_effects
from tests.contracts import models as contract
from tests.oracle.recompute import loop_in_forward
from tests.oracle.swap import full_logits, loop_in_forward_swap, prefill_rows
from tests.tiny import TOKEN_IDS, tiny_margin, tiny_pair

N = contract.N_TOKENS
SETS = ((3,), (4,), (10,), (18,), (3, 4), (3, 11, 18), (5, 6, 7, 8), tuple(range(3, 19)), tuple(range(19)), (0, 18))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "gemma3_text", "gpt_oss"])
def test_sets_of_rows_equal_running_the_rest_token_by_token(name: str) -> None:
    model = contract.note_model(name)
    ids, other = contract.random_ids(), contract.random_ids(changed=[3])
    rows, caches = [prefill_rows(model.hf, i) for i in (ids, other)], [model.prefill(i).cache for i in (ids, other)]
    sites = [Site(s) for s in SETS]
    found = swap_effects(
        model, caches[0], caches[1:], sites, Reader.last(caches[0], contract.ANSWERS), mode="in_forward"
    )
    for site, logits in zip(sites, found.logits, strict=True):
        slow = loop_in_forward(model.hf, *rows, ids, [p for p in site.positions if p >= 3], contract.ANSWERS)
        assert float((logits - slow).abs().max()) <= contract.SWAP_TOLERANCE, site
    fresh = full_logits(model.hf, other, contract.ANSWERS)
    assert float((found.logits[0] - fresh).abs().max()) <= contract.SWAP_TOLERANCE, (
        "the field row brings the new prompt"
    )
    assert float((found.logits - found.baseline).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt_oss"])
def test_bands_of_layers_equal_hooked_keys_and_values(name: str) -> None:
    model = contract.note_model(name)
    ids, other = contract.random_ids(), contract.random_ids(changed=[3])
    caches = [model.prefill(i).cache for i in (ids, other)]
    bands = [(low, high) for low in range(3) for high in range(low + 1, 4)]
    sites = [Site((4, 9), layers=band) for band in bands] + [Site((17,), layers=band) for band in bands]
    found = swap_effects(
        model, caches[0], caches[1:], sites, Reader.last(caches[0], contract.ANSWERS), mode="in_forward"
    )
    for site, logits in zip(sites, found.logits, strict=True):
        slow = loop_in_forward_swap(model.hf, ids, other, site.positions, contract.ANSWERS, site.layers)
        assert float((logits - slow).abs().max()) <= contract.SWAP_TOLERANCE, site


def test_the_suffix_is_what_is_paid_for() -> None:
    model = contract.note_model("llama")
    ids, other = contract.random_ids(), contract.random_ids(changed=[3])
    caches = [model.prefill(i).cache for i in (ids, other)]
    reader = Reader.last(caches[0], contract.ANSWERS)
    for row in (3, 10, 18):
        found = swap_effects(model, caches[0], caches[1:], [Site((row,))], reader, mode="in_forward")
        assert found.n_tokens == (N - row) + 1, "the suffix behind the row, and the unpatched reader"
    isolated = swap_effects(model, caches[0], caches[1:], [Site((3,))], reader)
    assert isolated.n_tokens == 2
    nothing = swap_effects(model, caches[0], caches[1:], [Site((0, 2))], reader, mode="in_forward")
    assert nothing.n_tokens == 1 and torch.equal(nothing.logits[0], nothing.baseline)


def test_chunks_do_not_change_results() -> None:
    model = contract.note_model("gemma2")
    ids, other = contract.random_ids(), contract.random_ids(changed=[3])
    caches = [model.prefill(i).cache for i in (ids, other)]
    sites = [Site((p,), layers=band) for p in (3, 7, 12) for band in (None, (0, 2), (2, 4))]
    reader = Reader.last(caches[0], contract.ANSWERS)
    whole = swap_effects(model, caches[0], caches[1:], sites, reader, mode="in_forward")
    for options in ({"budget_bytes": 1}, {"max_chunk": 2}):
        parts = swap_effects(model, caches[0], caches[1:], sites, reader, mode="in_forward", **options)
        assert float((parts.logits - whole.logits).abs().max()) <= 1e-5
    assert not torch.allclose(whole.logits[0], whole.logits[1], atol=1e-3), "a band is less than all layers"


def test_one_site_scores_0_isolated_and_1_in_forward(tiny: Any) -> None:
    """Recovery of the trigger row, both ways, on the hand-set decoder: the same site, two numbers."""
    pair = tiny_pair("polarity", "trigger", n_notes=2)
    answers = (TOKEN_IDS["deny"], TOKEN_IDS["approve"])
    caches = [tiny.prefill(p.token_ids).cache for p in (pair.old, pair.new)]
    reader = Reader.last(caches[0], answers)
    low, high = (tiny_margin(1.0 if p.answer == "approve" else -1.0) for p in (pair.old, pair.new))
    notes = [i for i, word in enumerate(pair.old.tokens) if word == ";"]
    sites = [Site(pair.old.positions("trigger")), Site((notes[0],)), Site(tuple(notes))]
    for mode, expected in (("isolated", [low, tiny_margin(0.0), high]), ("in_forward", [high, tiny_margin(0.0), high])):
        found = swap_effects(tiny, caches[0], caches[1:], sites, reader, mode=mode)  # type: ignore[arg-type]
        assert found.mode == mode
        assert (found.logits[:, 1] - found.logits[:, 0]).tolist() == pytest.approx(expected, abs=1e-4)
