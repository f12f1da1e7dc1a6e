"""The hand-set decoder does what its docstring derives, checked with plain transformers (the oracle)."""

from typing import Any

import pytest
import torch

from notelens.prompt import Pair
from notelens.tasks.base import Task
from tests.oracle import probes, timing
from tests.oracle.swap import full_logits, loop_isolated_swap, margin, prefill_rows, read, swapped_rows
from tests.tiny import (
    ANSWERS,
    COMMIT_INDEX,
    FAMILIES,
    FORMS,
    LENS_MARGIN_BEFORE,
    READ_KV_HEAD,
    READ_LAYER,
    TOKEN_IDS,
    WRITE_INDEX,
    TinyTask,
    broken_blind,
    broken_direct,
    ids_of,
    new_tokenizer,
    tiny_hf,
    tiny_instance,
    tiny_instances,
    tiny_margin,
    tiny_pair,
)

EXACT = 1e-5
ANSWER_IDS = (TOKEN_IDS["deny"], TOKEN_IDS["approve"])
DIRECTIONS = ("denoising", "noising")


@pytest.fixture(scope="module")
def hf() -> Any:
    return tiny_hf()


def recovery(hf: Any, pair: Pair, positions: Any, direction: Any = "denoising", **where: Any) -> float:
    old, new = pair.old.token_ids, pair.new.token_ids
    return probes.swap_recovery(hf, old, new, positions, pair.answer_ids, direction, **where)["recovery"]


@pytest.mark.parametrize("form", FORMS)
def test_margins_have_their_closed_form(hf: Any, form: str) -> None:
    for family in FAMILIES:
        instance = tiny_instance(form, family)
        for cell, prompt in instance.cells.items():
            expected = tiny_margin(1.0 if instance.conclusion[cell] == 1 else -1.0)
            assert margin(full_logits(hf, prompt.token_ids, ANSWER_IDS)) == pytest.approx(expected, abs=EXACT)
            logits = full_logits(hf, prompt.token_ids, range(len(TOKEN_IDS)))
            assert list(TOKEN_IDS)[int(logits.argmax())] == prompt.answer


def test_a_field_without_a_value_concludes_nothing(hf: Any) -> None:
    words = ["f2" if w in ("f0", "f1") else w for w in tiny_pair().old.tokens]
    assert margin(full_logits(hf, ids_of(words), ANSWER_IDS)) == pytest.approx(tiny_margin(0.0), abs=EXACT)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_field_rows_carry_nothing_and_notes_everything(hf: Any, form: str, direction: Any) -> None:
    pair = tiny_pair(form, "field")
    assert recovery(hf, pair, pair.old.positions("field"), direction) == 0.0
    assert recovery(hf, pair, pair.old.after("field"), direction) == pytest.approx(1.0, abs=EXACT)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("form", [f for f in FORMS if f != "two_clause"])
def test_trigger_and_rule_rows_carry_nothing(hf: Any, form: str, direction: Any) -> None:
    pair = tiny_pair(form, "trigger")
    assert pair.old.positions("field") == pair.new.positions("field")
    assert recovery(hf, pair, pair.old.positions("trigger"), direction) == 0.0
    assert recovery(hf, pair, pair.old.positions("rule"), direction) == 0.0
    assert recovery(hf, pair, pair.old.after("trigger"), direction) == pytest.approx(1.0, abs=EXACT)


def test_one_row_is_the_whole_note(hf: Any) -> None:
    pair = tiny_pair()
    effects = {pos: recovery(hf, pair, [pos]) for pos in range(len(pair.old) - 1)}
    note = pair.old.tokens.index(";")
    assert effects.pop(note) == pytest.approx(1.0, abs=EXACT)
    assert set(effects.values()) == {0.0}


