"""Editable contexts on the hand-set decoder, whose answers are known, and on small random models."""

from typing import Any

import pytest
import torch

from notelens.cache.ops import max_difference
from notelens.edits.context import EditableContext
from notelens.edits.storage import load, save
from notelens.errors import AnswerError, CacheError, EditError, FieldError, SeamError
from tests.contracts import models as contract
from tests.tiny import tiny_instance, tiny_margin, tiny_pair

PAIR = tiny_pair(n_notes=1)
OLD_VALUE, NEW_VALUE = (p.tokens[p.positions("field")[0]] for p in (PAIR.old, PAIR.new))
OLD, NEW = (tiny_margin(1.0 if p.answer == "approve" else -1.0) for p in (PAIR.old, PAIR.new))
NOTE = PAIR.old.tokens.index(";")
ANSWERS = ("deny", "approve")
TWO = "start parcel is {{a}} , w0 w1 , if {{t}} then , ; w2 w3 , please decide . : ?"


def margin(context: EditableContext) -> float:
    ids = [context.answer_id(w) for w in ANSWERS]
    logits = context.model.answer_logits(context.hidden, ids)
    return float(logits[1] - logits[0])


@pytest.fixture(scope="module")
def old() -> EditableContext:
    from tests.tiny import tiny_model

    return EditableContext.from_prompt(tiny_model(), PAIR.old)


def two_fields(model: Any, a: str = "f0", t: str = "t0") -> EditableContext:
    return EditableContext.from_text(model, TWO, {"a": a, "t": t}, rendering="raw")


# --- known answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("stale", {}, OLD),
        ("full_prefill", {}, NEW),
        ("full_suffix", {}, NEW),
        ("in_place", {}, OLD),
        ("edit_local@1", {}, OLD),
        ("selective@1", {}, NEW),
        ("selective@1", {"ranking": "chain"}, NEW),
        ("selective@3", {"ranking": "deviation"}, NEW),
        ("transplant@1", {}, NEW),
        ("carrier_window@1", {}, NEW),
        ("auto", {}, NEW),
        ("erratum", {"template": " is {value} , "}, OLD),
        ("field_erratum", {"template": " is {value} , "}, OLD),
    ],
)
def test_what_every_method_decides(old: EditableContext, method: str, options: Any, expected: float) -> None:
    """The note row decides; a line at the end writes no note, so errata are not read by this model."""
    made, report = old.edit("field", NEW_VALUE, method, **options)
    assert margin(made) == pytest.approx(expected, abs=1e-3)
    assert (report.field, report.old, report.new) == ("field", OLD_VALUE, NEW_VALUE)
    assert margin(old) == pytest.approx(OLD, abs=1e-3) and old.values["field"] == OLD_VALUE
    assert made.values["field"] == NEW_VALUE and made.reports == (report,)


def test_the_report_says_which_rows_ran(old: EditableContext) -> None:
    made, report = old.edit("field", NEW_VALUE, "selective@1")
    field = PAIR.old.positions("field")[0]
    n = len(PAIR.old)
    assert report.rows("run") == (field, NOTE, n - 1) and report.tokens_run == 3
    assert report.rows("kept") == tuple(p for p in range(n) if p not in (field, NOTE, n - 1))
    assert (
        n + 2 < report.planning_tokens <= n + 2 + (n - field - 2) + 1
    )  # donor, in place, a reader per changed row, baseline
    assert report.suffix_tokens == n - field and report.prompt_tokens == n
    assert report.total_tokens == report.tokens_run + report.planning_tokens
    assert not report.exact and not made.exact and report.history == ("selective@1: field",)
    assert report.ms > 0 and report.planning_ms > 0


def test_a_hoisted_field_is_cheap_the_second_time(tiny: Any) -> None:
    context = two_fields(tiny)
    first, moved = context.edit("a", "f1", "hoist", template=" is {value} , ", place="w9")
    second, again = first.edit("a", "f0", "hoist", template=" is {value} , ", place="w9")
    assert "moved to the end" in moved.surgery and "already" in again.surgery
    assert moved.tokens_run == len(first) - 3 and first.exact
    assert second.exact and again.rows("run")[0] == second.tokens.positions("a")[0]
    assert again.tokens_run < moved.tokens_run
    assert max_difference(second.cache(), tiny.prefill(second.tokens.ids).cache) <= contract.ROW_TOLERANCE


# --- histories --------------------------------------------------------------------------------------------------------


