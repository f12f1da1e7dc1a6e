"""Figure of a serving benchmark: time to the first token against the offered load, on a logarithmic scale, by arm."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from notelens.report import style as s
from notelens.runs.serve_tables import FEW_TAIL, MIN_TAIL

HEIGHT, TOP, BOTTOM, LEFT, GAP, RIGHT = 2.4, 0.74, 1.02, 0.80, 0.26, 0.12
PANELS = ((0.5, "median"), (0.9, "90th percentile"))
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
SPREAD = 0.5
"""Of the distance between two loads, over which the arms stand beside each other."""
ROOM = 1.08
"""Factor by which the time axis reaches beyond the outermost interval at least; it ends at round numbers."""
TICKS = tuple(m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5))
NOTE = "bars: 95 % intervals"
NOTE_TAIL = f"hollow: fewer than {MIN_TAIL} requests lie beyond this percentile, so its interval ends at the slowest"
Row = Mapping[str, Any]


def draw_serving(rows: Sequence[Row], subtitle: str = "") -> Figure:
    """Two panels: median and 90th percentile of the time to the first token.

    Args:
        rows: aggregates of a benchmark (:func:`notelens.runs.serve_tables.serve_table`).
        subtitle: such as the name of the run.
    """
    title = "Time to the first token by where the changing field stands"
    own = [r for r in rows if r["metric"] == "ttft_ms" and r["value"] is not None]
    shown = [r for r in own if r["params"]["q"] in [q for q, _ in PANELS]]
    if not shown:
        return s.message(title, ["no request of any load was answered"])
    loads = list(dict.fromkeys((r["params"]["load"], r["params"]["offered_rps"]) for r in shown))
    loads.sort(key=lambda x: (x[1] is None, x[1] or 0.0))
    arms = list(dict.fromkeys(str(r["method"]) for r in shown))
    known = [v for r in shown for v in (r["value"], r["lo"], r["hi"]) if v]
    with s.style():
        figure = s.new_figure(TOP + HEIGHT + BOTTOM)
        s.heading(figure, title, s.drawable(" · ".join(x for x in (subtitle, *_facts(rows, shown)) if x)))
        width = (s.WIDTH - LEFT - RIGHT - GAP) / 2
        for at, (q, name) in enumerate(PANELS):
            axes = s.place(figure, LEFT + at * (width + GAP), TOP, width, HEIGHT)
            axes.set_title(name, pad=4)
            for i, arm in enumerate(arms):
                points = {r["params"]["load"]: r for r in shown if r["method"] == arm and r["params"]["q"] == q}
                _curve(axes, [points.get(load) for load, _ in loads], arm, i, len(arms))
            _axes(axes, loads, min(known), max(known))
            if at == 0:
                axes.set_ylabel("time to first token")
            else:
                axes.tick_params(axis="y", labelleft=False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.005, 0.0), ncols=5, handlelength=2.8)
        tail = any(FEW_TAIL in r["flags"] for r in shown)
        note = f"{NOTE}; {NOTE_TAIL}" if tail else NOTE
        figure.text(0.12 / s.WIDTH, 0.30 / (TOP + HEIGHT + BOTTOM), note, fontsize=s.SMALL, color=s.MUTED)
    return figure


def _facts(rows: Sequence[Row], shown: Sequence[Row]) -> list[str]:
    """Model, capacity of the baseline, requests behind a point."""
    model = str(shown[0]["model"])
    facts = [model if len(model) <= 40 else f"...{model[-37:]}"]
    capacity = next((r["value"] for r in rows if r["metric"] == "capacity_rps"), None)
    if capacity is not None:
        facts.append(f"baseline's capacity {capacity:.3g} requests/s")
    n = sorted({int(r["n"]) for r in shown})
    return [*facts, f"n = {n[0]}{f' to {n[-1]}' if n[1:] else ''} requests a point"]


def _curve(axes: Axes, points: Sequence[Row | None], arm: str, at: int, n: int) -> None:
    colour, marker = s.CURVES[at % len(s.CURVES)]
    shift = SPREAD * (at - (n - 1) / 2) / max(n, 4)
    shown = [(i + shift, p) for i, p in enumerate(points) if p is not None]
    for x, p in shown:
        if p["lo"] is not None and p["hi"] is not None and p["lo"] > 0:
            axes.plot([x, x], [p["lo"], p["hi"]], color=colour, linewidth=1.0, zorder=2.5, solid_capstyle="butt")
    axes.plot([x for x, _ in shown], [p["value"] for _, p in shown], color=colour, marker=marker, markersize=3.6, linewidth=1.1,
              linestyle=DASHES[at % len(DASHES)], label=s.drawable(arm), zorder=3)  # fmt: skip
    hollow = [(x, p["value"]) for x, p in shown if FEW_TAIL in p["flags"]]
    axes.plot([x for x, _ in hollow], [y for _, y in hollow], color=colour, marker=marker, markersize=3.6, linestyle="none",
              markerfacecolor="white", markeredgewidth=0.9, zorder=3.5)  # fmt: skip


def _axes(axes: Axes, loads: Sequence[tuple[str, float | None]], low: float, high: float) -> None:
    axes.set_yscale("log")
    bottom = max((t for t in TICKS if t <= low / ROOM), default=low / ROOM)
    top = min((t for t in TICKS if t >= high * ROOM), default=high * ROOM)
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(FixedLocator([t for t in TICKS if bottom <= t <= top]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1e3:g} s" if v >= 1000 else f"{v:g} ms"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    names = [f"{s.drawable(load)}\n{'all at once' if rate is None else f'{rate:.3g}/s'}" for load, rate in loads]
    axes.set_xticks(range(len(loads)), names)
    axes.set_xlim(-0.5, len(loads) - 0.5)
    axes.set_xlabel("offered load, requests a second")
    axes.grid(axis="y")


__all__ = ["draw_serving"]