def test_the_note_is_the_value_of_one_stored_head_in_one_layer(hf: Any) -> None:
    pair = tiny_pair()
    note = [pair.old.tokens.index(";")]
    other = 1 - READ_KV_HEAD
    assert recovery(hf, pair, note, layers=(0, READ_LAYER)) == 0.0
    assert recovery(hf, pair, note, layers=(READ_LAYER, 2)) == pytest.approx(1.0, abs=EXACT)
    assert recovery(hf, pair, note, parts="k") == 0.0
    assert recovery(hf, pair, note, parts="v") == pytest.approx(1.0, abs=EXACT)
    assert recovery(hf, pair, note, heads=[other]) == 0.0
    assert recovery(hf, pair, note, heads=[READ_KV_HEAD]) == pytest.approx(1.0, abs=EXACT)
    rows, others = (prefill_rows(hf, p.token_ids)[READ_LAYER][1] for p in (pair.old, pair.new))
    assert not torch.equal(rows[other, note], others[other, note])  # the other head differs too, and nobody reads it


def test_several_notes_are_averaged(hf: Any) -> None:
    pair = tiny_pair(n_notes=4)
    notes = [i for i, word in enumerate(pair.old.tokens) if word == ";"]
    sign = 1.0 if pair.old.answer == "approve" else -1.0
    for k in range(5):
        logits = loop_isolated_swap(hf, pair.old.token_ids, pair.new.token_ids, notes[:k], ANSWER_IDS)
        assert margin(logits) == pytest.approx(tiny_margin(sign * (1 - k / 2)), abs=1e-4)


def test_the_same_field_rows_are_nothing_isolated_and_everything_in_forward(hf: Any) -> None:
    """With the field row swapped, running everything from the note on reads it; running the decision alone does not."""
    pair = tiny_pair()
    note = pair.old.tokens.index(";")
    stale, fresh = (prefill_rows(hf, p.token_ids) for p in (pair.old, pair.new))
    mixed = swapped_rows(stale, fresh, pair.old.positions("field"))
    sign = 1.0 if pair.new.answer == "approve" else -1.0
    in_forward = read(hf, [(k[:, :note], v[:, :note]) for k, v in mixed], pair.old.token_ids[note:], ANSWER_IDS)
    isolated = read(hf, [(k[:, :-1], v[:, :-1]) for k, v in mixed], pair.old.token_ids[-1:], ANSWER_IDS)
    assert margin(in_forward) == pytest.approx(tiny_margin(sign), abs=EXACT)
    assert margin(isolated) == pytest.approx(tiny_margin(-sign), abs=EXACT)


def test_the_conclusion_is_written_before_the_decision_commits(hf: Any) -> None:
    instances = tiny_instances(12, ("polarity", "negated", "swapped"))
    cells = [(i, c, p) for i in instances for c, p in i.cells.items()]
    groups = [i.group for i, _, _ in cells]
    for anchor, written in (("rule_end", WRITE_INDEX), ("before_decision", WRITE_INDEX), ("decision", COMMIT_INDEX)):
        found = timing.timing(
            hf, [p.token_ids for _, _, p in cells], [p.anchors[anchor] for _, _, p in cells],
            [i.conclusion[c] for i, c, _ in cells], groups, 4,
        )  # fmt: skip
        assert found["accuracies"] == [0.5] * written + [1.0] * (3 - written)
    for instance in instances:
        pair = instance.pair("field")
        lens = [
            timing.lens_margins(hf, timing.residuals(hf, p.token_ids, [p.decision])[:, 0], ANSWER_IDS)
            for p in (pair.old, pair.new)
        ]
        assert timing.commit_index(*lens) == COMMIT_INDEX > WRITE_INDEX
        for margins in lens:
            assert margins[:2] == pytest.approx([LENS_MARGIN_BEFORE] * 2, abs=EXACT)


def test_the_field_is_decodable_at_delimiters_and_not_at_the_decision(hf: Any) -> None:
    instances = tiny_instances(8)
    cells = [(i, c, p) for i in instances for c, p in i.cells.items()]

    def accuracies(anchor: str) -> list[float]:
        ids, at = [p.token_ids for _, _, p in cells], [p.anchors[anchor] for _, _, p in cells]
        return timing.timing(hf, ids, at, [c[0] for _, c, _ in cells], [i.group for i, _, _ in cells], 4)["accuracies"]

    assert accuracies("request_end") == [0.5, 1.0, 1.0]
    assert accuracies("decision") == [0.5, 0.5, 0.5]


