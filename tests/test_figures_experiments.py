"""One figure per experiment: what it draws is what the sweep measured, and nothing on it overlaps or is cut off."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import InputError
from notelens.report.dots import Dot, Panel, draw_dots
from notelens.report.experiments import COMPETENCE, EXPERIMENTS, HEADLINES, KINDS, PLACES, draw_experiment
from notelens.report.select_sweep import Cell, Measure, dot_panels, find, read_cells, share_panels
from notelens.runs import runner
from notelens.runs.sweep import run_sweep
from notelens.runs.sweep_config import load_sweep
from notelens.runs.sweep_tables import load_cells
from notelens.runs.yamlfile import parse_document
from notelens.tasks import TASKS
from tests.figure_checks import cut, overlaps, text_boxes
from tests.tiny import broken_direct, tiny_instances, tiny_model

ROOT = Path(__file__).parents[1]
TEXT = """\
name: drawn
task: {name: tiny_grid, n: 4}
sweep:
  models: [organism-notes, organism-direct]
probes:
  - name: locality
  - name: dissociation
  - {name: specificity, params: {ks: [1, 2, 8]}}
  - {name: injection, params: {doses: [1, 4]}}
  - name: placebo
  - name: suffix_concentration
  - name: knockout
  - name: token_stats
figures: false
"""


class TinyGrid:
    """The hand-set decoder's prompts as a task."""

    name = "tiny_grid"

    def __init__(self, *, n_notes: int = 1) -> None:
        self.n_notes = n_notes

    def instances(self, tokenizer: Any, n: int, seed: int) -> list[Any]:
        return tiny_instances(n, ("polarity", "swapped", "negated"), seed=seed, n_notes=self.n_notes)


