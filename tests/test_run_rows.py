"""Rows run again on cached ones: equality with prefill in every family, row by row, and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from notelens.cache.ops import max_difference
from notelens.cache.rows import Rows
from notelens.errors import CacheError, NonFiniteError, PatchError
from notelens.intervene.recompute import recompute_effects
from notelens.intervene.run_rows import run_rows
from tests.contracts import models as contract

TOLERANCE = contract.ROW_TOLERANCE


def test_a_prefill_is_a_prefill(any_model: Any) -> None:
    ids, _ = contract.contract_ids(any_model.name)
    full = any_model.prefill(ids)
    kernel = any_model.attention_kernel
    plain = run_rows(any_model, None, ids, range(len(ids)))
    seen: list[int] = []
    watched = run_rows(any_model, None, ids, range(len(ids)), watch=lambda layer, q, p, c: seen.append(layer))
    for done in (plain, watched):
        assert max_difference(done.rows, full.cache) <= TOLERANCE
        assert float((done.hidden - full.hidden).abs().max()) <= contract.SWAP_TOLERANCE
        assert done.n_tokens == len(ids)
    assert seen == list(range(any_model.geometry.n_layers))
    assert any_model.attention_kernel == kernel


def test_unchanged_rows_come_out_as_they_were(any_model: Any) -> None:
    """Scattered rows of an unchanged prompt, at once and one by one: windows and masks must be those of the prefill."""
    ids, _ = contract.contract_ids(any_model.name)
    n = len(ids)
    full = any_model.prefill(ids)
    rows = Rows.of(full.cache)
    for at in ([n - 1], [0], [3, 7, 8, 15, n - 1], list(range(n // 2, n)), list(range(0, n, 2))):
        done = run_rows(any_model, rows, [ids[p] for p in at], at)
        made = rows.replaced(done.rows, history=()).join()
        assert max_difference(made, full.cache) <= TOLERANCE, at
        apart = run_rows(any_model, rows, [ids[p] for p in at], at, apart=True)
        assert max_difference(rows.replaced(apart.rows, history=()).join(), full.cache) <= TOLERANCE, at


def test_changed_rows_equal_the_recompute_engine(any_model: Any) -> None:
    """The same repair through the patch engine, which has its own kernel and its own loop oracle."""
    old, donors = contract.contract_ids(any_model.name)
    new, answers = donors[0], contract.contract_answers(any_model.name)
    edited = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    n, cache = len(old), any_model.prefill(old).cache
    for site in ((), (n - 3,), (edited[0] + 1, n // 2, n - 2)):
        at = sorted({*edited, *site, n - 1})
        done = run_rows(any_model, Rows.of(cache), [new[p] for p in at], at)
        expected = recompute_effects(any_model, cache, new, [site], answers, edited=edited)[0]
        found = any_model.answer_logits(done.hidden, answers).cpu()
        assert float((found - expected).abs().max()) <= contract.SWAP_TOLERANCE


def test_apart_rows_do_not_see_each_other() -> None:
    """A changed row in front changes the row behind in one pass, and not when both are run apart."""
    model = contract.note_model("llama")
    ids = contract.random_ids()
    other = (*ids[:5], ids[6], *ids[6:])
    cache = model.prefill(ids).cache
    together = run_rows(model, Rows.of(cache), [other[5], other[9]], [5, 9])
    apart = run_rows(model, Rows.of(cache), [other[5], other[9]], [5, 9], apart=True)
    assert float((apart.rows.keys[2][:, 1] - cache.keys[2][:, 9]).abs().max()) <= TOLERANCE
    assert float((together.rows.keys[2][:, 1] - cache.keys[2][:, 9]).abs().max()) > 1e-2


def test_rows_can_follow_a_gap_and_fill_a_hole() -> None:
    model = contract.note_model("mistral")
    ids = contract.random_ids()
    full = model.prefill(ids).cache
    holes = Rows(Rows.of(full).without([4, 5]))
    done = run_rows(model, holes, ids[4:6], (4, 5))
    assert max_difference(holes.replaced(done.rows, history=()).join(), full) <= TOLERANCE
    after = run_rows(model, Rows.of(full), (7, 8), (len(ids), len(ids) + 1))
    whole = model.prefill((*ids, 7, 8)).cache
    assert max_difference(Rows.of(full).replaced(after.rows, history=()).join(), whole) <= TOLERANCE


def test_nothing_is_changed_or_left_behind(any_model: Any) -> None:
    ids, _ = contract.contract_ids(any_model.name)
    cache = any_model.prefill(ids).cache
    digest, kernel = cache.digest(), any_model.attention_kernel
    done = run_rows(any_model, Rows.of(cache), ids[5:7], (5, 6))
    assert cache.digest() == digest and any_model.attention_kernel == kernel
    assert not any(t.requires_grad for t in (*done.rows.keys, *done.rows.values, done.hidden))


def test_what_does_not_fit_is_refused(tiny: Any) -> None:
    ids, _ = contract.contract_ids("tiny")
    rows = Rows.of(tiny.prefill(ids).cache)
    for tokens, at in (((), ()), ((1, 2), (3,)), ((1, 2), (4, 4)), ((1, 2), (5, 4))):
        with pytest.raises(PatchError, match="must strictly increase"):
            run_rows(tiny, rows, tokens, at)
    with pytest.raises(CacheError, match=r"positions 3..512 exceed the 512"):
        run_rows(tiny, rows, (1, 2), (3, 512))
    foreign = Rows.of(contract.note_model("llama").prefill(ids).cache)
    with pytest.raises(CacheError, match="the cache has 3 layers, tiny has 2"):
        run_rows(tiny, foreign, (1,), (3,))
    cache = tiny.prefill(ids).cache
    values = [v.clone() for v in cache.values]
    values[1][:, 0] = float("nan")
    bad = replace(cache, values=tuple(values), history=("poisoned",))
    with pytest.raises(NonFiniteError, match="not finite"):
        run_rows(tiny, Rows.of(bad), ids[-1:], (len(ids) - 1,))
    assert tiny.attention_kernel == "sdpa" and torch.is_grad_enabled()
