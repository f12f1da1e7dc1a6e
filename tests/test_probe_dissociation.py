"""Dissociation: known answers, equality with the oracle, lines by form, refusals."""

import pytest

from notelens.context import ContextStore
from notelens.errors import InputError, TaskError
from notelens.probes.base import DIRECTIONS, ProbeResult
from notelens.probes.dissociation import SITES, Dissociation, dissociation_sites
from tests.oracle import probes as oracle
from tests.probe_cases import CASES, FORMS, TOLERANCE, assert_rows_make_the_table, case, grid, only, run
from tests.tiny import broken_direct, tiny_instance, tiny_pair


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    return run(Dissociation(), instances=grid(12, (*FORMS, "two_clause")))


def test_known_answers(result: ProbeResult) -> None:
    expected = {"trigger_only": 0.0, "rule_only": 0.0, "notes": 1.0, "notes_after_rule": 1.0, "full": 1.0}
    for row in result.rows:
        for site, value in expected.items():
            assert row.values[f"{site}_recovery"] == pytest.approx(value, abs=1e-6), (row.item, site)
    assert result.get("trigger_only_recovery").estimate.value == 0.0
    assert result.get("flip_rate").estimate.value == 1.0
    assert result.get("flip_rate", site="rule_only").estimate.value == 0.0


def test_by_form_and_pooled(result: ProbeResult) -> None:
    pooled = result.get("notes_recovery").estimate.n
    by_form = [result.get("notes_recovery", form=form).estimate.n for form in FORMS]
    assert sum(by_form) == pooled == len(result.rows)
    assert result.get("competence", form="negated").estimate.value == 1.0
    assert not any(row.meta["form"] == "two_clause" for row in result.rows)


def test_the_field_is_the_same_on_both_sides() -> None:
    for form in FORMS:
        pair = tiny_pair(form, "trigger")
        positions = pair.old.positions("field")
        assert [pair.old.token_ids[p] for p in positions] == [pair.new.token_ids[p] for p in positions]
        trigger, rule, notes, behind, full = (s.positions for s in dissociation_sites(pair))
        assert trigger == pair.differing
        assert set(trigger) <= set(rule) and not set(notes) & set(trigger) and not set(behind) & set(rule)
        assert full == tuple(range(trigger[0], pair.old.decision))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    _, hf, instances = case(name)
    found = run(Dissociation(), name)
    for instance in instances:
        for at in (0, 1):
            pair = instance.pair("trigger", at)
            for direction in DIRECTIONS:
                row = only(found.rows, pair.id, direction)
                expected = oracle.dissociation(
                    hf, pair.old.token_ids, pair.new.token_ids, pair.differing, pair.answer_ids, direction
                )
                for metric, value in expected.items():
                    assert row.values[metric] == pytest.approx(value, abs=TOLERANCE), (pair.id, direction, metric)
                for site, positions in zip(SITES, dissociation_sites(pair), strict=True):
                    alone = oracle.swap_recovery(
                        hf, pair.old.token_ids, pair.new.token_ids, positions.positions, pair.answer_ids, direction
                    )
                    assert row.values[f"{site}_recovery"] == pytest.approx(alone["recovery"], abs=TOLERANCE)


def test_a_model_that_reads_the_trigger_falsifies_the_claim() -> None:
    found = Dissociation().run(ContextStore(broken_direct()), grid(4, ("polarity",)))
    assert found.get("trigger_only_recovery").estimate.value == pytest.approx(1.0, abs=1e-4)
    assert found.get("notes_recovery").estimate.value == pytest.approx(0.0, abs=1e-4)


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(Dissociation(), result)


def test_refusals() -> None:
    with pytest.raises(InputError, match="two_clause"):
        Dissociation(forms=("two_clause",))
    with pytest.raises(InputError, match="polarity"):
        Dissociation(forms=("polarity", "polarity"))
    with pytest.raises(InputError):
        Dissociation(forms=())
    with pytest.raises(InputError, match="3"):
        Dissociation(pairs_per_instance=3)
    with pytest.raises(TaskError, match="two_clause"):
        Dissociation().items([tiny_instance("two_clause")], "measure", [])
