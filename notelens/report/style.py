"""One look for every figure: sizes, colours, fonts, and the only way a figure reaches the disk.

Colours are those of Okabe and Ito (distinguishable with every common colour vision), and no figure tells two things
apart by colour alone: directions also differ by hatching, curves by marker and dash, marked tokens by their outline.
Fonts are two that matplotlib ships. Nothing here touches pyplot, so drawing never changes a caller's settings.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.ft2font import FT2Font

from notelens.runs.files import make_folder, write_atomic

DPI = 200
WIDTH = 7.2
"""Inches: the width of a notebook's output column and of two columns of a paper."""

INK, MUTED, GRID, PAPER = "#1a1a1a", "#5f5f5f", "#dddddd", "#b9a57a"
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
CURVES = ((BLUE, "o"), (VERMILLION, "s"), (GREEN, "^"), (PURPLE, "D"), (ORANGE, "v"), (SKY, "P"))
"""Colour and marker of the first, second, ... curve."""

SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"
MONO_ADVANCE = 0.6021
"""Width of one character of ``MONO`` in em; the same for every character."""
SMALL, BODY, TITLE = 7.5, 8.5, 9.5

_RC: dict[str, Any] = {
    "font.family": [SANS],
    "font.size": BODY,
    "axes.titlesize": BODY,
    "axes.labelsize": BODY,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "hatch.linewidth": 0.7,
    "text.parse_math": False,
    "text.usetex": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "notelens",
}


@contextmanager
def style() -> Iterator[None]:
    """Settings under which figures are drawn and saved; the caller's come back afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for key, value in _RC.items():
            matplotlib.rcParams[key] = value  # pyright: ignore[reportArgumentType]  # keys are rc names
        yield


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure of this size in inches, on its own canvas."""
    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches from the left and the top edge of the figure."""
    total_width, total_height = figure.get_size_inches()
    bottom = total_height - top - height
    box = (left / total_width, bottom / total_height, width / total_width, height / total_height)
    return figure.add_axes(box)


def heading(figure: Figure, title: str, subtitle: str = "", left: float = 0.12) -> None:
    """Title and one line below it, flush left at the top of the figure."""
    width, height = figure.get_size_inches()
    figure.text(left / width, 1 - 0.10 / height, title, fontsize=TITLE, fontweight="bold", va="top")
    if subtitle:
        figure.text(left / width, 1 - 0.31 / height, subtitle, fontsize=SMALL, color=MUTED, va="top")


def message(title: str, lines: list[str]) -> Figure:
    """A figure that says why there is nothing to draw."""
    with style():
        figure = new_figure(0.75 + 0.19 * max(1, len(lines)))
        heading(figure, title, "nothing to draw")
        width, height = figure.get_size_inches()
        for at, line in enumerate(lines):
            figure.text(0.12 / width, 1 - (0.60 + 0.19 * at) / height, line, fontsize=BODY, va="top")
    return figure


def number(value: float, digits: int = 3) -> str:
    """``value`` with a real minus sign and without a negative zero."""
    return f"{value:z.{digits}f}".replace("-", "\u2212")


@cache
def _glyphs(family: str) -> frozenset[int]:
    path = fontManager.findfont(FontProperties(family=[family]), fallback_to_default=False)
    return frozenset(FT2Font(path).get_charmap())


def drawable(text: str, family: str = SANS) -> str:
    """``text`` with every character that the font lacks written as its code point."""
    known = _glyphs(family)
    return "".join(c if ord(c) in known else c.encode("unicode_escape").decode("ascii") for c in text)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg``; each is complete or not there. The bytes depend on the figure alone.

    Raises:
        RecordError: a file cannot be written; an earlier version of it is intact.
    """
    written: list[Path] = []
    make_folder(folder)
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        buffer = io.BytesIO()
        with style():
            figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
        target = folder / f"{name}.{kind}"
        write_atomic(target, buffer.getvalue())
        written.append(target)
    return written
