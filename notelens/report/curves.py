"""Panels of curves over one axis, such as recovery against the share of the suffix."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from notelens.report import style as s

TOP, HEIGHT, BOTTOM, LEFT, GAP, RIGHT, LEGEND_LINE, LEGEND_COLUMNS = 0.86, 1.55, 0.50, 0.52, 0.14, 0.10, 0.17, 2
DASHES = ("-", "--", ":", "-.")
MOST = 0.06
"""Of the axis, by which intervals of several curves are moved apart at most."""


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: in the legend; equal labels of several panels share one entry and one look.
        x, y: points; ``x`` are numbers or, with names on the axis, indices.
        lo, hi: intervals, ``None`` where there is none.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    lo: tuple[float | None, ...] = ()
    hi: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class CurvePanel:
    """One cell of a sweep."""

    title: str
    lines: tuple[Line, ...]


def draw_curves(
    panels: Sequence[CurvePanel], title: str, subtitle: str = "", *, x_label: str, y_label: str,
    names: Sequence[str] = (), per_line: int = 4,
) -> Figure:  # fmt: skip
    """One panel for each cell, all on the same axes.

    Args:
        panels: in reading order; those without a curve are left out.
        title, subtitle: heading.
        x_label, y_label: of the axes.
        names: names of the places on the x axis, where it has no numbers.
        per_line: panels beside each other at most.
    """
    shown = [p for p in panels if p.lines]
    if not shown:
        return s.message(title, ["none of its curves was measured"])
    labels = list(dict.fromkeys(line.label for p in shown for line in p.lines))
    columns = min(per_line, len(shown))
    n_lines = -(-len(shown) // columns)
    inner = (s.WIDTH - LEFT - RIGHT + GAP) / columns - GAP
    step = HEIGHT + BOTTOM + 0.16
    legend = LEGEND_LINE * -(-len(labels) // LEGEND_COLUMNS) + 0.04
    known = [v for p in shown for c in p.lines for v in (*c.y, *c.lo, *c.hi) if v is not None]
    y_range = min([-0.05, *(v - 0.03 for v in known)]), max([1.05, *(v + 0.03 for v in known)])
    xs = sorted({x for p in shown for c in p.lines for x in c.x})
    room = 0.06 * (xs[-1] - xs[0]) if len(xs) > 1 else 0.5
    with s.style():
        figure = s.new_figure(TOP - 0.02 + n_lines * step + legend)
        s.heading(figure, title, subtitle)
        for at, panel in enumerate(shown):
            line, column = divmod(at, columns)
            axes = s.place(figure, LEFT + column * (inner + GAP), TOP + line * step, inner, HEIGHT)
            axes.set_title(s.drawable(panel.title), fontsize=s.SMALL, pad=4)
            axes.set(xlim=(xs[0] - room, xs[-1] + room), ylim=y_range)
            if names:
                axes.set_xticks(range(len(names)), [s.drawable(n) for n in names])
            else:
                axes.locator_params(axis="x", nbins=4)
            axes.grid(axis="y")
            for level in (0.0, 1.0):
                axes.axhline(level, color=s.MUTED, linewidth=0.8, zorder=1.5)
            if column == 0:
                axes.set_ylabel(y_label)
            else:
                axes.tick_params(axis="y", labelleft=False)
            if at + columns >= len(shown):
                axes.set_xlabel(x_label)
            for curve in panel.lines:
                _line(axes, curve, labels.index(curve.label), len(labels), xs[-1] - xs[0])
        handles = {h.get_label(): h for a in figure.axes for h in a.get_legend_handles_labels()[0]}
        figure.legend(
            [handles[s.drawable(x)] for x in labels], [s.drawable(x) for x in labels], loc="lower left",
            bbox_to_anchor=(0.005, 0.0), ncols=LEGEND_COLUMNS, handlelength=2.6,
        )  # fmt: skip
    return figure


def _line(axes: Axes, curve: Line, at: int, n: int, span: float) -> None:
    color, marker = s.CURVES[at % len(s.CURVES)]
    shift = MOST * (span or 1.0) * (at - (n - 1) / 2) / max(n, 6)
    xs = [x + shift for x in curve.x]
    for x, lo, hi in zip(xs, curve.lo, curve.hi, strict=False):
        if lo is not None and hi is not None:
            axes.plot([x, x], [lo, hi], color=color, linewidth=1.0, zorder=2.5, solid_capstyle="butt")
    axes.plot(xs, curve.y, color=color, marker=marker, linestyle=DASHES[at % len(DASHES)], markersize=3.4,
              linewidth=1.3, label=s.drawable(curve.label), zorder=3)  # fmt: skip
