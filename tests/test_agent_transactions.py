"""All or nothing: what a session refuses, and what a failure at any step leaves behind."""

from typing import Any

import pytest

from notelens.agents import OnDrift, Session, core
from notelens.agents import prompt as live
from notelens.agents import session as module
from notelens.edits.context import EditableContext
from notelens.edits.edit import Edit
from notelens.errors import (
    AgentError,
    AnswerError,
    ContextOverflowError,
    EditError,
    FieldError,
    LengthChangeError,
    NonFiniteError,
    ToolError,
    UnknownNameError,
)
from tests.session_cases import ANSWERS, REQUEST, TOOLS, margin, new, overflow, picture
from tests.tiny import tiny_margin

# --- refusals -------------------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "unknown field": (FieldError, "no field 'b'", lambda s: s.update(b="f0")),
    "unknown field behind a known one": (FieldError, "no field 'b'", lambda s: s.update(a="f0", b="f0")),
    "empty value": (FieldError, "empty", lambda s: s.update(a=" ")),
    "no text": (AgentError, "values are text", lambda s: s.update(a=1)),
    "nothing": (AgentError, "nothing to update", lambda s: s.update()),
    "long value": (ContextOverflowError, "positions", lambda s: s.update(t="t0", a="w0 " * 600)),
    "long line": (ContextOverflowError, "positions", lambda s: s.add("w0 " * 600)),
    "long request": (ContextOverflowError, "positions", lambda s: s.ask("w0 " * 600)),
    "much to say": (ContextOverflowError, "600 more", lambda s: s.ask(max_tokens=600)),
    "empty request": (AgentError, "empty", lambda s: s.ask("  ")),
    "empty line": (AgentError, "empty", lambda s: s.add("")),
    "less than nothing": (AgentError, "negative", lambda s: s.ask(max_tokens=-1)),
    "same answers": (AnswerError, "share", lambda s: s.ask("w4 ?", answers=("deny", "deny w0"))),
    "no seed": (EditError, "seed", lambda s: s.ask("w4 ?", max_tokens=2, temperature=1.0)),
    "no tool": (AgentError, "no tool 'shop'", lambda s: s.call("shop")),
    "tool that raises": (ToolError, "RuntimeError: no connection", lambda s: s.call("broken")),
    "tool with wrong arguments": (ToolError, "TypeError", lambda s: s.call("ship", order=1)),
    "tool that gives a number": (ToolError, "int", lambda s: s.call("odd")),
    "tool that names an unknown field": (FieldError, "no field 'b'", lambda s: s.call("unknown_field")),
    "tool that says too much": (ContextOverflowError, "positions", lambda s: s.call("long")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("method", ["full_suffix", "in_place"])
def test_what_is_refused_leaves_everything_as_it_was(tiny: Any, case: str, method: str) -> None:
    kind, words, call = REFUSED[case]
    session = new(tiny, method, tools=TOOLS)
    session.update(t="t0")
    before = picture(session)
    with pytest.raises(kind, match=words) as caught:
        call(session)
    assert type(caught.value) is kind
    assert picture(session) == before
    session.update(a="f0", t="t1")
    session.reanchor()
    assert margin(session) == pytest.approx(tiny_margin(-1.0), abs=1e-3)


def test_a_method_that_cannot_do_it_leaves_everything_as_it_was(tiny: Any) -> None:
    session = new(tiny, "stale")
    before = picture(session)
    with pytest.raises(LengthChangeError):
        session.update(t="t0", a="f0 f0")
    assert picture(session) == before


def test_a_session_that_cannot_be_made(tiny: Any) -> None:
    for kind, words, more in (
        (UnknownNameError, "edit method", {"method": "automatic"}),
        (EditError, "K", {"method": "selective"}),
        (AgentError, "empty", {"request": " "}),
        (AgentError, "may not hold a field", {"request": "{{a}} ?"}),
    ):
        with pytest.raises(kind, match=words):
            new(tiny, **more)
    with pytest.raises(ContextOverflowError, match="positions"):
        Session(tiny, overflow(tiny) + "is {{a}} ,", {"a": "f0"}, request=REQUEST, rendering="raw")
    with pytest.raises(AgentError, match="int"):
        Session(tiny, [7], {"a": "f0"}, request=REQUEST)  # type: ignore[list-item]


# --- failing at every step --------------------------------------------------------------------------------------------------

STEPS: list[tuple[Any, str]] = [
    (module, "with_values"), (module, "advance"), (module, "fresh"), (module, "with_log"), (module, "checked"),
    (core.SessionCore, "_turn"), (core.SessionCore, "_changed"), (core.SessionCore, "_commit"), (core, "fresh"),
    (live, "run_rows"), (live, "exact_prefix"), (live, "check_value"), (live, "common_prefix"), (EditableContext, "edit"),
    (EditableContext, "build"),
    (EditableContext, "_edited"), (EditableContext, "next_logits"), (EditableContext, "verify"), (EditableContext, "generate"),
    (EditableContext, "decide"), (Edit, "forward"), (Edit, "run"), (OnDrift, "check"), (live.FieldText, "tokenise"),
    (live.FieldText, "with_value"), (live.FieldText, "with_line"),
]  # fmt: skip
"""Everything that a call goes through."""


@pytest.mark.parametrize(("where", "step"), STEPS, ids=[s for _, s in STEPS])
def test_a_failure_at_any_step_leaves_everything_as_it_was(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, where: Any, step: str
) -> None:
    hit = 0
    calls = (
        lambda s: s.update(a="f0", t="t0"), lambda s: s.call("ship"), lambda s: s.add("w5 ,"), lambda s: s.reanchor(),
        lambda s: s.ask("w4 : ?", answers=ANSWERS, keep=True, max_tokens=2),
    )  # fmt: skip
    for method in ("in_place", "full_suffix"):
        for call in calls:
            for nth in (1, 2):
                session = new(tiny, method, tools=TOOLS, reanchor=OnDrift(0.0, rows=64))
                before = picture(session)
                seen = 0
                original = where.__dict__[step]
                plain = original.__func__ if isinstance(original, classmethod) else original

                def fails(*a: Any, _plain: Any = plain, _nth: int = nth, **k: Any) -> Any:
                    nonlocal seen
                    seen += 1
                    if seen == _nth:
                        raise NonFiniteError("an injected failure")
                    return _plain(*a, **k)

                with monkeypatch.context() as patch:
                    patch.setattr(where, step, classmethod(fails) if isinstance(original, classmethod) else fails)
                    try:
                        call(session)
                    except NonFiniteError:
                        hit += 1
                        failed = True
                    else:
                        failed = False
                assert (seen >= nth) is failed
                if failed:
                    assert picture(session) == before
                    call(session)
                    assert picture(session) != before, "the session goes on as if nothing had happened"
    assert hit > 0, "no call goes through this step"
