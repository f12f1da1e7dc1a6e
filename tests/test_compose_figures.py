"""Figures of the composing experiments show what the aggregates say, and say when there is nothing."""

from typing import Any

import pytest

from notelens.report.compose import draw_agreement, draw_keystone, select
from notelens.report.style import PAPER


def line(metric: str, method: str, value: float | None, **more: Any) -> dict[str, Any]:
    """An aggregate."""
    half = None if value is None else 0.05
    return {
        "metric": metric, "method": method, "params": more.pop("params", {}), "value": value,
        "lo": None if half is None or value is None else value - half,
        "hi": None if half is None or value is None else value + half, "n": 48, **more,
    }  # fmt: skip


def keystone_lines() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for method, plain, composed in (
        ("stale", 0.0, 0.0),
        ("in_place", 0.02, 0.05),
        ("full_suffix", 1.0, 0.97),
        ("refused", None, None),
    ):
        flips = 48 if method == "full_suffix" else 0
        gap = None if plain is None or composed is None else composed - plain
        for metric, value in (("recovery", plain), ("recovery_composed", composed), ("recovery_gap", gap)):
            found.append(line(metric, method, value, params={"inside": "record"}, flips=flips))
    return found


def drawn(axes: Any, marker: str) -> dict[tuple[float, float], str]:
    """Points with a marker, by place, with their colour."""
    return {
        (round(float(p.get_xdata()[0]), 3), round(float(p.get_ydata()[0]), 3)): p.get_color()
        for p in axes.get_lines()
        if p.get_marker() == marker and len(p.get_xdata())
    }


def test_edits_stand_side_by_side() -> None:
    figure = draw_keystone(keystone_lines(), "record", "a model")
    left, right = figure.axes
    assert set(drawn(left, "o")) == {(0.0, -0.15), (0.02, 0.85), (1.0, 1.85)}
    assert set(drawn(left, "s")) == {(0.0, 0.15), (0.05, 1.15), (0.97, 2.15)}
    assert set(drawn(right, "D")) == {(0.0, 0.0), (0.03, 1.0), (-0.03, 2.0)}
    assert drawn(left, "o")[0.0, -0.15] == PAPER != drawn(left, "o")[1.0, 1.85]  # without flips an edit says nothing
    assert [t.get_text() for t in left.get_yticklabels()] == ["stale", "in_place", "full_suffix", "refused"]
    assert {t.get_text() for t in left.get_legend().get_texts()} == {"prefilled", "composed"}


def test_agreement_over_a_parameter() -> None:
    lines = [
        line("agreement_given_full_correct", method, value, params={"offset": offset}, empty=method == "no_context")
        for offset in (1024, 16)
        for method, value in (("shift", 0.99), ("no_shift", 0.9 if offset == 16 else 0.4), ("no_context", 0.5))
    ]
    (axes,) = draw_agreement(lines, "offset").axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["16", "1024"]
    assert {y for _, y in drawn(axes, "s")} == {0.9, 0.4} and {y for _, y in drawn(axes, "o")} == {0.99}
    assert set(drawn(axes, "^").values()) == {PAPER}
    assert select(lines, "agreement_given_full_correct", offset=16)["no_shift"].value == 0.9


@pytest.mark.parametrize("figure", [draw_keystone([], "record"), draw_agreement([], "offset")])
def test_nothing_to_draw_is_said(figure: Any) -> None:
    assert any("nothing to draw" in t.get_text() for t in figure.texts)