def loader(name: str, **_: Any) -> Any:
    return tiny_model() if name.endswith("notes") else broken_direct()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sweep of two models through every probe that these figures draw."""
    folder = tmp_path_factory.mktemp("swept") / "s"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TASKS, "_targets", {**TASKS._targets, "tiny_grid": f"{__name__}:TinyGrid"})
        patch.setattr(runner, "default_loader", lambda: loader)
        done = run_sweep(load_sweep(parse_document(TEXT, "x.yaml")), folder)
        assert done.marks == {}
        yield folder


def texts(figure: Any) -> str:
    return "\n".join(text for text, _ in text_boxes(figure))


def check(figure: Any) -> None:
    assert overlaps(figure) == [] and cut(figure) == []


NAMES = ["notes", "direct"]


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if n != "false_effects"])
def test_every_figure_of_a_sweep_is_whole_and_names_every_cell(name: str, swept: Path) -> None:
    figure = draw_experiment(name, swept)
    check(figure)
    assert all(cell in texts(figure) for cell in NAMES)
    assert "2 cells" in texts(figure)


def test_what_is_drawn_is_what_was_measured(swept: Path) -> None:
    cells, about = read_cells(swept)
    assert [c.name for c in cells] == NAMES and about == "2 cells · tiny_grid"
    panels = {p.title: p for p in dot_panels(cells, HEADLINES)}
    assert {"write depth", "commit depth"}.isdisjoint(panels)  # timing was not measured
    # the note holds everything in one model, the field in the other
    assert [d.value for d in panels["field only"].dots] == pytest.approx([0, 1], abs=1e-3)
    assert [d.value for d in panels["downstream"].dots] == pytest.approx([1, 0], abs=1e-3)
    low, high = panels["downstream"].reference or (0, 0)
    assert 0.9 < low <= high < 1.2  # of the paper's models
    (competence,) = dot_panels(cells, [COMPETENCE])
    assert competence.reference is None and [d.value for d in competence.dots] == pytest.approx([1, 1])
    for entry in load_cells(swept)[1]:
        rows = [r for r in entry.rows if r["metric"] == "notes_recovery" and r["method"] == "both"]
        assert rows[0]["value"] == find(cells[NAMES.index(_name(entry))], HEADLINES[3])["value"]  # type: ignore[index]


def _name(entry: Any) -> str:
    return str(entry.entry.model).removeprefix("organism-")


def test_the_measures_are_metrics_that_probes_write(swept: Path) -> None:
    """A name that no probe writes would silently leave its panel out."""
    cells, _ = read_cells(swept)
    for m in (*HEADLINES, *KINDS, *PLACES):
        if m.experiment == "timing":
            continue
        assert any(find(c, m) is not None for c in cells), m


def test_curves_are_those_of_the_records(swept: Path) -> None:
    figure = draw_experiment("suffix", swept)
    cells, _ = read_cells(swept)
    rows = [r for r in cells[0].lines if r["metric"] == "suffix_recovery"]
    curve = next(c for c in figure.axes[0].lines if c.get_label() == "last rows")
    assert list(curve.get_ydata()) == [r["value"] for r in sorted(rows, key=lambda r: r["params"]["at_fraction"])]
    assert len(figure.axes) == 2
    shown = texts(draw_experiment("knockout", swept))
    assert "strongest rows hidden" in shown and "random rows hidden" in shown


def test_shares_stand_beside_base_rates(swept: Path) -> None:
    cells, _ = read_cells(swept)
    names, panels = share_panels(cells, ("class", "region"))
    assert names[0] == "delimiters" and any(n.startswith("class: ") for n in names)
    effect, base = (d.value for d in panels[0].dots if d.row == 0)
    assert effect == pytest.approx(1.0, abs=1e-3) and base is not None and base < 0.5  # the note is a delimiter


def test_a_single_run_has_figures_too(swept: Path) -> None:
    run = swept / "cells" / "organism-notes" / "tiny_grid" / "seed-0"
    for name in ("suffix", "token_stats", "off_template"):
        figure = draw_experiment(name, run)
        check(figure)
        assert "one run" in texts(figure)


def test_a_cell_without_numbers_says_so() -> None:
    cells = [Cell("good", ({"experiment": "locality", "metric": "m", "params": {}, "value": 0.5, "lo": 0.4, "hi": 0.6},)),
             Cell("bad", (), "not competent")]  # fmt: skip
    (panel,) = dot_panels(cells, [Measure("m", "locality", "m", {})])
    assert panel.dots[1] == Dot(1, 0, None)
    figure = draw_dots(["good", "bad"], [panel], ["measured"], "t", "s")
    check(figure)
    assert "not measurable" in texts(figure)
    assert "nothing to draw" in texts(draw_dots(["bad"], [Panel("m", (Dot(0, 0, None),))], ["measured"], "t"))


def test_long_names_and_many_panels_fit() -> None:
    rows = [f"a-model-with-a-very-long-name-{i}, tokens-400, seed {i}" for i in range(15)]
    dots = tuple(Dot(i, 0, i / 15, 0.0, 1.0) for i in range(15))
    panels = [Panel(f"metric {k}", dots, reference=(0.2, 0.3)) for k in range(10)]
    check(draw_dots(rows, panels, ["measured"], "t", "s"))


ARMS = [
    {"arm": "shuffled", "verdict": "no effect", "flagged": False},
    {"arm": "fake", "verdict": "effect", "flagged": True},
    {"arm": "random", "verdict": "no effect", "flagged": False},
]


def test_the_blinded_check_is_drawn_with_its_bound(tmp_path: Path) -> None:
    def table(value: float | None) -> list[dict[str, Any]]:
        ends = {
            "value": value,
            "lo": None if value is None else value - 0.05,
            "hi": None if value is None else value + 0.05,
        }
        return [
            {"experiment": "locality", "metric": "full_downstream_recovery", "params": {}, **ends},
            {"experiment": "dissociation", "metric": "notes_recovery", "params": {}, **ends},
            {"experiment": "injection", "metric": "follow_rate", "params": {}, **ends},
            {"experiment": "specificity", "metric": "topk_recovery", "params": {"k": 8, "ranking": "own"}, **ends},
        ]

    arms = [{**a, "table": table(v)} for a, v in zip(ARMS, (0.0, 0.9, None), strict=True)]
    record = {"arms": arms, "config": {"rule": {"bound": 0.1}}}
    (tmp_path / "unblinded.json").write_text(json.dumps(record))
    figure = draw_experiment("false_effects", tmp_path)
    check(figure)
    assert "fake: effect (FLAGGED)" in texts(figure) and "not measurable" in texts(figure)
    bounds = sorted({float(x.get_xdata()[0]) for x in figure.axes[0].lines if len(set(x.get_xdata())) == 1})
    assert -0.1 in bounds and 0.1 in bounds


def test_wrong_folders_and_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown figure 'sufix'; did you mean 'suffix'"):
        draw_experiment("sufix", tmp_path)
    with pytest.raises(InputError, match="holds no sweep and no records"):
        draw_experiment("suffix", tmp_path)
    with pytest.raises(InputError, match=r"holds no unblinded\.json"):
        draw_experiment("false_effects", tmp_path)


def test_there_is_a_script_for_every_figure_and_it_needs_no_torch(swept: Path, tmp_path: Path) -> None:
    for name in EXPERIMENTS:
        source = (ROOT / "paper_figures" / f"fig_{name}.py").read_text()
        assert f'experiment_command("{name}", __doc__)' in source
    program = (
        "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "assert 'torch' not in sys.modules"
    )
    script = str(ROOT / "paper_figures" / "fig_suffix.py")
    command = [sys.executable, "-c", program, script, str(swept), "--out", str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["suffix.png", "suffix.svg"]


def test_titles_of_narrow_panels_wrap_before_they_meet() -> None:
    dots = (Dot(0, 0, 0.5),)
    names = [f"gemma3-270m, {kind}, seed {seed}" for kind in ("gated", "organism", "off-template") for seed in (0, 1)]
    check(draw_dots(["region: template"], [Panel(name, dots) for name in names[:5]], ["measured"], "t", "s"))
    check(draw_dots(["region: template"], [Panel(name, dots) for name in names], ["measured"], "t", "s"))
