"""Tables: fields, marks and escapes, and the paper's value beside ours."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import InputError
from notelens.runs import tables as t

MANIFEST: dict[str, Any] = {
    "manifest_version": 1,
    "name": "demo",
    "config_hash": "c0ffee" * 10,
    "config": {"probes": [{"name": "locality"}, {"name": "specificity"}]},
    "seed": 3,
    "model": {
        "name": "smollm2", "revision": "r1", "dtype": "float32", "attention_kernel": "sdpa", "device": "cpu",
        "gate": {"passed": True}, "ungated": False,
    },
    "sessions": [{"commit": "abc", "dirty": False}],
    "state": "finished",
}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    base = {
        "kind": "aggregate", "experiment": "locality", "metric": "field_only_recovery", "model": "smollm2",
        "method": "both", "params": {}, "value": 0.012345, "lo": -0.0001, "hi": 0.03, "n": 48, "n_clusters": 8,
        "n_excluded": 0, "reasons": {}, "swap": "isolated", "unit": "recovery", "flags": [], "paper_value": None,
        "paper_note": None, "control": None, "interval": "bca", "level": 0.95, "gate": "passed",
    }  # fmt: skip
    return base | changes


def table(*rows: dict[str, Any], manifest: dict[str, Any] = MANIFEST) -> t.Table:
    return t.make_table(manifest, rows)


def md_cells(text: str) -> list[list[str]]:
    """Cells of every table line, read as markdown reads them."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_json_rows_have_the_fields_of_the_design() -> None:
    rows = json.loads(t.render(table(row(params={"k": 8})), "json"))
    wanted = "experiment, metric, model, method, params, value, lo, hi, n, n_excluded, swap, unit, paper_value"
    assert isinstance(rows, list)
    assert list(rows[0])[: len(wanted.split(", "))] == wanted.split(", ")
    assert rows[0]["params"] == {"k": 8} and rows[0]["value"] == 0.012345
    assert {"reasons", "flags", "n_clusters", "gate", "seed", "config"} <= set(rows[0])


def test_markdown_has_a_header_in_plain_words_and_one_table_per_experiment() -> None:
    rows = (row(), row(metric="competence", value=0.975, n=40), row(experiment="specificity", metric="topk_recovery"))
    text = t.render(table(*rows), "md")
    assert "Model smollm2 (revision r1, float32, sdpa, cpu). Gate: passed." in text
    assert "Competence (both prompts of a pair answered right): 0.975 (locality, n=40)." in text
    assert text.count("## ") == 2 and "## specificity" in text
    cells = md_cells(text)
    assert cells[0] == list(t.COLUMNS)
    assert cells[2] == ["field_only_recovery", "both", "", "0.012 [0.000, 0.030]", "48", "0", "isolated", ""]


def test_an_ungated_model_and_an_unfinished_run_are_shouted() -> None:
    facts = MANIFEST["model"] | {"gate": {"passed": False}, "ungated": True}
    assert "UNGATED" in t.render(table(row(), manifest=MANIFEST | {"model": facts}), "md")
    facts = MANIFEST["model"] | {"gate": None}
    assert "UNGATED" in t.render(table(row(), manifest=MANIFEST | {"model": facts}), "md")
    text = t.render(t.make_table(MANIFEST, [row()], ["timing"], ["locality: none of 4 rows could be measured"]), "md")
    assert "UNFINISHED: no aggregates yet for timing" in text and "NOT COMPETENT: locality: none of 4" in text


@pytest.mark.parametrize("flags", [[], ["zero_width"]])
def test_a_zero_width_interval_is_marked_with_a_footnote(flags: list[str]) -> None:
    flat = row(value=1.0, lo=1.0, hi=1.0, flags=flags)
    text = t.render(table(flat), "md")
    assert "1.000 [1.000, 1.000] †" in text and "† the interval has no width although n \\> 1" in text
    assert r"\textdagger{}" in t.render(table(flat), "tex")
    assert json.loads(t.render(table(flat), "json"))[0]["flags"] == ["zero_width"]
    for unmarked in (row(), row(value=1.0, lo=None, hi=None, n=1), row(value=1.0, lo=1.0, hi=1.0, n=1)):
        assert "†" not in t.render(table(unmarked), "md")


def test_undefined_values_and_reasons_are_words() -> None:
    bare = row(value=None, lo=None, hi=None, n=0, n_excluded=5, reasons={"donor wrong": 3, "gap too small": 2})
    cells = md_cells(t.render(table(bare), "md"))[2]
    assert cells[3:6] == ["undefined", "0", "5 (donor wrong: 3, gap too small: 2)"]
    assert list(csv.reader(io.StringIO(t.render(table(bare), "csv"))))[1][5:8] == ["", "", ""]