def test_there_and_back(old: EditableContext) -> None:
    """A -> B -> A: with the note repaired each time the first decision comes back; in place it never left."""
    there, _ = old.edit("field", NEW_VALUE, "selective@1", ranking="chain")
    back, report = there.edit("field", OLD_VALUE, "selective@1", ranking="chain")
    assert margin(there) == pytest.approx(NEW, abs=1e-3) and margin(back) == pytest.approx(OLD, abs=1e-3)
    assert not back.exact and len(back.history) == 2 and back.values["field"] == OLD_VALUE
    healed, report = back.edit("field", NEW_VALUE, "full_suffix")
    assert healed.exact and report.exact and healed.history == () and healed.touched == ()


def test_an_exact_repair_behind_an_unrepaired_field_stays_approximate(tiny: Any) -> None:
    context = two_fields(tiny)
    one, _ = context.edit("a", "f1", "in_place")
    two, report = one.edit("t", "t1", "full_suffix")
    assert not two.exact and not report.exact and "in_place: a" in two.history
    other, _ = context.edit("t", "t1", "in_place")
    healed, _ = other.edit("a", "f1", "full_suffix")
    assert healed.exact and healed.values == {"a": "f1", "t": "t1"}
    assert max_difference(healed.cache(), tiny.prefill(healed.tokens.ids).cache) <= contract.ROW_TOLERANCE


def test_all_values_of_two_fields(tiny: Any) -> None:
    """Consequences of both fields: every combination reached by two repairs decides like a fresh prompt."""
    for a in ("f0", "f1"):
        for t in ("t0", "t1"):
            context = two_fields(tiny)
            for name, value in (("a", a), ("t", t)):
                if context.values[name] != value:
                    context, _ = context.edit(name, value, "auto", budget=1.0)
            assert margin(context) == pytest.approx(margin(two_fields(tiny, a, t)), abs=1e-3)


