"""What makes a picture broken, measured with matplotlib's own renderer."""

from itertools import combinations

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SLACK = 1.0
"""Pixels (at 200 dpi) by which two boxes may touch: rounding of glyph boxes."""


def text_boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every text that is drawn, with its box in pixels."""
    figure.canvas.draw()  # places ticks and legends
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # an Agg canvas
    hidden: set[int] = set()
    for axis in figure.findobj(Axis):
        drawn = {id(tick) for tick in axis._update_ticks()}  # no public call says which ticks are drawn
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if id(tick) not in drawn:
                hidden |= {id(tick.label1), id(tick.label2)}
    for axes in figure.axes:
        if not axes.axison:
            hidden |= {id(t) for axis in (axes.xaxis, axes.yaxis) for t in axis.findobj(Text)}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes overlap by more than the slack in both directions."""
    found = []
    for (text_a, a), (text_b, b) in combinations(text_boxes(figure), 2):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        height = min(a.y1, b.y1) - max(a.y0, b.y0)
        if width > SLACK and height > SLACK:
            found.append((text_a, text_b))
    return found


def cut(figure: Figure) -> list[str]:
    """Texts that reach beyond the edge of the figure."""
    edge = figure.bbox
    return [
        text
        for text, box in text_boxes(figure)
        if box.x0 < edge.x0 - SLACK or box.y0 < edge.y0 - SLACK or box.x1 > edge.x1 + SLACK or box.y1 > edge.y1 + SLACK
    ]
