"""Suffix concentration: known answers on the tiny decoder, equality with the oracle, refusals."""

from typing import Any

import pytest

from notelens.context import ContextStore
from notelens.errors import InputError
from notelens.probes.base import DIRECTIONS, ProbeResult, field_and_downstream
from notelens.probes.suffix_concentration import SHARES, SuffixConcentration
from tests.oracle.probes import swap_recovery
from tests.probe_cases import CASES, TOLERANCE, assert_rows_make_the_table, case, grid, only, run
from tests.tiny import FORMS, broken_direct


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    return run(SuffixConcentration(), instances=grid(6, FORMS))


def test_the_note_decides_where_the_curves_jump(result: ProbeResult) -> None:
    """The tiny decoder has one note; a set of rows recovers 1 if it holds the note and 0 if not."""
    for row in result.rows:
        assert row.excluded is None
        suffix, prefix = (list(map(float, row.values[f"{name}_recovery"])) for name in ("suffix", "prefix"))  # type: ignore[arg-type]
        for curve in (suffix, prefix):
            assert curve == sorted(curve) and curve[-1] == pytest.approx(1.0, abs=1e-6)
            assert all(v == pytest.approx(0.0, abs=1e-6) or v == pytest.approx(1.0, abs=1e-6) for v in curve)
        assert row.values["random_recovery"][-1] == pytest.approx(1.0, abs=1e-6)  # type: ignore[index]
    assert result.get("suffix_recovery", at_fraction=1.0).estimate.value == pytest.approx(1.0, abs=1e-6)
    assert result.get("prefix_recovery_curve", prefix_fraction=1.0).estimate.value == pytest.approx(1.0, abs=1e-6)
    assert result.get("flip_rate", at_fraction=1.0).estimate.value == 1.0
    assert result.get("random_recovery", fraction=0.02).estimate.value < 0.5


def test_small_shares_are_one_row(result: ProbeResult) -> None:
    assert result.get("rows", fraction=0.02).estimate.value == 1.0
    for row in result.rows:
        assert list(row.values["rows"]) == sorted(row.values["rows"])  # type: ignore[arg-type, type-var]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    _, hf, instances = case(name)
    found = run(SuffixConcentration(shares=(0.1, 0.5, 1.0)), name)
    for instance in instances:
        pair = instance.pair("field", 0)
        _, downstream = field_and_downstream(pair)
        for direction in DIRECTIONS:
            row = only(found.rows, pair.id, direction)
            for at, k in enumerate(row.values["rows"]):  # type: ignore[arg-type]
                for key, which in (("suffix", downstream[-k:]), ("prefix", downstream[:k])):  # type: ignore[misc]
                    expected = swap_recovery(
                        hf, pair.old.token_ids, pair.new.token_ids, which, pair.answer_ids, direction
                    )
                    mine = row.values[f"{key}_recovery"][at]  # type: ignore[index]
                    assert mine == pytest.approx(expected["recovery"], abs=TOLERANCE)


def test_a_model_that_reads_the_field_itself_has_flat_curves() -> None:
    found = SuffixConcentration().run(ContextStore(broken_direct()), grid(4))
    assert found.get("competence").estimate.value == 1.0
    for metric, param in (("suffix_recovery", "at_fraction"), ("random_recovery", "fraction")):
        assert found.get(metric, **{param: 1.0}).estimate.value == pytest.approx(0.0, abs=1e-3)


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(SuffixConcentration(), result)


@pytest.mark.parametrize("shares", [(), (0.0, 1.0), (0.5, 0.2, 1.0), (0.5,), (0.5, 1.5), (True,)])
def test_shares_are_checked(shares: Any) -> None:
    with pytest.raises(InputError, match="rise"):
        SuffixConcentration(shares=shares)


def test_few_draws_are_refused() -> None:
    with pytest.raises(InputError, match="n_draws is 2"):
        SuffixConcentration(n_draws=2)
    assert SuffixConcentration().shares == SHARES
