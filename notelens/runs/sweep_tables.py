"""The long table of a sweep: the aggregates of all cells, each row with its model, task and seed. Imports no torch.

A sweep of serving benchmarks has engines where others have models, and no tasks.
"""

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
from notelens.runs.sweep_config import SweepKind
from notelens.runs.sweep_folder import Entry, Mark, SweepFolder, incompetence, read_sweep_folder
from notelens.runs.tables import FORMATS, Table, gate_word, render

Layout = Literal["long", "wide"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LABELS = (("model", "label"), ("task", "task"), ("seed", "seed"))
SERVE_LABELS = (("engine", "label"), ("seed", "seed"))
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
    rows = tuple({**row, **labels} for row in _aggregates(sweep.kind, path, manifest))
    mark: Mark | None = sweep.marks.get(entry.key)
    if manifest is not None and manifest["state"] == "finished":
        mark = incompetence(path)  # an older mark is history: the run was finished since
    problem = mark.reason if mark is not None else None
    if problem is None and (manifest is None or manifest["state"] != "finished"):
        problem = "not measured yet" if manifest is None else "not finished yet"
    return CellRows(entry, manifest, rows, problem)


def _aggregates(kind: SweepKind, path: Path, manifest: Manifest | None) -> list[Line]:
    """Aggregate lines on record; of a serving benchmark that is not whole, those of what there is."""
    if kind == "serve" and manifest is not None and manifest["state"] != "finished":
        from notelens.runs.serve_tables import serve_table

        return list(serve_table(path).rows)
    return read_records(path).all_aggregates()


def header(sweep: SweepFolder, cells: tuple[CellRows, ...]) -> tuple[str, ...]:
    """What a reader must know about the cells, in sentences."""
    serve = sweep.kind == "serve"
    n_models, n_tasks, n_seeds = (len({getattr(c.entry, axis) for c in cells}) for axis in ("model", "task", "seed"))
    grid = f"{n_models} engines" if serve else f"{n_models} models, {n_tasks} tasks"
    finished = sum(c.problem is None for c in cells)
    first = [c.manifest["sessions"][0] for c in cells if c.manifest is not None]
    commits = sorted({str(s.get("commit") or "unknown") + (" with changes" if s.get("dirty") else "") for s in first})
    gate, *rest = _serve_sentences(sweep, cells) if serve else _run_sentences(cells)
    lines = [
        f"Sweep of {len(cells)} cells ({grid}, {n_seeds} seeds); {finished} are complete. {gate}",
        *rest,
        f"Commit {', '.join(commits) or 'unknown'}.",
    ]
    return (*lines, *(f"MARKED {c.entry.key}: {c.problem}" for c in cells if c.problem is not None))


def _serve_sentences(sweep: SweepFolder, cells: tuple[CellRows, ...]) -> list[str]:
    from notelens.runs.serve_tables import READING, engine_text
    from notelens.serving.workload import BASELINE

    prompt: Mapping[str, Any] = sweep.shared["prompt"]
    tokens, output = prompt["policy_tokens"], prompt["max_tokens"]
    engines = dict.fromkeys((c.entry.model, engine_text(c.manifest["engine"])) for c in cells if c.manifest is not None)
    facts = "; ".join(f"{label}: {text}" for label, text in engines)
    notes = dict.fromkeys(str(note) for c in cells if c.manifest is not None for note in c.manifest["engine"]["notes"])
    asked = f"Baseline: {BASELINE}, prompts of about {tokens} tokens, {output} output tokens at most."
    return [f"Engines: {facts or 'none measured'}.", asked, *READING, *notes]


def _run_sentences(cells: tuple[CellRows, ...]) -> list[str]:
    facts: dict[str, Mapping[str, Any]] = {c.entry.model: c.manifest["model"] for c in cells if c.manifest is not None}
    ungated = sorted(label for label, f in facts.items() if gate_word(f) == "ungated")
    return [
        "Gate: passed by all models with records." if not ungated else f"UNGATED: {', '.join(ungated)}.",
        "n counts measured rows: one instance in one direction, where a probe has directions. Intervals are 95 % and "
        "resample scenario families. Rows that could not be measured are excluded and counted.",
    ]


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
    labels = DATA_LABELS if data else SERVE_LABELS if sweep.kind == "serve" else LABELS
    return render(Table(sweep.name, header(sweep, cells), (*rows, *marks), labels), format)


def _mark_row(cell: CellRows) -> Line:
    """A cell without a full result as a row of data."""
    manifest = cell.manifest
    config = manifest["config_hash"] if manifest is not None else cell.entry.config
    return {
        "experiment": "sweep",
        "metric": MARKED,
        "model": _model_of(manifest) if manifest is not None else cell.entry.model,
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


def _model_of(manifest: Manifest) -> str:
    return str(manifest["engine"]["model"] if manifest.get("kind") == "serve" else manifest["model"]["name"])


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