@pytest.mark.parametrize("name", ["tiny", "llama3", "qwen3", "gemma2", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("value", ["f1 w4", "w4 w5 f1", "f1"])
def test_values_of_another_length_shift_what_follows(name: str, value: str) -> None:
    any_model = contract.note_model(name)
    context = EditableContext.from_text(any_model, TWO, {"a": "f0 w7", "t": "t0"}, rendering="raw")
    fresh = EditableContext.from_text(any_model, TWO, {"a": value, "t": "t0"}, rendering="raw")
    delta = len(fresh) - len(context)
    behind = len(fresh) - fresh.tokens.positions("a")[-1] - 2
    for method in ("in_place", "edit_local@2", "selective@3", "carrier_window@2", "full_suffix"):
        options = {"ranking": "chain"} if method.startswith(("selective", "carrier")) else {}
        made, report = context.edit("a", value, method, **options)
        assert made.tokens.ids == fresh.tokens.ids and made.rows.positions.tolist() == list(range(len(fresh)))
        ran_behind = report.tokens_run - len(fresh.tokens.positions("a")) - 1
        if method == "full_suffix":
            assert max_difference(made.cache(), fresh.cache()) <= contract.ROW_TOLERANCE
        else:
            assert len(report.rows("moved")) == (behind - ran_behind if delta else 0)
    everything, report = context.edit("a", value, f"selective@{behind}", ranking="random")
    assert report.exact and max_difference(everything.cache(), fresh.cache()) <= contract.ROW_TOLERANCE
    moved, _ = context.edit("a", value, "in_place")
    after = fresh.tokens.positions("a")[-1] + 1
    for layer in range(any_model.geometry.n_layers):
        held, before = moved.rows.layer(layer)[1], context.rows.layer(layer)[1]
        assert torch.equal(held[:, after:-1], before[:, after - delta : -1])


# --- continuing -------------------------------------------------------------------------------------------------------


def test_greedy_decoding_equals_transformers(any_model: Any) -> None:
    context = EditableContext.from_text(any_model, TWO, {"a": "f0", "t": "t0"}, rendering="raw")
    ours = context.generate(6)
    theirs = any_model.hf.generate(**context.generate_inputs(), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert ours.ids == tuple(theirs[0, len(context) :].tolist())
    assert ours.context.exact and ours.context.tokens.ids == (*context.tokens.ids, *ours.ids)
    fresh = any_model.prefill(ours.context.tokens.ids)
    assert max_difference(ours.context.cache(), fresh.cache) <= contract.ROW_TOLERANCE
    assert float((ours.context.hidden - fresh.hidden).abs().max()) <= contract.SWAP_TOLERANCE


def test_sampling_repeats_with_its_seed() -> None:
    context = EditableContext.from_text(contract.note_model("llama"), TWO, {"a": "f0", "t": "t0"}, rendering="raw")
    one, same, other = (context.generate(12, temperature=1.5, seed=s).ids for s in (1, 1, 2))
    assert one == same and one != other
    first = context.generate(3).ids[0]
    halted = context.generate(5, stop=[first])
    assert halted.ids == () and halted.stopped and halted.context is context
    with pytest.raises(EditError, match="needs a seed"):
        context.generate(3, temperature=1.0)
    with pytest.raises(EditError, match="at least 1"):
        context.generate(0)


def test_the_mark_survives_everything(old: EditableContext, tmp_path: Any) -> None:
    approximate, _ = old.edit("field", NEW_VALUE, "in_place")
    for made in (
        approximate.continue_with("w1 w2"),
        approximate.generate(2).context,
        approximate.edit("field", OLD_VALUE, "erratum", template=" is {value} , ")[0],
        load(old.model, save(approximate, tmp_path / "a.safetensors")),
    ):
        assert not made.exact and "in_place: field" in made.history and made.key.startswith("approximate-")
        assert not made.cache().exact
    assert old.exact and old.key.startswith("exact-") and old.continue_with("w1").exact
    assert approximate.key != EditableContext.from_prompt(old.model, PAIR.new).key


def test_continued_text_is_behind_everything_and_errata_follow_it(old: EditableContext) -> None:
    longer = old.continue_with(" w1 w2 ?")
    assert longer.exact and len(longer) == len(old) + 3
    fresh = old.model.prefill(longer.tokens.ids)
    assert max_difference(longer.cache(), fresh.cache) <= contract.ROW_TOLERANCE
    made, report = longer.edit("field", NEW_VALUE, "erratum", template=" is {value} , ?")
    assert made.exact and report.tokens_run == 4 and report.appended_only
    repaired, _ = longer.edit("field", NEW_VALUE, "full_suffix")
    assert repaired.exact and repaired.tokens.ids[-3:] == longer.tokens.ids[-3:]
    with pytest.raises(EditError, match="tokens stand behind the prompt"):
        longer.edit("field", NEW_VALUE, "hoist")
    with pytest.raises(EditError, match="no text"):
        old.continue_with("")


def test_stacked_errata_and_one_current_erratum(old: EditableContext) -> None:
    options = {"template": " is {value} , "}
    one, _ = old.edit("field", NEW_VALUE, "erratum", **options)
    stacked, _ = one.edit("field", OLD_VALUE, "erratum", stack=True, **options)
    current, _ = one.edit("field", OLD_VALUE, "erratum", **options)
    assert len(stacked) == len(one) + 3 and len(current) == len(one)
    assert stacked.exact and current.exact and stacked.tokens.text.count("is") == current.tokens.text.count("is") + 1
    for made in (stacked, current):
        fresh = old.model.prefill(made.tokens.ids).cache
        assert max_difference(made.cache(), fresh) <= contract.ROW_TOLERANCE


def test_a_line_that_updates_a_field_is_never_left_to_contradict_it(old: EditableContext) -> None:
    one, _ = old.edit("field", NEW_VALUE, "erratum", template=" is {value} , ")
    assert one.values["field"] == NEW_VALUE and one.text.values["field"] == OLD_VALUE
    for method in (
        "stale",
        "in_place",
        "edit_local@2",
        "selective@2",
        "transplant@1",
        "carrier_window@2",
        "auto",
        "hoist",
    ):
        with pytest.raises(EditError, match="a line of the prompt already updates field 'field'"):
            one.edit("field", OLD_VALUE, method)
    for method in ("full_suffix", "full_prefill"):
        back, report = one.edit("field", OLD_VALUE, method)
        assert back.exact and back.tokens.ids == old.tokens.ids and report.old == NEW_VALUE
        assert max_difference(back.cache(), old.cache()) <= contract.ROW_TOLERANCE
        third, _ = one.edit("field", "f2", method)
        assert third.exact and third.tokens.text == old.tokens.text.replace(OLD_VALUE, "f2")
        assert max_difference(third.cache(), old.model.prefill(third.tokens.ids).cache) <= contract.ROW_TOLERANCE


# --- files and transformers -------------------------------------------------------------------------------------------


def test_saved_and_loaded(old: EditableContext, tmp_path: Any) -> None:
    made, _ = old.edit("field", NEW_VALUE, "selective@1", ranking="chain")
    path = save(made, tmp_path / "context.safetensors")
    again = load(old.model, path)
    assert again.cache().digest() == made.cache().digest() and torch.equal(again.hidden, made.hidden)
    assert again.tokens == made.tokens and again.key == made.key and again.values == made.values
    assert margin(again.edit("field", OLD_VALUE, "selective@1", ranking="chain")[0]) == pytest.approx(OLD, abs=1e-3)
    assert [p.name for p in tmp_path.iterdir()] == ["context.safetensors"]
    assert b"pickle" not in path.read_bytes()


def test_files_that_do_not_fit_are_refused(old: EditableContext, tmp_path: Any) -> None:
    path = save(old, tmp_path / "a.safetensors")
    with pytest.raises(CacheError, match="only fit the model"):
        load(contract.note_model("llama"), path)
    with pytest.raises(CacheError, match="no file"):
        load(old.model, tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_bytes(path.read_bytes()[:200])
    with pytest.raises(CacheError, match="cannot be read"):
        load(old.model, tmp_path / "c.safetensors")
    changed = path.read_bytes().replace(b'\\"exact_rows\\": ' + str(len(old)).encode(), b'\\"exact_rows\\": 10')
    assert changed != path.read_bytes()
    (tmp_path / "d.safetensors").write_bytes(changed)
    with pytest.raises(CacheError, match="does not fit"):
        load(old.model, tmp_path / "d.safetensors")
    with pytest.raises(CacheError, match="not a folder"):
        save(old, tmp_path / "none" / "a.safetensors")


def test_a_transformers_cache_comes_in(old: EditableContext) -> None:
    from transformers import DynamicCache

    ids = torch.tensor([old.tokens.ids])
    for held in (len(old), len(old) - 1):
        store = DynamicCache()
        with torch.no_grad():
            old.model.hf(input_ids=ids[:, :held], past_key_values=store, use_cache=True)
        made = EditableContext.from_transformers(old.model, old.text, store)
        assert max_difference(made.cache(), old.cache()) <= contract.ROW_TOLERANCE and made.build_tokens == 1
        assert margin(made.edit("field", NEW_VALUE, "full_suffix")[0]) == pytest.approx(NEW, abs=1e-3)
    short = DynamicCache()
    with torch.no_grad():
        old.model.hf(input_ids=ids[:, :5], past_key_values=short, use_cache=True)
    with pytest.raises(CacheError, match="the cache holds 5 rows"):
        EditableContext.from_transformers(old.model, old.text, short)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["in_place", "edit_local@4", "selective@6", "erratum"])
def test_unchanged_rows_are_shared(method: str) -> None:
    """A long prompt: what an edit adds are the rows it ran, not a copy of the others."""
    model = contract.note_model("qwen3")
    text = "start parcel is {{a}} , " + " w1 w2 , w3" * 40 + " please decide . : ?"
    context = EditableContext.from_text(model, text, {"a": "f0"}, rendering="raw")
    options: dict[str, Any] = {"ranking": "chain"} if method.startswith("selective") else {}
    if method == "erratum":
        options = {"template": " is {value} , "}
    made, report = context.edit("a", "f1", method, **options)
    per_row = context.cache().nbytes // len(context)
    assert made.rows.bytes_beyond(context.rows) == report.tokens_run * per_row
    assert report.tokens_run < len(context) / 5


# --- reading ----------------------------------------------------------------------------------------------------------


def test_decisions_are_read_behind_the_prompt(old: EditableContext) -> None:
    shares = old.decide(ANSWERS)
    assert sum(shares.values()) == pytest.approx(1.0) and max(shares, key=shares.__getitem__) == PAIR.old.answer
    with pytest.raises(AnswerError, match="share a first token"):
        old.decide(("deny", "deny"))
    assert "exact" in repr(old) and f"{len(PAIR.old)} tokens" in repr(old)


def test_a_prompt_whose_text_encodes_otherwise_is_refused(tiny: Any) -> None:
    from dataclasses import replace

    prompt = tiny_instance().cells[0, 0]
    odd = replace(prompt, text=prompt.text.replace("please", "w0"))
    with pytest.raises(SeamError, match="encodes to other tokens"):
        EditableContext.from_prompt(tiny, odd)
    with pytest.raises(FieldError, match="no span 'x'"):
        EditableContext.from_prompt(tiny, prompt, {"x": "y"})
