"""Tables from records: markdown, CSV, LaTeX and JSON. Imports no torch."""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from notelens.errors import InputError
from notelens.registry import nearest
from notelens.runs.files import write_atomic
from notelens.runs.manifest import read_manifest
from notelens.runs.records import Line, read_records

Format = Literal["md", "csv", "tex", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)

FIELDS = (
    "experiment", "metric", "model", "method", "params", "value", "lo", "hi", "n", "n_excluded", "swap", "unit",
    "paper_value",
)  # fmt: skip
"""Fields of DESIGN section 8; every row has them, in this order."""
MORE_FIELDS = (
    "paper_text", "paper_note", "reasons", "flags", "n_clusters", "control", "interval", "level", "revision", "dtype",
    "attention", "device", "seed", "gate", "config",
)  # fmt: skip

MARKS = {
    "zero_width": ("†", "the interval has no width although n > 1: every resample gave the same value"),
    "few_clusters": ("‡", "fewer than 5 scenario families, so the interval is too short"),
    "one_cluster": ("‡", "fewer than 5 scenario families, so the interval is too short"),
    "single_instance": ("§", "one row, so there is no interval"),
    "few_tail": ("¶", "fewer than 5 requests lie beyond this percentile, so its interval ends at the slowest of them"),
    "few_batches": ("‖", "answers ended in fewer than 5 groups, so there is no interval"),
}
DIRECTIONS = ("denoising", "noising")


@dataclass(frozen=True)
class Table:
    """Aggregates of a run with what a reader must know about them.

    Attributes:
        title: name of the run.
        header: sentences on model, gate, competence and what n counts.
        rows: aggregate lines.
        labels: names of columns to put first, each with the field of a row that fills it; a run needs none.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[Line, ...]
    labels: tuple[tuple[str, str], ...] = ()


def load_table(folder: Path) -> Table:
    """The table of a run's folder, finished or not.

    Raises:
        InputError: the folder holds no run.
        RecordError: manifest or records cannot be read.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"{folder}: holds no run (no manifest.json); give the folder that 'notelens run' wrote to")
    records = read_records(folder)
    missing = [p["name"] for p in manifest["config"]["probes"] if p["name"] not in records.probes]
    incompetent = [str(end["incompetent"]) for end in records.probes.values() if end.get("incompetent")]
    return make_table(manifest, records.all_aggregates(), missing, incompetent)


def make_table(
    manifest: Mapping[str, Any], rows: Sequence[Line], missing: Sequence[str] = (), incompetent: Sequence[str] = ()
) -> Table:
    """A table from a manifest and aggregate lines.

    Args:
        manifest: of the run.
        rows: aggregate lines.
        missing: probes without aggregates yet.
        incompetent: why probes could not measure.
    """
    facts: Mapping[str, Any] = manifest["model"]
    kernel, device = facts.get("attention_kernel"), facts.get("device")
    model = f"Model {facts['name']} (revision {facts.get('revision')}, {facts.get('dtype')}, {kernel}, {device})."
    gate = "Gate: passed." if gate_word(facts) == "passed" else "UNGATED: this model did not pass its admission gate."
    shares: dict[str, Line] = {}
    for row in rows:
        if row["metric"] == "competence" and row["method"] not in DIRECTIONS:
            shares.setdefault(str(row["experiment"]), row)  # the first one pools all rule forms
    competence = ", ".join(f"{number(r['value'])} ({name}, n={r['n']})" for name, r in shares.items())
    began: Mapping[str, Any] = manifest["sessions"][0]
    header = [
        f"{model} {gate}",
        f"Competence (both prompts of a pair answered right): {competence or 'not measured'}.",
        "n counts measured rows: one instance in one direction, where a probe has directions. Intervals are 95 % and "
        "resample scenario families. Rows that could not be measured are excluded and counted.",
        f"Configuration {manifest['config_hash'][:12]}, seed {manifest['seed']}, commit "
        f"{began.get('commit') or 'unknown'}{' with changes' if began.get('dirty') else ''}.",
    ]
    if missing:
        header.insert(0, f"UNFINISHED: no aggregates yet for {', '.join(missing)}; run the same command again.")
    header += [f"NOT COMPETENT: {sentence}" for sentence in incompetent]
    return Table(str(manifest["name"]), tuple(header), tuple(rows))


def gate_word(facts: Mapping[str, Any]) -> str:
    """``passed`` or ``ungated``, from the facts of a model."""
    gate = facts.get("gate")
    passed = isinstance(gate, Mapping) and cast(Mapping[str, Any], gate).get("passed") is True
    return "passed" if passed and not facts.get("ungated") else "ungated"


