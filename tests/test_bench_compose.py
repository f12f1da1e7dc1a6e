"""The composing benchmark: rows have the names of DESIGN section 8, and a new run replaces the rows of its own cases only."""

import json
from pathlib import Path

import pytest

import notelens
from benchmarks.compose import main, merge, rotation_rows, ttft_rows
from benchmarks.report import FIELDS

TTFT = {"ttft_ratio", "full_ms", "compose_ms", "compile_ms", "pays_after_uses"}
ROTATION = {
    f"{name}{which}"
    for name in ("share_of_copy_bandwidth", "gib_per_s")
    for which in ("", "_unrotated", "_with_values")
}


def test_rows_of_a_small_model(tmp_path: Path) -> None:
    model = notelens.load("smollm2", dry_run=True)
    rows = ttft_rows(model, (96,), 2) + rotation_rows(model, 96, 3)
    assert {r["metric"] for r in rows if r["benchmark"] == "ttft"} >= TTFT - {"pays_after_uses"}
    assert {r["metric"] for r in rows if r["benchmark"] == "rotation"} == ROTATION
    assert all(r["value"] > 0 and r["q1"] <= r["value"] <= r["q3"] and r["case"] == {"n": 96} for r in rows)
    by = {r["metric"]: r["value"] for r in rows}
    assert by["gib_per_s"] > 0.01
    path = tmp_path / "results.json"
    other = {"benchmark": "ttft", "case": {"n": 512}, "metric": "ttft_ratio", "value": 9.0}
    path.write_text(json.dumps([other]))
    merge(rows, path)
    merge(rows, path)  # a second run of the same cases
    found = json.loads(path.read_text())
    assert found == [other, *rows]
    assert {"benchmark", "case", "metric", "value", "q1", "q3", "n"} == set(FIELDS) - {"device"} == set(rows[0])


def test_processor_time_needs_one_thread(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    with pytest.raises(SystemExit):
        main(["--clock", "cpu", "--lengths"])
    assert "OMP_NUM_THREADS=1" in capsys.readouterr().err
