"""A prompt that lives for many turns: the world changes, the cache is edited, the model answers.

>>> session = Session(model, policy + "The order is {{status}}.", {"status": "pending"}, request=" What do you do?")
>>> session.update(status="delivered")
>>> session.ask(answers=("cancel", "refuse")).answer

Every public call either does all of what it says or raises and leaves the session as it was: a new state is computed beside
the old one and put in its place at the very end.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from notelens.agents import storage
from notelens.agents.accounts import Turn
from notelens.agents.anchor import Policy
from notelens.agents.core import Reply, SessionCore, State, Tool, ToolResult, leading, passed_ms
from notelens.agents.prompt import Changed, advance, build, checked, fresh, with_log, with_request, with_values
from notelens.compose.base import Composer
from notelens.compose.skill import Skill
from notelens.edits.context import EditableContext
from notelens.edits.text import FieldText
from notelens.errors import AgentError, ToolError
from notelens.models.base import NoteModel
from notelens.prompt import Prompt
from notelens.registry import nearest
from notelens.spans import Rendering


class Session(SessionCore):
    """A live prompt with static parts, fields and skills.

    Args:
        model: runs it.
        static: parts in order: text in which fields are marked ``{{name}}`` (or found by their value), and compiled skills
            (:func:`notelens.compose.compile_skill`), which are spliced instead of prefilled.
        fields: name to value.
        request: what is asked where ``ask`` is given nothing; it ends the prompt.
        system, rendering: as for :meth:`~notelens.edits.context.EditableContext.from_text`.
        method: edit method by name (``auto``, ``erratum``, ``selective@16``, ...; see ``notelens.edits.EDITS``).
        options: of the method.
        composer: how skills are spliced, by name or as an object (:class:`notelens.compose.References`).
        reanchor: when to pay for a fresh prefill of the corrected prompt, see :mod:`notelens.agents.anchor`.
        tools: functions by name that :meth:`call` runs.
        record: keep which rows read which, as ``auto`` needs; by default where the method is ``auto``.

    Raises:
        FieldError, SeamError, SpanError: as ``from_text``.
        ComposeError: a skill cannot be spliced.
        ContextOverflowError: the prompt is longer than the model's positions.
        UnknownNameError: no such method.

    Cost: one prefill; with skills, the text around them (and a prefill where ``record`` is set).
    """

    def __init__(
        self,
        model: NoteModel,
        static: str | Sequence[str | Skill],
        fields: Mapping[str, str],
        *,
        request: str,
        system: str | None = None,
        rendering: Rendering = "chat",
        method: str = "auto",
        options: Mapping[str, Any] | None = None,
        composer: str | Composer = "seam@4",
        reanchor: Policy | None = None,
        tools: Mapping[str, Tool] | None = None,
        record: bool | None = None,
    ) -> None:
        parts = [static] if isinstance(static, str) else list(static)
        for part in parts:
            if not isinstance(part, str | Skill):
                raise AgentError(f"a static part is a {type(part).__name__}; give text or compiled skills")
        text = "".join(p if isinstance(p, str) else str(model.tokenizer.decode(list(p.token_ids))) for p in parts)
        request = checked(model.tokenizer, "request", request)
        made = FieldText.from_template(
            model.tokenizer, text, fields, request=request, system=system, rendering=rendering
        )
        self._begin(model, made, request, method, options, reanchor, tools)
        started = time.perf_counter()
        skills = tuple({id(p): p for p in parts if isinstance(p, Skill)}.values())
        context = build(model, made, skills, composer=composer, record=self._record(record))
        self._start(context, request, passed_ms(started))

    @classmethod
    def from_prompt(
        cls,
        model: NoteModel,
        prompt: Prompt,
        names: Mapping[str, str],
        *,
        method: str = "auto",
        options: Mapping[str, Any] | None = None,
        skills: Sequence[Skill] = (),
        composer: str | Composer = "seam@4",
        reanchor: Policy | None = None,
        tools: Mapping[str, Tool] | None = None,
        record: bool | None = None,
        context: EditableContext | None = None,
    ) -> "Session":
        """A session of a prompt with spans.

        Args:
            model: runs it.
            prompt: its region ``request`` is the request.
            names: span name to field name.
            method, options, composer, reanchor, tools, record: as for the class.
            skills: compiled texts that stand in the prompt.
            context: the prompt with these fields, prefilled; sessions may begin with the same one, and each is charged for it.

        Raises:
            AgentError: the prompt has no request, or the context is one of another prompt or model.
            FieldError, SeamError: as :meth:`~notelens.edits.text.FieldText.from_prompt`.

        Cost: one prefill; none where ``context`` is given.
        """
        made = FieldText.from_prompt(model.tokenizer, prompt, names)
        n = sum(label == "request" for label in prompt.regions)
        at = [i for i, label in enumerate(prompt.regions) if label == "request"]
        if not n or at[-1] - at[0] + 1 != n:
            raise AgentError(f"prompt {prompt.id!r} has no request in one piece; a session needs to know what is asked")
        tail = "".join(node.text for node in made.nodes[made.tail :])
        session = cls.__new__(cls)
        session._begin(
            model,
            made,
            leading(model.tokenizer, tail, prompt.token_ids[at[0] : at[-1] + 1]),
            method,
            options,
            reanchor,
            tools,
        )
        started = time.perf_counter()
        if context is None:
            context = build(model, made, skills, composer=composer, record=session._record(record))
            context = replace(context, build_ms=passed_ms(started))
        elif context.model is not model or context.text != made:
            raise AgentError(
                f"the context is not one of prompt {prompt.id!r} with this model; leave it out or build it anew"
            )
        request = tail[: len(tail) - len(session._closing)]
        session._start(context, request, context.build_ms)
        return session

    # --- turns ------------------------------------------------------------------------------------------------------------

    def update(self, **values: str) -> Turn:
        """Change fields, all of them or none.

        Raises:
            FieldError: no such field, or a value that cannot be used.
            EditError: the edit method cannot do it; the message names the alternatives.
            ContextOverflowError: the prompt becomes too long.

        Cost: as the edit method's; a fresh prefill where the re-anchoring policy asks for one. Values that fields have already
        cost nothing.
        """
        if not values:
            raise AgentError("nothing to update; name at least one field with its value")
        started = time.perf_counter()
        changed = with_values(self.context, values, self.method, self.options)
        return self._changed("update", changed, started, ", ".join(f"{k}={v}" for k, v in values.items()))

    def ask(
        self,
        request: str | None = None,
        *,
        answers: Sequence[str] = (),
        max_tokens: int = 0,
        keep: bool = False,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Reply:
        """Let the model answer.

        Args:
            request: the question; the one asked before when ``None``.
            answers: words to choose among by their first token.
            max_tokens: tokens to generate; with 0 only the next token is read.
            keep: put request and reply (the generated text, else the answer, else the token) into the log of the prompt.
            temperature, seed: of generating.

        Raises:
            AgentError: an empty request, or fewer than no tokens.
            AnswerError: two answers share their first token.
            ContextOverflowError: request and generated tokens do not fit.

        Cost: tokens from the first one that differs from what is cached; none where the same request stands there already.
        """
        started = time.perf_counter()
        state = self._state
        wanted = state.request if request is None else checked(self.model.tokenizer, "request", request)
        if max_tokens < 0:
            raise AgentError(f"max_tokens is {max_tokens}; it cannot be negative")
        step = advance(state.context, with_request(state.context.text, wanted, self._closing), room=max_tokens)
        context, tokens = step.context, step.tokens_run
        logits = context.next_logits()
        top = int(logits.argmax())
        ms = 1e3 * (time.perf_counter() - started)
        scores = context.decide(answers) if answers else {}
        answer = max(scores, key=lambda w: scores[w]) if scores else None
        done = context.generate(max_tokens, temperature=temperature, seed=seed) if max_tokens else None
        word = str(self.model.tokenizer.decode([top]))
        if keep:
            said = (done.text if done is not None else answer or word).strip() or word
            kept = advance(context, with_log(context.text, f"{wanted}\n{said}\n"))
            context, tokens = kept.context, tokens + kept.tokens_run
        decoded = len(done.ids) if done is not None else 0
        turn = self._turn("ask", context, ms, tokens=tokens, reused=step.reused, decoded=decoded, detail=wanted)
        reply = Reply(word, top, answer, scores, done.text if done is not None else "", logits, turn)
        self._commit(replace(state, context=context, request=wanted, turns=(*state.turns, turn)))
        return reply

    def add(self, text: str) -> Turn:
        """Append a line to the log: what a user said, what a tool found.

        Raises:
            AgentError: it is empty.
            ContextOverflowError: it does not fit.

        Cost: the line and the request behind it.
        """
        started = time.perf_counter()
        line = checked(self.model.tokenizer, "line", text)
        step = advance(self.context, with_log(self.context.text, line))
        turn = self._turn(
            "add", step.context, passed_ms(started), tokens=step.tokens_run, reused=step.reused, detail=line
        )
        self._commit(replace(self._state, context=step.context, turns=(*self._state.turns, turn)))
        return turn

    def call(self, name: str, **arguments: Any) -> ToolResult:
        """Run a tool, change the fields that it names, and append its text to the log: all of it or nothing.

        What the tool has done outside the session is its own business: a tool should check before it acts.

        Raises:
            AgentError: no such tool.
            ToolError: the tool raised, or gave back something else than text or a :class:`ToolResult`.
            FieldError, EditError, ContextOverflowError: as :meth:`update` and :meth:`add`.
        """
        if name not in self.tools:
            raise AgentError(f"there is no tool {name!r}; {nearest(name, sorted(self.tools))}")
        started = time.perf_counter()
        try:
            given = self.tools[name](**arguments)
        except Exception as e:  # a tool may raise anything; it is raised again under one type
            raise ToolError(f"tool {name!r} raised {type(e).__name__}: {e}; the session is as it was") from e
        result = ToolResult(given) if isinstance(given, str) else given
        if not isinstance(result, ToolResult):
            raise ToolError(f"tool {name!r} gave back a {type(given).__name__}; give back text or a ToolResult")
        changed = with_values(self.context, result.updates, self.method, self.options)
        if result.text:
            line = checked(self.model.tokenizer, "line", result.text)
            step = advance(changed.context, with_log(changed.context.text, line))
            tokens = changed.tokens_run + step.tokens_run
            changed = Changed(step.context, tokens, changed.planning_tokens, min(changed.reused, step.reused))
        self._changed("call", changed, started, name, counts=bool(result.updates))
        return result

    def reanchor(self) -> Turn:
        """Pay for a fresh prefill of the corrected prompt now. Cost: all its tokens."""
        started = time.perf_counter()
        made = fresh(self.context, self.values)
        turn = replace(self._turn("reanchor", made, passed_ms(started), tokens=len(made), reused=0), reanchored=True)
        self._commit(replace(self._state, context=made, turns=(*self._state.turns, turn), updates=0))
        return turn

    # --- elsewhere --------------------------------------------------------------------------------------------------------

    def generate_inputs(self) -> dict[str, Any]:
        """Arguments for transformers' ``model.generate``: ids, mask, and a copy of the rows as its cache.

        >>> session.model.hf.generate(**session.generate_inputs(), max_new_tokens=20)
        """
        return self.context.generate_inputs()

    def save(self, path: str | Path) -> Path:
        """Write the session, its mark and its accounts included; the file appears whole or not at all.

        Tools are functions and are not written; pass them to :meth:`resume` again.

        Raises:
            CacheError: the folder does not exist.
        """
        state = self._state
        facts = storage.Facts(
            state.request, self._closing, self.method, self.options, state.updates, state.turns, self.reanchoring
        )
        return storage.write(self.model, state.context, facts, Path(path))

    @classmethod
    def resume(cls, model: NoteModel, path: str | Path, *, tools: Mapping[str, Tool] | None = None) -> "Session":
        """Continue a session that this very model made.

        Raises:
            ArtefactError: no such file, damaged, no session, or made by another model.

        Cost: reading; nothing is run.
        """
        context, facts = storage.read(model, Path(path))
        session = cls.__new__(cls)
        session._begin(model, context.text, facts.request, facts.method, facts.options, facts.reanchor, tools)
        session._state = State(context, facts.request, facts.turns, facts.updates)
        return session


__all__ = ["Reply", "Session", "Tool", "ToolResult"]
