"""Note maps: known values on the hand-set decoder, pairs from text, files, and the figure."""

import errno
import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import notelens
from notelens.circuits.note_map import NoteMap, note_map
from notelens.circuits.text_pair import pair_from_text
from notelens.errors import AnswerError, InputError, PairError, RecordError, SpanError
from notelens.report.map_figure import draw_map
from notelens.runs import files, maps
from tests.contracts import models as contract
from tests.figure_checks import cut, overlaps, text_boxes
from tests.oracle.recompute import loop_recompute
from tests.oracle.swap import loop_isolated_swap, margin, prefill_rows
from tests.tiny import (
    READ_LAYER,
    TOKEN_IDS,
    broken_blind,
    broken_direct,
    new_tokenizer,
    tiny_margin,
    tiny_pair,
    wrapped,
)

PAIR = tiny_pair(n_notes=1)
N_ROWS = PAIR.old.decision
NOTE = PAIR.old.tokens.index(";")
FIELD = PAIR.old.positions("field")
TEXT = "start parcel is {{status}} , w1 w2 , if t0 then , ; w3 , please decide . : ?"
ANSWERS = ("deny", "approve")


def one_hot(row: int, n: int = N_ROWS) -> list[float]:
    return [1.0 if i == row else 0.0 for i in range(n)]


@pytest.fixture(scope="module")
def known() -> NoteMap:
    from tests.tiny import tiny_model

    return note_map(tiny_model(), PAIR)


# --- known values -----------------------------------------------------------------------------------------------------


def test_the_note_is_one_row_in_one_layer(known: NoteMap) -> None:
    signs = [1.0 if p.answer == "approve" else -1.0 for p in (PAIR.old, PAIR.new)]
    for direction, turn in (("denoising", 1.0), ("noising", -1.0)):
        towards = turn * signs[1]  # margins are read towards the donor's answer
        low, high = known.margins[direction]
        assert (low, high) == pytest.approx([towards * tiny_margin(s) for s in signs[:: int(turn)]], abs=1e-4)
        assert known.positions[direction].tolist() == pytest.approx(one_hot(NOTE), abs=1e-5)
        assert known.shifts[direction].tolist() == pytest.approx([(high - low) * x for x in one_hot(NOTE)], abs=1e-4)
        assert not bool(known.positions[direction][: FIELD[0]].any()), "rows before the field are exactly nothing"
        assert known.field_only[direction] == pytest.approx(0.0, abs=1e-5)
        assert known.notes[direction] == pytest.approx(1.0, abs=1e-5)
        assert known.flipping(direction) == (NOTE,) and known.ranking(direction)[0] == NOTE
    assert known.excluded == {} and known.swap == "isolated"
    assert known.layers is not None
    expected = torch.zeros(2, N_ROWS)
    expected[READ_LAYER, NOTE] = 1.0
    torch.testing.assert_close(known.layers, expected, atol=1e-5, rtol=0)


def test_recomputed_rows_beside_transplanted_ones(known: NoteMap) -> None:
    """The note, run again behind the new field, is the fresh note; the field alone or any other row changes nothing."""
    assert known.in_place == pytest.approx(0.0, abs=1e-5)
    assert known.recompute.tolist() == pytest.approx(one_hot(NOTE), abs=1e-5)


def test_the_smallest_set_is_the_delimiter(known: NoteMap) -> None:
    found = known.minimal
    assert found is not None
    assert found.rows == (NOTE,) and found.flips and found.recomputed_flips
    assert (*found.path, found.recovery, found.recomputed) == pytest.approx([1.0] * 3, abs=1e-5)


def test_the_estimate_is_the_slope_of_the_closed_form(known: NoteMap) -> None:
    sign = 1.0 if PAIR.old.answer == "approve" else -1.0
    slope = (tiny_margin(sign + 1e-4) - tiny_margin(sign - 1e-4)) / 2e-4
    expected = 2 * slope / (tiny_margin(1.0) - tiny_margin(-1.0))
    assert known.attribution is not None
    assert known.attribution.tolist() == pytest.approx([expected * x for x in one_hot(NOTE)], abs=1e-3)
    assert known.false_negatives == () and known.rank_correlation is not None


