"""The pages on editing, composing and agents are what the committed records say, and claims are held against every model."""

from typing import Any

import pytest

from tests.scripts import FIGURES, load_script

pages: Any = load_script("measured_pages")


def row(method: str, value: float | None, metric: str = "p_correct", **more: Any) -> dict[str, Any]:
    base = {"experiment": "x", "model": "m", "params": {"length": 600}, "lo": None, "hi": None, "n": 48}
    return {**base, "method": method, "metric": metric, "value": value, **more}


def topic(*claims: Any) -> Any:
    return pages.Topic("x", "Title", "What is asked.", ["competence", "p_correct", "unknown"], claims)


def test_the_committed_pages_are_what_the_committed_records_say() -> None:
    assert pages.main(["--check"]) == 0, "run: python paper_figures/measured_pages.py"


def test_every_topic_is_of_an_experiment_that_exists() -> None:
    for _, topics in pages.topics().values():
        for topic in topics:
            assert (FIGURES.parent / "experiments" / f"{topic.experiment}.py").is_file(), topic.experiment


@pytest.mark.parametrize(
    ("bound", "value", "said"),
    [
        ({"at_least": 0.95}, 0.95, "met"), ({"at_least": 0.95}, 0.94, "**not met**"),
        ({"at_most": 0.05}, 0.05, "met"), ({"at_most": 0.05}, 0.06, "**not met**"),
    ],
)  # fmt: skip
def test_claims_are_held_against_every_model(bound: dict[str, float], value: float, said: str) -> None:
    claim = pages.Claim("it holds", "p_correct", "auto", **bound, params={"length": 600})
    found = {
        "one": [row("auto", value), row("auto", 0.5, params={"length": 150})],
        "two": [row("auto", value, model="k")],
    }
    lines = [line for line in pages.verdicts(topic(claim), found) if "it holds" in line]
    assert len(lines) == 2 and all(line.endswith(f"| {said} |") for line in lines)
    assert "| m | length 600 |" in lines[0] and "| k |" in lines[1]


def test_what_was_not_measured_is_not_shown_as_a_number() -> None:
    text = pages.page(
        "T", [topic()], {"r": [row("auto", None), row("full_prefill", 1.0, "competence", lo=0.9, hi=1.0)]}
    )
    assert "| length 600 | `full_prefill` | 1.000 [0.900, 1.000] (48) |" in text
    assert "`p_correct`" not in text and "`unknown`" not in text
    assert "Not on record: `x`." in pages.page("T", [topic()], {"r": [row("auto", 1.0, experiment="y")]})
    assert "Records: `r.json`." in text


def test_costs_are_those_of_the_benchmarks_asked_for() -> None:
    base = {"case": {"n": 8}, "metric": "ratio", "value": 12.34567, "q1": 11.0, "q3": 13.0, "n": 3, "device": "cpu"}
    results = [{**base, "benchmark": "ttft"}, {**base, "benchmark": "rotation", "value": 99.0}]
    lines = pages.cost_table(["ttft"], results)
    assert "| ttft | n 8 | `ratio` | 12.35 [11, 13] | 3 | cpu |" in lines and not any("99" in line for line in lines)
    assert pages.cost_table(["edit_cost"], results) == []
    text = pages.page("T", [topic()], {"r": [row("auto", 1.0)]}, lines)
    assert "## What it costs" in text
