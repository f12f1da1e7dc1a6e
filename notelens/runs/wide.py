"""The wide table of a sweep: one row per model, one column per headline metric, the paper's models below ours.

It follows the cross-family tables of arXiv:2606.17107 (Tables 4 and 5). That of serving benchmarks has one row per engine.
Imports no torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notelens.report.reference import reference_range, reference_rows
from notelens.runs.records import Line
from notelens.runs.serve_record import HEADLINE_ARM
from notelens.runs.sweep_folder import SweepFolder
from notelens.runs.sweep_tables import CellRows, grid_csv, header
from notelens.runs.tables import DIRECTIONS, footnotes, latex_grid, markdown_grid, md, number, tex, value_text

PAPER = "paper"


@dataclass(frozen=True)
class Column:
    """A headline metric.

    Attributes:
        name, title: in data and in print.
        experiment, metric: in records.
        params: what a row's parameters must hold; the first pooled row that does is the one to read.
        paper_params: conditions of the paper's rows.
        method: of the row; any but single patch directions where it is empty.
    """

    name: str
    title: str
    experiment: str
    metric: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    paper_params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    method: str = ""


COLUMNS = (
    Column("field_only", "field only", "locality", "field_only_recovery"),
    Column("downstream", "downstream", "locality", "full_downstream_recovery"),
    Column("trigger_only", "trigger only", "dissociation", "trigger_only_recovery"),
    Column("notes", "notes", "dissociation", "notes_recovery"),
    Column("top8", "top 8", "specificity", "topk_recovery", {"k": 8, "ranking": "own"}, {"k": 8}),
    Column("random8", "random 8", "specificity", "randk_recovery", {"k": 8}, {"k": 8}),
    Column("write_depth", "write depth", "timing", "write_depth"),
    Column("commit_depth", "commit depth", "timing", "commit_depth"),
    Column("follow_rate", "follow rate", "injection", "follow_rate"),
    Column("placebo", "placebo", "placebo", "recovery", {"donor": "other_filler"}),
)
RUN_NOTE = "Recoveries pool both patch directions."
SERVE_NOTE = (
    f"All columns are of the arm {HEADLINE_ARM}; ratios compare it with the baseline under the same load: the baseline's TTFT "
    "over the arm's, the arm's throughput over the baseline's."
)


def columns_of(sweep: SweepFolder) -> tuple[Column, ...]:
    """Headlines of a sweep; of serving benchmarks with a ratio of times for every rate, of throughputs for saturation."""
    if sweep.kind == "run":
        return COLUMNS
    ratios: list[Column] = []
    for load in sweep.shared["loads"]:
        name, at_once = str(load["name"]), load["rate"] is None and load["multiple"] is None
        metric, title = ("throughput_ratio", "throughput") if at_once else ("p90_ttft_ratio", "p90 TTFT")
        title = f"{title} ratio, {name}"
        ratios.append(Column(f"{metric}_{name}", title, "serve", metric, {"load": name}, method=HEADLINE_ARM))
    return (
        Column("hit_rate", "hit rate", "serve", "prefix_hit_rate", method=HEADLINE_ARM),
        *ratios,
        Column("p_correct", "P(correct)", "serve", "p_correct", method=HEADLINE_ARM),
    )


@dataclass(frozen=True)
class WideRow:
    """One row.

    Attributes:
        source: ``measured`` or ``paper``.
        model, task: of the row; the paper's rows have no task.
        seeds: of the cells behind it.
        found: aggregate lines of every column, one per seed.
        paper: the paper's value beside each column, as printed.
        marked: what is missing, by cell.
    """

    source: str
    model: str
    task: str | None
    seeds: tuple[int, ...]
    found: Mapping[str, tuple[Line, ...]]
    paper: Mapping[str, str]
    marked: Mapping[str, str]


def wide_rows(sweep: SweepFolder, cells: Sequence[CellRows]) -> list[WideRow]:
    """One row for every model and task, then the paper's models, then the paper's range over them; one for every engine."""
    columns = columns_of(sweep)
    groups: dict[tuple[str, str], list[CellRows]] = {}
    for cell in cells:
        groups.setdefault((cell.entry.model, cell.entry.task), []).append(cell)
    measured = [_measured(model, task, group, columns) for (model, task), group in groups.items()]
    return [*measured, *_paper()] if sweep.kind == "run" else measured


def _measured(model: str, task: str, group: Sequence[CellRows], columns: Sequence[Column]) -> WideRow:
    found = {c.name: tuple(line for cell in group if (line := _headline(cell.rows, c)) is not None) for c in columns}
    paper = {
        name: str(lines[0]["paper_text"])
        for name, lines in found.items()
        if lines and isinstance(lines[0].get("paper_value"), int | float)
    }
    marked = {cell.entry.key: cell.problem for cell in group if cell.problem is not None}
    seeds = tuple(cell.entry.seed for cell in group if cell.rows)
    return WideRow("measured", model, task, seeds, found, paper, marked)


def _headline(rows: Sequence[Line], column: Column) -> Line | None:
    """The first pooled row of a metric with these parameters, which probes put first because it is the one to read."""
    for row in rows:
        named = (row["experiment"], row["metric"]) == (column.experiment, column.metric)
        method = row["method"] == column.method if column.method else row["method"] not in DIRECTIONS
        if named and method and column.params.items() <= row["params"].items():
            return row
    return None


def _paper() -> Iterator[WideRow]:
    usable = {
        c.name: [r for r in reference_rows(c.experiment, c.metric, c.paper_params) if r.unusable is None]
        for c in COLUMNS
    }
    models = dict.fromkeys(r.model for rows in usable.values() for r in rows)
    for model in models:
        texts = {
            c.name: reference_range(c.experiment, c.metric, c.paper_params, model)
            for c in COLUMNS
            if any(r.model == model for r in usable[c.name])
        }
        yield WideRow(PAPER, model, None, (), {}, texts, {})
    texts = {c.name: reference_range(c.experiment, c.metric, c.paper_params) for c in COLUMNS if usable[c.name]}
    yield WideRow(PAPER, "range", None, (), {}, texts, {})


def pooled(lines: Sequence[Line]) -> dict[str, Any]:
    """What one field of the table says: of one seed its estimate, of several their mean, smallest and largest."""
    values = [line["value"] for line in lines if line["value"] is not None]
    out: dict[str, Any] = {
        "value": sum(values) / len(values) if values else None,
        "lo": None,
        "hi": None,
        "n": sum(line["n"] for line in lines),
        "n_excluded": sum(line["n_excluded"] for line in lines),
        "by_seed": [line["value"] for line in lines],
    }
    if len(lines) == 1:
        out |= {"value": lines[0]["value"], "lo": lines[0]["lo"], "hi": lines[0]["hi"]}
    return out


def _text(row: WideRow, column: Column) -> str:
    lines = row.found.get(column.name, ())
    paper = row.paper.get(column.name)
    if row.source == PAPER:
        return paper or ""
    if not lines:
        return ""
    what = pooled(lines)
    if len(lines) == 1:
        text = value_text(lines[0])
    elif what["value"] is None:
        text = f"undefined ({len(lines)} seeds)"
    else:
        known = [v for v in what["by_seed"] if v is not None]
        text = f"{number(what['value'])} ({number(min(known))} to {number(max(known))}, {len(known)} seeds)"
    return f"{text}; paper {paper}" if paper else text


def render_wide(sweep: SweepFolder, cells: tuple[CellRows, ...], format: str) -> str:
    """The wide table as text; formats as :func:`~notelens.runs.sweep_tables.render_sweep`."""
    rows, columns = wide_rows(sweep, cells), columns_of(sweep)
    if format == "json":
        return json.dumps([_data(row, columns) for row in rows], indent=1) + "\n"
    if format == "csv":
        return _csv(rows, columns)
    tasks = {row.task for row in rows if row.task is not None}
    first = "engine" if sweep.kind == "serve" else "model"
    titles = (first, *(["task"] if len(tasks) > 1 else []), *(c.title for c in columns))
    lines = [
        [
            f"{PAPER}: {row.model}" if row.source == PAPER else row.model,
            *([row.task or ""] if len(tasks) > 1 else []),
            *(_text(row, c) for c in columns),
        ]
        for row in rows
    ]
    used = [line for row in rows for found in row.found.values() if len(found) == 1 for line in found]
    sentences = header(sweep, cells)
    notes = [
        *footnotes(used),
        f"{SERVE_NOTE if sweep.kind == 'serve' else RUN_NOTE} Several seeds of one {first} are shown as their mean with the "
        "smallest and the largest; intervals and n of every seed are in the long table.",
    ]
    if format == "md":
        out = [f"# {md(sweep.name)}", "", *(f"{md(line)}  " for line in sentences), "", *markdown_grid(titles, lines)]
        return "\n".join([*out, "", *(f"{md(n)}  " for n in notes)]) + "\n"
    out = [f"% {' '.join(line.split())}" for line in (sweep.name, *sentences)]
    out.append("% needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}")
    out += ["\\begin{table}", "\\centering", f"\\caption{{{tex(sweep.name)}: {tex(sentences[0])}}}"]
    missing = [f"{key}: {why}" for row in rows for key, why in row.marked.items()]
    notes += [f"Marked: {line}" for line in missing]
    out += [*latex_grid(titles, lines), *(f"\\par {tex(n)}" for n in notes), "\\end{table}"]
    return "\n".join(out) + "\n"


def _data(row: WideRow, columns: Sequence[Column]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "source": row.source,
        "model": row.model,
        "task": row.task,
        "seeds": list(row.seeds),
        "marked": dict(row.marked),
    }
    for c in columns:
        lines = row.found.get(c.name, ())
        if row.source == PAPER:
            out[c.name] = {"paper": row.paper[c.name]} if c.name in row.paper else None
        else:
            out[c.name] = {**pooled(lines), "paper": row.paper.get(c.name)} if lines else None
    return out


def _csv(rows: Sequence[WideRow], columns: Sequence[Column]) -> str:
    parts = ("value", "lo", "hi", "n", "paper")
    titles = ["source", "model", "task", "seeds", "marked"]
    titles += [c.name if part == "value" else f"{c.name}_{part}" for c in columns for part in parts]
    table: list[list[Any]] = []
    for row in rows:
        data = _data(row, columns)
        fields = [data[c.name] or {} for c in columns]
        start = [row.source, row.model, row.task, " ".join(map(str, row.seeds)), "; ".join(row.marked.values())]
        table.append([*start, *(f.get(part) for f in fields for part in parts)])
    return grid_csv(tuple(titles), table)
