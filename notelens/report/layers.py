"""Figure 3: at which depth the conclusion is written, the field is known, and the decision is settled."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from notelens.report import style as s
from notelens.report.topk import Curve

TOP, LEFT, RIGHT, GAP = 0.60, 0.78, 0.14, 0.26
FIRST, OTHER, ROW_GAP, PANEL_TITLE = 2.0, 1.15, 0.28, 0.56
MAX_PANELS = 3
CHANCE = 0.5
DOTS, DASHES = (0, (1, 2)), (0, (4, 3))


@dataclass(frozen=True)
class Accuracy:
    """One row of a panel.

    Attributes:
        curves: accuracy over layers, by anchor.
        shuffled: the same with shuffled labels: mean, and lowest and highest over shuffles and anchors.
    """

    curves: Mapping[str, Curve]
    shuffled: Curve | None = None


@dataclass(frozen=True)
class Panel:
    """One column: a set of rule forms.

    Attributes:
        title: what is shown.
        rows: accuracies by name of the row; the first row also shows commitment and depths.
        commit: share of pairs that keep the final sign of both margins from this layer on.
        write_depth: relative depth at which the conclusion is written, by anchor; ``None`` where it never is.
        commit_depth: mean relative depth at which pairs commit.
        note: lines below the title.
    """

    title: str
    rows: Mapping[str, Accuracy]
    commit: Curve | None = None
    write_depth: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    commit_depth: float | None = None
    note: tuple[str, ...] = ()


def draw_layers(
    panels: Sequence[Panel], n_layers: int, title: str = "Conclusion and commitment by layer", subtitle: str = ""
) -> Figure:
    """Small multiples: a column per set of forms, a row per label and grouping, one legend.

    Args:
        panels: the first three are drawn; more would not be readable, and the subtitle says how many there are.
        n_layers: depth of the model; layer 0 of a curve is the embedding.
        title: heading.
        subtitle: a line below it.
    """
    if not panels:
        return s.message(title, ["no layer curve was measured in this run"])
    if len(panels) > MAX_PANELS:
        subtitle += f" \u00b7 the first {MAX_PANELS} of {len(panels)} sets of rule forms"
        panels = panels[:MAX_PANELS]
    rows = list(dict.fromkeys(name for p in panels for name in p.rows))
    anchors = list(dict.fromkeys(a for p in panels for row in p.rows.values() for a in row.curves))
    looks = {a: s.CURVES[i % len(s.CURVES)] for i, a in enumerate(anchors)}
    with s.style():
        handles = _handles(panels, looks)
        bottom = 0.62 + 0.17 * -(-len(handles) // 4)
        figure = s.new_figure(TOP + PANEL_TITLE + FIRST + (len(rows) - 1) * (ROW_GAP + OTHER) + bottom)
        s.heading(figure, title, subtitle)
        width = (s.WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)
        for r, name in enumerate(rows):
            top = TOP + PANEL_TITLE + (FIRST + ROW_GAP if r else 0) + max(0, r - 1) * (OTHER + ROW_GAP)
            for c, panel in enumerate(panels):
                axes = s.place(figure, LEFT + c * (width + GAP), top, width, OTHER if r else FIRST)
                axes.set_gid(f"{name}|{panel.title}")
                _frame(axes, n_layers, whole=r == 0, last=r == len(rows) - 1)
                axes.set_ylabel(name if c == 0 else "", linespacing=1.3)
                axes.tick_params(labelleft=c == 0)
                _accuracies(axes, panel.rows.get(name), looks)
                if r == 0:
                    _depths(axes, panel, looks, n_layers)
                    _titles(axes, panel)
        place = {"loc": "lower left", "bbox_to_anchor": (0.005, 0.0)}
        figure.legend(handles=handles, ncols=4, columnspacing=1.4, handlelength=2.2, **place)
    return figure


def _frame(axes: Axes, n_layers: int, *, whole: bool, last: bool) -> None:
    ticks = (0, 0.25, 0.5, 0.75, 1.0) if whole else (0.5, 0.75, 1.0)
    axes.set(xlim=(-0.03 * n_layers, 1.03 * n_layers), ylim=(-0.03 if whole else 0.28, 1.06), yticks=ticks)
    axes.grid(axis="y")
    axes.axhline(CHANCE, color=s.MUTED, linewidth=0.8, linestyle=DOTS, zorder=1.5)
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.set_xlabel("layer (0 = embedding)" if last else "")
    axes.tick_params(labelbottom=last)


def _titles(axes: Axes, panel: Panel) -> None:
    lines = [(panel.title, "bold", s.INK), *((line, "normal", s.MUTED) for line in panel.note)]
    for at, (text, weight, colour) in enumerate(lines):
        y = 1 + (0.05 + 0.145 * (len(lines) - 1 - at)) / FIRST
        size = s.SMALL - 0.5 * (at > 0)
        place = {"transform": axes.transAxes, "va": "bottom"}
        axes.text(0, y, s.drawable(text), fontweight=weight, color=colour, fontsize=size, **place)


def _accuracies(axes: Axes, row: Accuracy | None, looks: Mapping[str, tuple[str, str]]) -> None:
    if row is None:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, color=s.MUTED, ha="center", fontsize=s.SMALL)
        return
    if row.shuffled is not None:
        _band(axes, row.shuffled, s.MUTED)
        axes.plot(row.shuffled.x, row.shuffled.y, color=s.MUTED, linewidth=0.8, zorder=2, label="shuffled")
    order = list(looks)
    for anchor, curve in row.curves.items():
        colour, marker = looks[anchor]
        _band(axes, curve, colour)
        every = max(1, len(curve.x) // 6)
        start = order.index(anchor) * every // len(order)  # markers of different curves do not hide each other
        axes.plot(curve.x, curve.y, color=colour, marker=marker, markevery=(start, every), zorder=3, label=anchor)


def _band(axes: Axes, curve: Curve, colour: str) -> None:
    ends = zip(curve.x, curve.lo, curve.hi, strict=False)
    points = [(x, lo, hi) for x, lo, hi in ends if lo is not None and hi is not None]
    if points:
        xs, lows, highs = zip(*points, strict=True)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.14, linewidth=0, zorder=1.6)


def _depths(axes: Axes, panel: Panel, looks: Mapping[str, tuple[str, str]], n_layers: int) -> None:
    """The share of committed pairs, and where the conclusion is written and the decision committed."""
    if panel.commit is not None:
        axes.plot(
            panel.commit.x, panel.commit.y, color=s.BLACK, linewidth=1.8, linestyle="--", zorder=3.5, label="commit"
        )
    for anchor, depth in panel.write_depth.items():
        if depth is not None and anchor in looks:
            colour, marker = looks[anchor]
            y = 0.07 + 0.075 * list(looks).index(anchor)
            look = {"markersize": 5.5, "markerfacecolor": "white", "markeredgewidth": 1.4, "zorder": 4}
            axes.plot(depth * n_layers, y, marker, markeredgecolor=colour, label=f"write {anchor}", **look)
    if panel.commit_depth is not None:
        axes.axvline(panel.commit_depth * n_layers, color=s.BLACK, linewidth=1.0, linestyle=DASHES, zorder=1.8)


def _handles(panels: Sequence[Panel], looks: Mapping[str, tuple[str, str]]) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=c, marker=m, label=s.drawable(a)) for a, (c, m) in looks.items()
    ]
    if any(d is not None for p in panels for d in p.write_depth.values()):
        look = {"marker": "o", "linestyle": "", "markersize": 5.5, "markerfacecolor": "white", "markeredgewidth": 1.4}
        handles.append(Line2D([], [], markeredgecolor=s.MUTED, label="write depth, by anchor", **look))
    if any(p.commit for p in panels):
        handles.append(Line2D([], [], color=s.BLACK, linewidth=1.8, linestyle="--", label="pairs committed"))
    if any(p.commit_depth is not None for p in panels):
        handles.append(Line2D([], [], color=s.BLACK, linewidth=1.0, linestyle=DASHES, label="mean commit depth"))
    if any(row.shuffled for p in panels for row in p.rows.values()):
        handles.append(Patch(facecolor=s.MUTED, alpha=0.35, label="shuffled labels, range"))
    return handles
