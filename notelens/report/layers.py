"""Figure 3: at which depth the conclusion is written, the field is known, and the decision is settled."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from notelens.report import style as s
from notelens.report.topk import Curve

TOP, LEFT, RIGHT, GAP = 0.60, 0.62, 0.14, 0.26
PANEL, SECOND, ROW_GAP, PANEL_TITLE = 2.0, 1.2, 0.30, 0.56
CHANCE = 0.5
THRESHOLD = 0.95
"""Accuracy from which a conclusion counts as written (DESIGN, probe 3)."""


@dataclass(frozen=True)
class Panel:
    """One rule form (or one grouping of the folds).

    Attributes:
        title: what is shown.
        conclusion: accuracy over layers, by anchor.
        field: the same for the field's value.
        shuffled: the same with shuffled labels.
        commit: share of pairs whose margin keeps its final sign from this layer on.
        write_depth: relative depth at which the conclusion is written, by anchor; ``None`` where it never is.
        commit_depth: relative depth of the commitment.
        note: lines below the title.
    """

    title: str
    conclusion: Mapping[str, Curve]
    field: Mapping[str, Curve] = dataclasses.field(default_factory=dict)
    shuffled: Mapping[str, Curve] = dataclasses.field(default_factory=dict)
    commit: Curve | None = None
    write_depth: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    commit_depth: float | None = None
    note: tuple[str, ...] = ()


def draw_layers(
    panels: Sequence[Panel], n_layers: int, title: str = "Written before it is read", subtitle: str = ""
) -> Figure:
    """Small multiples: a column per panel, conclusion above and field below, with one legend.

    Args:
        panels: at most four.
        n_layers: depth of the model; layer 0 of a curve is the embedding.
        title: heading.
        subtitle: a line below it.
    """
    if not panels:
        return s.message(title, ["no layer curve was measured in this run"])
    anchors = list(dict.fromkeys(a for p in panels for a in (*p.conclusion, *p.field)))
    rows = ["conclusion", "field"] if any(p.field for p in panels) else ["conclusion"]
    looks = {a: s.CURVES[i % len(s.CURVES)] for i, a in enumerate(anchors)}
    with s.style():
        legend = _handles(panels, looks)
        bottom = 0.62 + 0.17 * -(-len(legend) // 4)
        height = TOP + PANEL_TITLE + PANEL + (len(rows) - 1) * (ROW_GAP + SECOND) + bottom
        figure = s.new_figure(height)
        s.heading(figure, title, subtitle)
        width = (s.WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)
        for r, what in enumerate(rows):
            for c, panel in enumerate(panels):
                top = TOP + PANEL_TITLE + r * (PANEL + ROW_GAP)
                axes = s.place(figure, LEFT + c * (width + GAP), top, width, SECOND if r else PANEL)
                _frame(axes, n_layers, first=c == 0, last=r == len(rows) - 1, what=what)
                if what == "conclusion":
                    _conclusion(axes, panel, looks, n_layers)
                else:
                    _accuracies(axes, panel.field, looks)
                if r == 0:
                    lines = [(panel.title, "bold", s.INK), *((line, "normal", s.MUTED) for line in panel.note)]
                    for at, (text, weight, colour) in enumerate(lines):
                        y = 1 + (0.05 + 0.145 * (len(lines) - 1 - at)) / PANEL
                        axes.text(0, y, s.drawable(text), transform=axes.transAxes, fontweight=weight, color=colour,
                                  fontsize=s.SMALL - 0.5 * (at > 0), va="bottom")  # fmt: skip
        figure.legend(
            handles=legend, loc="lower left", bbox_to_anchor=(0.005, 0.0), ncols=4, columnspacing=1.4, handlelength=2.2
        )
    return figure


def _frame(axes: Axes, n_layers: int, *, first: bool, last: bool, what: str) -> None:
    low = -0.03 if what == "conclusion" else 0.36
    ticks = (0, 0.25, 0.5, 0.75, 1.0) if what == "conclusion" else (0.5, 0.75, 1.0)
    axes.set(xlim=(-0.03 * n_layers, 1.03 * n_layers), ylim=(low, 1.06), yticks=ticks)
    axes.grid(axis="y")
    axes.axhline(CHANCE, color=s.MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1.5)
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.set_ylabel(f"{what}: accuracy" if first else "")
    axes.tick_params(labelbottom=last)
    axes.set_xlabel("layer (0 = embedding)" if last else "")
    if not first:
        axes.set_yticklabels([])


def _accuracies(axes: Axes, curves: Mapping[str, Curve], looks: Mapping[str, tuple[str, str]]) -> None:
    order = list(looks)
    for anchor, curve in curves.items():
        colour, marker = looks[anchor]
        _band(axes, curve, colour)
        every = max(1, len(curve.x) // 6)
        start = order.index(anchor) * every // len(order)  # markers of different curves do not hide each other
        axes.plot(curve.x, curve.y, color=colour, marker=marker, markevery=(start, every), zorder=3, label=anchor)


def _band(axes: Axes, curve: Curve, colour: str) -> None:
    points = [
        (x, lo, hi) for x, lo, hi in zip(curve.x, curve.lo, curve.hi, strict=False) if lo is not None and hi is not None
    ]
    if points:
        xs, lows, highs = zip(*points, strict=True)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.14, linewidth=0, zorder=2)


def _conclusion(axes: Axes, panel: Panel, looks: Mapping[str, tuple[str, str]], n_layers: int) -> None:
    for curve in panel.shuffled.values():
        axes.plot(curve.x, curve.y, color=s.MUTED, linewidth=0.8, linestyle=(0, (1, 1)), zorder=2)
    _accuracies(axes, panel.conclusion, looks)
    if panel.commit is not None:
        axes.plot(
            panel.commit.x, panel.commit.y, color=s.BLACK, linewidth=1.8, linestyle="--", zorder=3.5, label="commit"
        )
    for at, (anchor, depth) in enumerate(panel.write_depth.items()):
        if depth is not None and anchor in looks:
            colour, marker = looks[anchor]
            y = 0.10 + 0.075 * at
            axes.plot(depth * n_layers, y, marker, markersize=5.5, markerfacecolor="white", markeredgecolor=colour,
                      markeredgewidth=1.4, zorder=4, label=f"write {anchor}")  # fmt: skip
    if panel.commit_depth is not None:
        axes.axvline(panel.commit_depth * n_layers, color=s.BLACK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1.8)


def _handles(panels: Sequence[Panel], looks: Mapping[str, tuple[str, str]]) -> list[Line2D]:
    handles = [Line2D([], [], color=c, marker=m, label=s.drawable(a)) for a, (c, m) in looks.items()]
    if any(p.shuffled for p in panels):
        handles.append(Line2D([], [], color=s.MUTED, linewidth=0.8, linestyle=(0, (1, 1)), label="shuffled labels"))
    if any(p.commit for p in panels):
        handles.append(Line2D([], [], color=s.BLACK, linewidth=1.8, linestyle="--", label="pairs committed"))
    if any(p.commit_depth is not None for p in panels):
        handles.append(Line2D([], [], color=s.BLACK, linewidth=1.0, linestyle=(0, (4, 3)), label="commit depth"))
    if any(p.write_depth for p in panels):
        look = {"marker": "o", "linestyle": "", "markersize": 5.5, "markerfacecolor": "white", "markeredgewidth": 1.4}
        handles.append(Line2D([], [], markeredgecolor=s.MUTED, label="write depth, by anchor", **look))
    return handles
