"""The page on families is what the committed tables say."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "paper_figures" / "families_page.py"
TABLES = SCRIPT.with_name("tables")


@pytest.fixture(scope="module")
def families_page() -> Any:
    spec = importlib.util.spec_from_file_location("families_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_what_the_committed_tables_say(
    families_page: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert families_page.main(["--check"]) == 0, capsys.readouterr().out


def test_another_number_or_verdict_is_another_page(families_page: Any) -> None:
    table = json.loads((TABLES / "cross-family.json").read_text(encoding="utf-8"))
    record = json.loads((TABLES / "false-effects.json").read_text(encoding="utf-8"))
    before = families_page.page(table, record)
    table[0]["field_only"]["value"] = 0.777
    assert "0.777 [" in families_page.page(table, record)
    record["arms"][0]["flagged"] = not record["arms"][0]["flagged"]
    assert families_page.page(table, record).count("flagged**") != before.count("flagged**")


def test_what_could_not_be_measured_is_no_number(families_page: Any) -> None:
    nothing = {"value": None, "lo": None, "hi": None, "n": 12}
    assert families_page.cell(None) == "-" and families_page.cell(nothing) == "undefined"
    assert families_page.cell(nothing | {"n": 0}) == "-"
    assert families_page.cell({"value": -0.0001, "lo": -0.0004, "hi": 0.2, "n": 3}) == "0.000 [0.000, 0.200]"
