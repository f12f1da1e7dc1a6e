"""From a run's records to its figures: the rows of the real probes on the hand-set decoder, and rows with known numbers."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import InputError
from notelens.report.figures import FIGURES, draw_figure, write_figures
from notelens.report.select import MEASURES, paper_range, select_bars, select_shares, select_strips, select_topk
from notelens.report.select_layers import select_panels
from notelens.runs.records import RecordWriter, read_records
from tests.figure_checks import cut, overlaps, text_boxes

ROOT = Path(__file__).parents[1]
FORMS = ("polarity", "swapped", "negated")


def texts(figure: Any) -> str:
    return "\n".join(text for text, _ in text_boxes(figure))


def line(experiment: str, metric: str, value: float | None, **changes: Any) -> dict[str, Any]:
    known = value is not None
    return {
        "kind": "aggregate",
        "experiment": experiment,
        "metric": metric,
        "method": "both",
        "params": {},
        "value": value,
        "lo": value - 0.1 if known else None,
        "hi": value + 0.1 if known else None,
        "n": 12 if known else 0,
        "n_excluded": 0 if known else 12,
        "model": "a-model",
        "gate": "passed",
    } | changes


def row(experiment: str, stage: str, item: str, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "instance", "experiment": experiment, "stage": stage, "item": item, "cluster": "family",
        "direction": "denoising", "excluded": None, "values": {}, "meta": {"form": "polarity", "v0": "a", "v1": "b"},
    } | changes  # fmt: skip


def write_run(
    folder: Path,
    lines: Mapping[str, Sequence[Mapping[str, Any]]],
    rows: Sequence[Mapping[str, Any]] = (),
    incompetent: Mapping[str, str] | None = None,
) -> Path:
    """A run's records: aggregates by experiment, one item per row."""
    folder.mkdir(parents=True, exist_ok=True)
    with RecordWriter(folder / "records.jsonl") as writer:
        writer.write([{"kind": "run", "config": "c", "seed": 0, "facts": {}}])
        for r in rows:
            end = {k: r[k] for k in ("experiment", "stage", "item")}
            writer.write([r, {"kind": "item", **end, "n_lines": 1}])
        for name, body in lines.items():
            sentence = (incompetent or {}).get(name)
            end = {"kind": "probe", "experiment": name, "n_lines": len(body), "n_rows": 0, "incompetent": sentence}
            writer.write([*body, end])
    return folder


# --- the probes' own rows -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every probe on the hand-set decoder, written as the runner writes it."""
    from notelens.context import ContextStore
    from notelens.probes import PROBES
    from notelens.probes.base import Row
    from notelens.runs.measure import Stamp, aggregate_line, item_group
    from tests.tiny import FAMILIES, tiny_instances, tiny_model

    folder = tmp_path_factory.mktemp("run")
    store, stamp = ContextStore(tiny_model()), Stamp("c", 0, "passed", {"name": "tiny"})
    instances = tiny_instances(12, FORMS, families=FAMILIES[:2])
    params: dict[str, dict[str, Any]] = {"timing": {"n_folds": 2, "n_shuffles": 2}, "specificity": {"ks": (1, 2, 8)}}
    with RecordWriter(folder / "records.jsonl") as writer:
        writer.write([{"kind": "run", "config": "c", "seed": 0, "facts": {}}])
        for name in PROBES.names():
            probe = PROBES.get(name)(**params.get(name, {}))
            rows: list[Row] = []
            for stage in probe.stages:
                for item in probe.items(instances, stage, rows):
                    group = item_group(probe, stage, item, probe.measure(store, item), stamp)
                    rows += [Row.from_json(each) for each in writer.write(group)[:-1]]
            body = [aggregate_line(a, stamp) for a in probe.aggregate(rows)]
            end = {"kind": "probe", "experiment": name, "n_lines": len(body), "n_rows": len(rows), "incompetent": None}
            writer.write([*body, end])
    return folder


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_figure_draws_what_the_probes_record(tiny_run: Path, name: str) -> None:
    figure = draw_figure(name, tiny_run)
    assert overlaps(figure) == []
    assert cut(figure) == []
    assert figure.axes and "nothing to draw" not in texts(figure)


