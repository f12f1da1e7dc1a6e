"""Figure 2: how few positions carry the decision, against as many random ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from notelens.report import style as s

TOP, BOTTOM, LEGEND_LINE, LEFT = 0.66, 0.52, 0.16, 0.62
HEIGHT = 2.75
ROLES = {
    "own": {"color": s.BLUE, "marker": "o", "linestyle": "-"},
    "split": {"color": s.VERMILLION, "marker": "s", "linestyle": "--"},
    "cross": {"color": s.GREEN, "marker": "D", "linestyle": "-."},
    "random": {"color": s.MUTED, "marker": "^", "linestyle": ":"},
}


@dataclass(frozen=True)
class Curve:
    """Values over x with intervals.

    Attributes:
        label: legend text.
        role: who made the ranking: ``own`` (the same pair and direction), ``split`` (the other half of the instances),
            ``cross`` (the opposite direction), or ``random``.
        x, y: points; x is the number of patched positions, or the layer.
        lo, hi: intervals; ``None`` where there is none.
        n: instances behind the points.
    """

    label: str
    role: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    lo: tuple[float | None, ...] = ()
    hi: tuple[float | None, ...] = ()
    n: int = 0


@dataclass(frozen=True)
class Share:
    """How often one kind of token is among the strongest positions, against its share of all patched positions."""

    label: str
    top: float
    base: float
    lo: float | None = None
    hi: float | None = None


def draw_topk(
    curves: Sequence[Curve],
    shares: Sequence[Share] = (),
    title: str = "Recovery by number of patched positions",
    subtitle: str = "",
    share_title: str = "share of positions",
) -> Figure:
    """Recovery over k on a log2 axis; where ``shares`` is given, a second panel says which tokens are on top."""
    if not curves:
        return s.message(title, ["no top-k recovery was measured in this run"])
    with s.style():
        figure = s.new_figure(TOP + HEIGHT + BOTTOM + LEGEND_LINE * max(len(curves), 2))
        s.heading(figure, title, subtitle)
        width = s.WIDTH - LEFT - (0.15 if not shares else 2.75)
        axes = s.place(figure, LEFT, TOP, width, HEIGHT)
        ticks = sorted({x for c in curves for x in c.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.set(xlabel="patched positions k", ylabel="recovery", xlim=(min(ticks) / 1.25, max(ticks) * 1.25))
        axes.grid(axis="y")
        for at in (0.0, 1.0):
            axes.axhline(at, color=s.MUTED, linewidth=0.9, zorder=1.5)
        known = [v for c in curves for v in (*c.y, *c.lo, *c.hi) if v is not None]
        axes.set_ylim(min([-0.08, *(v - 0.04 for v in known)]), max([1.08, *(v + 0.04 for v in known)]))
        for shift, curve in enumerate(curves):
            _curve(axes, curve, 2.0 ** (0.07 * (shift - (len(curves) - 1) / 2)))
        figure.legend(
            *axes.get_legend_handles_labels(), loc="lower left", bbox_to_anchor=(0.005, 0.0), handlelength=2.6
        )
        if shares:
            _shares(figure, shares, share_title)
    return figure


def _curve(axes: Axes, curve: Curve, shift: float) -> None:
    """One curve; points are shifted a little so that the intervals of several curves stay apart."""
    look = ROLES[curve.role]
    xs = [x * shift for x in curve.x]
    for x, lo, hi in zip(xs, curve.lo, curve.hi, strict=False):
        if lo is not None and hi is not None:
            axes.plot([x, x], [lo, hi], color=look["color"], linewidth=1.1, zorder=2.5, solid_capstyle="butt")
            axes.plot([x, x], [lo, hi], "_", color=look["color"], markersize=4, markeredgewidth=1.0, zorder=2.5)
    label = s.drawable(f"{curve.label} (n = {curve.n})" if curve.n else curve.label)
    axes.plot(xs, curve.y, label=label, zorder=3, **look)  # type: ignore[arg-type]  # keywords of Line2D


def _shares(figure: Figure, shares: Sequence[Share], title: str) -> None:
    """Bars for the strongest positions, ticks for the base rate."""
    axes = s.place(figure, s.WIDTH - 1.5, TOP + 0.22, 1.38, min(HEIGHT - 0.4, 0.29 * len(shares)))
    ys = list(range(len(shares)))
    axes.barh(ys, [x.top for x in shares], height=0.62, color=s.SKY, label="among the strongest")
    for y, x in zip(ys, shares, strict=True):
        if x.lo is not None and x.hi is not None:
            axes.plot([x.lo, x.hi], [y, y], color=s.INK, linewidth=1.0, zorder=3, solid_capstyle="butt")
    marks = {"color": s.VERMILLION, "markersize": 10, "markeredgewidth": 2.2, "linestyle": "", "zorder": 4}
    axes.plot([x.base for x in shares], ys, "|", label="among all positions", **marks)
    axes.set_yticks(ys, [s.drawable(x.label) for x in shares])
    high = max(v for x in shares for v in (x.top, x.base, x.hi or 0.0))
    axes.set(xlim=(0, max(1e-9, 1.06 * high)), ylim=(len(shares) - 0.45, -0.55))
    axes.text(1, -0.62, s.drawable(title), transform=axes.get_yaxis_transform(), fontsize=s.SMALL,
              ha="right", va="bottom")  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.locator_params(axis="x", nbins=4)
    figure.legend(*axes.get_legend_handles_labels(), loc="lower right", bbox_to_anchor=(0.995, 0.0), handlelength=1.4)
