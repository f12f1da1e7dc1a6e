"""Figure of the diagnostic: predicted against true recovery of an in-place refresh, prompt by prompt and in bins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from notelens.report import style as s
from notelens.runs.records import Records

EXPERIMENT = "diagnostic"
LEVELS = {"recorded": "reads recorded at prefill (no token)", "one_token": "and one token", "mapped": "and a note map"}
COLORS = {"recorded": s.MUTED, "one_token": s.VERMILLION, "mapped": s.BLUE}
MARKERS = {"recorded": "^", "one_token": "s", "mapped": "o"}
TOP, SIDE, LEFT, BOTTOM = 0.66, 3.0, 0.62, 1.15


@dataclass(frozen=True)
class Reliability:
    """One level of features.

    Attributes:
        level: key of :data:`LEVELS`.
        predicted, true: means of every bin.
        lo, hi: intervals of the true means.
        n: prompts in every bin.
        correlation: Spearman, or ``None`` where it is not defined.
    """

    level: str
    predicted: tuple[float, ...]
    true: tuple[float, ...]
    lo: tuple[float | None, ...]
    hi: tuple[float | None, ...]
    n: tuple[int, ...]
    correlation: float | None


def select_reliability(lines: Sequence[Mapping[str, Any]]) -> list[Reliability]:
    """What the aggregates of a run say about calibration, one entry for every level that has bins."""
    found: list[Reliability] = []
    for level in LEVELS:
        own = [x for x in lines if x["experiment"] == EXPERIMENT and x["method"] == level]
        bins = sorted((x for x in own if x["metric"] == "calibration"), key=lambda x: x["predicted"])
        if not bins:
            continue
        value = next((x["value"] for x in own if x["metric"] == "rank_correlation"), None)
        columns = ([x[k] for x in bins] for k in ("predicted", "value", "lo", "hi", "n"))
        predicted, true, lo, hi, n = (tuple(c) for c in columns)
        found.append(Reliability(level, predicted, true, lo, hi, n, value))
    return found


def draw_calibration(records: Records, title: str = "Recovery of an in-place refresh, told beforehand") -> Figure:
    """Predicted against true recovery in bins; a figure that says so where the run has no bins."""
    found = select_reliability(records.all_aggregates())
    if not found:
        return s.message(title, [f"{EXPERIMENT}: no calibration was measured in this run"])
    with s.style():
        figure = s.new_figure(TOP + SIDE + BOTTOM)
        s.heading(
            figure, title, "held-out prompts; 95 % intervals over scenario families; numbers are prompts in a bin"
        )
        axes = s.place(figure, LEFT, TOP, SIDE, SIDE)
        axes.plot([0, 1], [0, 1], color=s.MUTED, linewidth=0.9, zorder=1)
        for x in found:
            color = COLORS[x.level]
            for p, lo, hi in zip(x.predicted, x.lo, x.hi, strict=True):
                if lo is not None and hi is not None:
                    axes.plot([p, p], [lo, hi], color=color, linewidth=1.1, zorder=2)
            rank = "" if x.correlation is None else f", Spearman {s.number(x.correlation, 2)}"
            axes.plot(
                x.predicted, x.true, color=color, marker=MARKERS[x.level], label=s.drawable(f"{LEVELS[x.level]}{rank}")
            )
            for p, t, n in zip(x.predicted, x.true, x.n, strict=True):
                axes.annotate(str(n), (p, t), textcoords="offset points", xytext=(5, 4), fontsize=s.SMALL, color=color)
        known = [v for x in found for v in (*x.true, *x.lo, *x.hi) if v is not None]
        axes.set(xlabel="predicted recovery", ylabel="true recovery", xlim=(-0.05, 1.05))
        axes.set_ylim(min([-0.08, *(v - 0.04 for v in known)]), max([1.08, *(v + 0.04 for v in known)]))
        axes.grid(axis="both")
        figure.legend(
            *axes.get_legend_handles_labels(), loc="lower left", bbox_to_anchor=(0.005, 0.0), handlelength=2.2
        )
    return figure
