"""The live prompt of a session: built once, perhaps from compiled skills, then grown and changed from its longest prefix."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from notelens.cache.rows import Rows
from notelens.compose.base import Composer
from notelens.compose.join import compose
from notelens.compose.skill import Skill
from notelens.edits.context import EditableContext
from notelens.edits.dependencies import Dependencies, Recorder
from notelens.edits.report import exact_prefix
from notelens.edits.text import FieldText, Node, check_value, common_prefix
from notelens.errors import AgentError, ComposeError, ContextOverflowError
from notelens.intervene.run_rows import run_rows
from notelens.models.base import NoteModel
from notelens.spans import refuse_special


@dataclass(frozen=True)
class Advanced:
    """A context for another text.

    Attributes:
        context: what it became.
        tokens_run: tokens run.
        reused: leading rows that were kept.
    """

    context: EditableContext
    tokens_run: int
    reused: int


def check_room(model: NoteModel, n: int, more: int = 0) -> None:
    """Check that ``n`` tokens and ``more`` behind them fit.

    Raises:
        ContextOverflowError: they do not.
    """
    room = model.geometry.max_positions
    if n + more > room:
        raise ContextOverflowError(
            f"the prompt would have {n} tokens{f' and {more} more' if more else ''}; {model.name} has {room} positions. "
            "Drop or shorten a part, or begin a new session"
        )


def build(
    model: NoteModel,
    text: FieldText,
    skills: Sequence[Skill] = (),
    *,
    composer: str | Composer = "seam@4",
    record: bool = True,
) -> EditableContext:
    """Prefill a text, with compiled skills spliced in where their tokens stand.

    Args:
        model: runs it.
        text: with fields.
        skills: each must stand in the text once, token by token.
        composer: of :mod:`notelens.compose`.
        record: keep which rows read which; with skills this takes a prefill of its own.

    Raises:
        ContextOverflowError: the text is too long.
        ComposeError: a skill is not in the text, stands in it twice, holds a field, or skills overlap.

    Cost: one prefill; with skills, the tokens outside them and what the composer runs again.
    """
    tokens = text.tokenise(model.tokenizer)
    check_room(model, len(tokens))
    if not skills:
        return EditableContext.build(model, text, record=record)
    started = time.perf_counter()
    parts: list[Any] = []
    at = 0
    for start, skill in sorted((_place(tokens.ids, s), s) for s in skills):
        stop = start + len(skill)
        if start < at:
            raise ComposeError(f"skill {skill.name!r} overlaps the one in front of it; give each a text of its own")
        if any(start <= p < stop for name in tokens.mentions for p in tokens.positions(name)):
            raise ComposeError(f"skill {skill.name!r} holds a field; put fields into parts that are not compiled")
        parts += [tokens.ids[at:start]] if start > at else []
        parts.append(skill)
        at = stop
    made = compose(model, [*parts, *([tokens.ids[at:]] if at < len(tokens) else [])], method=composer)
    cache = made.cache
    spliced = [p for piece in made.pieces if piece.spliced for p in range(piece.start, piece.stop)]
    ms = 1e3 * (time.perf_counter() - started)
    context = EditableContext(
        model, text, tokens, Rows.of(cache), made.read(model),
        len(tokens) if cache.exact else min(spliced), () if cache.exact else tuple(spliced),
        build_tokens=round(made.cost.tokens_run), build_ms=ms,
    )  # fmt: skip
    return context.recorded() if record else context


def _place(ids: tuple[int, ...], skill: Skill) -> int:
    wanted, n = skill.token_ids, len(skill)
    places = [i for i in range(len(ids) - n + 1) if ids[i : i + n] == wanted]
    if len(places) != 1:
        found = "is not in the prompt, or its ends merge with their neighbours" if not places else "stands in it twice"
        raise ComposeError(
            f"skill {skill.name!r} {found}: its {n} tokens must stand in the prompt once; put line breaks around it"
        )
    return places[0]


def advance(context: EditableContext, text: FieldText, *, room: int = 0) -> Advanced:
    """The context of another text: rows of the common prefix are kept, the others run. ``context`` stays unchanged.

    The mark is kept: rows that are run on exact rows are exact.

    Args:
        context: to start from.
        text: to end with.
        room: further tokens that must fit.

    Raises:
        ContextOverflowError: too many tokens.

    Cost: tokens behind the common prefix.
    """
    model = context.model
    tokens = text.tokenise(model.tokenizer)
    n = len(tokens)
    check_room(model, n, room)
    shared = common_prefix(context.tokens.ids, tokens.ids)
    if shared == n == len(context):
        return Advanced(replace(context, text=text, tokens=tokens), 0, n)
    cut = min(shared, n - 1)
    at = range(cut, n)
    recorder = None
    if context.dependencies is not None:
        recorder = Recorder(model.geometry.n_layers, n, _cut(context.dependencies, cut))
    kept = Rows(context.rows.between(0, cut)) if cut else None
    done = run_rows(model, kept, tokens.ids[cut:], at, watch=recorder)
    exact_rows = exact_prefix(context.exact_rows, cut, at, n)
    history = () if exact_rows == n else context.history
    made = replace(
        context,
        text=text,
        tokens=tokens,
        rows=Rows.of(done.rows) if kept is None else kept.replaced(done.rows, history=history),
        hidden=done.hidden,
        exact_rows=exact_rows,
        touched=() if exact_rows == n else tuple(p for p in context.touched if p < cut),
        dependencies=recorder.done() if recorder is not None else None,
    )
    return Advanced(made, done.n_tokens, cut)


def _cut(known: Dependencies, n: int) -> Dependencies:
    return Dependencies(known.source[:, :n], known.weight[:, :n])


def corrected(text: FieldText, tokenizer: Any, values: Mapping[str, str]) -> FieldText:
    """The text as it would have been written with these values: in the fields' places, without lines that update them."""
    for name in text.values:
        value = values.get(name, text.current[name])
        if text.values[name] != value:
            text = text.with_value(tokenizer, name, value)
        text = text.without_updates(name) if name in text.updates else text
    return text


