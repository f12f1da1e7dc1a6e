"""The figure of a note map: the prompt coloured by effect, and below it every row in every layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from notelens.report import style as s
from notelens.report.strip import CMAP, MIN_SCALE, Strip, draw_strips, readable

HEAT_HEIGHT, HEAT_GAP, HEAT_BOTTOM = 2.6, 0.55, 1.0
MAX_LABELS = 60


def draw_map(data: Mapping[str, Any], layers: Sequence[Sequence[float]] | None) -> Figure:
    """Draw a map from its JSON and, where it has one, its layer map ``[layer][row]``."""
    first = data["changed_rows"][0]
    effects = data["recovery"]["denoising"]
    values = tuple(effects[i] if first <= i < len(effects) else None for i in range(len(data["tokens"])))
    strip = Strip(
        f"{data['answers'][0]} \u2192 {data['answers'][1]}",
        tuple(data["tokens"]),
        values,
        field=frozenset(data["changed_rows"]),
        note="isolated swap, new rows into the old cache, one row at a time",
    )
    subtitle = f"{data['model'].get('name', '')}; recovery of the decision when one cached row is the new prompt's"
    figure = draw_strips([strip], "Note map", subtitle)
    if layers is None:
        return figure
    with s.style():
        _, height = figure.get_size_inches()
        total = height + HEAT_GAP + HEAT_HEIGHT + HEAT_BOTTOM
        _extend(figure, total)
        axes = s.place(figure, 0.62, height + HEAT_GAP, s.WIDTH - 1.5, HEAT_HEIGHT)
        shown = [row[first:] for row in layers]
        scale = max([MIN_SCALE, *(abs(v) for row in shown for v in row)])
        image = axes.imshow(
            shown, aspect="auto", origin="lower", cmap=CMAP, norm=TwoSlopeNorm(0.0, -scale, scale), interpolation="nearest"
        )
        names = [readable(t) for t in data["tokens"][first : first + len(shown[0])]]
        step = max(1, -(-len(names) // MAX_LABELS))
        ticks = list(range(0, len(names), step))
        axes.set_xticks(ticks, [names[i] for i in ticks], rotation=90, fontsize=5.5, family=s.MONO)
        axes.set_ylabel("layer")
        axes.set_title("One row in one layer (isolated swap)", loc="left", fontsize=s.BODY)
        width, _ = figure.get_size_inches()
        bar = figure.add_axes((
            (s.WIDTH - 0.72) / width, (total - height - HEAT_GAP - HEAT_HEIGHT) / total, 0.12 / width, HEAT_HEIGHT / total
        ))  # fmt: skip
        figure.colorbar(image, cax=bar, label="recovery")
    return figure


def _extend(figure: Figure, total: float) -> None:
    """Add room at the bottom; everything that is there keeps its place and size."""
    width, height = figure.get_size_inches()
    shrink = height / total
    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position((box.x0, 1 - (1 - box.y0) * shrink, box.width, box.height * shrink))
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((x, 1 - (1 - float(y)) * shrink))
    figure.set_size_inches(width, total)