NASTY = 'a|b_c *x* `q` <i> \\ $1 & 50% #2 {y} ~ ^ "z", [l](u) _w_\nnext'


def test_nothing_breaks_out_of_a_cell() -> None:
    bad = row(params={"anchor": NASTY}, experiment=NASTY, method="a,b")
    cells = md_cells(t.render(table(bad), "md"))
    assert {len(line) for line in cells} == {len(t.COLUMNS)}
    assert r"a\|b_c \*x\* \`q\` \<i\> \\ $1" in cells[2][2] and r"\_w\_ next" in cells[2][2] and "](" not in cells[2][2]
    parsed = list(csv.reader(io.StringIO(t.render(table(bad), "csv"))))
    assert len(parsed) == 2 and len(parsed[1]) == len(parsed[0])
    named = dict(zip(parsed[0], parsed[1], strict=True))
    assert json.loads(named["params"]) == {"anchor": NASTY} and named["experiment"] == NASTY
    assert json.loads(t.render(table(bad), "json"))[0]["params"]["anchor"] == NASTY
    body = [line for line in t.render(table(bad), "tex").splitlines() if line.endswith(r"\\") and "anchor" in line]
    assert len(body) == 1 and len(re.findall(r"(?<!\\)&", body[0])) == len(t.COLUMNS) - 1
    assert not re.search(r"(?<!\\)[$#_%]", body[0])
    plain = re.sub(r"\\[{}]", "", t.render(table(bad), "tex"))
    assert plain.count("{") == plain.count("}")


def test_the_summary_keeps_the_first_pooled_row_of_a_metric_and_its_rule_forms() -> None:
    rows = [row(method=m) for m in ("both", "denoising", "noising")] + [row(metric="other", method="noising")]
    rows += [row(method="both", params=p) for p in ({"form": "swapped"}, {"k": 4})]
    rows += [row(metric="flip_rate", method="both", params=p) for p in ({}, {"form": "swapped"})]
    cells = md_cells(t.render(table(*rows), "md", summary=True))[2:]
    assert [c[:2] for c in cells] == [
        ["field_only_recovery", "both"], ["other", "noising"], ["field_only_recovery", "both"], ["flip_rate", "both"]
    ]  # fmt: skip
    assert cells[2][2] == "form=swapped"
    assert "4 more rows (single directions, other parameters)" in t.render(table(*rows), "md", summary=True)
    assert len(md_cells(t.render(table(*rows), "md"))) == 10


def test_the_papers_value_is_a_number_for_its_own_model_and_a_range_elsewhere() -> None:
    from notelens.report.reference import reference_range, reference_rows

    rows = reference_rows("locality", "field_only_recovery", {}, "google/gemma-2-9b-it")
    usable = [r.value for r in rows if r.unusable is None]
    own = t.paper(row(model="google/gemma-2-9b-it"))
    assert own["paper_value"] == usable[0] and own["paper_text"] == " / ".join(map(str, usable))
    other = t.paper(row())
    assert (
        other["paper_value"] == other["paper_text"] == reference_range("locality", "field_only_recovery", {}, "smollm2")
    )
    assert "models" in other["paper_text"]
    assert set(t.paper(row(method="noising")).values()) == {None}
    assert set(t.paper(row(metric="nobody_reports_this")).values()) == {None}
    k8, k1 = (t.paper(row(experiment="specificity", metric="topk_recovery", params={"k": k})) for k in (8, 1))
    assert k8["paper_value"] is not None and k8["paper_value"] != k1["paper_value"]
    assert md_cells(t.render(table(row() | own), "md"))[2][-1] == own["paper_text"]


def test_unknown_formats_and_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'json'"):
        t.render(table(row()), "jsn")
    with pytest.raises(InputError, match="holds no run"):
        t.load_table(tmp_path)


def test_tables_are_functions_of_records(tmp_path: Path) -> None:
    from notelens.runs.records import FILE, RecordWriter

    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    with RecordWriter(tmp_path / FILE) as writer:
        end = {"kind": "probe", "experiment": "locality", "n_lines": 2, "n_rows": 2, "incompetent": None}
        writer.write([row(), row(metric="flip_rate"), end])
    first = {f: t.render(t.write_tables(tmp_path), f) for f in t.FORMATS}
    for name, text in first.items():
        assert (tmp_path / f"table.{name}").read_text() == text
    assert {f: t.render(t.load_table(tmp_path), f) for f in t.FORMATS} == first
    assert "UNFINISHED: no aggregates yet for specificity" in first["md"]
