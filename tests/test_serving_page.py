"""The page on prompts is what the committed records say; without records it has no numbers."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

serving_page: Any = load_script("serving_page")


def row(
    metric: str, method: str, value: float | None, lo: float | None = None, hi: float | None = None, **params: Any
) -> Any:
    """One aggregate."""
    return {
        "experiment": "serve",
        "metric": metric,
        "method": method,
        "value": value,
        "lo": lo,
        "hi": hi,
        "n": 24,
        "model": "m",
        "params": params,
    }


ROWS = [
    row("prefix_hit_rate", "in_prefix", 0.0125), row("p_correct", "in_prefix", 0.96, 0.8, 0.99),
    row("prefix_hit_rate", "erratum", None), row("p_correct", "erratum", 0.92, 0.7, 0.98),
    row("p_correct", "erratum", 0.83, 0.6, 0.95, changed=True), row("capacity_rps", "in_prefix", 0.41),
    row("ttft_ms", "erratum", 301.4, 290.0, 320.0, load="below", q=0.9, offered_rps=0.164),
    row("p90_ttft_ratio", "erratum", 7.06, 6.5, 8.0, load="below"),
]  # fmt: skip


def test_the_committed_page_is_what_the_committed_records_say() -> None:
    assert serving_page.PAGE.read_text(encoding="utf-8") == serving_page.page(serving_page.tables())
    assert serving_page.main(["--check"]) == 0


def test_the_numbers_are_those_of_the_records() -> None:
    text = serving_page.page({"serve-m": ROWS})
    assert "| `in_prefix` | rewritten where it stands in the prefix | 0.013 | 0.96 [0.80, 0.99] | 24 |  |  |" in text
    assert "| unavailable | 0.92 [0.70, 0.98] | 24 | 0.83 [0.60, 0.95] | 24 |" in text, "what was not counted is not 0"
    assert "| below | 0.164 | `erratum` |  | 301 [290, 320] | 7.1 [6.5, 8.0] |  |  | 24 |" in text
    flat = serving_page.page({"serve-m": [*ROWS, row("p_correct", "hoisted", 1.0, 1.0, 1.0)]})
    assert (
        "| 1.00 [1.00, 1.00] † |" in flat and "† the interval has no width although n > 1" in flat and "†" not in text
    )
    assert "Capacity of the baseline: 0.41 requests a second." in text and "Records: `serve-m.json`." in text


def test_without_records_no_number_is_claimed() -> None:
    text = serving_page.page({})
    assert "No benchmark is on record here yet" in text and not re.search(r"\d+\.\d+x?\b(?!\.)", text.split("```")[2])


def test_skills_are_no_benchmark_of_arms() -> None:
    rows = [
        {**row("skill_ttft_ratio", "skill", 3.4, 3.1, 3.9, state="whole"), "experiment": "serve_skill", "n_excluded": 1}
    ]
    text = serving_page.page({"serve-m": ROWS, "serve-skill-m": rows})
    assert "| skill_ttft_ratio | `skill` | whole | 3.400 [3.100, 3.900] | 24 | 1 |" in text
    assert text.count("Capacity of the baseline") == 1 and text.index("## Measured") < text.index("## Skills")
    alone = serving_page.page({"serve-skill-m": rows})
    assert "No benchmark is on record here yet" in alone and "## Skills" in alone


def test_a_page_out_of_date_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving_page, "PAGE", tmp_path / "docs" / "serving.md")
    assert serving_page.main(["--check"]) == 1 and "out of date" in capsys.readouterr().out
    assert serving_page.main([]) == 0 and serving_page.main(["--check"]) == 0
