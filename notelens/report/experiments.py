"""One figure per experiment of ``configs/paper``, from the folder of its sweep or run. Imports no torch and no probe."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from notelens.errors import InputError, NotelensError
from notelens.registry import nearest
from notelens.report import style
from notelens.report.curves import draw_curves
from notelens.report.dots import Dot, Panel, draw_dots
from notelens.report.select_sweep import (
    Measure,
    band_panels,
    curve_panels,
    dot_panels,
    read_cells,
    share_panels,
)

FOLDER = "figures"
_K8: dict[str, Any] = {"k": 8}
HEADLINES = (
    Measure("field only", "locality", "field_only_recovery", {}),
    Measure("downstream", "locality", "full_downstream_recovery", {}),
    Measure("trigger only", "dissociation", "trigger_only_recovery", {}),
    Measure("notes", "dissociation", "notes_recovery", {}),
    Measure("top 8", "specificity", "topk_recovery", {**_K8, "ranking": "own"}),
    Measure("random 8", "specificity", "randk_recovery", _K8),
    Measure("write depth", "timing", "write_depth", {}),
    Measure("commit depth", "timing", "commit_depth", {}),
    Measure("follow rate", "injection", "follow_rate", {}),
    Measure("placebo", "placebo", "recovery", {"donor": "other_filler"}),
)
COMPETENCE = Measure("competence", "locality", "competence", {})
LAST_TENTH = Measure("last tenth of rows", "suffix_concentration", "suffix_recovery", {"at_fraction": 0.1})
DELIMITERS = (
    Measure("delimiters' share", "token_stats", "delimiter_mass", {}),
    Measure("their base rate", "token_stats", "delimiter_base_rate", {}),
)
KINDS = (COMPETENCE, *HEADLINES[:4], *DELIMITERS)
PLACES = (
    COMPETENCE,
    *HEADLINES[:2],
    LAST_TENTH,
    Measure("follow rate", "injection", "follow_rate", {}),
    Measure("follow rate, 1 note", "injection", "follow_rate", {"dose": 1, "order": "ranked"}),
    Measure("follow rate, 4 notes", "injection", "follow_rate", {"dose": 4, "order": "ranked"}),
)
BY_CELL = "isolated swaps · both directions pooled · 95 % intervals over scenario families"


def _dots(title: str, measures: tuple[Measure, ...]) -> Callable[[Path], Figure]:
    def draw(folder: Path) -> Figure:
        cells, about = read_cells(folder)
        panels = dot_panels(cells, measures)
        return draw_dots([c.name for c in cells], panels, ["measured"], title, f"{about} · {BY_CELL}")

    return draw


def _suffix(folder: Path) -> Figure:
    cells, about = read_cells(folder)
    name = "suffix_concentration"
    panels = curve_panels(
        cells,
        (
            ("last rows", name, "suffix_recovery", "at_fraction"),
            ("first rows", name, "prefix_recovery_curve", "prefix_fraction"),
            ("as many at random", name, "random_recovery", "fraction"),
        ),
    )
    return draw_curves(panels, "Recovery by share of the suffix patched", f"{about} · {BY_CELL}",
                       x_label="share of rows", y_label="recovery")  # fmt: skip


def _knockout(folder: Path) -> Figure:
    cells, about = read_cells(folder)
    labels = (
        ("intact: still right, strongest rows hidden", "kept"),
        ("intact: still right, random rows hidden", "kept_random"),
        ("stale: follows the new field, strongest rows hidden", "safe"),
        ("stale: follows the new field, random rows hidden", "safe_random"),
    )
    names = _states(cells)
    curves: list[tuple[str, str, str, str]] = []
    for label, key in labels:
        state, _, rest = key.partition("_")
        metric = f"p_{state}_by_masked_fraction{'_' + rest if rest else ''}"
        if metric in names:
            curves.append((label, "knockout", metric, "at_masked_fraction"))
    return draw_curves(curve_panels(cells, curves), "Decisions with rows out of sight", f"{about} · {BY_CELL}",
                       x_label="share hidden", y_label="share of decisions")  # fmt: skip


def _states(cells: Any) -> set[str]:
    return {str(r["metric"]) for c in cells for r in c.lines if r["experiment"] == "knockout"}


def _thirds(folder: Path) -> Figure:
    cells, about = read_cells(folder)
    curves = [
        (f"{state}: {what}", "knockout", f"p_{key}_by_masked_layer_third{suffix}", "at_band")
        for state, key in (("intact, still right", "kept"), ("stale, follows the new field", "safe"))
        for what, suffix in (("strongest rows", ""), ("random rows", "_random"))
    ]
    panels, names = band_panels(cells, curves)
    return draw_curves(panels, "Decisions with rows out of sight in some layers", f"{about} · {BY_CELL}",
                       x_label="layers", y_label="share of decisions", names=names)  # fmt: skip


def _token_stats(folder: Path) -> Figure:
    cells, about = read_cells(folder)
    names, panels = share_panels(cells, ("class", "region"))
    series = ["share of the effect", "share of the tokens"]
    return draw_dots(names, panels, series, "Which tokens carry the effect", f"{about} · {BY_CELL}")


def _false_effects(folder: Path) -> Figure:
    path = folder / "unblinded.json"
    if not path.is_file():
        raise InputError(f"{folder}: holds no unblinded.json; give the folder that experiments.false_effects wrote to")
    record = json.loads(path.read_text(encoding="utf-8"))
    arms, bound = record["arms"], float(record["config"]["rule"]["bound"])
    panels: list[Panel] = []
    for at, line in enumerate(arms[0]["table"]):
        dots = tuple(
            Dot(i, 0, row["value"], row["lo"], row["hi"]) for i, row in enumerate(arm["table"][at] for arm in arms)
        )
        params = "".join(f", {k} {v}" for k, v in line["params"].items() if k != "ranking")
        title = f"{line['experiment']}\n{line['metric'].replace('_', ' ')}{params}"
        panels.append(Panel(title, dots, 0.0, 1.0, None, (-bound, bound)))
    rows = [f"{a['arm']}: {a['verdict']}{' (FLAGGED)' if a['flagged'] else ''}" for a in arms]
    about = f"judged under code names · effect where an interval lies beyond {bound:g} · 95 % intervals"
    return draw_dots(rows, panels, ["measured"], "Blinded false-effect check", about)


EXPERIMENTS: Mapping[str, Callable[[Path], Figure]] = {
    "cross_family": _dots("Headline metrics over families", HEADLINES),
    "off_template": _dots("Other kinds of prompts", KINDS),
    "lookup": _dots("Looking up against deciding", (COMPETENCE, *HEADLINES[:2], LAST_TENTH, *DELIMITERS)),
    "scale": _dots("Where do notes begin? Widths and depths of one family", (COMPETENCE, *HEADLINES[:9])),
    "sliding_window": _dots("Behind the window", (COMPETENCE, *HEADLINES[:2], *HEADLINES[4:6], HEADLINES[8])),
    "dose": _dots("Place of the field, number of notes", PLACES),
    "suffix": _suffix,
    "knockout": _knockout,
    "knockout_layers": _thirds,
    "token_stats": _token_stats,
    "false_effects": _false_effects,
}
"""Figures of experiments, by name; each takes the folder of the sweep or run."""


def draw_experiment(name: str, folder: Path) -> Figure:
    """The figure of an experiment.

    Raises:
        InputError: unknown name, or the folder holds neither a sweep nor a run.
        RecordError: records cannot be read.
    """
    if name not in EXPERIMENTS:
        raise InputError(f"unknown figure {name!r}; {nearest(name, list(EXPERIMENTS))}")
    return EXPERIMENTS[name](folder)


def experiment_command(name: str, description: str | None) -> list[Path]:
    """Body of a script that draws one figure: reads ``FOLDER [--out DIR]`` from the command line, writes the files.

    Bad input ends the process with exit code 2 and one sentence.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a sweep or run, as written by 'notelens run'")
    parser.add_argument("--out", type=Path, default=None, help="folder for the files (default: FOLDER/figures)")
    given = parser.parse_args()
    try:
        figure = draw_experiment(name, given.folder)
        return style.save(figure, given.out if given.out is not None else given.folder / FOLDER, name)
    except NotelensError as error:
        parser.error(str(error))
