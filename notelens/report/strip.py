"""Figure 4: the prompt itself, every token coloured by what patching that one position does to the decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from notelens.prompt import Prompt
from notelens.report import style as s

FONT = 7.8
CHAR = FONT * s.MONO_ADVANCE
BOX, LINE, PAD = 11.6, 15.0, 1.6
"""Points: height of a box, distance of lines, space left and right of a token's text inside its box."""
TOP, BOTTOM, LEFT, PANEL_TITLE, PANEL_GAP = 0.60, 0.86, 0.14, 0.40, 0.16
CMAP = "RdBu_r"
UNPATCHED = "#eeeeee"
MIN_SCALE = 0.05
"""Smallest end of the colour scale, so that noise around zero is not stretched to full colour."""
MAX_TOKENS = 420
"""Longer prompts leave out runs of tokens with weak effects; how many and how weak is written in their place."""
SHOWN = {"\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d"}


@dataclass(frozen=True)
class Strip:
    """One prompt.

    Attributes:
        title, note: heading and a line below it.
        tokens: text of every token.
        effects: recovery when only this position is patched; ``None`` before the field and at the decision.
        field, trigger, rule: positions to mark.
    """

    title: str
    tokens: tuple[str, ...]
    effects: tuple[float | None, ...]
    field: frozenset[int] = frozenset()
    trigger: frozenset[int] = frozenset()
    rule: frozenset[int] = frozenset()
    note: str = ""

    @classmethod
    def of(cls, prompt: Prompt, effects: Mapping[int, float], *, title: str, note: str = "") -> "Strip":
        """The strip of a prompt; ``effects`` by position, positions it lacks were not patched."""
        marks = {n: frozenset(prompt.positions(n)) for n in ("field", "trigger", "rule") if n in prompt.spans}
        values = tuple(effects.get(p) for p in range(len(prompt)))
        return cls(title, prompt.tokens, values, note=note, **marks)


@dataclass(frozen=True)
class _Box:
    """A token on the page, in points from the upper left corner of its panel."""

    position: int | None
    text: str
    x: float
    line: int
    width: float


def draw_strips(
    strips: Sequence[Strip],
    title: str = "Effect of every single position",
    subtitle: str = "",
    reason: str = "",
    unit: str = "recovery when only this position is patched",
) -> Figure:
    """Token heat strips, one below the other, with one colour scale for all.

    Args:
        strips: what to draw.
        title: heading.
        subtitle: a line below it.
        reason: said in place of the picture when there are no strips.
        unit: what the colours stand for.
    """
    if not strips:
        return s.message(title, [reason or "no per-position effects were measured in this run"])
    room = (s.WIDTH - 2 * LEFT) * 72
    pages = [_lay_out(strip, room) for strip in strips]
    heights = [(max(b.line for b in page) + 1) * LINE / 72 for page in pages]
    scale = max([MIN_SCALE, *(abs(e) for strip in strips for e in strip.effects if e is not None)])
    norm = TwoSlopeNorm(0.0, -scale, scale)
    with s.style():
        figure = s.new_figure(TOP + sum(heights) + len(pages) * (PANEL_TITLE + PANEL_GAP) + BOTTOM)
        s.heading(figure, title, subtitle)
        top = TOP
        for strip, page, height in zip(strips, pages, heights, strict=True):
            axes = s.place(figure, LEFT, top + PANEL_TITLE, s.WIDTH - 2 * LEFT, height)
            axes.set(xlim=(0, room), ylim=(height * 72, 0))
            axes.axis("off")
            _titles(axes, strip)
            for box in page:
                _draw_box(axes, strip, box, norm)
            top += PANEL_TITLE + height + PANEL_GAP
        _legend(figure, strips, norm, unit)
    return figure


def _lay_out(strip: Strip, room: float) -> list[_Box]:
    """Boxes in reading order.

    A new line begins where the next box does not fit and after every newline token, except in the text before the
    field's own line: no patch can change anything there, so it is set without breaks.
    """
    boxes: list[_Box] = []
    x, line = 0.0, 0
    head = _line_start(strip)
    for position, raw in _visible(strip):
        text = raw if position is None else readable(raw)
        limit = int((room - 2 * PAD) / CHAR)
        text = text if len(text) <= limit else text[: limit - 1] + "\u2026"
        width = len(text) * CHAR + 2 * PAD
        if x > 0 and x + width > room:
            x, line = 0.0, line + 1
        boxes.append(_Box(position, text, x, line, width))
        x += width
        if position is not None and raw.endswith("\n") and position >= head - 1:
            x, line = 0.0, line + 1
    return boxes


def _line_start(strip: Strip) -> int:
    """First position of the line in which the first patched token stands."""
    first = next((i for i, e in enumerate(strip.effects) if e is not None), 0)
    return next((i + 1 for i in range(first - 1, -1, -1) if strip.tokens[i].endswith("\n")), 0)


