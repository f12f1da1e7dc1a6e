"""The record of reads and the planner that follows it: known chains, budgets, controls."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import notelens
from notelens.edits.auto import Auto
from notelens.edits.context import EditableContext
from notelens.edits.dependencies import SOURCES, Dependencies
from notelens.edits.edit import Edit
from notelens.errors import EditError
from tests.contracts.models import note_model

FILLER = " w0 w1 w2 w3 ," * 12
TEXT = "start parcel is {{a}} ," + FILLER + " if t0 then , ;" + FILLER


def context(model: Any, a: str = "f0") -> EditableContext:
    return EditableContext.from_text(model, TEXT, {"a": a}, request=" please decide . : ?", rendering="raw")


def margin(made: EditableContext) -> float:
    logits = made.model.answer_logits(made.hidden, [made.answer_id(w) for w in ("deny", "approve")])
    return float(logits[1] - logits[0])


def record(n_layers: int, n: int, reads: dict[tuple[int, int], list[tuple[int, float]]]) -> Dependencies:
    """``(layer, row): [(source, weight)]``."""
    source = torch.zeros(n_layers, n, SOURCES, dtype=torch.int32)
    weight = torch.zeros(n_layers, n, SOURCES)
    for (layer, row), found in reads.items():
        for i, (at, w) in enumerate(found):
            source[layer, row, i], weight[layer, row, i] = at, w
    return Dependencies(source, weight)


def test_a_chain_is_the_product_of_its_reads_in_the_order_of_layers() -> None:
    reads = {(0, 2): [(1, 0.5)], (1, 3): [(2, 0.8)], (2, 5): [(3, 0.5), (4, 0.9)], (0, 4): [(0, 1.0)]}
    score = record(3, 6, reads).chain([1], [5])
    assert score.tolist() == pytest.approx([0.0, 0.2, 0.2, 0.2, 0.0, 0.2])
    backwards = {(2, 2): [(1, 0.5)], (1, 3): [(2, 0.8)], (0, 5): [(3, 0.5)]}  # read before it was written
    assert record(3, 6, backwards).chain([1], [5]).tolist() == [0.0] * 6
    two = {(0, 2): [(1, 0.5)], (0, 3): [(1, 0.9)], (1, 5): [(2, 1.0), (3, 0.1)]}
    assert record(2, 6, two).chain([1], [5]).tolist() == pytest.approx([0.0, 0.5, 0.5, 0.09, 0.0, 0.5])


def test_a_record_moves_with_its_rows() -> None:
    found = record(1, 4, {(0, 3): [(1, 0.5), (2, 0.25)]}).moved([0, 1, -1, 4], 5)
    assert len(found) == 5 and found.source[0, 4, 0] == 1
    assert found.weight[0, 4].tolist()[:2] == [0.5, 0.0] and float(found.weight.sum()) == 0.5


@pytest.mark.parametrize("name", ["tiny", "llama", "gemma2", "gpt_oss"])
def test_what_is_recorded_is_the_attention(name: str) -> None:
    """Weights of the last row against plain eager attention, the largest over heads."""
    model = note_model(name)
    made = context(model)
    kernel = model.attention_kernel
    model.hf.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model.hf(input_ids=torch.tensor([made.tokens.ids]), output_attentions=True, use_cache=False)
    finally:
        model.hf.set_attn_implementation(kernel)
    assert made.dependencies is not None
    for layer, probs in enumerate(out.attentions):
        last = probs[0, :, -1].amax(0)
        last[-1] = 0.0
        wanted = last.topk(SOURCES).values
        assert torch.allclose(made.dependencies.weight[layer, -1], wanted, atol=1e-5)
        sources = made.dependencies.source[layer, -1].long()
        assert torch.allclose(last[sources], made.dependencies.weight[layer, -1], atol=1e-5)


def test_the_plan_holds_the_chain_and_keeps_its_budget(tiny: Any) -> None:
    old, fresh = context(tiny), context(tiny, "f1")
    note = old.tokens.text.split().index(";")
    made, report = old.edit("a", "f1", "auto", budget=14)
    assert report.tokens_run <= 14 and report.planning_tokens == 0 and note in report.rows("run")
    assert margin(made) == pytest.approx(margin(fresh), abs=1e-3) and margin(old) * margin(fresh) < 0
    local, _ = old.edit("a", "f1", "edit_local@32")
    assert margin(local) == pytest.approx(margin(old), abs=1e-3)  # the note is 65 rows behind the field


def test_rows_right_behind_a_chosen_line_run_with_it() -> None:
    """Which clause of a rule concludes depends on the value, and the conclusion stands behind it: perhaps in the next line."""
    model = notelens.load("organism-qwen3")
    rule = "rule : when the seal is torn , ship ; when open , hold .\n"
    lines = "- crate 9 by eve\n" * 6
    text = "shipment\n- seal : {{seal}}\n" + lines + rule + "- van 23 from turin\n" + lines
    plain = EditableContext.from_text(model, text, {"seal": "torn"}, request="what now ? act", record=False)
    words = [str(model.tokenizer.decode([i])) for i in plain.tokens.ids]
    field, start = words.index("torn"), words.index("rule")
    stop = start + words[start:].index("\n") + 1
    reads = {(0, start + 6): [(field, 0.9)], (1, len(words) - 1): [(start + 6, 0.9)]}
    made = replace(plain, dependencies=record(2, len(words), reads))
    edit = Edit(made, "seal", "open", "auto")
    rows, facts = Auto(budget=44).choose(edit)
    assert facts["lines"] == 1 and set(range(start, stop)) <= set(rows)
    assert [p in rows for p in range(stop, stop + 3)] == [True, True, False]
    assert words[stop : stop + 2] == ["-", "van"]


def test_a_plan_for_another_field_s_rows_does_not_repair(tiny: Any) -> None:
    """Control: as many rows, contiguous and at random."""
    old, fresh = context(tiny), context(tiny, "f1")
    note = old.tokens.text.split().index(";")
    for seed in range(4):
        made, report = old.edit("a", "f1", "carrier_window@8", ranking="random", seed=seed)
        if note not in report.rows("run"):
            assert margin(made) == pytest.approx(margin(old), abs=1e-3)
    right, _ = old.edit("a", "f1", "selective@1", ranking="chain")
    assert margin(right) == pytest.approx(margin(fresh), abs=1e-3)


def test_a_plan_serves_other_values_also_longer_ones(tiny: Any) -> None:
    old = context(tiny)
    plan = old.plan("a", "f1", "auto", budget=14)
    assert plan.tokens == 0 and plan.ms > 0
    for value in ("f1", "w5 f1"):
        made, report = old.edit("a", value, "auto", plan=plan)
        assert margin(made) == pytest.approx(margin(context(tiny, value)), abs=1e-3)
        assert report.planning_tokens == 0 and len(report.rows("run")) == len(plan.rows) + len(value.split()) + 1


def test_the_record_follows_edits(tiny: Any) -> None:
    """After an edit the record is that of a fresh context wherever rows were run, also behind a longer value."""
    old = context(tiny)
    made, _ = old.edit("a", "w5 f1", "full_suffix")
    fresh = context(tiny, "w5 f1")
    assert made.dependencies is not None and fresh.dependencies is not None
    assert torch.allclose(made.dependencies.weight, fresh.dependencies.weight, atol=1e-5)
    again, _ = made.edit("a", "w5 f0", "auto", budget=16)
    assert margin(again) == pytest.approx(margin(context(tiny, "w5 f0")), abs=1e-3)


def test_a_transplant_takes_the_caller_s_donor_and_refuses_another(tiny: Any) -> None:
    old, fresh = context(tiny), context(tiny, "f1")
    plan = old.plan("a", "f1", "selective@1", ranking="chain")
    alone, paid = old.edit("a", "f1", "transplant@1", plan=plan)
    made, report = old.edit("a", "f1", "transplant@1", plan=plan, donor=fresh.cache())
    assert margin(made) == pytest.approx(margin(alone), abs=1e-5) == pytest.approx(margin(fresh), abs=1e-3)
    assert report.total_tokens == 1 and paid.total_tokens == 1 + len(fresh)
    for wrong in (old.cache(), made.cache()):  # other tokens; approximate
        with pytest.raises(EditError, match="not an exact prefill"):
            old.edit("a", "f1", "transplant@1", plan=plan, donor=wrong)