def test_the_known_answers_of_the_tiny_decoder_are_on_the_page(tiny_run: Path) -> None:
    bars = {(b.group, b.label, b.direction): b for b in select_bars(read_records(tiny_run).all_aggregates())}
    for direction in ("denoising", "noising"):
        assert bars["Locality (the field changes)", "field only", direction].value == pytest.approx(0, abs=1e-5)
        assert bars["Locality (the field changes)", "full downstream", direction].value == pytest.approx(1, abs=1e-5)
        for form in ("one trigger", "actions swapped", "negated trigger"):
            found = bars["Dissociation by rule form", f"{form}: notes", direction]
            assert found.value == pytest.approx(1, abs=1e-5)
            assert found.n > 0
    assert {group for group, _, _ in bars} == {g for _, g, _ in MEASURES} | {"Dissociation by rule form"}
    strips = select_strips(read_records(tiny_run).rows("specificity"))
    assert len(strips) == len(FORMS)
    for strip in strips:
        strongest = max((e, p) for p, e in enumerate(strip.effects) if e is not None)[1]
        assert strip.tokens[strongest].strip() == ";"
        assert strip.field and strip.trigger <= strip.rule


def test_panels_equal_the_rows_of_the_timing_probe(tiny_run: Path) -> None:
    records = read_records(tiny_run)
    panels, n_layers = select_panels(records.rows("timing"), records.aggregates["timing"])
    assert n_layers == 2 and len(panels) == 3
    rows = [r for r in records.rows("timing") if r["stage"] == "read_out"]
    for panel, form in zip(panels, dict.fromkeys(r["meta"]["form"] for r in rows), strict=True):
        mine = [
            r["values"]
            for r in rows
            if (r["meta"]["form"], r["meta"]["grouping"], r["meta"]["anchor"])
            == (form, "held_out_instances", "rule_end")
        ]
        hits = [sum(v["conclusion_correct"][at] for v in mine) for at in range(n_layers + 1)]
        trials = sum(v["conclusion_total"] for v in mine)
        assert panel.rows["conclusion"].curves["rule end"].y == pytest.approx([h / trials for h in hits])
        assert panel.commit is not None and panel.commit.y == (0.0, 0.0, 1.0)  # the decision is read in the last layer
        assert panel.commit_depth == 1.0


def test_all_files_of_a_run_are_written(tiny_run: Path, tmp_path: Path) -> None:
    paths = write_figures(tiny_run, tmp_path)
    assert [p.name for p in paths] == [f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")]
    assert all(p.stat().st_size > 5_000 for p in paths)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)


def test_the_scripts_draw_the_same_files(tiny_run: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "paper_figures" / "fig_strip.py")]
    done = subprocess.run([*program, str(tiny_run), "--out", str(tmp_path)], capture_output=True, text=True, check=True)
    assert [Path(p).name for p in done.stdout.split()] == ["strip.png", "strip.svg"]
    own = {p.name: p.read_bytes() for p in write_figures(tiny_run, tmp_path / "all")}
    assert (tmp_path / "strip.png").read_bytes() == own["strip.png"]
    done = subprocess.run([*program, str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "holds no records" in done.stderr and "Traceback" not in done.stderr


# --- known numbers --------------------------------------------------------------------------------------------------


def test_missing_probes_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"locality": [line("locality", "field_only_recovery", 0.01)]})
    assert [p.name for p in write_figures(run)] == ["recovery.png", "recovery.svg"]
    assert sorted(p.name for p in (run / "figures").iterdir()) == ["recovery.png", "recovery.svg"]
    shown = texts(draw_figure("layers", run))
    assert "nothing to draw" in shown and "timing: not measured in this run" in shown
    assert write_figures(write_run(tmp_path / "empty", {})) == []
    assert write_figures(tmp_path) == []


def test_runs_with_excluded_rows_only_say_so(tmp_path: Path) -> None:
    rows = [row("specificity", "map", f"i{n}", excluded="both wrong") for n in range(12)]
    sentence = "timing: none of 12 rows could be measured (both wrong: 12); the model does not decide this task, " * 2
    lines = {
        "locality": [line("locality", "field_only_recovery", None)],
        "specificity": [line("specificity", "topk_recovery", None, params={"k": 8, "ranking": "own"})],
        "timing": [],
    }
    run = write_run(tmp_path / "run", lines, rows, {"timing": sentence})
    assert len(write_figures(run)) == 8
    for name in FIGURES:
        figure = draw_figure(name, run)
        assert cut(figure) == [] and overlaps(figure) == []
        assert "nothing to draw" in texts(figure)
    assert "12 of 12 rows are excluded (both wrong: 12)" in texts(draw_figure("strip", run))
    assert "none of 12 rows could be measured" in texts(draw_figure("layers", run))


def test_no_run_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no records"):
        draw_figure("recovery", tmp_path)
    with pytest.raises(InputError, match="unknown figure 'recovry'"):
        draw_figure("recovry", tmp_path)


def test_an_ungated_model_is_marked(tmp_path: Path) -> None:
    lines = {"locality": [line("locality", "field_only_recovery", 0.01, gate="ungated")]}
    assert "a-model (UNGATED)" in texts(draw_figure("recovery", write_run(tmp_path / "run", lines)))


