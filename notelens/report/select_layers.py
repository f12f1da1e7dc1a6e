"""From rows and lines of the timing probe to the panels of the layer figure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from notelens.report.layers import Accuracy, Panel
from notelens.report.select import Line, lines_of
from notelens.report.style import number
from notelens.report.topk import Curve
from notelens.stats import cluster_statistic

Floats = npt.NDArray[np.float64]
HELD_OUT, LEAVE_OUT = "held_out_instances", "leave_one_family_out"
ROWS = (
    ("conclusion", HELD_OUT, "conclusion"),
    ("conclusion", LEAVE_OUT, "conclusion,\nnew families"),
    ("field", HELD_OUT, "field"),
    ("repetition", HELD_OUT, "rule repeats\nthe field"),
)
"""Label, grouping, name of the row."""
TITLES = {
    "swapped": "actions swapped",
    "polarity": "one trigger (confounded)",
    "polarity+negated": "one trigger, half negated",
    "two_clause": "two clauses",
    "negated": "negated trigger",
}


def select_panels(rows: Sequence[Line], lines: Sequence[Line]) -> tuple[list[Panel], int]:
    """Panels of every set of rule forms, and the number of layers.

    Accuracies pool the families of a set; their intervals resample families.
    """
    read = [r for r in rows if r["stage"] == "read_out" and r["excluded"] is None]
    pairs = [r for r in rows if r["stage"] == "commit" and r["excluded"] is None]
    if not read:
        return [], 0
    n_layers = int(read[0]["values"]["n_layers"])
    return [
        _panel(form, read, pairs, lines, n_layers) for form in dict.fromkeys(r["meta"]["form"] for r in read)
    ], n_layers


def _panel(form: str, read: Sequence[Line], pairs: Sequence[Line], lines: Sequence[Line], n_layers: int) -> Panel:
    mine = [r for r in read if r["meta"]["form"] == form]
    rows: dict[str, Accuracy] = {}
    for label, grouping, name in ROWS:
        chosen = [r for r in mine if r["meta"]["grouping"] == grouping and r["values"].get(f"{label}_total")]
        if chosen:
            anchors = dict.fromkeys(str(r["meta"]["anchor"]) for r in chosen)
            by_anchor = {_name(a): _curve([r for r in chosen if r["meta"]["anchor"] == a], label) for a in anchors}
            rows[name] = Accuracy(by_anchor, _shuffled(chosen) if label == "conclusion" else None)
    committed = [r for r in pairs if r["meta"]["form"] in form.split("+")]
    write = {
        _name(line["params"]["anchor"]): line["value"]
        for line in lines
        if line["metric"] == "write_depth" and (line["params"]["form"], line["params"]["grouping"]) == (form, HELD_OUT)
    }
    commit = lines_of(lines, "timing", "commit_depth", {"form": form}).get("both")
    depth = None if commit is None else commit["value"]
    n_prompts = sum(
        int(r["values"]["n_prompts"])
        for r in mine
        if (r["meta"]["grouping"], r["meta"]["anchor"]) == (mine[0]["meta"]["grouping"], mine[0]["meta"]["anchor"])
    )
    note = (_written(write), f"commit {'never' if depth is None else number(depth, 2)}, {len(committed)} pairs")
    title = f"{TITLES.get(form, form)}, n = {n_prompts}"
    return Panel(title, rows, _commitment(committed, n_layers), write, depth, note)


def _name(anchor: str) -> str:
    return anchor.replace("_", " ")


def _curve(rows: Sequence[Line], label: str) -> Curve:
    table = np.asarray(
        [
            [*r["values"][f"{label}_correct"], r["values"][f"{label}_total"]]
            for r in sorted(rows, key=lambda r: str(r["cluster"]))
        ],
        dtype=np.float64,
    )
    return _accuracy(table)


def _accuracy(table: Floats) -> Curve:
    """Accuracy by layer from hits per layer and trials of every family."""
    n = int(table[:, -1].sum())
    layers = range(table.shape[1] - 1)
    points = [cluster_statistic(table[:, [layer, -1]], lambda t: t[:, 0] / t[:, 1], n) for layer in layers]
    values = tuple(float(p.value) if p.value is not None else float("nan") for p in points)
    lows, highs = tuple(p.lo for p in points), tuple(p.hi for p in points)
    return Curve("", "own", tuple(map(float, layers)), values, lows, highs, n)


def _shuffled(rows: Sequence[Line]) -> Curve | None:
    """Accuracy on shuffled labels: mean, lowest and highest over shuffles and anchors, families pooled."""
    by_anchor: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["values"].get("shuffled_total") and all(row["values"]["shuffled_total"]):
            by_anchor.setdefault(row["meta"]["anchor"], []).append(row["values"])
    if not by_anchor:
        return None
    accuracies: list[Floats] = []
    for values in by_anchor.values():
        hits = np.asarray([v["shuffled_correct"] for v in values], dtype=np.float64).sum(axis=0)  # [shuffle, layer]
        trials = np.asarray([v["shuffled_total"] for v in values], dtype=np.float64).sum(axis=0)
        accuracies.append(hits / trials[:, None])
    every = np.concatenate(accuracies)
    mean, low, high = (tuple(map(float, c)) for c in (every.mean(axis=0), every.min(axis=0), every.max(axis=0)))
    return Curve("shuffled", "random", tuple(map(float, range(every.shape[1]))), mean, low, high)


def _commitment(pairs: Sequence[Line], n_layers: int) -> Curve | None:
    if not pairs:
        return None
    layers = [int(r["values"]["commit_layer"]) for r in pairs]
    shares = tuple(sum(at <= layer for at in layers) / len(layers) for layer in range(n_layers + 1))
    return Curve("commit", "own", tuple(map(float, range(n_layers + 1))), shares, n=len(pairs))


def _written(write: Mapping[str, float | None]) -> str:
    known = [d for d in write.values() if d is not None]
    if not known:
        return f"write: at none of {len(write)} anchors"
    span = number(min(known), 2) if min(known) == max(known) else f"{number(min(known), 2)} to {number(max(known), 2)}"
    return f"write {span}" + (f" ({len(known)} of {len(write)} anchors)" if len(known) < len(write) else "")
