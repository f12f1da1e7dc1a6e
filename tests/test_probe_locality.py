"""Locality: known answers on the tiny decoder, equality with the oracle, exclusions, faults that must be noticed."""

from dataclasses import replace
from typing import Any

import pytest

from notelens.context import ContextStore
from notelens.errors import CompetenceError, InputError, PatchError, TaskError
from notelens.intervene.engine import SwapEffects, swap_effects
from notelens.probes import swaps
from notelens.probes.base import DIRECTIONS, ProbeResult, Swapped, end_values, site_values, swap_pair
from notelens.probes.locality import SITES, Locality, locality_sites
from notelens.prompt import Span
from notelens.readout import Recovery, exclusion
from tests.oracle import probes as oracle
from tests.probe_cases import (
    CASES,
    TOLERANCE,
    assert_rows_make_the_table,
    case,
    grid,
    only,
    run,
)
from tests.tiny import FORMS, broken_blind, broken_direct, tiny_instance, tiny_margin, tiny_pair


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    return run(Locality(), instances=grid(8, FORMS))


def test_known_answers(result: ProbeResult) -> None:
    for row in result.rows:
        assert row.excluded is None
        assert row.values["field_only_recovery"] == 0.0
        assert row.values["full_downstream_recovery"] == pytest.approx(1.0, abs=1e-6)
        assert row.values["full_recovery"] == pytest.approx(1.0, abs=1e-6)
        assert row.values["donor_margin"] == pytest.approx(abs(tiny_margin(1.0)), abs=1e-3) or row.values[
            "donor_margin"
        ] == pytest.approx(abs(tiny_margin(-1.0)), abs=1e-3)
    assert result.get("flip_rate").estimate.value == 1.0
    assert result.get("flip_rate", site="field_only").estimate.value == 0.0
    assert result.get("identity_rate").estimate.value == 1.0
    assert result.get("competence").estimate.value == 1.0


def test_two_directions_and_both_scales_are_reported(result: ProbeResult) -> None:
    n = len(result.rows)
    assert result.get("field_only_recovery").estimate.n == n
    for direction in DIRECTIONS:
        line = result.get("full_downstream_recovery", direction)
        assert line.estimate.n == n // 2
        assert line.swap == "isolated"
        assert result.get("patched_probability", direction, site="full_downstream").estimate.value > 0.99
    for row in result.rows:
        assert row.values["full_downstream_margin"] == pytest.approx(row.values["donor_margin"], abs=1e-4)


def test_pairs_of_both_rules_are_used_unless_asked_otherwise() -> None:
    instances = grid(4, ("polarity",))
    ids = [i.id for i in Locality().items(instances, "measure", [])]
    assert ids == [f"{i.id}/field{at}" for i in instances for at in (0, 1)]
    assert len(Locality(pairs_per_instance=1).items(instances, "measure", [])) == 4


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    _, hf, instances = case(name)
    found = run(Locality(), name)
    for instance in instances:
        for at in (0, 1):
            pair = instance.pair("field", at)
            for direction in DIRECTIONS:
                row = only(found.rows, pair.id, direction)
                assert row.excluded is None
                expected = oracle.locality(
                    hf, pair.old.token_ids, pair.new.token_ids, pair.old.positions("field"), pair.answer_ids, direction
                )
                for metric, value in expected.items():
                    assert row.values[metric] == pytest.approx(value, abs=TOLERANCE), (pair.id, direction, metric)
                assert row.values["full_recovery"] == pytest.approx(1.0, abs=TOLERANCE)


def test_a_field_with_two_parts_keeps_the_rows_between_them_downstream() -> None:
    pair = tiny_pair()
    at = pair.old.positions("field")[0]
    spans = {**pair.old.spans, "field": (Span(at, at + 1), Span(at + 3, at + 4))}
    two = replace(pair, old=replace(pair.old, spans=spans), new=replace(pair.new, spans=spans))
    field, downstream, full = (site.positions for site in locality_sites(two))
    assert field == (at, at + 3)
    assert downstream == tuple(p for p in range(at + 1, pair.old.decision) if p != at + 3)
    assert sorted(full) == list(range(at, pair.old.decision))


