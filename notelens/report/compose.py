"""Figures of the composing experiments: edits in a splice beside edits in a prefilled prompt, and agreement with full prefill.

Both are functions of aggregates (:func:`notelens.runs.tables.load_table`); nothing is computed here. Values without an interval
are drawn hollow, and cells that say nothing (a constant column, no flips) are drawn in sand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from notelens.report import style as s

LEFT, RIGHT, TOP, BOTTOM, ROW = 1.95, 0.85, 0.72, 0.62, 0.27
TOLERANCE = 0.1
"""Largest difference of recoveries that the experiment calls equal."""


@dataclass(frozen=True)
class Point:
    """A value with its interval.

    Attributes:
        value, lo, hi: ``None`` where undefined.
        n: cases.
        empty: it says nothing.
    """

    value: float | None
    lo: float | None
    hi: float | None
    n: int
    empty: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any], *, empty: bool = False) -> "Point":
        """From an aggregate."""
        return cls(line["value"], line["lo"], line["hi"], line["n"], empty or bool(line.get("empty")))


def select(lines: Sequence[Mapping[str, Any]], metric: str, **params: Any) -> dict[str, Point]:
    """Points of a metric by method, of the stage with these parameters, in the order of the records."""
    found = [r for r in lines if r["metric"] == metric and all(r["params"].get(k) == v for k, v in params.items())]
    return {r["method"]: Point.of(r, empty=r.get("flips") == 0) for r in found}


def draw_keystone(lines: Sequence[Mapping[str, Any]], inside: str, subtitle: str = "") -> Figure:
    """Recovery of every edit in the composed and in the prefilled context, and their difference with its tolerance.

    Args:
        lines: aggregates of ``keystone``.
        inside: what the skill holds; the stage that is drawn.
        subtitle: such as the model.
    """
    title = f"Edits inside a splice ({inside.replace('_', ' ')})"
    plain, composed, gap = (
        select(lines, metric, inside=inside) for metric in ("recovery", "recovery_composed", "recovery_gap")
    )
    if not plain:
        return s.message(title, ["no edit was measured in this run"])
    methods, height = list(plain), ROW * len(plain)
    with s.style():
        figure = s.new_figure(TOP + height + BOTTOM)
        s.heading(figure, title, subtitle)
        width = s.WIDTH - LEFT - RIGHT
        left = s.place(figure, LEFT, TOP, 0.58 * width, height)
        right = s.place(figure, LEFT + 0.66 * width, TOP, 0.34 * width, height)
        looks = ((-0.15, plain, s.BLUE, "o", "prefilled"), (0.15, composed, s.VERMILLION, "s", "composed"))
        for _, _, colour, marker, label in looks:
            left.plot([], [], marker, color=colour, label=label)
        for at, method in enumerate(methods):
            for offset, points, colour, marker, _ in looks:
                _point(left, at + offset, points[method], colour, marker)
            _point(right, float(at), gap[method], s.INK, "D")
            flips = "no flips" if plain[method].empty else ""
            text = f"{gap[method].n}  {flips}".strip()
            right.annotate(text, (1.04, at), xycoords=("axes fraction", "data"), va="center", fontsize=s.SMALL)
        right.annotate(
            "n", (1.04, -0.85), xycoords=("axes fraction", "data"), va="center", fontsize=s.SMALL, color=s.MUTED
        )
        right.axvspan(-TOLERANCE, TOLERANCE, color=s.GRID, zorder=0, linewidth=0)
        right.set(xlabel="composed less prefilled", yticks=[], ylim=(len(methods) - 0.5, -0.5))
        left.set(xlabel="recovery", ylim=(len(methods) - 0.5, -0.5))
        left.set_yticks(range(len(methods)), [s.drawable(m) for m in methods])
        for axes in (left, right):
            axes.grid(axis="x")
            axes.tick_params(axis="y", length=0)
        left.legend(
            loc="upper left", bbox_to_anchor=(-0.02, 1 + 0.33 / height), ncols=2, handletextpad=0.3, borderpad=0
        )
    return figure


def draw_agreement(
    lines: Sequence[Mapping[str, Any]], parameter: str, title: str = "Agreement with full prefill", subtitle: str = ""
) -> Figure:
    """Agreement where full prefill is right over a parameter (offset, length of the policy, number of skills), by method.

    Args:
        lines: aggregates of a composing experiment.
        parameter: key of ``params``.
        title, subtitle: heading.
    """
    own = [r for r in lines if r["metric"] == "agreement_given_full_correct" and parameter in r["params"]]
    places = sorted({r["params"][parameter] for r in own})
    if not own:
        return s.message(title, [f"no agreement over {parameter!r} was measured in this run"])
    methods = list(dict.fromkeys(r["method"] for r in own))
    with s.style():
        figure = s.new_figure(3.1)
        s.heading(figure, title, subtitle)
        axes = s.place(figure, 0.62, TOP - 0.1, s.WIDTH - 2.35, 3.1 - TOP - 0.45)
        step = 0.6 / max(1, len(methods) - 1)
        for i, method in enumerate(methods):
            colour, marker = s.CURVES[i % len(s.CURVES)]
            axes.plot([], [], marker, color=colour, label=method)
            points = {r["params"][parameter]: Point.of(r) for r in own if r["method"] == method}
            xs = [places.index(p) + (i - (len(methods) - 1) / 2) * step for p in points]
            for x, point in zip(xs, points.values(), strict=True):
                _point(axes, x, point, colour, marker, upright=True)
        axes.axhline(0.95, color=s.MUTED, linewidth=0.8, dashes=(4, 3), zorder=1)
        axes.set(ylim=(-0.04, 1.04), xlabel=parameter.replace("_", " "), ylabel="agreement where full prefill is right")
        axes.set_xticks(range(len(places)), [str(p) for p in places])
        axes.grid(axis="y")
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _point(axes: Axes, at: float, point: Point, colour: str, marker: str, *, upright: bool = False) -> None:
    """One value with its interval, along the other axis than ``at``."""
    if point.value is None:
        return
    colour = s.PAPER if point.empty else colour
    face = "white" if point.lo is None else colour
    where = ([at], [point.value]) if upright else ([point.value], [at])
    axes.plot(*where, marker, color=colour, markerfacecolor=face, label="_", zorder=3)
    if point.lo is not None and point.hi is not None:
        span = ([at, at], [point.lo, point.hi]) if upright else ([point.lo, point.hi], [at, at])
        axes.plot(*span, color=colour, linewidth=1.1, zorder=2, solid_capstyle="butt", label="_")


__all__ = ["Point", "draw_agreement", "draw_keystone", "select"]
