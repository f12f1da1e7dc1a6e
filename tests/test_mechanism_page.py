"""The page on the mechanism is what the committed tables say, and keeps of a sweep what it shows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notelens.errors import InputError
from tests.scripts import load_script

mechanism: Any = load_script("mechanism_page")


def cell(model: str, task: str, value: float | None, **also: Any) -> dict[str, Any]:
    row = {
        "experiment": "locality", "metric": "field_only_recovery", "params": {}, "value": value, "lo": None, "hi": None, "n": 7,
    }  # fmt: skip
    return {"model": model, "task": task, "seed": 0, "problem": None, "rows": [row], **also}


def topic(**also: Any) -> Any:
    columns = (mechanism.Measure("field only", "locality", "field_only_recovery", {}),)
    return mechanism.Topic("s", "Title", "Question?", columns, **also)


def test_the_committed_page_is_what_the_committed_tables_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert mechanism.main(["--check"]) == 0, capsys.readouterr().out


def test_every_table_is_on_the_page_and_every_claim_is_about_a_column() -> None:
    asked = mechanism.topics()
    assert len({t.sweep for t in asked}) == len(asked)
    for t in asked:
        titles = [c.title for c in t.columns]
        assert len(set(titles)) == len(titles) and {c.column for c in t.claims} <= set(titles)
        assert all((c.at_least is None) != (c.at_most is None) for c in t.claims)
    shown = {t.path.name for t in asked}
    assert {p.name for p in mechanism.TABLES.glob("mechanism-*.json")} <= shown
    for t in asked:
        if t.path.is_file():  # a column that no cell has is a misspelt metric
            cells = json.loads(t.path.read_text(encoding="utf-8"))
            assert cells and all(any(mechanism._row(c, x) is not None for x in cells) for c in t.columns), t.sweep


def test_verdicts_follow_the_values() -> None:
    claim = mechanism.Claim("text", "field only", at_most=0.05)
    cells = [
        cell("a", "t", 0.01),
        cell("b", "t", 0.3),
        cell("c", "t", None),
        cell("d", "t", 0.0, problem="incompetent"),
    ]
    shown = mechanism.section(topic(claims=(claim,)), cells)
    assert "met in 2 of 3 rows; not in b 0.300 (7)." in shown
    assert "| c | - |" in shown and "in part: d: incompetent" in shown
    where = mechanism.Claim("text", "field only", where="lookup", at_least=0.25)
    cells = [cell("a", "lookup", 0.3), cell("a", "decision", 0.0)]
    assert "met in 1 of 1 rows." in mechanism.section(topic(claims=(where,)), cells)
    assert mechanism.labels(cells) == ["a, lookup", "a, decision"]


def test_a_sweep_that_the_page_does_not_know_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mechanism.main(["--keep", str(tmp_path)]) == 2
    assert "error:" in capsys.readouterr().err
    with pytest.raises(InputError):
        mechanism.keep(tmp_path, [topic()])


def test_what_is_kept_of_a_sweep_is_its_pooled_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {**cell("m", "t", 0.2)["rows"][0], "method": "both", "reasons": {}}
    single, other = {**line, "method": "noising", "value": 0.9}, {**line, "metric": "competence"}
    entry = SimpleNamespace(model="m", task="t", seed=3, key="m/t/seed-3")
    found = SimpleNamespace(entry=entry, rows=(single, other, line), problem=None)
    monkeypatch.setattr(mechanism, "TABLES", tmp_path)
    monkeypatch.setattr(mechanism, "load_cells", lambda _: (SimpleNamespace(name="s"), (found,)))
    (kept,) = json.loads(mechanism.keep(tmp_path, [topic()]).read_text(encoding="utf-8"))
    assert (kept["model"], kept["task"], kept["seed"], kept["problem"]) == ("m", "t", 3, None)
    (row,) = kept["rows"]
    assert row["value"] == 0.2 and row["metric"] == "field_only_recovery" and "reasons" not in row
    found.rows = ()
    with pytest.raises(InputError, match="not finished"):
        mechanism.keep(tmp_path, [topic()])
    with pytest.raises(InputError, match="no topic"):
        mechanism.keep(tmp_path, [])


def test_numbers() -> None:
    row = {"value": -0.0001, "lo": -0.001, "hi": 0.25, "n": 9}
    assert mechanism.number(row) == "0.000 [0.00, 0.25] (9)" and mechanism.number(None) == "-"
