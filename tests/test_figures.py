"""Figures: what is drawn equals what was measured, and nothing overlaps or is cut."""

import math
import random
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from notelens.errors import RecordError
from notelens.report import style
from notelens.report.layers import Accuracy, Panel, draw_layers
from notelens.report.recovery import Bar, draw_recovery
from notelens.report.strip import MAX_TOKENS, UNPATCHED, Strip, draw_strips, readable
from notelens.report.topk import Curve, Share, draw_topk
from tests.figure_checks import cut, overlaps, text_boxes


def check(figure: Figure) -> None:
    assert overlaps(figure) == []
    assert cut(figure) == []


def texts(figure: Figure) -> list[str]:
    return [text for text, _ in text_boxes(figure)]


# --- the checks themselves ------------------------------------------------------------------------------------------


def test_the_checks_notice_overlap_and_cut_text() -> None:
    figure = style.new_figure(2.0)
    figure.text(0.5, 0.5, "first words")
    figure.text(0.52, 0.5, "second words")
    figure.text(0.95, 0.1, "far too long for this place")
    assert overlaps(figure) == [("first words", "second words")]
    assert cut(figure) == ["far too long for this place"]


# --- recovery bars --------------------------------------------------------------------------------------------------


def some_bars(n_rows: int = 6) -> list[Bar]:
    rng = random.Random(1)
    bars = []
    for row in range(n_rows):
        for direction in ("denoising", "noising"):
            value = rng.uniform(-0.1, 1.1)
            bars.append(Bar(f"Probe {row // 2}", f"rows {row}", direction, value, value - 0.05, value + 0.1, 24, row))
    return bars


def test_bars_have_the_measured_length_whiskers_and_counts() -> None:
    bars = some_bars()
    figure = draw_recovery(bars, subtitle="a model")
    check(figure)
    (axes,) = figure.axes
    drawn = {c.get_label(): c.patches[0] for c in axes.containers}
    whiskers = {tuple(line.get_xdata()) for line in axes.lines}
    for bar in bars:
        patch = drawn[f"{bar.group}|{bar.label}|{bar.direction}"]
        assert patch.get_width() == bar.value and patch.get_x() == 0
        assert (bar.lo, bar.hi) in whiskers
        assert style.number(bar.value or 0) in texts(figure)
    assert texts(figure).count("24") == len(bars)


def test_directions_differ_by_more_than_colour() -> None:
    (axes,) = draw_recovery(some_bars(1)).axes
    looks = [(to_rgba(c.patches[0].get_facecolor()), c.patches[0].get_hatch()) for c in axes.containers]
    assert len({colour for colour, _ in looks}) == 2
    assert [hatch for _, hatch in looks] == [None, "/////"]


def test_the_range_of_the_paper_is_drawn_where_it_is_known() -> None:
    bars = [Bar("P", "a", "both", 0.5, 0.4, 0.6, 8, 0, (0.1, 0.3)), Bar("P", "b", "both", 0.5, 0.4, 0.6, 8)]
    figure = draw_recovery(bars)
    check(figure)
    ranges = [c.patches[0] for c in figure.axes[0].containers if c.get_label() == "paper"]
    assert [(r.get_x(), r.get_width()) for r in ranges] == [(0.1, pytest.approx(0.2))]
    assert "range over the paper's models" in texts(figure)


def test_undefined_and_zero_width_are_said() -> None:
    bars = [
        Bar("P", "nothing counted", "both", None, None, None, 0, 12),
        Bar("P", "one row", "both", 0.7, None, None, 1),
        Bar("P", "all equal", "both", 1.0, 1.0, 1.0, 9, zero_width=True),
    ]
    figure = draw_recovery(bars)
    check(figure)
    shown = texts(figure)
    assert "undefined" in shown and "12" in shown and "1.000†" in shown
    assert "† interval of zero width although n > 1" in shown
    assert len(figure.axes[0].containers) == 2


def test_nothing_measured_gives_a_sentence() -> None:
    for figure in (draw_recovery([]), draw_topk([]), draw_layers([], 4), draw_strips([], reason="all pairs excluded")):
        check(figure)
        assert not figure.axes
        assert "nothing to draw" in texts(figure)
    assert "all pairs excluded" in texts(draw_strips([], reason="all pairs excluded"))


# --- top-k ----------------------------------------------------------------------------------------------------------

KS = (1, 2, 4, 8, 16, 32, 64)


def curve(role: str, label: str, start: float) -> Curve:
    ys = tuple(min(1.0, start * k) for k in KS)
    return Curve(label, role, KS, ys, tuple(y - 0.05 for y in ys), tuple(y + 0.05 for y in ys), 24)