def paper(row: Mapping[str, Any]) -> Line:
    """The paper's value for an aggregate: ``paper_value``, ``paper_text`` (as printed in tables) and ``paper_note``.

    The value is a number where the paper measured this model (of several records of one quantity the first; the text
    has all of them), else its range over models as text, else ``None``. The paper patches in the denoising direction,
    so noising rows have none.
    """
    from notelens.report.reference import discrepancy, reference_range, reference_rows

    experiment, metric, params, model = row["experiment"], row["metric"], row["params"], row["model"]
    found = [r for r in reference_rows(experiment, metric, params) if r.unusable is None]
    if row["method"] == "noising" or not found:
        return {"paper_value": None, "paper_text": None, "paper_note": None}
    own = [r for r in found if r.is_of(model)]
    notes = [n for r in own or found for n in (r.note, *(discrepancy(d) for d in r.discrepancies)) if n]
    text = reference_range(experiment, metric, params, model)
    note = " ".join(n if n[-1] in ".!?" else f"{n}." for n in dict.fromkeys(notes)) or None
    return {"paper_value": own[0].value if own else text, "paper_text": text, "paper_note": note}


def render(table: Table, format: str, *, summary: bool = False) -> str:
    """The table as text.

    Args:
        table: from :func:`load_table`.
        format: ``md``, ``csv``, ``tex`` or ``json``.
        summary: of every metric only the first row, and that of each rule form; single directions only where they are
            not pooled.

    Raises:
        InputError: unknown format.
    """
    rows = _headlines(table.rows) if summary else table.rows
    if format == "md":
        return _markdown(table, rows, summary)
    if format == "csv":
        return _csv(table, rows)
    if format == "tex":
        return _latex(table, rows)
    if format == "json":
        return json.dumps([_flat(r, table) for r in rows], indent=1) + "\n"
    raise InputError(f"unknown format {format!r}; {nearest(format, list(FORMATS))}")


def write_tables(folder: Path) -> Table:
    """Write ``table.md``, ``.csv``, ``.tex`` and ``.json`` beside the records; the same records give the same bytes."""
    table = load_table(folder)
    for format in FORMATS:
        write_atomic(folder / f"table.{format}", render(table, format))
    return table


def _headlines(rows: Sequence[Line]) -> list[Line]:
    """The first pooled row of every metric, which probes put first because it is the one to read, and its rule forms."""
    seen: set[tuple[str, str]] = set()
    kept: list[Line] = []
    for row in rows:
        key = (row["experiment"], row["metric"])
        first = key not in seen
        by_form = set(row["params"]) == {"form"} and str(row["metric"]).endswith("_recovery")
        if not _in_pooled(row, rows) and (first or by_form):
            seen.add(key)
            kept.append(row)
    return kept


def _in_pooled(row: Line, rows: Sequence[Line]) -> bool:
    return row["method"] in DIRECTIONS and any(
        r["method"] == "both" and all(r[k] == row[k] for k in ("experiment", "metric", "params")) for r in rows
    )


def _names(table: Table) -> tuple[str, ...]:
    """Fields of a row of data: those of every run, then those that only this table has."""
    return tuple(dict.fromkeys((*FIELDS, *MORE_FIELDS, *(field for _, field in table.labels))))


def _flat(row: Line, table: Table) -> Line:
    return {**{name: row.get(name) for name in _names(table)}, "flags": flags(row)}


def number(value: object) -> str:
    """Three digits, or ``undefined``."""
    if not isinstance(value, int | float):
        return "undefined"
    text = f"{value:.3f}"
    return text[1:] if text == "-0.000" else text


def flags(row: Line) -> list[str]:
    """Flags of a row; zero width is recognised here too, whoever made the estimate."""
    out = [str(f) for f in row.get("flags") or ()]
    flat = row["lo"] is not None and row["lo"] == row["hi"] and row["n"] > 1
    return [*out, "zero_width"] if flat and "zero_width" not in out else out


def value_text(row: Line) -> str:
    """Value, interval and marks."""
    if row["value"] is None:
        return "undefined"
    interval = "" if row["lo"] is None or row["hi"] is None else f" [{number(row['lo'])}, {number(row['hi'])}]"
    return f"{number(row['value'])}{interval}{marks(row)}"


def marks(row: Line) -> str:
    """Marks of a row behind a space, to be explained by :func:`footnotes`; empty where it has none."""
    found = "".join(dict.fromkeys(MARKS[f][0] for f in flags(row) if f in MARKS))
    return f" {found}" if found else ""


