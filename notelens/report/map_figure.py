"""The figure of a note map: the prompt coloured by effect, and below it every row in every layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from notelens.report import style as s
from notelens.report.strip import CMAP, MIN_SCALE, Strip, draw_strips, readable

HEAT_LEFT, HEAT_RIGHT, HEAT_GAP, HEAT_BOTTOM = 0.62, 0.95, 0.50, 0.95
"""Inches around the layer map; its bottom margin holds the tokens."""
MIN_HEIGHT, LAYER_HEIGHT, MAX_HEIGHT = 1.2, 0.11, 3.4
MAX_LABELS, LABEL_CHARS = 60, 14


def draw_map(data: Mapping[str, Any], layers: Sequence[Sequence[float]] | None) -> Figure:
    """Draw a map from its JSON and, where it has one, its layer map ``[layer][row]``.

    Where recoveries are not defined, the strip shows the change of the margin in logits and says why; there is no layer
    map then.
    """
    changed = data["changed_rows"]
    first, n = changed[0], len(data["tokens"])
    reason = data["excluded"].get("denoising")

    def strip(title: str, effects: Sequence[float | None], note: str) -> Strip:
        values = tuple(effects[i] if first <= i < len(effects) else None for i in range(n))
        return Strip(title, tuple(data["tokens"]), values, field=frozenset(changed), note=note)

    name = data["model"].get("name", "")
    answers = " \u2192 ".join(_short(a) for a in data["answers"])
    title = f"Note map: {answers}" if answers.strip(" \u2192") else "Note map"
    if reason is not None:
        low, high = data["margins"]["denoising"]
        note = f"recovery is not defined: {reason} (margin {s.number(low, 2)}, of the new prompt {s.number(high, 2)})"
        shifts = strip("New row into the old cache", data["shift"]["denoising"], note)
        return draw_strips([shifts], title, name, unit="change of the margin in logits, one row at a time")
    copied, again = data["recovery"]["denoising"], data["recompute"]
    strips = [
        strip("Row copied from the new prompt's cache", copied, _ends(data)),
        strip(
            "Row run again in the old cache, with the new field",
            again["rows"],
            f"the field alone {s.number(again['in_place'], 3)}; rows that are not run again stay as they were",
        ),
    ]
    subtitle = f"{name}; isolated swaps, recovery of the decision when one row is replaced"
    figure = draw_strips(strips, title, subtitle, unit="recovery, one row at a time")
    if layers is not None:
        _add_layers(figure, [row[first:] for row in layers], data["tokens"][first:])
    return figure


def _short(answer: str, limit: int = 24) -> str:
    text = s.drawable(" ".join(answer.split()) or repr(answer))
    return text if len(text) <= limit else text[: limit - 1] + "\u2026"


def _ends(data: Mapping[str, Any]) -> str:
    parts = [f"field rows alone {s.number(data['field_only']['denoising'], 3)}"]
    parts.append(f"all rows behind it {s.number(data['notes']['denoising'], 3)}")
    if "noising" not in data["excluded"]:
        parts.append(
            f"old rows into the new cache {s.number(data['field_only']['noising'], 3)} and "
            f"{s.number(data['notes']['noising'], 3)}"
        )
    return "; ".join(parts)


def _add_layers(figure: Figure, shown: Sequence[Sequence[float]], tokens: Sequence[str]) -> None:
    """Append the heat map of rows and layers below what is drawn."""
    n_layers, n_rows = len(shown), len(shown[0])
    heat = min(MAX_HEIGHT, max(MIN_HEIGHT, LAYER_HEIGHT * n_layers))
    with s.style():
        _, above = figure.get_size_inches()
        total = above + HEAT_GAP + heat + HEAT_BOTTOM
        _extend(figure, total)
        axes = s.place(figure, HEAT_LEFT, above + HEAT_GAP, s.WIDTH - HEAT_LEFT - HEAT_RIGHT, heat)
        scale = max(MIN_SCALE, float(np.abs(shown).max()))
        norm = TwoSlopeNorm(0.0, -scale, scale)
        image = axes.imshow(shown, aspect="auto", origin="lower", cmap=CMAP, norm=norm, interpolation="nearest")
        ticks = _labelled(shown)
        names = [_label(tokens[i]) for i in ticks]
        axes.set_xticks(ticks, names, rotation=90, fontsize=5.5, family=s.MONO)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 4, 5, 10]))
        axes.set_ylabel("layer")
        axes.set_xlim(-0.5, n_rows - 0.5)
        axes.set_ylim(-0.5, n_layers - 0.5)
        axes.set_title("One row in one layer", loc="left", fontsize=s.SMALL, fontweight="bold")
        bar = s.place(figure, s.WIDTH - HEAT_RIGHT + 0.12, above + HEAT_GAP, 0.11, heat)
        figure.colorbar(image, cax=bar, ticks=MaxNLocator(5))
        bar.set_ylabel("recovery", labelpad=3)
        bar.tick_params(labelsize=s.SMALL)


def _label(token: str) -> str:
    text = readable(token.strip(" ") or token)
    return text if len(text) <= LABEL_CHARS else text[: LABEL_CHARS - 1] + "\u2026"


def _labelled(shown: Sequence[Sequence[float]]) -> list[int]:
    """Columns that get a label: the strongest first, as many as stand clear of each other."""
    strength = np.abs(shown).max(0)
    apart = -(-len(strength) // MAX_LABELS)
    chosen: list[int] = []
    for column in sorted(range(len(strength)), key=lambda i: (-strength[i], i)):
        if all(abs(column - other) >= apart for other in chosen):
            chosen.append(column)
    return sorted(chosen)


def _extend(figure: Figure, total: float) -> None:
    """Add room at the bottom; everything that is there keeps its place and size."""
    width, height = figure.get_size_inches()
    shrink = height / total

    def lifted(y: float) -> float:
        return 1 - (1 - y) * shrink

    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position((box.x0, lifted(box.y0), box.width, box.height * shrink))
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((x, lifted(float(y))))
    for legend in figure.legends:
        box = legend.get_bbox_to_anchor().transformed(figure.transFigure.inverted())
        legend.set_bbox_to_anchor((box.x0, lifted(box.y0)), transform=figure.transFigure)
    figure.set_size_inches(width, total)
