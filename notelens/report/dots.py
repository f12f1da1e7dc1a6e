"""Rows of names against panels of numbers: one mark with its interval for each, the reference drawn behind.

The figures of cross-family tables, prompt kinds, sizes and false effects are all of this shape.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from notelens.report import style as s

TOP, ROW, BOTTOM, GAP, RIGHT, LEGEND = 0.92, 0.21, 0.30, 0.16, 0.12, 0.22
LEFT_MAX, CHARACTER = 2.3, 0.062
"""Inches for the names at most, and for a character of a name or title."""
SPREAD = 0.34
"""Of a row, over which several marks of one row are spread."""
TITLE_WIDTH = 22
"""Characters of a panel's title in one line at most."""
PER_LINE = 5
"""Panels beside each other; more go below."""


@dataclass(frozen=True)
class Dot:
    """One number of one row.

    Attributes:
        row: index of its row.
        series: index of its series (colour and marker).
        value: ``None`` where nothing could be measured; the row then says so.
        lo, hi: interval.
    """

    row: int
    series: int
    value: float | None
    lo: float | None = None
    hi: float | None = None


@dataclass(frozen=True)
class Panel:
    """One metric.

    Attributes:
        title: of the metric.
        dots: in any order.
        low, high: axis at least from, to; numbers outside widen it.
        reference: range of the paper's models, or ``None``.
        lines: values to draw a line at.
        always: shown also without any number, where it stands for a cell that could not be measured.
    """

    title: str
    dots: tuple[Dot, ...]
    low: float = 0.0
    high: float = 1.0
    reference: tuple[float, float] | None = None
    lines: tuple[float, ...] = (0.0, 1.0)
    always: bool = False


def draw_dots(
    rows: Sequence[str], panels: Sequence[Panel], series: Sequence[str], title: str, subtitle: str = "",
    reference: str = "range over the paper's models",
) -> Figure:  # fmt: skip
    """Every panel has all rows, from the top down; a panel without any number is left out unless it is ``always`` shown.

    Args:
        rows: names.
        panels: from left to right, several lines of them where there are many.
        series: names of the series; one alone needs no legend.
        title, subtitle: heading.
        reference: what the shaded ranges are.
    """
    shown = [p for p in panels if p.always or any(d.value is not None for d in p.dots)]
    if all(d.value is None for p in shown for d in p.dots):
        return s.message(title, ["none of its metrics was measured"])
    names = [shortened(s.drawable(r), int((LEFT_MAX - 0.2) / CHARACTER)) for r in rows]
    left = min(LEFT_MAX, 0.2 + CHARACTER * max(map(len, names)))
    n_lines = -(-len(shown) // PER_LINE)
    per_line = -(-len(shown) // n_lines)
    inner, tall = (s.WIDTH - left - RIGHT + GAP) / per_line - GAP, ROW * len(rows)
    legend = len(series) > 1 or any(p.reference for p in shown)
    step = TOP - 0.5 + tall + BOTTOM
    with s.style():
        figure = s.new_figure(0.5 + n_lines * step + (LEGEND if legend else 0.0))
        s.heading(figure, title, subtitle)
        for at, panel in enumerate(shown):
            line, column = divmod(at, per_line)
            axes = s.place(figure, left + column * (inner + GAP), TOP + line * step, inner, tall)
            _panel(axes, panel, len(rows), len(series), min(TITLE_WIDTH, int((inner + GAP) / CHARACTER) - 1))
            axes.set_yticks(range(len(rows)), names if column == 0 else [""] * len(rows))
        if legend:
            _legend(figure, series, reference if any(p.reference for p in shown) else None)
    return figure


def shortened(name: str, longest: int) -> str:
    """A name of at most ``longest`` characters: the middle goes, since both ends tell names apart."""
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[len(name) - (longest - head - 1) :]}"


def _panel(axes: Axes, panel: Panel, n_rows: int, n_series: int, width: int) -> None:
    known = [v for d in panel.dots for v in (d.value, d.lo, d.hi) if v is not None]
    low, high = min([panel.low, *known]), max([panel.high, *known])
    room = 0.06 * (high - low)
    axes.set(xlim=(low - room, high + room), ylim=(n_rows - 0.5, -0.5))
    lines = [part for line in panel.title.splitlines() for part in textwrap.wrap(line, width)]
    axes.set_title("\n".join(map(s.drawable, lines)), fontsize=s.SMALL, pad=4)
    axes.grid(axis="x")
    axes.locator_params(axis="x", nbins=3)
    axes.tick_params(axis="y", length=0)
    if panel.reference is not None:
        a, b = panel.reference
        pad = max(0.0, 0.012 * (high - low) - (b - a) / 2)
        axes.axvspan(a - pad, b + pad, color=s.PAPER, alpha=0.35, linewidth=0)
    for at in panel.lines:
        axes.axvline(at, color=s.MUTED, linewidth=0.8, zorder=1.5)
    for y in range(1, n_rows):
        axes.axhline(y - 0.5, color=s.GRID, linewidth=0.5, zorder=1)
    for d in panel.dots:
        y = d.row + SPREAD * (d.series - (n_series - 1) / 2) / max(1, n_series - 1)
        color, marker = s.CURVES[d.series % len(s.CURVES)]
        if d.value is None:
            middle = (low + high) / 2
            axes.text(middle, y, "not measurable", fontsize=s.SMALL - 1.5, color=s.MUTED, ha="center", va="center")
            continue
        if d.lo is not None and d.hi is not None:
            axes.plot([d.lo, d.hi], [y, y], color=color, linewidth=1.2, zorder=2.5, solid_capstyle="butt")
        axes.plot([d.value], [y], marker, color=color, markersize=3.6, zorder=3)


def _legend(figure: Figure, series: Sequence[str], reference: str | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Line2D | Patch] = []
    if len(series) > 1:
        for at, name in enumerate(series):
            color, marker = s.CURVES[at % len(s.CURVES)]
            handles.append(Line2D([], [], color=color, marker=marker, markersize=3.6, label=s.drawable(name)))
    if reference is not None:
        handles.append(Patch(color=s.PAPER, alpha=0.35, linewidth=0, label=reference))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.005, 0.0), ncols=5, handlelength=1.6)
