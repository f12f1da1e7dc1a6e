"""Token statistics: known answers on the tiny decoder, whose one note stands on a delimiter, and by hand from rows."""

import pytest

from notelens.probes.base import ProbeResult, Row
from notelens.probes.token_stats import NO_EFFECT, TokenStats
from tests.probe_cases import assert_rows_make_the_table, grid, run
from tests.tiny import FORMS


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    return run(TokenStats(), instances=grid(6, FORMS))


def test_the_tiny_note_is_a_delimiter(result: ProbeResult) -> None:
    assert result.get("delimiter_mass").estimate.value == pytest.approx(1.0, abs=1e-6)
    base = result.get("delimiter_base_rate").estimate.value
    assert 0 < base < 1
    assert result.get("delimiter_enrichment").estimate.value > 1.0
    assert result.get("flip_rate").estimate.value == 1.0


def test_shares_and_base_rates_sum_to_one(result: ProbeResult) -> None:
    for metric in ("region_mass", "region_base_rate", "class_mass", "class_base_rate"):
        found = [a.estimate.value for a in result.aggregates if a.metric == metric and a.method == "both"]
        assert sum(found) == pytest.approx(1.0, abs=1e-6)


def by_hand(effects: list[float]) -> Row:
    values = {
        "positions": [3, 4, 5, 6],
        "effects": effects,
        "regions": ["a"] * 4 + ["rule", "rule", "filler"],
        "kinds": ["content", "content", "newline", "punctuation"],
        "aggregator": [False, False, True, True],
        "all_flipped": True,
        "competent": True,
        "margin_gap": 2.0,
    }
    return Row("i", "map", "family", "denoising", None, values, {})


def test_by_hand() -> None:
    table = TokenStats().aggregate([by_hand([0.2, -1, 0.6, 0.2])])
    lines = {(a.metric, tuple(a.params.items())): a.estimate.value for a in table if a.method == "both"}
    assert lines["delimiter_mass", ()] == pytest.approx(0.8)
    assert lines["delimiter_base_rate", ()] == 0.5
    assert lines["delimiter_enrichment", ()] == pytest.approx(1.6)
    assert lines["region_mass", (("at_region", "rule"),)] == pytest.approx(0.6)
    assert lines["top_token_class", (("at_class", "newline"),)] == 1.0
    assert lines["class_mass", (("at_class", "content"),)] == pytest.approx(0.2)


def test_rows_without_effect_are_excluded() -> None:
    line = next(
        a for a in TokenStats().aggregate([by_hand([0.0] * 4), by_hand([1.0, 0, 0, 0])]) if a.metric == "delimiter_mass"
    )
    assert line.n_excluded == 1 and dict(line.reasons) == {NO_EFFECT: 1}


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(TokenStats(), result)