def readable(token: str) -> str:
    """How a token is written: newlines, tabs and lone spaces get a sign, characters the font lacks their code point."""
    text = "".join(SHOWN.get(c, c) for c in token)
    if not text.strip():
        text = "\u00b7" * max(1, len(text))
    return s.drawable(text, s.MONO)


def _visible(strip: Strip) -> list[tuple[int | None, str]]:
    """Tokens to draw; in long prompts weak ones are replaced, run by run, by a remark (position ``None``)."""
    everything: list[tuple[int | None, str]] = list(enumerate(strip.tokens))
    if len(everything) <= MAX_TOKENS:
        return everything
    strength = [abs(e) if e is not None else 0.0 for e in strip.effects]
    marked = strip.field | strip.trigger | strip.rule
    ranked = sorted(range(len(strength)), key=lambda i: (i not in marked, -strength[i], i))
    keep: set[int] = set()
    for i in ranked:
        if len(keep) >= MAX_TOKENS // 2:
            break
        keep.update(range(max(0, i - 2), min(len(strength), i + 3)))
    shown: list[tuple[int | None, str]] = []
    run: list[int] = []
    for i in range(len(strength) + 1):
        if i < len(strength) and i not in keep:
            run.append(i)
            continue
        if run:
            most = max(strength[j] for j in run)
            shown.append((None, f" \u2026 {len(run)} tokens, |effect| \u2264 {most:.3f} \u2026 "))
            run = []
        if i < len(strength):
            shown.append((i, strip.tokens[i]))
    return shown


def _titles(axes: Axes, strip: Strip) -> None:
    axes.text(0, -18.5, s.drawable(strip.title), fontsize=s.SMALL, fontweight="bold", va="bottom")
    axes.text(0, -6.5, s.drawable(strip.note), fontsize=s.SMALL - 0.5, color=s.MUTED, va="bottom")


def _draw_box(axes: Axes, strip: Strip, box: _Box, norm: TwoSlopeNorm) -> None:
    y = box.line * LINE
    effect = None if box.position is None else strip.effects[box.position]
    colour: object = UNPATCHED if effect is None else colormaps[CMAP](norm(effect))
    ink = s.INK if effect is None or _luminance(colour) > 0.2 else "white"
    if box.position is not None:
        axes.add_patch(
            Rectangle((box.x + 0.3, y), box.width - 0.6, BOX, facecolor=colour, linewidth=0, zorder=2)  # type: ignore[arg-type]
        )
    axes.text(
        box.x + PAD, y + BOX / 2, box.text, family=s.MONO, fontsize=FONT, color=ink, va="center_baseline", zorder=4,
        gid=f"token-{box.position}",
    )  # fmt: skip
    if box.position in strip.field or box.position in strip.trigger:
        dashes = "-" if box.position in strip.field else (0, (1.6, 1.2))
        axes.add_patch(
            Rectangle((box.x + 0.5, y + 0.2), box.width - 1.0, BOX - 0.4, fill=False, edgecolor=s.BLACK, linewidth=1.3,
                      linestyle=dashes, zorder=5)
        )  # fmt: skip
    if box.position in strip.rule:
        axes.plot(
            [box.x, box.x + box.width], [y + BOX + 1.5] * 2, color=s.INK, linewidth=0.9, zorder=3, solid_capstyle="butt"
        )


def _luminance(colour: object) -> float:
    red, green, blue = (float(x) for x in colour[:3])  # type: ignore[index]  # an RGBA tuple
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2


def _legend(figure: Figure, strips: Sequence[Strip], norm: TwoSlopeNorm, unit: str) -> None:
    height = figure.get_size_inches()[1]
    bar = s.place(figure, LEFT + 0.16, height - 0.56, 2.6, 0.11)
    figure.colorbar(ScalarMappable(norm, CMAP), cax=bar, orientation="horizontal", ticks=MaxNLocator(4))
    bar.set_title(unit, fontsize=s.SMALL, loc="left", pad=3)
    bar.tick_params(labelsize=s.SMALL)
    handles: list[Artist] = [Patch(facecolor=UNPATCHED, label="not patched")]
    if any(x.field for x in strips):
        handles.append(Patch(fill=False, edgecolor=s.BLACK, linewidth=1.3, label="field"))
    if any(x.trigger for x in strips):
        handles.append(Patch(fill=False, edgecolor=s.BLACK, linewidth=1.3, linestyle=(0, (1.6, 1.2)), label="trigger"))
    if any(x.rule for x in strips):
        handles.append(Line2D([], [], color=s.INK, linewidth=0.9, label="rule"))
    figure.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(0.995, 0.25 / height),
        ncols=4,
        columnspacing=1.2,
        handlelength=1.4,
    )
