"""Sessions: what is reused, what is run, what is refused, and that nothing is ever half done."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notelens.agents import EveryTurns, Never, OnDrift, Session, break_even
from notelens.agents import prompt as live
from notelens.cache.ops import max_difference
from notelens.compose import References, compile_skill
from notelens.edits.context import EditableContext
from notelens.errors import (
    AgentError,
    ArtefactError,
    ComposeError,
    EditError,
)
from tests.contracts import models as contract
from tests.session_cases import ANSWERS, LINE, REQUEST, TEXT, TOOLS, margin, new, picture
from tests.tiny import VOCABULARY, tiny_hf, tiny_margin, tiny_pair, wrapped

# --- the loop -----------------------------------------------------------------------------------------------------------


def test_a_session_follows_its_fields(tiny: Any) -> None:
    session = new(tiny)
    assert margin(session) == pytest.approx(tiny_margin(1.0), abs=1e-3)
    session.update(a="f0")
    assert margin(session) == pytest.approx(tiny_margin(-1.0), abs=1e-3)
    session.update(a="f1", t="t0")
    assert margin(session) == pytest.approx(tiny_margin(-1.0), abs=1e-3)
    session.update(t="t1")
    assert session.ask(answers=ANSWERS).answer == "approve" and session.values == {"a": "f1", "t": "t1"}


def test_several_fields_are_changed_in_one_pass(tiny: Any) -> None:
    session = new(tiny)
    n, first = len(session), session.context.tokens.positions("a")[0]
    assert session.update(a="f0", t="t0").tokens_run == n - first
    assert new(tiny, "full_prefill").update(a="f0", t="t0").tokens_run == n
    stepwise = new(tiny, "in_place").update(a="f0", t="t0")
    assert stepwise.tokens_run == 4, "a field and the last row, twice"


@pytest.mark.parametrize("name", ["tiny", "llama3", "qwen3", "gemma2", "gpt_oss"])
def test_reused_rows_equal_a_full_prefill(name: str) -> None:
    model = contract.note_model(name)
    session = new(model)
    steps = (
        lambda: session.ask("w4 w5 ?", keep=True), lambda: session.update(t="t0"), lambda: session.add("w6 w7 ,"),
        lambda: session.ask("w8 : ?"), lambda: session.update(a="f0"), lambda: session.ask("w9 ?", max_tokens=3, keep=True),
    )  # fmt: skip
    for step in steps:
        step()
        ids = session.context.tokens.ids
        assert session.exact and not session.context.history
        assert max_difference(session.context.cache(), model.prefill(ids).cache) <= contract.ROW_TOLERANCE
    assert session.context.verify("exact").passed


def test_only_what_differs_is_run(tiny: Any) -> None:
    session = new(tiny)
    assert session.ask().turn.tokens_run == 0
    turn = session.ask("please decide . : w5 ?").turn
    assert (turn.tokens_run, turn.reused_tokens) == (2, len(session) - 2)
    head = session.context.tokens.tail
    turn = session.add("w6 w7 ,")
    assert (turn.tokens_run, turn.reused_tokens) == (3 + 6, head)
    assert "w6 w7 ,\nplease" in session.context.tokens.text


def test_a_kept_turn_is_in_the_prompt(tiny: Any) -> None:
    session = new(tiny)
    reply = session.ask("w4 : ?", answers=ANSWERS, keep=True)
    assert reply.answer == "approve" and "w4 : ?\napprove\nw4 : ?" in session.context.tokens.text
    assert session.ask().turn.tokens_run == 0


@pytest.mark.parametrize("method", ["auto", "in_place", "stale", "selective@2", "erratum", "field_erratum"])
def test_marks_go_with_the_rows(tiny: Any, method: str) -> None:
    options = LINE if "erratum" in method else None
    session = new(tiny, method, options=options)
    turn = session.update(a="f0")
    assert turn.exact is session.exact is session.context.exact
    before = session.exact
    session.ask("w4 : ?")
    session.add("w5 ,")
    assert session.exact is before, "rows run on approximate rows are approximate, on exact ones exact"
    if before:
        assert session.context.verify("exact").passed
    again = new(tiny, method, options=options)
    made = again.context.edit("a", "f0", method, **(options or {})).context
    again.update(a="f0")
    assert again.context.rows.join().digest() == made.rows.join().digest()


def test_auto_plans_from_the_record_of_all_turns(tiny: Any) -> None:
    session = new(tiny, options={"budget": 1.0}, method="auto")
    session.ask("w4 w5 : ?")
    session.add("w6 ; w7 ,")
    record = session.context.dependencies
    assert record is not None and len(record) == len(session)
    whole = EditableContext.build(tiny, session.context.text).dependencies
    assert whole is not None
    assert (record.weight - whole.weight).abs().max() <= 1e-5
    session.update(a="f0")
    assert session.ask(REQUEST, answers=ANSWERS).answer == "deny"


def test_a_session_of_a_prompt(tiny: Any) -> None:
    pair = tiny_pair()
    session = Session.from_prompt(tiny, pair.old, {"field": "seal"}, method="full_suffix")
    assert session.context.tokens.ids == pair.old.token_ids
    value = pair.new.tokens[pair.new.positions("field")[0]]
    session.update(seal=value)
    assert session.ask().turn.tokens_run == 0 and session.context.tokens.ids == pair.new.token_ids
    shared = EditableContext.from_prompt(tiny, pair.old, {"field": "seal"}, record=False)
    twin = Session.from_prompt(tiny, pair.old, {"field": "seal"}, method="full_suffix", context=shared)
    twin.update(seal=value)
    assert twin.context.rows.join().digest() == session.context.rows.join().digest() and shared.values != twin.values
    assert [t.total_tokens for t in twin.report().turns][:2] == [t.total_tokens for t in session.report().turns][:2]
    with pytest.raises(AgentError, match="not one of prompt"):
        Session.from_prompt(tiny, pair.new, {"field": "seal"}, context=shared)
    other = session.ask("w3 w4 .")
    assert other.turn.tokens_run == 5, "the request of three words and the template behind it"


# --- skills -------------------------------------------------------------------------------------------------------------


def test_a_skill_is_spliced_and_edits_go_on(tiny: Any) -> None:
    policy = "w5 w6 , w7 w8 , w9 w10 , w11 w0 ,"
    skill = compile_skill(tiny, policy, name="policy")
    parts = ["start w1 , ", skill, f" {TEXT.removeprefix('start ')}"]
    session = Session(
        tiny, parts, {"a": "f1", "t": "t1"}, request=REQUEST, rendering="raw", method="in_place", composer="shift"
    )
    whole = new(tiny)
    assert session.context.tokens.ids[3 : 3 + len(skill)] == skill.token_ids
    built = session.report().turns[0]
    assert built.tokens_run == len(session) - len(skill) and built.reused_tokens == len(skill)
    assert not session.exact and session.context.exact_rows == 3
    session.update(t="t0")
    assert len(session) == len(whole) + len(skill) + 2
    session.reanchor()
    assert session.exact and session.ask(answers=ANSWERS).answer == "deny"
    named = References([(skill, ["w7 w8 ,"])], model=tiny)
    other = Session(
        tiny, parts, {"a": "f1", "t": "t1"}, request=REQUEST, rendering="raw", method="in_place", composer=named
    )
    assert other.report().turns[0].tokens_run == built.tokens_run + 3 and not other.exact


def test_skills_that_do_not_fit_are_refused(tiny: Any) -> None:
    skill = compile_skill(tiny, "w5 w6 ,", name="policy")
    more = {"request": REQUEST, "rendering": "raw", "method": "in_place"}
    with pytest.raises(ComposeError, match="twice"):
        Session(tiny, ["start ", skill, " w5 w6 , is {{a}} , "], {"a": "f1"}, **more)
    with pytest.raises(ComposeError, match="holds a field"):
        Session(tiny, ["start w0 ", skill, " w1 "], {"a": "w6"}, **more)
    text = compile_skill(tiny, "w7 w6 ,", name="other")
    context = live.FieldText.from_template(
        tiny.tokenizer, "start is {{a}} ,", {"a": "f1"}, request=REQUEST, rendering="raw"
    )
    with pytest.raises(ComposeError, match="not in the prompt"):
        live.build(tiny, context, (text,))
    with pytest.raises(EditError, match="record"):
        one = Session(tiny, ["start ", skill, " is {{a}} , "], {"a": "f1"}, **{**more, "method": "auto"}, record=False)
        one.update(a="f0")


# --- when to pay for a fresh prefill --------------------------------------------------------------------------------------


def test_every_so_many_turns(tiny: Any) -> None:
    session = new(tiny, "in_place", reanchor=EveryTurns(3))
    turns = [session.update(a=v) for v in ("f0", "f1", "f0", "f1", "f0", "f1")]
    assert [t.reanchored for t in turns] == [False, False, True] * 2
    assert [t.exact for t in turns] == [False, False, True] * 2
    assert turns[2].tokens_run == 2 + len(session) and turns[2].reused_tokens == 0
    exact = new(tiny, "full_suffix", reanchor=EveryTurns(1))
    assert not exact.update(a="f0").reanchored, "there is nothing to gain"
    lines = new(tiny, "erratum", options=LINE, reanchor=EveryTurns(1))
    assert (
        lines.update(a="f0").reanchored and lines.context.text.updates == {} and "f1" not in lines.context.tokens.text
    )


def test_drift_is_measured(tiny: Any) -> None:
    session = new(tiny, "in_place", reanchor=OnDrift(1e-3, rows=64))
    turn = session.update(a="f0")
    assert turn.reanchored and turn.exact and turn.drift is not None and turn.drift > 1e-3 and turn.check_tokens > 0
    patient = new(tiny, "in_place", reanchor=OnDrift(1e9, rows=64))
    turn = patient.update(a="f0")
    assert not turn.reanchored and turn.drift is not None and turn.drift > 0
    held = new(tiny, "stale", reanchor=OnDrift(1e9)).update(a="f0")
    assert held.reanchored and held.drift == float("inf") and held.check_tokens == 0
    right = new(tiny, "full_suffix", reanchor=OnDrift(0.0)).update(a="f0")
    assert not right.reanchored and right.check_tokens == 0
    rare = new(tiny, "in_place", reanchor=OnDrift(0.0, every=2))
    assert [rare.update(**{k: v}).reanchored for k, v in (("a", "f0"), ("t", "t0"))] == [False, True]
    back = new(tiny, "in_place", reanchor=OnDrift(1e-4, rows=64, every=2))
    turns = [back.update(a=v) for v in ("f0", "f1")]
    assert not turns[1].reanchored and turns[1].drift is not None and turns[1].drift <= 1e-4, "there and back again"
    assert Never().check(session.context, 10**6).due is False


@pytest.mark.parametrize(
    "wrong", [lambda: EveryTurns(0), lambda: OnDrift(-1.0), lambda: OnDrift(float("nan")), lambda: OnDrift(1, rows=0)]
)
def test_policies_that_mean_nothing(wrong: Any) -> None:
    with pytest.raises(AgentError):
        wrong()


# --- files and other libraries ------------------------------------------------------------------------------------------------


def test_saved_and_resumed(tiny: Any, tmp_path: Path) -> None:
    session = new(tiny, "in_place", reanchor=EveryTurns(2), tools=TOOLS)
    session.update(a="f0")
    session.ask("w4 : ?", keep=True)
    again = Session.resume(tiny, session.save(tmp_path / "a.session"), tools=TOOLS)
    assert picture(again)[:-2] == picture(session)[:-2]
    assert json.dumps(again.report().rows()) == json.dumps(session.report().rows())
    for one in (session, again):
        one.update(a="f1")
        one.call("ship")
    assert again.context.rows.join().digest() == session.context.rows.join().digest()
    assert [t.reanchored for t in again.report().turns] == [t.reanchored for t in session.report().turns]


def test_a_session_of_another_model_is_refused(tiny: Any, tmp_path: Path) -> None:
    path = new(tiny).save(tmp_path / "a.session")
    other = wrapped(tiny_hf(reads_notes=False), "other")
    with pytest.raises(ArtefactError, match=r"made by tiny with weights .* this is other"):
        Session.resume(other, path)
    with pytest.raises(ArtefactError, match="no file"):
        Session.resume(tiny, tmp_path / "b.session")
    raw = path.read_bytes()
    for at in (len(raw) // 2, len(raw) - 3, raw.index(b"full_suffix")):
        (tmp_path / "c.session").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(ArtefactError):
            Session.resume(tiny, tmp_path / "c.session")
    (tmp_path / "d.session").write_bytes(b"no session")
    with pytest.raises(ArtefactError, match="cannot be read"):
        Session.resume(tiny, tmp_path / "d.session")
    from notelens.edits.storage import save

    with pytest.raises(ArtefactError, match="no saved session"):
        Session.resume(tiny, save(new(tiny).context, tmp_path / "e.session"))


def test_policies_of_ones_own_cannot_be_saved(tiny: Any, tmp_path: Path) -> None:
    class Mine(Never):
        pass

    with pytest.raises(AgentError, match="Mine"):
        new(tiny, reanchor=Mine()).save(tmp_path / "a.session")
    assert not list(tmp_path.iterdir())


def test_transformers_goes_on_from_a_session(tiny: Any) -> None:
    session = new(tiny)
    session.update(a="f0")
    before = picture(session)
    out = tiny.hf.generate(**session.generate_inputs(), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert picture(session) == before
    reply = session.ask(max_tokens=3)
    assert tuple(out[0, -3:].tolist()) == session.context.generate(3).ids
    assert reply.token == VOCABULARY[int(out[0, -3])] == "deny"


# --- accounts ----------------------------------------------------------------------------------------------------------------


def test_the_report_adds_up(tiny: Any) -> None:
    session = new(tiny, "in_place")
    session.update(a="f0")
    session.update(t="t0")
    session.ask()
    session.ask("w4 ?", max_tokens=2)
    report = session.report()
    n = report.turns[0].tokens_run
    assert [t.kind for t in report.turns] == ["build", "update", "update", "ask", "ask"]
    assert report.tokens_run == (n, n + 2, n + 4, n + 4, n + 4 + report.turns[-1].tokens_run + 2)
    ms = [t.ms for t in report.turns]
    assert report.first_token_ms == pytest.approx((sum(ms[1:4]), ms[4]))
    assert report.cumulative_first_token_ms[-1] == pytest.approx(sum(ms))
    assert report.peak_bytes == max(t.nbytes for t in report.turns) >= session.context.rows.join().nbytes
    assert not report.exact and "approximate" in str(report) and "a=f0" in str(report)
    assert replace(report, exact=True, history=()).rows()[1]["cumulative_tokens"] == n + 2


def test_break_even() -> None:
    assert break_even([10, 1, 1, 1], [4, 4, 4, 4]) == 3
    assert break_even([10, 1], [4, 4]) is None
    assert break_even([1, 1], [4, 4]) == 1
    assert break_even([1, 9, 0, 0, 0], [3, 3, 3, 3, 3]) == 4
    with pytest.raises(ValueError, match="argument"):
        break_even([1], [1, 2])