def test_a_model_that_reads_the_field_falsifies_the_claim() -> None:
    found = Locality().run(ContextStore(broken_direct()), grid(4, ("polarity",)))
    assert found.get("field_only_recovery").estimate.value == pytest.approx(1.0, abs=1e-4)
    assert found.get("full_downstream_recovery").estimate.value == pytest.approx(0.0, abs=1e-4)
    assert found.get("flip_rate").estimate.value == 0.0
    assert found.get("flip_rate", site="field_only").estimate.value == 1.0


def test_an_undecided_model_is_excluded_with_reasons_and_refused() -> None:
    probe, store = Locality(), ContextStore(broken_blind())
    (item, *_) = probe.items([tiny_instance()], "measure", [])
    rows = probe.measure(store, item)
    assert {r.excluded for r in rows} <= {"recipient wrong", "donor wrong"}
    assert all(r.values["competent"] is False and "full_recovery" not in r.values for r in rows)
    lines = {a.metric: a for a in probe.aggregate(rows) if a.method == "both" and not a.params}
    assert lines["competence"].estimate.value == 0.0 and lines["competence"].estimate.n == 2
    assert lines["field_only_recovery"].estimate.value is None
    assert sum(lines["field_only_recovery"].reasons.values()) == lines["field_only_recovery"].n_excluded == 2
    with pytest.raises(CompetenceError, match="none of 4 rows"):
        probe.run(store, [tiny_instance()])


@pytest.mark.parametrize("gap", [0.0, 1e-6])
def test_a_gap_too_small_has_no_recovery_and_does_not_divide(gap: float) -> None:
    low, high = -gap / 2 - 1e-12, gap / 2 + 1e-12
    excluded = exclusion(low, high)
    assert excluded == "gap too small"
    swapped = Swapped("denoising", low, high, excluded, (Recovery(low, high, 0.3),))
    assert site_values(swapped, ["full"]) == {}
    assert end_values(swapped)["competent"] is True


def test_patches_that_never_reach_the_model_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(model: Any, recipient: Any, donors: Any, sites: Any, reader: Any) -> SwapEffects:
        out = swap_effects(model, recipient, [], [], reader)
        return replace(out, logits=out.baseline.expand(len(sites), -1))

    monkeypatch.setattr(swaps, "swap_effects", idle)
    with pytest.raises(PatchError, match="did not reach"):
        run(Locality(), instances=[tiny_instance()])


def test_a_pair_with_itself_reversed_gives_the_other_direction() -> None:
    model, _, instances = case("llama")
    pair, store = instances[0].pair("field"), ContextStore(model)
    forward = swap_pair(store, pair, locality_sites(pair))["noising"]
    backward = swap_pair(store, pair.reversed(), locality_sites(pair))["denoising"]
    assert [r.patched for r in forward.recoveries] == pytest.approx([r.patched for r in backward.recoveries], abs=1e-5)


def test_the_order_of_instances_changes_nothing(result: ProbeResult) -> None:
    again = run(Locality(), instances=grid(8, FORMS)[::-1])
    assert [a.estimate for a in again.aggregates] == [a.estimate for a in result.aggregates]


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(Locality(), result)
    assert {a.params.get("site") for a in result.aggregates if a.metric == "flip_rate"} == {None, *SITES}


@pytest.mark.parametrize("bad", [0, 3, -1])
def test_parameters_are_checked(bad: int) -> None:
    with pytest.raises(InputError, match=f"pairs_per_instance is {bad}"):
        Locality(pairs_per_instance=bad)


def test_no_instance_is_an_error() -> None:
    with pytest.raises(TaskError, match="0 instances"):
        Locality().items([], "measure", [])