def test_topk_curves_are_the_records_on_a_log2_axis() -> None:
    curves = [curve("own", "own ranking", 0.2), curve("split", "other half", 0.15), curve("random", "random", 0.01)]
    shares = [Share("newline", 0.5, 0.1), Share("punctuation", 0.2, 0.1)]
    figure = draw_topk(curves, shares, subtitle="a model", share_title="top 8")
    check(figure)
    axes, side = figure.axes
    assert axes.get_xscale() == "log"
    assert [t.get_text() for t in axes.get_xticklabels()] == [str(k) for k in KS]
    drawn = {line.get_label(): line for line in axes.lines if "(n = 24)" in str(line.get_label())}
    for c in curves:
        line = drawn[f"{c.label} (n = 24)"]
        assert tuple(line.get_ydata()) == c.y
        assert [x / k for x, k in zip(line.get_xdata(), KS, strict=True)] == pytest.approx(
            [line.get_xdata()[0]] * len(KS)
        )
        assert abs(math.log2(line.get_xdata()[0])) <= 0.1  # moved aside for the intervals, far less than one tick
    assert len({(line.get_linestyle(), line.get_marker()) for line in drawn.values()}) == 3
    assert [patch.get_width() for patch in side.containers[0].patches] == [0.5, 0.2]
    check(draw_topk(curves[:1]))


# --- layers ---------------------------------------------------------------------------------------------------------

LAYERS = tuple(range(31))


def layer_curve(middle: float, low: float = 0.5) -> Curve:
    ys = tuple(low + (1 - low) / (1 + math.exp(middle - x)) for x in LAYERS)
    return Curve("", "own", LAYERS, ys, tuple(y - 0.04 for y in ys), tuple(y + 0.02 for y in ys), 48)


def panel(
    title: str, anchors: tuple[str, ...] = ("rule end", "before request", "before decision", "decision")
) -> Panel:
    curves = {a: layer_curve(10 + 3 * i) for i, a in enumerate(anchors)}
    flat = Curve("", "random", LAYERS, (0.5,) * 31, (0.4,) * 31, (0.6,) * 31)
    rows = {
        "conclusion": Accuracy(curves, flat),
        "conclusion,\nnew families": Accuracy(curves),
        "field": Accuracy(curves),
    }
    write = {a: 0.4 + 0.1 * i for i, a in enumerate(anchors)}
    return Panel(title, rows, layer_curve(24, 0), write, 0.8, ("write 0.40 to 0.70 (4 of 5 anchors)", "commit 0.80"))


