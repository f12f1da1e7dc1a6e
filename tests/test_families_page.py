"""The page on families is what the committed tables say."""

import json
from typing import Any

import pytest

from tests.scripts import FIGURES, load_script

TABLES = FIGURES / "tables"
CONTROL = "organism-qwen3-notes-free"
SCRATCH = ("organism-qwen3", "organism-qwen3_moe", "organism-gemma3")
families_page: Any = load_script("families_page")


def tables() -> tuple[Any, Any]:
    table, record = (
        json.loads((TABLES / f"{n}.json").read_text(encoding="utf-8")) for n in ("cross-family", "false-effects")
    )
    return table, record


def test_the_committed_page_is_what_the_committed_tables_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert families_page.main(["--check"]) == 0, capsys.readouterr().out


def test_another_number_or_verdict_is_another_page() -> None:
    table, record = tables()
    before = families_page.page(table, record)
    table[0]["field_only"]["value"] = 0.777
    assert "0.777 [" in families_page.page(table, record)
    record["arms"][0]["flagged"] = not record["arms"][0]["flagged"]
    assert families_page.page(table, record).count("flagged**") != before.count("flagged**")


def test_what_could_not_be_measured_is_no_number() -> None:
    nothing = {"value": None, "lo": None, "hi": None, "n": 12}
    assert families_page.cell(None) == "-" and families_page.cell(nothing) == "undefined"
    assert families_page.cell(nothing | {"n": 0}) == "-"
    assert families_page.cell({"value": -0.0001, "lo": -0.0004, "hi": 0.2, "n": 3}) == "0.000 [0.000, 0.200]"


def test_a_model_that_was_not_there_is_named_and_has_no_row() -> None:
    table, _ = tables()
    absent = {**dict.fromkeys(table[0]), "source": "measured", "model": "organism-absent"}
    lines = families_page.families([absent, *table])
    assert "not there to be measured: organism-absent" in lines[-1]
    assert not any(line.startswith("| organism-absent") for line in lines)


def test_what_the_page_says_in_words_holds_in_its_tables() -> None:
    table, record = tables()
    rows = {r["model"]: r for r in table if r["source"] == "measured"}
    control = rows.pop(CONTROL)
    seeds = [rows.pop(f"organism-{name}-seed1") for name in ("qwen3", "llama")]
    rows = {k: r for k, r in rows.items() if r["field_only"] is not None}
    assert len(rows) >= 7
    for row in rows.values():
        assert max(abs(row["field_only"][k]) for k in ("value", "lo", "hi")) <= 0.05 and row["downstream"]["lo"] >= 0.95
        assert row["top8"]["lo"] > row["random8"]["hi"] + 0.3 and row["follow_rate"]["value"] == 1.0
    for seed in seeds:
        assert seed["field_only"]["lo"] > 0.05 and seed["field_only"]["value"] < 0.15
        assert seed["trigger_only"]["value"] <= 0.06 and seed["notes"]["value"] >= 0.94
        first = {k: r for k, r in rows.items() if k in SCRATCH}
        assert len(first) == 3 and all(r["notes"]["hi"] < seed["notes"]["value"] for r in first.values())
        nearer = {k for k, r in first.items() if r["trigger_only"]["value"] < seed["trigger_only"]["value"]}
        assert nearer == {"organism-gemma3"}
    for name in ("qwen3", "llama"):
        second, zero = rows[f"organism-{name}-seed2"], rows[f"organism-{name}"]
        assert second["trigger_only"]["hi"] < min(0.05, zero["trigger_only"]["lo"])
        assert second["notes"]["value"] > zero["notes"]["value"]
    assert rows["smollm2"]["trigger_only"]["lo"] > 0.8 and rows["smollm2"]["notes"]["hi"] < 0.2
    assert all(0.4 < rows["gemma3-270m"][k]["value"] < 0.6 for k in ("trigger_only", "notes"))
    hybrid = rows["organism-falcon_h1"]
    assert hybrid["placebo"] is None and hybrid["downstream"]["lo"] >= 0.99
    assert control["field_only"]["lo"] >= 0.95 and abs(control["downstream"]["lo"]) <= 0.05
    assert control["notes"]["lo"] > 0.3 and control["follow_rate"]["value"] == 0.0
    for arm in record["arms"]:
        by = {r["experiment"]: r for r in arm["table"]}
        if arm["expect"] == "no effect":
            for name in ("locality", "injection"):
                assert by[name]["value"] is None or abs(by[name]["value"]) <= 0.05