def fresh(context: EditableContext, values: Mapping[str, str]) -> EditableContext:
    """A fresh prefill of the corrected prompt. Cost: all its tokens."""
    model = context.model
    text = corrected(context.text, model.tokenizer, values)
    check_room(model, len(text.tokenise(model.tokenizer)))
    return EditableContext.build(model, text, record=context.dependencies is not None)


def with_values(
    context: EditableContext, values: Mapping[str, str], method: str, options: Mapping[str, Any]
) -> "Changed":
    """Change fields, all of them or none: the context given stays as it is.

    ``full_prefill`` and ``full_suffix`` run once for all fields, other methods once per field, in the order given.

    Args:
        context: to start from.
        values: new values; those that a field has already cost nothing.
        method, options: of the registry of edit methods.

    Raises:
        FieldError: no such field, or a value that cannot be used.
        EditError: the method cannot do it.
        ContextOverflowError: the prompt becomes too long.
    """
    tokenizer = context.model.tokenizer
    wanted: dict[str, str] = {}
    for name, value in values.items():
        context.text.check_field(name)
        if not isinstance(value, str):
            raise AgentError(f"the value of field {name!r} is a {type(value).__name__}; values are text")
        made = check_value(tokenizer, name, value)
        if context.values[name] != made:
            wanted[name] = made
    if not wanted:
        return Changed(context, 0, 0, len(context))
    after = corrected(context.text, tokenizer, wanted)
    check_room(context.model, len(after.tokenise(tokenizer)))
    if method == "full_prefill" and not options:
        made = fresh(context, wanted)
        return Changed(made, len(made), 0, 0)
    if method == "full_suffix" and not options:
        step = advance(context, after)
        return Changed(step.context, step.tokens_run, 0, step.reused)
    run = planning = 0
    ran: set[int] = set()
    for name, value in wanted.items():
        context, report = context.edit(name, value, method, **options)
        run, planning = run + report.tokens_run, planning + report.planning_tokens
        ran |= {*report.rows("run"), *report.rows("donor")}
        check_room(context.model, len(context))
    return Changed(context, run, planning, len(context) - len(ran))


@dataclass(frozen=True)
class Changed:
    """A context with other values, tokens run to repair it and to plan, and rows that were not run."""

    context: EditableContext
    tokens_run: int
    planning_tokens: int
    reused: int


def with_request(text: FieldText, request: str, closing: str) -> FieldText:
    """The text with another request at its end."""
    return replace(text, nodes=(*text.nodes[: text.tail], Node(request + closing)))


def with_log(text: FieldText, line: str) -> FieldText:
    """The text with a line of the log behind everything said so far, in front of the request."""
    return text.with_line([Node(line if line.endswith("\n") else line + "\n", mark="log")])


def checked(tokenizer: Any, what: str, text: str) -> str:
    """Text that may go into the prompt, without white space at its ends.

    Raises:
        AgentError: it is empty.
        SpanError: it holds a special token.
    """
    if not isinstance(text, str) or not text.strip():
        raise AgentError(f"the {what} is empty; say something")
    refuse_special(tokenizer, what, text)
    return text.strip()


__all__ = [
    "Advanced",
    "Changed",
    "advance",
    "build",
    "check_room",
    "checked",
    "corrected",
    "fresh",
    "with_log",
    "with_request",
    "with_values",
]