def test_three_notes_take_two_rows(tiny: Any) -> None:
    """The decision reads the mean of three notes, so two of them decide and one alone does not."""
    pair = tiny_pair(n_notes=3)
    notes = [i for i, word in enumerate(pair.old.tokens) if word == ";"]
    found = note_map(tiny, pair, layers=False, attribution=False)
    low, high = found.margins["denoising"]
    sign = 1.0 if pair.new.answer == "approve" else -1.0
    steps = [(sign * tiny_margin(sign * (2 * k / 3 - 1)) - low) / (high - low) for k in (1, 2)]
    for row in notes:
        assert float(found.positions["denoising"][row]) == pytest.approx(steps[0], abs=1e-4)
    assert found.minimal is not None and found.minimal.flips
    decided = sign * tiny_margin(-sign / 3) > 0  # the bias may make one note enough
    expected = steps[:1] if decided else steps
    assert len(found.minimal.rows) == len(expected) and set(found.minimal.rows) <= set(notes)
    assert found.minimal.path == pytest.approx(expected, abs=1e-4)
    assert found.flipping() == (tuple(notes) if decided else ())
    assert (found.layers, found.attribution, found.rank_correlation, found.false_negatives) == (None, None, None, ())


def test_the_search_gives_up_where_it_is_told_to(tiny: Any) -> None:
    pair = tiny_pair(n_notes=5)
    found = note_map(tiny, pair, layers=False, attribution=False, max_rows=1)
    assert found.minimal is not None
    assert len(found.minimal.rows) == 1 and not found.minimal.flips and not found.minimal.recomputed_flips
    assert note_map(tiny, pair, layers=False, attribution=False, minimal=False).minimal is None


def test_a_decision_that_reads_the_field_maps_to_the_field() -> None:
    found = note_map(broken_direct(), PAIR, attribution=False)
    assert found.positions["denoising"].tolist() == pytest.approx(one_hot(FIELD[0]), abs=1e-5)
    assert (found.field_only["denoising"], found.notes["denoising"]) == pytest.approx((1.0, 0.0), abs=1e-5)
    assert found.in_place == pytest.approx(1.0, abs=1e-5)
    assert found.recompute.tolist() == pytest.approx([1.0] * N_ROWS, abs=1e-5), "the field is always run again"
    assert found.minimal is not None and found.minimal.rows == FIELD


def test_undefined_recoveries_are_nan_with_their_reason() -> None:
    """The blind decoder always approves: both margins are the bias, and there is nothing to recover."""
    found = note_map(broken_blind(), PAIR)
    assert set(found.excluded) == {"denoising", "noising"}
    assert {*found.excluded.values()} == {"recipient wrong", "donor wrong"}
    numbers = [
        *found.positions["denoising"].tolist(),
        found.in_place,
        *found.recompute.tolist(),
        found.notes["noising"],
    ]
    assert all(math.isnan(x) for x in numbers)
    assert found.layers is not None and bool(found.layers.isnan().all())
    assert found.minimal is None and found.flipping() == () and found.false_negatives == ()
    assert found.shifts["denoising"].abs().max() <= 1e-5, "shifts in logits are defined all the same"


