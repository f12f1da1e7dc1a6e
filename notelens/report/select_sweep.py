"""From the aggregates of a sweep's cells, or of one run, to what the figures of experiments draw. Draws nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notelens.errors import InputError
from notelens.report.curves import CurvePanel
from notelens.report.curves import Line as Curve
from notelens.report.dots import Dot, Panel
from notelens.report.reference import reference_rows
from notelens.runs.records import FILE, read_records
from notelens.runs.sweep_tables import load_cells

Line = Mapping[str, Any]
POOLED = ("both", "probe", "none")
_SINGLE = ("denoising", "noising")


@dataclass(frozen=True)
class Cell:
    """One cell: its name in the figure and its aggregates (pooled over directions)."""

    name: str
    lines: tuple[Line, ...]
    problem: str | None = None


@dataclass(frozen=True)
class Measure:
    """A metric of a panel: what :class:`notelens.runs.wide.Column` says, and the axis."""

    title: str
    experiment: str
    metric: str
    params: Mapping[str, Any]
    low: float = 0.0
    high: float = 1.0


def read_cells(folder: Path) -> tuple[list[Cell], str]:
    """Cells of a sweep's folder (or the one run that the folder holds), and what the heading says of them.

    Raises:
        InputError: the folder holds neither.
    """
    if (folder / "sweep.json").is_file():
        _, found = load_cells(folder)
        axes = [[getattr(c.entry, axis) for c in found] for axis in ("model", "task", "seed")]
        varied = [axis for axis, values in zip(("model", "task", "seed"), axes, strict=True) if len(set(values)) > 1]
        cells: list[Cell] = []
        for cell in found:
            parts = [_word(axis, getattr(cell.entry, axis)) for axis in varied] or [cell.entry.model]
            cells.append(Cell(", ".join(parts), _pooled(cell.rows), cell.problem))
        same = sorted({v[0] for v, axis in zip(axes[:2], ("model", "task"), strict=True) if axis not in varied})
        return cells, " · ".join([f"{len(cells)} cells", *map(str, same)])
    records = read_records(folder)
    if not records.runs and not records.items:
        raise InputError(
            f"{folder}: holds no sweep and no records ({FILE}); give the folder that 'notelens run' wrote to"
        )
    lines = _pooled(list(records.all_aggregates()))
    name = str(lines[0].get("model") or "unknown model") if lines else "unknown model"
    return [Cell(name, lines, None if lines else "not finished yet")], "one run"


def _word(axis: str, value: Any) -> str:
    return f"seed {value}" if axis == "seed" else str(value).removeprefix("organism-")


def _pooled(rows: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(row for row in rows if row["method"] not in _SINGLE)


def find(cell: Cell, m: Measure) -> Line | None:
    """The first pooled row of a metric with these parameters, which probes put first because it is the one to read."""
    for row in cell.lines:
        if (row["experiment"], row["metric"]) == (m.experiment, m.metric) and m.params.items() <= row["params"].items():
            return row
    return None


def dot_panels(cells: Sequence[Cell], measures: Sequence[Measure]) -> list[Panel]:
    """One panel for each measure that any cell has, with the range over the paper's models.

    Competence has no such range: how often a model is right is a property of that model.
    """
    panels: list[Panel] = []
    for m in measures:
        found = [(i, find(c, m)) for i, c in enumerate(cells)]
        if all(line is None for _, line in found):
            continue
        dots = tuple(
            Dot(i, 0, None) if line is None else Dot(i, 0, line["value"], line["lo"], line["hi"]) for i, line in found
        )
        known = [] if m.metric == "competence" else reference_rows(m.experiment, m.metric, _paper(m.params))
        paper = [r.value for r in known if r.unusable is None]
        panels.append(Panel(m.title, dots, m.low, m.high, (min(paper), max(paper)) if paper else None))
    return panels


def _paper(params: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in params.items() if k != "ranking"}


def curve_panels(cells: Sequence[Cell], curves: Sequence[tuple[str, str, str, str]]) -> list[CurvePanel]:
    """One panel for each cell.

    Args:
        cells: of the sweep.
        curves: (label, experiment, metric, name of the parameter on the x axis).
    """
    return [CurvePanel(c.name, tuple(_curves(c, curves, lambda v: float(v)))) for c in cells]


def band_panels(
    cells: Sequence[Cell], curves: Sequence[tuple[str, str, str, str]]
) -> tuple[list[CurvePanel], list[str]]:
    """As :func:`curve_panels`, with names on the x axis; in the order of the records."""
    names: list[str] = []
    for cell in cells:
        for _, experiment, metric, param in curves:
            for row in cell.lines:
                if (row["experiment"], row["metric"]) == (experiment, metric) and param in row["params"]:
                    names.append(str(row["params"][param]))
    names = list(dict.fromkeys(names))
    return [CurvePanel(c.name, tuple(_curves(c, curves, lambda v: float(names.index(str(v)))))) for c in cells], names


def _curves(cell: Cell, curves: Sequence[tuple[str, str, str, str]], place: Callable[[Any], float]) -> list[Curve]:
    found: list[Curve] = []
    for label, experiment, metric, param in curves:
        rows = [
            r for r in cell.lines
            if (r["experiment"], r["metric"]) == (experiment, metric) and set(r["params"]) == {param}
            and r["value"] is not None
        ]  # fmt: skip
        points = sorted(((place(r["params"][param]), r) for r in rows), key=lambda p: p[0])
        if points:
            y, lo, hi = (tuple(r[k] for _, r in points) for k in ("value", "lo", "hi"))
            found.append(Curve(label, tuple(x for x, _ in points), y, lo, hi))
    return found


def share_panels(cells: Sequence[Cell], kinds: Sequence[str]) -> tuple[list[str], list[Panel]]:
    """Share of the effect (series 0) and share of the tokens (series 1) by class or region; one panel for each cell."""
    names = ["delimiters"]
    for kind in kinds:
        rows = [r for c in cells for r in c.lines if r["experiment"] == "token_stats" and r["metric"] == f"{kind}_mass"]
        names += sorted({f"{kind}: {r['params'][f'at_{kind}']}" for r in rows})
    panels: list[Panel] = []
    for cell in cells:
        dots: list[Dot] = []
        for at, name in enumerate(names):
            kind, _, value = name.partition(": ")
            own, params = ("delimiter", {}) if not value else (kind, {f"at_{kind}": value})
            for series, metric in enumerate((f"{own}_mass", f"{own}_base_rate")):
                row = find(cell, Measure("", "token_stats", metric, params))
                if row is not None and row["value"] is not None:
                    dots.append(Dot(at, series, row["value"], row["lo"], row["hi"]))
        dots = dots or [Dot(at, 0, None) for at in range(len(names))]
        panels.append(Panel(cell.name, tuple(dots), 0.0, 0.5, None, (0.0,), always=True))
    return names, panels