def test_keys_depend_on_position_and_fillers_on_context(hf: Any) -> None:
    """The decoder is not blind to what the library must get right: RoPE, and rows that depend on earlier rows."""
    filler = ids_of(["w1", "w2", "w3"])
    alone, behind = (prefill_rows(hf, ids) for ids in (filler, (*ids_of(["start", "w5"]), *filler)))
    for layer in (0, 1):
        assert not torch.allclose(alone[layer][0], behind[layer][0][:, 2:], atol=1e-2)
    a, b = (full_logits(hf, (*ids_of([w]), *filler), range(len(TOKEN_IDS))) for w in ("w5", "w6"))
    assert float((a - b).abs().max()) > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_instances_are_sound(form: str) -> None:
    tokenizer = new_tokenizer()
    instances = tiny_instances(10, (form,))
    assert len({i.id for i in instances}) == 10 and len({i.family for i in instances}) == 4
    assert len({len(i.cells[0, 0]) for i in instances}) > 1, (
        "all prompts have one length: position and content coincide"
    )
    for instance in instances:
        assert instance.answers == ANSWERS and set(instance.conclusion.values()) == {0, 1}
        for at in range(1 if form == "two_clause" else 2):
            for axis in ("field",) if form == "two_clause" else ("field", "trigger"):
                pair = instance.pair(axis, at)
                assert pair.differing == pair.old.positions(axis)
        for cell, prompt in instance.cells.items():
            assert tuple(tokenizer.encode(prompt.text)) == prompt.token_ids
            assert prompt.tokens[prompt.positions("field")[0]] == f"f{cell[0]}"
            assert prompt.tokens[-1] == "?" and prompt.anchors["decision"] == prompt.decision
            assert [prompt.tokens[prompt.anchors[a]] for a in sorted(prompt.anchors)] == [":", ",", "?", ".", ","]


def test_forms_of_a_group_share_their_fillers() -> None:
    a, b = (tiny_instance(form, "loan", 2) for form in ("polarity", "negated"))
    assert a.group == b.group and a.id != b.id
    fillers = [
        [w for w, r in zip(p.tokens, p.regions, strict=True) if r == "filler"] for p in (a.cells[0, 0], b.cells[1, 1])
    ]
    assert fillers[0] == fillers[1]


def test_the_task_is_a_task_and_deterministic() -> None:
    task = TinyTask(("polarity", "negated"))
    assert isinstance(task, Task)
    a, b = (task.instances(new_tokenizer(), 9, seed=3) for _ in range(2))
    assert a == b and a != task.instances(new_tokenizer(), 9, seed=4)
    assert {i.form for i in a} == {"polarity", "negated"}


def test_broken_variants_break_the_claims() -> None:
    """The direct reader's field rows carry everything and its notes nothing; the blind one never answers "deny"."""
    pair, other = tiny_pair("polarity", "field"), tiny_pair("polarity", "trigger")
    direct = broken_direct().hf
    assert recovery(direct, pair, pair.old.positions("field")) == pytest.approx(1.0, abs=EXACT)
    assert recovery(direct, pair, pair.old.after("field")) == 0.0
    assert recovery(direct, other, other.old.positions("trigger")) == pytest.approx(1.0, abs=EXACT)
    lens = [
        timing.lens_margins(direct, timing.residuals(direct, p.token_ids, [p.decision])[:, 0], ANSWER_IDS)
        for p in (pair.old, pair.new)
    ]
    assert timing.commit_index(*lens) == 1
    blind = broken_blind().hf
    for prompt in (pair.old, pair.new):
        assert margin(full_logits(blind, prompt.token_ids, ANSWER_IDS)) == pytest.approx(LENS_MARGIN_BEFORE, abs=EXACT)