def _params(row: Line) -> str:
    params: Mapping[str, Any] = row["params"]
    return ", ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in params.items())


def _excluded(row: Line) -> str:
    reasons: Mapping[str, int] = row.get("reasons") or {}
    detail = ", ".join(f"{name}: {count}" for name, count in reasons.items())
    return f"{row['n_excluded']} ({detail})" if row["n_excluded"] and detail else str(row["n_excluded"])


def _paper_cell(row: Line) -> str:
    text = row.get("paper_text")
    return str(text) if text else ""


COLUMNS = ("metric", "method", "params", "value [lo, hi]", "n", "excluded", "swap", "paper")


def columns(table: Table) -> tuple[str, ...]:
    """Titles of the columns."""
    return (*(title for title, _ in table.labels), *COLUMNS)


def cells(row: Line, labels: Sequence[tuple[str, str]] = ()) -> tuple[str, ...]:
    """What stands in the columns of one row, unescaped."""
    return (
        *(str(row[field]) for _, field in labels), str(row["metric"]), str(row["method"]), _params(row), value_text(row),
        str(row["n"]), _excluded(row), str(row["swap"]), _paper_cell(row),
    )  # fmt: skip


def footnotes(rows: Sequence[Line]) -> list[str]:
    """One line per mark that the rows use."""
    used = {MARKS[f] for row in rows for f in flags(row) if f in MARKS}
    return [f"{mark} {text}." for mark, text in sorted(used)]


def groups(rows: Sequence[Line]) -> dict[str, list[Line]]:
    """Rows by experiment, in their order."""
    out: dict[str, list[Line]] = {}
    for row in rows:
        out.setdefault(str(row["experiment"]), []).append(row)
    return out


def _markdown(table: Table, rows: Sequence[Line], summary: bool) -> str:
    out = [f"# {md(table.title)}", "", *(f"{md(line)}  " for line in table.header)]
    for experiment, members in groups(rows).items():
        lines = [cells(row, table.labels) for row in members]
        out += ["", f"## {md(experiment)}", "", *markdown_grid(columns(table), lines)]
    notes = footnotes(rows)
    if summary and len(rows) < len(table.rows):
        notes.append(
            f"{len(table.rows) - len(rows)} more rows (single directions, other parameters) are in the full table."
        )
    return "\n".join([*out, *([""] if notes else []), *(f"{md(n)}  " for n in notes)]) + "\n"


def markdown_grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, escaped and padded."""
    lines = [[md(c) for c in line] for line in (titles, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    padded = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return [padded[0], "| " + " | ".join("-" * w for w in widths) + " |", *padded[1:]]


def latex_grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A ``tabular``, escaped."""
    out = [
        f"\\begin{{tabular}}{{{'l' * len(titles)}}}",
        "\\toprule",
        " & ".join(map(tex, titles)) + " \\\\",
        "\\midrule",
    ]
    out += [" & ".join(map(tex, row)) + " \\\\" for row in rows]
    return [*out, "\\bottomrule", "\\end{tabular}"]


def md(text: str) -> str:
    """Escape what markdown would read; underscores inside words and lone brackets mean nothing to it."""
    text = re.sub(r"([\\`*<>|])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])", r"\\_", text)
    return text.replace("](", "]\\(")


def _csv(table: Table, rows: Sequence[Line]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_names(table))
    for row in rows:
        flat = _flat(row, table)
        writer.writerow(
            [json.dumps(v) if isinstance(v, dict | list | bool) else "" if v is None else v for v in flat.values()]
        )
    return out.getvalue()


_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}", "§": r"\S{}", "¶": r"\P{}", '"': r"\textquotedbl{}",
}  # fmt: skip


def tex(text: str) -> str:
    """Escape what LaTeX would read."""
    return "".join(_TEX.get(c, c) for c in " ".join(text.split()))


def _latex(table: Table, rows: Sequence[Line]) -> str:
    out = [f"% {line}" for line in (" ".join(t.split()) for t in (table.title, *table.header))]
    out.append("% needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}")
    for experiment, members in groups(rows).items():
        out += ["\\begin{table}", "\\centering", f"\\caption{{{tex(experiment)} ({tex(table.header[0])})}}"]
        out += latex_grid(columns(table), [cells(row, table.labels) for row in members])
        out += [*(f"\\par {tex(n)}" for n in footnotes(members)), "\\end{table}", ""]
    return "\n".join(out) + "\n"
