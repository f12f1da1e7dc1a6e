"""Tables of a sweep: every row knows its cell, the wide layout picks the rows to read, marks are never dropped."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import InputError, RecordError
from notelens.report.reference import reference_range
from notelens.runs import manifest as m
from notelens.runs.records import FILE, RecordWriter
from notelens.runs.sweep_folder import Entry, Mark, SweepFolder, write_marks, write_sweep_folder
from notelens.runs.sweep_tables import render_sweep, write_sweep_tables
from notelens.runs.tables import FIELDS, FORMATS
from notelens.runs.wide import COLUMNS

FACTS = {
    "revision": "r", "weights_hash": "w", "dtype": "float32", "attention_kernel": "sdpa", "device": "cpu",
    "gate": {"passed": True}, "ungated": False,
}  # fmt: skip
HEADLINES: list[tuple[str, str, dict[str, Any]]] = [
    ("locality", "field_only_recovery", {}),
    ("locality", "full_downstream_recovery", {}),
    ("dissociation", "trigger_only_recovery", {}),
    ("dissociation", "notes_recovery", {}),
    ("specificity", "topk_recovery", {"k": 8, "ranking": "own"}),
    ("specificity", "randk_recovery", {"k": 8}),
    ("timing", "write_depth", {"anchor": "all", "form": "swapped"}),
    ("timing", "commit_depth", {}),
    ("injection", "follow_rate", {}),
    ("placebo", "recovery", {"donor": "other_filler"}),
]


def line(experiment: str, metric: str, params: dict[str, Any], value: float | None, **more: Any) -> dict[str, Any]:
    known = value is not None
    return {
        "kind": "aggregate", "experiment": experiment, "metric": metric, "method": "both", "params": params,
        "value": value, "lo": value - 0.01 if known else None, "hi": value + 0.01 if known else None, "n": 96,
        "n_excluded": 2, "reasons": {}, "swap": "isolated", "unit": "recovery", "flags": [], "paper_value": None,
        "paper_text": None, "n_clusters": 8, "gate": "passed", **more,
    }  # fmt: skip


def rows(start: float, seed: int, model: str) -> list[dict[str, Any]]:
    """Every headline, preceded and followed by rows that are not the one to read."""
    out: list[dict[str, Any]] = []
    for i, (experiment, metric, params) in enumerate(HEADLINES):
        common = {"model": model, "seed": seed}
        if metric == "topk_recovery":
            out.append(line(experiment, metric, {"k": 4, "ranking": "own"}, 9.0, **common))
            out.append(line(experiment, metric, {"k": 8, "ranking": "split_half"}, 9.0, **common))
        out.append(line(experiment, metric, params, 9.0, method="denoising", **common))
        out.append(line(experiment, metric, params, round(start + i / 10, 3), **common))
        out.append(line(experiment, metric, {**params, "form": "later"}, 9.0, **common))
    return out


def make(folder: Path, cells: list[tuple[Entry, list[dict[str, Any]] | None]], marks: dict[str, Mark]) -> Path:
    folder.mkdir()
    sweep = SweepFolder(folder, "demo", "", {}, tuple(entry for entry, _ in cells), marks)
    write_sweep_folder(sweep)
    write_marks(sweep)
    for entry, lines in cells:
        if lines is None:
            continue
        cell = sweep.cell(entry.key)
        cell.mkdir(parents=True)
        by_probe: dict[str, list[dict[str, Any]]] = {}
        for row in lines:
            by_probe.setdefault(row["experiment"], []).append(row)
        with RecordWriter(cell / FILE) as writer:
            for name, body in by_probe.items():
                end = {"kind": "probe", "experiment": name, "n_lines": len(body), "n_rows": 1, "incompetent": None}
                writer.write([*body, end])
        name = lines[0]["model"]
        manifest = {
            "manifest_version": 1, "name": "x", "config": {}, "config_hash": entry.config, "seed": entry.seed,
            "model": {"name": name, **FACTS}, "sessions": [{"commit": "abc", "dirty": False}], "state": "finished",
        }  # fmt: skip
        m.write_manifest(cell, manifest)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cells: list[tuple[Entry, list[dict[str, Any]] | None]] = [
        (Entry("small", "base", 0, "h0"), rows(0.0, 0, "org/small")),
        (Entry("small", "base", 1, "h1"), rows(0.2, 1, "org/small")),
        (Entry("big", "base", 0, "h2"), rows(0.5, 0, "Qwen/Qwen3-8B")),
        (Entry("big", "base", 1, "h3"), None),
        (Entry("bad|one", "base", 0, "h4"), None),
    ]
    paper = cells[2][1]
    assert paper is not None
    for row in paper:
        if row["metric"] == "field_only_recovery":
            row |= {"paper_value": 0.009, "paper_text": "0.009"}
    reason = "bad|one failed its gate at a_b"
    return make(tmp_path / "sweep", cells, {"bad|one/base/seed-0": Mark("gate", reason)})


def md_cells(text: str) -> list[list[str]]:
    lines = [x for x in text.splitlines() if x.startswith("|")]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", x)[1:-1]] for x in lines]


# --- long -------------------------------------------------------------------------------------------------------------


def test_json_rows_keep_the_fields_of_the_design_and_name_their_cell(folder: Path) -> None:
    found = json.loads(render_sweep(folder, "json"))
    assert all(list(row)[: len(FIELDS)] == list(FIELDS) for row in found)
    measured = [row for row in found if row["metric"] != "marked"]
    assert len(measured) == 3 * len(rows(0, 0, "m"))
    assert {(r["label"], r["task"], r["seed"], r["model"], r["cell"]) for r in measured} == {
        ("small", "base", 0, "org/small", "small/base/seed-0"),
        ("small", "base", 1, "org/small", "small/base/seed-1"),
        ("big", "base", 0, "Qwen/Qwen3-8B", "big/base/seed-0"),
    }
    marks = {row["cell"]: (row["reason"], row["n"], row["value"]) for row in found if row["metric"] == "marked"}
    assert marks == {
        "big/base/seed-1": ("not measured yet", 0, None),
        "bad|one/base/seed-0": ("bad|one failed its gate at a_b", 0, None),
    }


def test_csv_has_the_same_rows(folder: Path) -> None:
    table = list(csv.DictReader(io.StringIO(render_sweep(folder, "csv"))))
    data = json.loads(render_sweep(folder, "json"))
    assert [(r["cell"], r["metric"], r["reason"]) for r in table] == [
        (r["cell"], r["metric"], r["reason"] or "") for r in data
    ]


def test_markdown_has_three_more_columns_and_the_marked_cells(folder: Path) -> None:
    text = render_sweep(folder, "md")
    cells = md_cells(text)
    assert cells[0][:4] == ["model", "task", "seed", "metric"] and len({len(c) for c in cells}) == 1
    assert ["small", "base", "1"] in [c[:3] for c in cells]
    assert "MARKED bad\\|one/base/seed-0: bad\\|one failed its gate at a_b" in text
    assert "MARKED big/base/seed-1: not measured yet" in text
    assert "Sweep of 5 cells (3 models, 1 tasks, 2 seeds); 3 are complete." in text


def test_latex_balances(folder: Path) -> None:
    for layout in ("long", "wide"):
        text = render_sweep(folder, "tex", layout)
        assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") > 0
        body = [x for x in text.splitlines() if x.endswith("\\\\") and not x.startswith("%")]
        assert len({len(re.findall(r"(?<!\\)&", x)) for x in body}) == 1


# --- wide -------------------------------------------------------------------------------------------------------------


def test_the_wide_table_reads_the_pooled_row_with_the_right_parameters(folder: Path) -> None:
    found = json.loads(render_sweep(folder, "json", "wide"))
    ours = {row["model"]: row for row in found if row["source"] == "measured"}
    assert list(ours) == ["small", "big", "bad|one"]
    for i, column in enumerate(COLUMNS):
        single = ours["big"][column.name]
        value = round(0.5 + i / 10, 3)
        assert (single["value"], single["lo"], single["hi"], single["n"]) == (value, value - 0.01, value + 0.01, 96)
        both = ours["small"][column.name]
        assert both["by_seed"] == [round(i / 10, 3), round(0.2 + i / 10, 3)]
        assert both["value"] == pytest.approx(0.1 + i / 10) and both["lo"] is both["hi"] is None and both["n"] == 192
        assert ours["bad|one"][column.name] is None
    assert ours["small"]["seeds"] == [0, 1] and ours["big"]["seeds"] == [0]
    assert ours["big"]["marked"] == {"big/base/seed-1": "not measured yet"}


def test_the_papers_models_stand_below_with_their_values(folder: Path) -> None:
    found = json.loads(render_sweep(folder, "json", "wide"))
    paper = {row["model"]: row for row in found if row["source"] == "paper"}
    assert paper["gemma2_9b"]["top8"]["paper"] == "0.955" and paper["gemma2_9b"]["write_depth"]["paper"] == "0.26"
    assert paper["mistral_7b"]["random8"]["paper"] == "0.528" and paper["qwen3_8b"]["trigger_only"]["paper"] == "-0.007"
    for column in COLUMNS:
        text = reference_range(column.experiment, column.metric, column.paper_params)
        assert (paper["range"][column.name] or {"paper": ""})["paper"] == text
    assert paper["range"]["notes"]["paper"] == "0.995..1.009 (5 models)"
    ours = next(row for row in found if row["model"] == "big")
    assert ours["field_only"]["paper"] == "0.009" and ours["notes"]["paper"] is None


def test_the_wide_table_in_markdown(folder: Path) -> None:
    cells = md_cells(render_sweep(folder, "md", "wide"))
    assert cells[0] == ["model", *(c.title for c in COLUMNS)]
    by_model = {c[0]: c[1:] for c in cells[2:]}
    assert by_model["big"][0] == "0.500 [0.490, 0.510]; paper 0.009"
    assert by_model["small"][3] == "0.400 (0.300 to 0.500, 2 seeds)"
    assert set(by_model["bad\\|one"]) == {""} and "paper: range" in by_model


def test_several_tasks_get_a_column(tmp_path: Path) -> None:
    cells: list[tuple[Entry, list[dict[str, Any]] | None]] = [
        (Entry("a", "one", 0, "h0"), rows(0.0, 0, "a")), (Entry("a", "two", 0, "h1"), rows(0.1, 0, "a")),
    ]  # fmt: skip
    cells[0][1][1]["value"] = None  # type: ignore[index]  # the rows are there
    table = md_cells(render_sweep(make(tmp_path / "s", cells, {}), "md", "wide"))
    assert table[0][:2] == ["model", "task"] and [c[:2] for c in table[2:4]] == [["a", "one"], ["a", "two"]]


def test_the_wide_csv_has_one_line_per_row(folder: Path) -> None:
    table = list(csv.DictReader(io.StringIO(render_sweep(folder, "csv", "wide"))))
    data = json.loads(render_sweep(folder, "json", "wide"))
    assert [(r["source"], r["model"]) for r in table] == [(r["source"], r["model"]) for r in data]
    assert table[1]["top8"] == "0.9" and table[1]["top8_lo"] == "0.89" and table[1]["field_only_paper"] == "0.009"
    assert table[2]["marked"] == "bad|one failed its gate at a_b" and table[2]["top8"] == ""


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_the_same_bytes_every_time(folder: Path) -> None:
    write_sweep_tables(folder)
    first = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert {f"{name}.{format}" for name in ("table", "wide") for format in FORMATS} <= set(first)
    write_sweep_tables(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == first


def test_unknown_formats_layouts_and_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown format 'jsn'; did you mean 'json'"):
        render_sweep(folder, "jsn")
    with pytest.raises(InputError, match="unknown layout 'wid'; did you mean 'wide'"):
        render_sweep(folder, "md", "wid")
    with pytest.raises(InputError, match="holds no sweep"):
        render_sweep(tmp_path, "md")
    (folder / "marks.json").write_text('{"x": {"kind": "gate"}}')
    with pytest.raises(RecordError, match="is damaged"):
        render_sweep(folder, "md")
