"""Checks of cached rows: what they prove, what they cost, when they stop."""

from math import comb
from typing import Any

import pytest

from notelens.edits.context import EditableContext
from notelens.edits.verify import BLOCK, detection, unproven
from notelens.errors import EditError
from tests.contracts import edits as contract
from tests.contracts.models import note_model

LONG = "start parcel is {{a}} , " + " w1 w2 , w3" * 45 + " please decide . : ?"


def long(name: str) -> EditableContext:
    return EditableContext.from_text(note_model(name), LONG, {"a": "f0"}, rendering="raw")


def test_an_exact_context_costs_nothing_to_prove(tiny: Any) -> None:
    context = contract.context(tiny)
    found = context.verify("exact")
    assert found.passed and found.exact and found.tokens_run == 0 and found.rows_proven == len(context)
    assert found.context is context and context.verify("spot").detection == 1.0


@pytest.mark.parametrize("name", ["tiny", "llama", "qwen3", "gemma2", "gemma3_text", "mixtral", "gpt_oss"])
def test_a_stale_note_is_found_and_the_check_stops_there(name: str) -> None:
    context = contract.context(note_model(name))
    made, _ = context.edit("a", "f1", "in_place")
    found = made.verify("exact")
    assert not found.passed and not found.exact and found.max_difference > 1e-3
    assert found.first_difference is not None and found.first_difference > context.tokens.positions("a")[0]
    assert found.rows_proven == made.exact_rows


def test_early_cut_off() -> None:
    made, _ = long("llama").edit("a", "f1", "in_place")
    found = made.verify("exact")
    assert not found.passed and found.tokens_run == BLOCK < len(made) - made.exact_rows


def test_stale_tokens_are_found_without_a_run(tiny: Any) -> None:
    made, _ = contract.context(tiny).edit("a", "f1", "stale")
    found = made.verify("exact")
    assert not found.passed and found.tokens_run == 0 and found.first_difference == made.tokens.positions("a")[0]


def test_an_approximate_context_can_be_proven_exact() -> None:
    """A repair of the rows that changed, where no other row attends to the field: the mark goes, the rows are the same."""
    from dataclasses import replace

    context = contract.context(note_model("llama"))
    doubted = replace(context, rows=replace(context.rows, history=("doubted",)), exact_rows=5)
    assert not doubted.exact
    found = doubted.verify("exact")
    assert found.passed and found.exact and found.context.exact and found.context.history == ()
    assert found.tokens_run == len(context) - 5 and found.rows_proven == 5
    assert found.context.rows.bytes_beyond(context.rows) == 0


def test_rows_out_of_reach_are_proven_by_the_windows() -> None:
    """Three layers with windows of 8 carry a difference at most 21 rows far."""
    made, _ = long("mistral").edit("a", "f1", "full_suffix")
    stale, _ = long("mistral").edit("a", "f1", "stale")
    field = stale.tokens.positions("a")[0]
    assert made.exact and unproven(made) == ()
    assert unproven(stale) == tuple(range(field, field + 22))
    full = long("llama").edit("a", "f1", "stale")[0]
    assert unproven(full) == tuple(range(field, len(full)))
    for row in range(field + 22, len(stale)):  # the claim itself, against fresh rows
        for held, fresh in zip(stale.rows.layer(2), made.rows.layer(2), strict=True):
            assert float((held[:, row] - fresh[:, row]).abs().max()) < 1e-5


def test_spot_checks_state_their_chance_and_find_what_they_look_at() -> None:
    context = long("llama")
    made, _ = context.edit("a", "f1", "in_place")
    n = len(made) - made.exact_rows
    found = made.verify("spot", rows=12, share=0.1, seed=3)
    assert found.rows_checked == found.tokens_run == 12 and not found.exact
    bad = -int(-0.1 * n // 1)
    assert found.detection == pytest.approx(1 - comb(n - bad, 12) / comb(n, 12)) == detection(n, 12, 0.1)
    assert not found.passed and found.first_difference is not None
    clean = context.verify("spot")
    assert clean.passed and clean.tokens_run == 0


def test_detection_is_the_measured_rate() -> None:
    import random

    rng = random.Random(0)
    hits = sum(bool(set(rng.sample(range(40), 6)) & set(range(8))) for _ in range(20_000)) / 20_000
    assert detection(40, 6, 0.2) == pytest.approx(hits, abs=0.01)
    assert detection(10, 10, 0.01) == 1.0


def test_decision_check_compares_with_a_fresh_prefill(tiny: Any) -> None:
    context = contract.context(tiny)
    stale, _ = context.edit("a", "f1", "in_place")
    right, _ = context.edit("a", "f1", "auto", budget=1.0)
    for made, same in ((stale, False), (right, True)):
        found = made.verify("decision")
        assert found.same_decision is same and found.passed is same and found.tokens_run == len(made)
        assert found.margin is not None and found.margin > 1.0
    assert not stale.verify("decision").context.exact


def test_checks_that_do_not_exist(tiny: Any) -> None:
    context = contract.context(tiny)
    with pytest.raises(EditError, match="unknown level 'exakt'; did you mean 'exact'"):
        context.verify("exakt")
    for options in ({"rows": 0}, {"share": 0.0}, {"share": 1.5}):
        with pytest.raises(EditError, match="at least 1 row and a share"):
            context.verify("spot", **options)
