"""Figure 1: what each set of patched rows recovers, with its control beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import Transform

from notelens.report import style as s

ROW, GROUP_GAP = 0.34, 0.26
LEFT, RIGHT, TOP, BOTTOM = 2.25, 1.55, 0.74, 0.78
DIRECTION_STYLE = {
    "denoising": {"color": s.BLUE, "hatch": None},
    "noising": {"color": s.SKY, "hatch": "/////"},
    "both": {"color": s.BLUE, "hatch": None},
}
DIRECTION_LABEL = {
    "denoising": "denoising (new rows into the old cache)",
    "noising": "noising (old rows into the new cache)",
    "both": "both directions",
}


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        group: probe, the heading it stands under.
        label: what was patched.
        direction: ``denoising``, ``noising`` or ``both``.
        value: recovery, or ``None`` where it is undefined.
        lo, hi: its interval, or ``None``.
        n, n_excluded: rows that count and rows that do not.
        paper: smallest and largest value the paper reports over its models, or ``None``.
        zero_width: the interval has no width although n > 1.
    """

    group: str
    label: str
    direction: str
    value: float | None
    lo: float | None
    hi: float | None
    n: int
    n_excluded: int = 0
    paper: tuple[float, float] | None = None
    zero_width: bool = False


def draw_recovery(bars: Sequence[Bar], title: str = "Recovery by patched rows", subtitle: str = "") -> Figure:
    """Horizontal bars, grouped by probe; directions side by side, n and excluded n in columns on the right.

    Args:
        bars: in the order in which they are drawn; bars of one row share group and label.
        title: heading.
        subtitle: a line below it, such as model and swap.
    """
    if not bars:
        return s.message(title, ["no recovery was measured in this run"])
    rows: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        rows.setdefault((bar.group, bar.label), []).append(bar)
    centres, headings, y, group = {}, [], 0.0, None
    for key in rows:
        if key[0] != group:
            group = key[0]
            headings.append((y + 0.55 * GROUP_GAP, group))
            y += GROUP_GAP
        centres[key] = y + ROW / 2
        y += ROW
    with s.style():
        figure = s.new_figure(TOP + y + BOTTOM)
        s.heading(figure, title, subtitle)
        axes = s.place(figure, LEFT, TOP, s.WIDTH - LEFT - RIGHT, y)
        low, high = _limits(bars)
        axes.set(
            xlim=(low, high), ylim=(y, 0), xlabel="recovery  (0 = stays with the recipient, 1 = follows the donor)"
        )
        axes.set_yticks(list(centres.values()), [s.drawable(label) for _, label in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        for at in (0.0, 1.0):
            axes.axvline(at, color=s.MUTED, linewidth=0.9, zorder=1.5)
        to_axes = axes.get_yaxis_transform()
        plot = s.WIDTH - LEFT - RIGHT
        for at, text in headings:
            axes.text((0.12 - LEFT) / plot, at, s.drawable(text), transform=to_axes, fontweight="bold", va="center")
        for at, text in ((0.45, "value"), (0.72, "n"), (1.0, "excl.")):
            x = 1 + at * (RIGHT - 0.14) / plot
            axes.text(
                x, 0.55 * GROUP_GAP, text, transform=to_axes, fontsize=s.SMALL, color=s.MUTED, ha="right", va="center"
            )
        for key, members in rows.items():
            _draw_row(axes, members, centres[key], to_axes)
        _legend(figure, bars)
    return figure


def _limits(bars: Sequence[Bar]) -> tuple[float, float]:
    known = [x for b in bars for x in (b.value, b.lo, b.hi, *(b.paper or ())) if x is not None]
    return min([-0.12, *(x - 0.04 for x in known)]), max([1.12, *(x + 0.04 for x in known)])


def _draw_row(axes: Axes, members: Sequence[Bar], centre: float, to_axes: Transform) -> None:
    ranges = [b.paper for b in members if b.paper is not None]
    if ranges:
        low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
        axes.barh(
            centre + 0.42 * ROW, max(high - low, 0.006), left=low, height=0.1 * ROW,
            color=s.PAPER, zorder=2.5, linewidth=0, label="paper",
        )  # fmt: skip
    thick = min(0.4 * ROW, 0.74 * ROW / len(members))
    for at, bar in enumerate(members):
        y = centre - 0.04 * ROW + (at - (len(members) - 1) / 2) * thick
        look = DIRECTION_STYLE[bar.direction]
        if bar.value is not None:
            axes.barh(
                y, bar.value, height=thick * 0.86, color=look["color"], hatch=look["hatch"], edgecolor="white",
                linewidth=0, zorder=2, label=f"{bar.group}|{bar.label}|{bar.direction}",
            )  # fmt: skip
            if bar.lo is not None and bar.hi is not None:
                axes.plot([bar.lo, bar.hi], [y, y], color=s.INK, linewidth=1.1, zorder=3, solid_capstyle="butt")
                axes.plot([bar.lo, bar.hi], [y, y], "|", color=s.INK, markersize=4.5, markeredgewidth=1.1, zorder=3)
            else:
                axes.plot(bar.value, y, "d", color=s.INK, markersize=3, zorder=3)
        value = "undefined" if bar.value is None else s.number(bar.value) + ("\u2020" if bar.zero_width else "")
        for share, text in ((0.45, value), (0.72, str(bar.n)), (1.0, str(bar.n_excluded))):
            x = 1 + share * (RIGHT - 0.14) / (s.WIDTH - LEFT - RIGHT)
            axes.text(x, y, text, transform=to_axes, ha="right", va="center", fontsize=s.SMALL - 0.5)


def _legend(figure: Figure, bars: Sequence[Bar]) -> None:
    used = [d for d in DIRECTION_LABEL if any(b.direction == d for b in bars)]
    handles = [
        Patch(facecolor=DIRECTION_STYLE[d]["color"], hatch=DIRECTION_STYLE[d]["hatch"], edgecolor="white", linewidth=0)
        for d in used
    ]
    labels = [DIRECTION_LABEL[d] for d in used]
    if any(b.paper for b in bars):
        handles.append(Patch(facecolor=s.PAPER))
        labels.append("range over the paper's models")
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.005, 0.0), ncols=3, columnspacing=1.4, handlelength=1.6
    )
    if any(b.zero_width for b in bars):
        width, height = figure.get_size_inches()
        text = "\u2020 interval of zero width although n > 1"
        figure.text(1 - 0.12 / width, 1 - 0.31 / height, text, fontsize=s.SMALL, color=s.MUTED, ha="right", va="top")
