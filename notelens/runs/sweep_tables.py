"""The long table of a sweep: the aggregates of all cells, each row with its model, task and seed. Imports no torch."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from notelens.errors import InputError
from notelens.registry import nearest
from notelens.runs.files import write_atomic
from notelens.runs.manifest import Manifest, read_manifest
from notelens.runs.records import Line, read_records
from notelens.runs.sweep_folder import Entry, Mark, SweepFolder, incompetence, read_sweep_folder
from notelens.runs.tables import FORMATS, Table, gate_word, render

Layout = Literal["long", "wide"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LABELS = (("model", "label"), ("task", "task"), ("seed", "seed"))
DATA_LABELS = (*LABELS, ("cell", "cell"), ("reason", "reason"))
"""Columns before those of a run. Rows of data also have ``cell`` and ``reason``; only marked cells have a reason."""
MARKED = "marked"
"""Metric of the data rows (CSV, JSON) that stand for cells without a full result."""


@dataclass(frozen=True)
class CellRows:
    """A cell with what it measured.

    Attributes:
        entry: its place in the grid.
        manifest: of its run, or ``None`` where it has none.
        rows: aggregate lines with ``label``, ``task`` and ``cell``.
        problem: why its result is missing or not full, or ``None``.
    """

    entry: Entry
    manifest: Manifest | None
    rows: tuple[Line, ...]
    problem: str | None


def load_cells(folder: Path) -> tuple[SweepFolder, tuple[CellRows, ...]]:
    """All cells of a sweep's folder, finished or not.

    Raises:
        InputError: the folder holds no sweep.
        RecordError: manifests or records cannot be read.
    """
    sweep = read_sweep_folder(folder)
    return sweep, tuple(_cell(sweep, entry) for entry in sweep.entries)


def _cell(sweep: SweepFolder, entry: Entry) -> CellRows:
    path = sweep.cell(entry.key)
    manifest = read_manifest(path)
    labels = {"label": entry.model, "task": entry.task, "cell": entry.key, "reason": None}
    rows = tuple({**row, **labels} for row in read_records(path).all_aggregates())
    mark: Mark | None = sweep.marks.get(entry.key)
    if manifest is not None and manifest["state"] == "finished":
        mark = incompetence(path)  # an older mark is history: the run was finished since
    problem = mark.reason if mark is not None else None
    if problem is None and (manifest is None or manifest["state"] != "finished"):
        problem = "not measured yet" if manifest is None else "not finished yet"
    return CellRows(entry, manifest, rows, problem)


def header(sweep: SweepFolder, cells: tuple[CellRows, ...]) -> tuple[str, ...]:
    """What a reader must know about the cells, in sentences."""
    finished = sum(c.problem is None for c in cells)
    facts: dict[str, Mapping[str, Any]] = {c.entry.model: c.manifest["model"] for c in cells if c.manifest is not None}
    ungated = sorted(label for label, f in facts.items() if gate_word(f) == "ungated")
    gate = "Gate: passed by all models with records." if not ungated else f"UNGATED: {', '.join(ungated)}."
    first = [c.manifest["sessions"][0] for c in cells if c.manifest is not None]
    commits = sorted({str(s.get("commit") or "unknown") + (" with changes" if s.get("dirty") else "") for s in first})
    n_models, n_tasks, n_seeds = (len({getattr(c.entry, axis) for c in cells}) for axis in ("model", "task", "seed"))
    lines = [
        f"Sweep of {len(cells)} cells ({n_models} models, {n_tasks} tasks, {n_seeds} seeds); {finished} are complete. {gate}",
        "n counts measured rows: one instance in one direction, where a probe has directions. Intervals are 95 % and "
        "resample scenario families. Rows that could not be measured are excluded and counted.",
        f"Commit {', '.join(commits) or 'unknown'}.",
    ]
    return (*lines, *(f"MARKED {c.entry.key}: {c.problem}" for c in cells if c.problem is not None))


def render_sweep(folder: Path, format: str, layout: str = "long") -> str:
    """The table of a sweep's folder as text.

    Args:
        folder: of the sweep, finished or not.
        format: ``md``, ``csv``, ``tex`` or ``json``. Rows of CSV and JSON have the fields of a run's rows, and ``label``,
            ``task``, ``cell`` and ``reason``; a marked cell is a row whose metric is ``marked``.
        layout: ``long``, or ``wide`` (one row per model, one column per headline metric).

    Raises:
        InputError: unknown format or layout; no sweep in the folder.
    """
    if format not in FORMATS:
        raise InputError(f"unknown format {format!r}; {nearest(format, list(FORMATS))}")
    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout!r}; {nearest(layout, list(LAYOUTS))}")
    sweep, cells = load_cells(folder)
    if layout == "wide":
        from notelens.runs.wide import render_wide

        return render_wide(sweep, cells, format)
    rows = [row for cell in cells for row in cell.rows]
    data = format in ("csv", "json")
    marks = [_mark_row(cell) for cell in cells if cell.problem is not None] if data else []
    return render(Table(sweep.name, header(sweep, cells), (*rows, *marks), DATA_LABELS if data else LABELS), format)


def _mark_row(cell: CellRows) -> Line:
    """A cell without a full result as a row of data."""
    manifest = cell.manifest
    config = manifest["config_hash"] if manifest is not None else cell.entry.config
    return {
        "experiment": "sweep",
        "metric": MARKED,
        "model": manifest["model"]["name"] if manifest is not None else cell.entry.model,
        "method": "none",
        "params": {},
        "value": None,
        "lo": None,
        "hi": None,
        "n": 0,
        "n_excluded": 0,
        "swap": "none",
        "unit": "none",
        "paper_value": None,
        "seed": cell.entry.seed,
        "config": config,
        "label": cell.entry.model,
        "task": cell.entry.task,
        "cell": cell.entry.key,
        "reason": cell.problem,
    }


def write_sweep_tables(folder: Path) -> None:
    """Write ``table.*`` and ``wide.*``; the same records give the same bytes."""
    for layout, name in (("long", "table"), ("wide", "wide")):
        for format in FORMATS:
            write_atomic(folder / f"{name}.{format}", render_sweep(folder, format, layout))


def grid_csv(titles: tuple[str, ...], rows: list[list[Any]]) -> str:
    """CSV of plain values; nothing is an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(titles)
    for row in rows:
        writer.writerow(["" if v is None else json.dumps(v) if isinstance(v, list | dict | bool) else v for v in row])
    return out.getvalue()