@pytest.mark.parametrize("n_panels", [1, 2, 3])
def test_layer_curves_write_and_commit(n_panels: int) -> None:
    panels = [panel(f"form {i}") for i in range(n_panels)]
    figure = draw_layers(panels, 30, subtitle="a model")
    check(figure)
    assert len(figure.axes) == 3 * n_panels
    upper = figure.axes[:n_panels]
    for axes, shown in zip(upper, panels, strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        for anchor, c in shown.rows["conclusion"].curves.items():
            assert tuple(lines[anchor].get_ydata()) == c.y
            assert lines[f"write {anchor}"].get_xdata()[0] == pytest.approx(30 * (shown.write_depth[anchor] or 0))
        assert shown.commit is not None
        assert tuple(lines["commit"].get_ydata()) == shown.commit.y
        assert any(list(line.get_xdata()) == [24.0, 24.0] for line in axes.lines)  # commit depth 0.8 of 30 layers
    looks = [(lines[a].get_color(), lines[a].get_marker()) for a in panels[0].rows["conclusion"].curves]
    assert len({c for c, _ in looks}) == len({m for _, m in looks}) == 4


def test_more_sets_of_forms_than_fit_are_counted() -> None:
    figure = draw_layers([panel(f"form {i}") for i in range(5)], 30, subtitle="a model")
    check(figure)
    assert "a model · the first 3 of 5 sets of rule forms" in texts(figure)


def test_layers_without_field_commit_or_write() -> None:
    figure = draw_layers(
        [Panel("bare", {"conclusion": Accuracy({"decision": layer_curve(9)})}, write_depth={"decision": None})], 30
    )
    check(figure)
    assert len(figure.axes) == 1


# --- token strips ---------------------------------------------------------------------------------------------------

TOKENS = ("<|im_start|>", "user", "\n", "- ", " State", ":", " loose", "\n", "Rule", ":", " If", " $5", " then",
          " sign", ".", "\n\n", " ", "<|im_end|>", "\n", "assistant", "\n")  # fmt: skip


def strip(tokens: tuple[str, ...] = TOKENS, field: int = 6) -> Strip:
    rng = random.Random(0)
    effects = tuple(rng.uniform(-0.2, 0.9) if field <= i < len(tokens) - 1 else None for i in range(len(tokens)))
    marks = frozenset({field}), frozenset({12}), frozenset(range(8, 15))
    return Strip("form: pair", tokens, effects, *marks, note="a note")


def token_patches(figure: Figure) -> list[Rectangle]:
    return [p for p in figure.axes[0].patches if isinstance(p, Rectangle) and p.get_fill()]


def test_every_token_is_a_box_coloured_by_its_effect() -> None:
    shown = strip()
    figure = draw_strips([shown], subtitle="a model")
    check(figure)
    boxes = token_patches(figure)
    assert len(boxes) == len(TOKENS)
    scale = max(abs(e) for e in shown.effects if e is not None)
    for box, effect in zip(boxes, shown.effects, strict=True):
        if effect is None:
            expected: Any = to_rgba(UNPATCHED)
        else:
            expected = matplotlib.colormaps["RdBu_r"](0.5 + 0.5 * effect / scale)
        assert box.get_facecolor() == pytest.approx(expected, abs=0.01)
    outlined = [p for p in figure.axes[0].patches if not p.get_fill()]
    assert [p.get_linestyle() for p in outlined].count("-") + [p.get_linestyle() for p in outlined].count("solid") == 1
    assert len(outlined) == 2  # field and trigger


def test_the_scale_is_centred_at_zero_and_shared() -> None:
    weak = Strip("weak", TOKENS, tuple(0.001 if i > 6 else None for i in range(len(TOKENS))))
    bar = draw_strips([weak]).axes[-1]
    assert bar.get_xlim() == (-0.05, 0.05)
    bar = draw_strips([weak, strip()]).axes[-1]
    low, high = bar.get_xlim()
    assert low == -high and high == pytest.approx(max(e for e in strip().effects if e is not None))


def test_token_text_stays_inside_its_box_and_is_readable() -> None:
    figure = draw_strips([strip()])
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # an Agg canvas
    labels = [t for t in figure.axes[0].findobj(Text) if str(t.get_gid() or "").startswith("token-")]
    assert len(labels) == len(TOKENS)
    for label, box in zip(labels, token_patches(figure), strict=True):
        inner, outer = label.get_window_extent(renderer), box.get_window_extent(renderer)
        assert inner.x0 >= outer.x0 - 1 and inner.x1 <= outer.x1 + 1
        assert inner.y0 >= outer.y0 - 2 and inner.y1 <= outer.y1 + 2
        ink, paper = (_luminance(to_rgba(c)) for c in (label.get_color(), box.get_facecolor()))
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.0  # WCAG contrast; AA asks 4.5, large text 3


def _luminance(colour: tuple[float, ...]) -> float:
    channels = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def test_special_tokens_are_written_out() -> None:
    assert readable("\n") == "⏎" and readable("\n\n") == "⏎⏎" and readable(" ") == "·" and readable("") == "·"
    assert readable("<|im_end|>") == "<|im_end|>" and readable(" $x$") == " $x$"
    assert readable("中") == "\\u4e2d"
    assert readable("\t") == "⇥"


def test_long_prompts_leave_out_weak_runs_and_say_so() -> None:
    n = 3000
    tokens = tuple("\n" if i % 12 == 11 else " word" for i in range(n))
    effects = [None if i < 100 or i == n - 1 else 0.001 for i in range(n)]
    for i in (500, 1500, 2990):
        effects[i] = 0.6
    figure = draw_strips([Strip("long", tokens, tuple(effects), frozenset({100}), rule=frozenset(range(700, 720)))])
    check(figure)
    remarks = [t for t in texts(figure) if "tokens, |effect|" in t]
    shown = token_patches(figure)
    assert len(shown) <= MAX_TOKENS
    assert sum(int(t.split("…")[1].split()[0]) for t in remarks) == n - len(shown)
    red = matplotlib.colormaps["RdBu_r"](1.0)
    assert sum(p.get_facecolor() == pytest.approx(red) for p in shown) == 3


def test_a_token_wider_than_the_page_is_shortened() -> None:
    figure = draw_strips([Strip("wide", (" ", "x" * 400, "\n"), (None, 0.5, None))])
    check(figure)
    assert any(t.endswith("x…") for t in texts(figure))


# --- files and settings ---------------------------------------------------------------------------------------------


def test_files_are_whole_repeatable_and_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = style.save(draw_recovery(some_bars()), tmp_path / "new", "recovery")
    assert [p.name for p in paths] == ["recovery.png", "recovery.svg"]
    before = [p.read_bytes() for p in paths]
    assert before[0].startswith(b"\x89PNG") and b"</svg>" in before[1][-20:]
    assert int.from_bytes(before[0][16:20], "big") == round(style.WIDTH * 200)
    style.save(draw_recovery(some_bars()), tmp_path / "new", "recovery")
    assert [p.read_bytes() for p in paths] == before

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RecordError, match=r"recovery\.png.*[Nn]o space left"):
        style.save(draw_recovery(some_bars(2)), tmp_path / "new", "recovery")
    assert [p.read_bytes() for p in paths] == before
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["recovery.png", "recovery.svg"]


def test_drawing_leaves_settings_alone() -> None:
    with matplotlib.rc_context({"font.size": 31.0, "axes.facecolor": "red"}):
        figure = draw_recovery(some_bars())
        assert matplotlib.rcParams["font.size"] == 31.0
        check(figure)
        assert figure.axes[0].get_facecolor() == (1.0, 1.0, 1.0, 1.0)
