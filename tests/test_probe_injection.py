"""Injection: the decision follows the note, not what is visible; controls and doses against the oracle."""

from typing import Any

import pytest

from notelens.context import ContextStore
from notelens.errors import InputError
from notelens.probes.base import DIRECTIONS, ProbeResult, field_and_downstream
from notelens.probes.injection import Injection
from tests.oracle import probes as oracle
from tests.oracle.swap import full_logits, margin
from tests.probe_cases import CASES, TOLERANCE, assert_rows_make_the_table, case, grid, only, run
from tests.tiny import FORMS, broken_blind, broken_direct, tiny_instance


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    return run(Injection(), instances=grid(12, FORMS))


def test_the_decision_follows_the_notes(result: ProbeResult) -> None:
    for params in ({}, {"notes": "after_rule"}, {"donor": "trigger", "notes": "after_rule"}):
        assert result.get("recovery", **params).estimate.value == pytest.approx(1.0, abs=1e-6)
        assert result.get("follow_rate", **params).estimate.value == 1.0
        assert result.get("flip_rate", **params).estimate.value == 1.0
    assert result.get("follow_rate", rows="all").estimate.n == len(result.rows)


def test_notes_of_the_same_conclusion_do_nothing(result: ProbeResult) -> None:
    line = result.get("same_conclusion_flip_rate")
    assert line.estimate.value == 0.0
    assert result.get("same_conclusion_shift").estimate.value == pytest.approx(0.0, abs=1e-6)
    two_clause = sum(row.meta["form"] == "two_clause" for row in result.rows)
    assert two_clause > 0 and dict(line.reasons) == {"the form has no second rule": two_clause}
    assert result.get("recovery").control == "same_conclusion_shift"


def test_dose(result: ProbeResult) -> None:
    assert result.get("recovery", dose=1, order="ranked").estimate.value == pytest.approx(1.0, abs=1e-5)
    assert result.get("follow_rate", dose=1, order="ranked").estimate.value == 1.0
    assert result.get("flip_rate", dose=1, order="ranked").estimate.value == 1.0
    assert (
        result.get("recovery", dose=1, order="end").estimate.value == 0.0
    )  # ":" holds the conclusion, nobody reads it
    assert result.get("follow_rate", dose=1, order="front").estimate.value == 0.0
    for row in result.rows:
        n = row.meta["n_positions"]
        for order in ("ranked", "end", "front"):
            for dose, value in zip(row.values["doses"], row.values[f"{order}_recovery"], strict=True):
                assert (value is None) == (dose > n)
    line = result.get("recovery", dose=32, order="end")
    assert line.reasons["fewer positions than the dose"] == line.n_excluded > 0


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    _, hf, instances = case(name)
    found = run(Injection(doses=(1, 3)), name)
    for instance in instances:
        pair = instance.pair("field")
        _, downstream = field_and_downstream(pair)
        field = pair.old.positions("field")
        behind = [p for p in downstream if p > pair.old.positions("rule")[-1]]
        for direction in DIRECTIONS:
            row = only(found.rows, pair.id, direction)
            live, false, answers = (
                (pair.old, pair.new, pair.answer_ids)
                if direction == "denoising"
                else (pair.new, pair.old, pair.answer_ids[::-1])
            )
            args: Any = (hf, live.token_ids, false.token_ids, field, answers)
            whole = oracle.injection(*args)
            assert row.values["recovery"] == pytest.approx(whole["recovery"], abs=TOLERANCE)
            assert row.values["followed"] == bool(whole["follow"]) and row.values["flipped"] == bool(whole["flip"])
            after = oracle.injection(*args, positions=behind)
            assert row.values["after_rule_recovery"] == pytest.approx(after["recovery"], abs=TOLERANCE)
            backward = oracle.position_effects(hf, false.token_ids, live.token_ids, field, answers[::-1])
            sets = {"ranked": oracle.ranked(backward), "end": list(downstream)[::-1], "front": list(downstream)}
            for order, positions in sets.items():
                for at, dose in enumerate((1, 3)):
                    expected = oracle.injection(*args, positions=positions[:dose])
                    got = row.values[f"{order}_recovery"][at]
                    assert got == pytest.approx(expected["recovery"], abs=TOLERANCE), (order, dose)
                    assert row.values[f"{order}_followed"][at] == bool(expected["follow"])
            f, r = next(cell for cell, p in instance.cells.items() if p is live)
            same, other = instance.cells[1 - f, 1 - r], instance.cells[f, 1 - r]
            gap = margin(full_logits(hf, false.token_ids, answers)) - margin(full_logits(hf, live.token_ids, answers))
            shift = oracle.placebo(hf, live.token_ids, same.token_ids, downstream, answers, gap)
            assert row.values["same_conclusion_shift"] == pytest.approx(shift, abs=TOLERANCE)
            trigger = oracle.swap_recovery(hf, live.token_ids, other.token_ids, behind, answers)
            assert row.values["trigger_recovery"] == pytest.approx(trigger["recovery"], abs=TOLERANCE)


def test_a_model_that_reads_the_field_does_not_follow() -> None:
    found = Injection(doses=(1,)).run(ContextStore(broken_direct()), grid(4, ("polarity",)))
    for params in ({}, {"notes": "after_rule"}, {"donor": "trigger", "notes": "after_rule"}):
        assert found.get("recovery", **params).estimate.value == pytest.approx(0.0, abs=1e-4)
        assert found.get("follow_rate", **params).estimate.value == 0.0


def test_an_undecided_model_has_no_dose_curve() -> None:
    probe, store = Injection(), ContextStore(broken_blind())
    (item,) = probe.items([tiny_instance()], "measure", [])
    rows = probe.measure(store, item)
    assert all(r.excluded and "recovery" not in r.values and r.values["competent"] is False for r in rows)
    lines = [a for a in probe.aggregate(rows) if a.metric == "recovery" and a.method == "both"]
    assert all(a.estimate.value is None and a.n_excluded == 2 for a in lines)
    everyone = [a for a in probe.aggregate(rows) if dict(a.params) == {"rows": "all"} and a.method == "both"]
    assert [(a.metric, a.estimate.n) for a in everyone] == [("follow_rate", 2)]


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(Injection(), result)


def test_refusals() -> None:
    with pytest.raises(InputError, match="rising"):
        Injection(doses=(4, 2))
    with pytest.raises(InputError, match="0"):
        Injection(pairs_per_instance=0)