def test_directions_are_preferred_to_their_pool_and_zero_width_is_flagged() -> None:
    lines = [
        line("locality", "field_only_recovery", 0.5),
        line("locality", "field_only_recovery", 0.4, method="denoising", n=5, n_excluded=1),
        line("locality", "field_only_recovery", 0.6, method="noising", lo=0.6, hi=0.6),
        line("placebo", "recovery", 0.0, params={"donor": "rerun"}),
        line("locality", "flip_rate", 0.9),
    ]
    bars = select_bars(lines)
    assert [(b.label, b.direction, b.value, b.n, b.n_excluded) for b in bars] == [
        ("field only", "denoising", 0.4, 5, 1),
        ("field only", "noising", 0.6, 12, 0),
        ("prefilled again", "both", 0.0, 12, 0),
    ]
    assert [b.zero_width for b in bars] == [False, True, False]
    assert bars[0].paper == paper_range("locality", "field_only_recovery", {})
    assert bars[0].paper is not None and bars[0].paper[0] < bars[0].paper[1]
    assert bars[2].paper is None


def test_the_paper_has_a_range_only_for_what_it_measured() -> None:
    assert paper_range("specificity", "topk_recovery", {"k": 8, "ranking": "own"}) is not None
    assert paper_range("specificity", "topk_recovery", {"k": 8, "ranking": "split_half"}) is None
    assert paper_range("injection", "recovery", {"notes": "after_rule"}) is None
    assert paper_range("placebo", "recovery", {"donor": "rerun"}) is None


def test_topk_curves_and_shares_by_name() -> None:
    def top(k: int, ranking: str, value: float | None, n: int = 12) -> dict[str, Any]:
        return line("specificity", "topk_recovery", value, params={"k": k, "ranking": ranking}, n=n)

    lines = [top(8, "own", 0.9), top(1, "own", 0.3), top(64, "own", None), top(1, "split_half", 0.2, 10)]
    lines += [top(8, "split_half", 0.7), line("specificity", "randk_recovery", 0.1, params={"k": 8})]
    lines += [top(8, "own", 0.5) | {"method": "noising"}]
    lines += [
        line("specificity", "region_share", 0.6, params={"region": "rule", "among": "top8"}),
        line("specificity", "region_base_rate", 0.2, params={"region": "rule"}),
        line("specificity", "region_share", 0.1, params={"region": "rule"}),
    ]
    curves = {c.role: c for c in select_topk(lines)}
    assert (curves["own"].x, curves["own"].y) == ((1.0, 8.0), (0.3, 0.9))
    assert curves["own"].lo == pytest.approx((0.2, 0.8)) and curves["own"].label.endswith("(n = 12)")
    assert curves["split"].label.endswith("(n = 10 to 12)")
    assert (curves["random"].x, curves["random"].y) == ((8.0,), (0.1,))
    assert [(s.label, s.top, s.base) for s in select_shares(lines)] == [("in: rule", 0.6, 0.2)]


def test_the_first_measurable_pair_of_each_form_is_shown() -> None:
    values = {
        "tokens": ["a", "b", "c", "d"], "positions": [2], "effects": [0.8], "field_positions": [1],
        "field_effects": [0.1], "trigger_positions": [], "rule_positions": [2],
    }  # fmt: skip
    meta = {"form": "swapped", "v0": "a", "v1": "b"}
    rows = [
        row("specificity", "map", "z/1", values=values),
        row("specificity", "map", "b/1", values=values),
        row("specificity", "map", "a/1", excluded="donor wrong"),
        row("specificity", "map", "0/1", values=values, direction="noising"),
        row("specificity", "topk", "0/0", values={}),
        row("specificity", "map", "c/1", values=values, meta=meta),
    ]
    strips = select_strips(rows)
    assert [s.title for s in strips] == ["one trigger: b/1", "actions swapped: c/1"]
    assert strips[0].effects == (None, 0.1, 0.8, None)
    assert (strips[0].field, strips[0].trigger, strips[0].rule) == (frozenset({1}), frozenset(), frozenset({2}))
    assert "“c” 0.80" in strips[0].note


def test_a_figure_needs_no_torch(tiny_run: Path, tmp_path: Path) -> None:
    program = (
        "import sys, json; from pathlib import Path; from notelens.report.figures import write_figures; "
        "write_figures(Path(sys.argv[1]), Path(sys.argv[2])); "
        "print(json.dumps([m for m in ('torch', 'transformers', 'matplotlib.pyplot', 'sklearn') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_run), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