def test_steps_are_announced_in_order(tiny: Any) -> None:
    steps: list[str] = []
    note_map(tiny, PAIR, on_step=steps.append)
    assert steps == [
        "prefill", "position map", "recomputed rows", "layer x position map", "attribution estimate", "greedy minimal set",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_map_of_a_random_model_equals_the_loops(name: str) -> None:
    """Text with a field in two places, every row transplanted and run again, both directions."""
    model = contract.note_model(name)
    text = "start w1 {{v}} w2 , w3 {{ v }} w4 ; w5 , please : ?"
    found = note_map(model, pair_from_text(model, text, "v", "f0", "x1", answers=ANSWERS, rendering="raw"))
    pair = found.pair
    old, new, ids = pair.old.token_ids, pair.new.token_ids, pair.answer_ids
    assert pair.differing == (2, 6) and len(old) == 14
    for direction, a, b, answers in (("denoising", old, new, ids), ("noising", new, old, ids[::-1])):
        base = margin(loop_isolated_swap(model.hf, a, b, [], answers))
        for row in range(len(old) - 1):
            slow = margin(loop_isolated_swap(model.hf, a, b, [row], answers)) - base
            assert float(found.shifts[direction][row]) == pytest.approx(slow, abs=1e-4)
    stale = prefill_rows(model.hf, old)
    low, high = found.margins["denoising"]
    for row in (2, 3, 8, 12):
        slow = (margin(loop_recompute(model.hf, stale, new, (2, 6, row), ids)) - low) / (high - low)
        recovered = float(found.recompute[row])
        assert math.isnan(recovered) if "denoising" in found.excluded else recovered == pytest.approx(slow, abs=1e-3)
    assert found.rank_correlation is not None and -1.0 <= found.rank_correlation <= 1.0


# --- pairs from text --------------------------------------------------------------------------------------------------


def test_pair_from_text_reads_the_models_own_decisions(tiny: Any) -> None:
    pair = pair_from_text(tiny, TEXT, "status", "f0", "f1", rendering="raw")
    assert (pair.old.answer, pair.new.answer) == ("approve", "deny"), "t0 and f0 agree"
    assert pair.answer_ids == (TOKEN_IDS["approve"], TOKEN_IDS["deny"])
    assert pair.differing == (3,) and pair.old.tokens[3] == "f0" and pair.new.tokens[3] == "f1"
    assert pair.old.regions[3] == "field" and (pair.form, pair.axis) == ("custom", "field")
    named = pair_from_text(tiny, TEXT, "status", "f0", "f1", answers=(" approve ", "deny"), rendering="raw")
    assert named == pair, "white space around an answer is not part of it"
    assert notelens.pair_from_text is pair_from_text and notelens.note_map is note_map
    found = note_map(tiny, pair)
    assert found.minimal is not None and found.minimal.rows == (pair.old.tokens.index(";"),)


@pytest.mark.parametrize(
    ("text", "old", "new", "kind", "message"),
    [
        (TEXT.replace("{{status}}", "f0"), "f0", "f1", SpanError, r"no field \{\{status\}\}; fields it has: none"),
        (TEXT.replace("status", "state"), "f0", "f1", SpanError, r"fields it has: state\. Mark the place"),
        (TEXT.replace("w1", "{{size}} {{ area }}"), "f0", "f1", SpanError, r"further fields: area, size; fill them in"),
        (TEXT, "f0", "f0 f1", PairError, r"with 'f0' the prompt has 20 tokens, with 'f0 f1' it has 21.*equal token length"),
        (TEXT, "", "f1", SpanError, r"a value of field 'status' is empty"),
        (TEXT, "f0", " \n", SpanError, r"a value of field 'status' is empty"),
        (TEXT, "f0", " f0 ", PairError, r"both values of field 'status' are 'f0'; give two different ones"),
        (TEXT.replace("t0", "w4"), "f0", "f1", AnswerError, r"continues both prompts with '.*name the two answers yourself"),
        ("start w1 {{status}}", "f0", "f1", SpanError, r"ends with the field.*put text after it"),
    ],
)  # fmt: skip
def test_texts_that_give_no_pair_are_refused(
    tiny: Any, text: str, old: str, new: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        pair_from_text(tiny, text, "status", old, new, rendering="raw")
    assert isinstance(caught.value, InputError)


def test_answers_and_renderings_that_do_not_work_are_refused(tiny: Any) -> None:
    def refused(kind: type[Exception], message: str, answers: Any, rendering: Any = "raw") -> None:
        with pytest.raises(kind, match=message):
            pair_from_text(tiny, TEXT, "status", "f0", "f1", answers=answers, rendering=rendering)

    refused(AnswerError, r"share their first token", ("deny w1", "deny w2"))
    refused(AnswerError, r"an answer is empty", ("deny", " "))
    refused(SpanError, r"has no chat template; use rendering='plain' or 'raw'", ANSWERS, "chat")
    refused(SpanError, r"unknown rendering 'html'", ANSWERS, "html")


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_hold_the_map(known: NoteMap, tmp_path: Path) -> None:
    written = maps.write_map(known, tmp_path / "deep" / "map")
    assert [p.name for p in written] == ["map.json", "map.safetensors", "map.png", "map.svg"]
    assert sorted(p.name for p in (tmp_path / "deep" / "map").iterdir()) == sorted(p.name for p in written)
    data = json.loads(written[0].read_text())
    assert data == json.loads(json.dumps(maps.as_json(known)))
    assert data["swap"] == "isolated" and data["changed_rows"] == list(FIELD) and data["schema_version"] == 1
    assert data["recovery"]["denoising"] == pytest.approx(one_hot(NOTE), abs=1e-5)
    assert data["flipping_rows"] == {"denoising": [NOTE], "noising": [NOTE]}
    assert data["minimal_set"]["tokens"] == [";"] and data["minimal_set"]["flips"] is True
    assert data["recompute"]["rows"][NOTE] == pytest.approx(1.0, abs=1e-5)
    assert data["attribution"]["note"].startswith("first-order estimate")
    assert data["model"]["name"] == "tiny" and data["model"]["gate"]["passed"] is True
    assert len(data["tokens"]) == len(data["token_ids"]) == len(PAIR.old)
    tensors = load_file(written[1])
    assert set(tensors) == {
        "shift.denoising", "shift.noising", "recovery.denoising", "recovery.noising", "recompute", "layers", "attribution",
    }  # fmt: skip
    assert known.layers is not None and torch.equal(tensors["layers"], known.layers)
    assert torch.equal(tensors["shift.noising"], known.shifts["noising"])
    before = [p.read_bytes() for p in written]
    assert [p.read_bytes() for p in maps.write_map(known, tmp_path / "deep" / "map")] == before


def test_undefined_numbers_are_null_in_json(tmp_path: Path) -> None:
    found = note_map(broken_blind(), PAIR, attribution=False)
    written = maps.write_map(found, tmp_path)
    data = json.loads(written[0].read_text(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert data["recovery"]["denoising"] == [None] * N_ROWS and data["recompute"]["in_place"] is None
    assert data["shift"]["denoising"][NOTE] == pytest.approx(0.0, abs=1e-5)
    assert data["minimal_set"] is None and data["attribution"] is None
    assert data["excluded"]["denoising"] in ("recipient wrong", "donor wrong")
    assert bool(load_file(written[1])["recovery.noising"].isnan().all())


def test_a_failed_gate_can_be_written(known: NoteMap) -> None:
    facts = {**known.facts, "gate": {"checks": [{"difference": float("inf")}]}}
    text = json.dumps(maps._finite(facts), allow_nan=False)
    assert json.loads(text)["gate"]["checks"] == [{"difference": None}]


def test_a_full_disk_leaves_no_half_file(known: NoteMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps.write_map(known, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    real = os.replace
    for name in ("map.json", "map.safetensors", "map.png"):

        def full(source: Any, target: Any, name: str = name) -> None:
            if Path(target).name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(source, target)

        monkeypatch.setattr(files.os, "replace", full)
        with pytest.raises(RecordError, match=rf"(?i){name}.*no space left on device"):
            maps.write_map(known, tmp_path)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_folders_that_cannot_be_used_are_refused(known: NoteMap, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="is a file, or lies below one; choose another folder with --out"):
            maps.write_map(known, folder)
    monkeypatch.setattr(maps.os, "access", lambda *_: False)
    with pytest.raises(RecordError, match="cannot be written to"):
        maps.check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_default_folder_is_named_after_the_change() -> None:
    assert maps.default_folder("status", "paid", "open") == Path("maps/status-paid-open")
    assert maps.default_folder("s", "not yet / never", "..") == Path("maps/s-not_yet_never-_")
    assert maps.default_folder("s", "x" * 99, "é") == Path(f"maps/s-{'x' * 40}-é")


def test_the_summary_says_both_directions(known: NoteMap) -> None:
    lines = maps.summary(known, top=2)
    assert lines[0].startswith("denoising: margin") and "field rows alone 0.000, all rows behind it 1.000" in lines[0]
    assert lines[1].startswith("noising: margin")
    assert lines[3].split() == [str(NOTE), "';'", "1.000", "|", "1.000"]
    assert f"rows {NOTE}; transplanted it flips the decision (1.000), recomputed it flips it (1.000)" in lines[-1]
    blind = maps.summary(note_map(broken_blind(), PAIR, layers=False), top=2)
    assert "recovery not defined: " in blind[0] and "change of the margin in logits" in blind[2]
    assert not any("nan" in line for line in blind)


# --- the figure -------------------------------------------------------------------------------------------------------


def drawn(found: NoteMap) -> Any:
    figure = draw_map(maps.as_json(found), None if found.layers is None else found.layers.tolist())
    assert overlaps(figure) == [] and cut(figure) == []
    return figure


def test_the_figure_shows_rows_copied_and_rows_run_again(known: NoteMap) -> None:
    figure = drawn(known)
    texts = [text for text, _ in text_boxes(figure)]
    assert "Note map: deny → approve" in texts or "Note map: approve → deny" in texts
    for title in (
        "Row copied from the new prompt's cache", "Row run again in the old cache, with the new field",
        "One row in one layer", "layer",
    ):  # fmt: skip
        assert title in texts
    (image,) = [i for axes in figure.axes for i in axes.get_images()]
    assert known.layers is not None
    np.testing.assert_array_equal(image.get_array(), known.layers[:, FIELD[0] :].numpy())
    low, high = image.get_clim()
    assert low == -high and high == pytest.approx(1.0, abs=1e-5)
    labels = [t.get_text() for t in image.axes.get_xticklabels()]
    assert labels == list(PAIR.old.tokens[FIELD[0] : -1])
    assert {float(y) for y in image.axes.get_yticks()} >= {0.0, 1.0}
    assert all(float(y).is_integer() for y in image.axes.get_yticks())
    (legend,) = figure.legends
    legend_box = legend.get_window_extent()
    assert not any(legend_box.overlaps(axes.get_tightbbox()) for axes in figure.axes if axes.axison)


def test_without_recoveries_the_figure_shows_logits_and_says_why() -> None:
    found = note_map(broken_blind(), PAIR, attribution=False)
    figure = drawn(found)
    texts = [text for text, _ in text_boxes(figure)]
    assert any(t.startswith(f"recovery is not defined: {found.excluded['denoising']} (margin ") for t in texts)
    assert "change of the margin in logits, one row at a time" in texts
    assert not [i for axes in figure.axes for i in axes.get_images() if i.axes.get_ylabel() == "layer"]


def test_long_prompts_and_many_layers_stay_readable(known: NoteMap) -> None:
    """Labels are thinned out; the strongest rows keep theirs."""
    times = 6
    data = maps.as_json(known)
    middle = slice(FIELD[0] + 1, N_ROWS)

    def longer(values: list[Any]) -> list[Any]:
        return [*values[: middle.start], *values[middle] * times, *values[middle.stop :]]

    data["tokens"] = longer(data["tokens"])
    data["recovery"] = {k: longer(v) for k, v in data["recovery"].items()}
    data["recompute"] = {**data["recompute"], "rows": longer(data["recompute"]["rows"])}
    n = len(data["tokens"]) - 1
    strong = FIELD[0] + 4 * (N_ROWS - middle.start)
    layers = np.zeros((62, n))
    layers[40, strong] = -0.7
    figure = draw_map(data, layers.tolist())
    assert overlaps(figure) == [] and cut(figure) == []
    (image,) = [i for axes in figure.axes for i in axes.get_images()]
    ticks = [int(x) for x in image.axes.get_xticks()]
    assert strong - FIELD[0] in ticks and len(ticks) <= 60
    assert min(b - a for a, b in pairwise(ticks)) >= -(-(n - FIELD[0]) // 60)
    assert image.get_clim() == (-0.7, 0.7)


def test_tokens_that_fonts_lack_can_be_drawn(known: NoteMap) -> None:
    data = maps.as_json(known)
    data["tokens"][FIELD[0] + 1 : FIELD[0] + 4] = ["\n", "漢字漢字", "<|a_very_long_special_token|>"]
    data["answers"] = ["no\n\n", "y" * 60]
    layers = [[0.0] * N_ROWS] * 2
    figure = draw_map(data, layers)
    assert overlaps(figure) == [] and cut(figure) == []


def test_a_model_without_gate_is_marked(tiny: Any) -> None:
    ungated = wrapped(tiny.hf, "tiny", gate=False)
    facts = maps.as_json(note_map(ungated, PAIR, layers=False, attribution=False, minimal=False))["model"]
    assert facts["ungated"] is True and facts["gate"] is None
    assert new_tokenizer() is not ungated.tokenizer
