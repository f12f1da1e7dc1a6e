"""A prefilled prompt whose fields can be changed, again and again, each time with a report of what was done."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.cache.hf import from_transformers, to_transformers
from notelens.cache.kv import KVCache
from notelens.cache.rows import Rows
from notelens.edits.base import EditMethod, PlannedMethod
from notelens.edits.dependencies import Dependencies, Recorder
from notelens.edits.edit import Edit
from notelens.edits.report import EditReport, Outcome, Plan, exact_prefix, row_actions
from notelens.edits.resolve import resolve
from notelens.edits.text import FieldText, Tokens
from notelens.errors import AnswerError, CacheError, EditError, SeamError
from notelens.intervene.run_rows import run_rows
from notelens.models.base import NoteModel
from notelens.prompt import Prompt
from notelens.spans import Rendering, encode

if TYPE_CHECKING:
    from notelens.edits.generate import Generated
    from notelens.edits.verify import Verification


class Edited(NamedTuple):
    """A new context and how it came about."""

    context: "EditableContext"
    report: EditReport


@dataclass(frozen=True)
class EditableContext:
    """A prefilled prompt with named fields; a value, never changed.

    Attributes:
        model: what runs it.
        text: the prompt with its fields.
        tokens: what the prompt says now.
        rows: cached rows; an unrepaired row still holds the token it was run with.
        hidden: final-norm output at the last row, ``[d_model]``.
        exact_rows: leading rows that equal a fresh prefill of ``tokens``.
        touched: rows of fields whose repair was approximate, since the context was last exact.
        dependencies: which rows read which, or ``None``.
        reports: of all edits so far.
        build_tokens, build_ms: what the first prefill cost.
    """

    model: NoteModel
    text: FieldText
    tokens: Tokens
    rows: Rows
    hidden: Float[Tensor, " d_model"]
    exact_rows: int
    touched: tuple[int, ...] = ()
    dependencies: Dependencies | None = None
    reports: tuple[EditReport, ...] = ()
    build_tokens: int = 0
    build_ms: float = 0.0

    # --- making one -------------------------------------------------------------------------------------------------------

    @classmethod
    def from_text(
        cls,
        model: NoteModel,
        text: str,
        fields: Mapping[str, str],
        *,
        request: str = "",
        system: str | None = None,
        rendering: Rendering = "chat",
        mentions: str = "one",
        record: bool = True,
    ) -> "EditableContext":
        """Render a message with fields and prefill it once.

        Args:
            model: runs and encodes.
            text: the message; fields are marked ``{{name}}``, or found by their value.
            fields: name to value; a value may hold another field.
            request: end of the message that follows everything mutable.
            system: system text.
            rendering: ``chat``, ``plain`` or ``raw``.
            mentions: ``one`` refuses an unmarked value that is found more than once, ``all`` takes every place.
            record: keep which rows read which (needed by ``auto`` and the ``chain`` ranking; a slower softmax, no token).

        Raises:
            FieldError: a field is not found, found twice where one was meant, or its value cannot be used.
            SeamError: a field's border lies inside a token.

        Cost: one prefill.
        """
        made = FieldText.from_template(
            model.tokenizer, text, fields, request=request, system=system, rendering=rendering, mentions=mentions
        )
        return cls.build(model, made, record=record)

    @classmethod
    def from_prompt(
        cls, model: NoteModel, prompt: Prompt, names: Mapping[str, str] | None = None, *, record: bool = True
    ) -> "EditableContext":
        """A context of a prompt with spans (by default its ``field``). Cost: one prefill.

        Raises:
            FieldError: the prompt has no such span.
            SeamError: encoding its text gives other tokens than it has.
        """
        made = FieldText.from_prompt(model.tokenizer, prompt, names or {"field": "field"})
        tokens = made.tokenise(model.tokenizer)
        if tokens.ids != prompt.token_ids:
            raise SeamError(f"the text of prompt {prompt.id!r} encodes to other tokens than the prompt has")
        return cls.build(model, made, record=record)

    @classmethod
    def build(cls, model: NoteModel, text: FieldText, *, record: bool = True) -> "EditableContext":
        """Prefill a text with fields. Cost: one prefill."""
        started = time.perf_counter()
        tokens = text.tokenise(model.tokenizer)
        n = len(tokens)
        recorder = Recorder(model.geometry.n_layers, n) if record else None
        done = run_rows(model, None, tokens.ids, range(n), watch=recorder)
        known = recorder.done() if recorder is not None else None
        ms = 1e3 * (time.perf_counter() - started)
        return cls(model, text, tokens, Rows.of(done.rows), done.hidden, n, (), known, (), n, ms)

    @classmethod
    def from_transformers(cls, model: NoteModel, text: FieldText, cache: Any) -> "EditableContext":
        """A context around a transformers cache that already holds the text's rows (all of them, or all but the last).

        Raises:
            CacheError: the cache holds another number of rows.

        Cost: one token. The rows are taken as exact, as a cache does not say how it was made; ``verify("exact")`` checks it.
        """
        tokens = text.tokenise(model.tokenizer)
        n, held = len(tokens), int(cache.get_seq_length())
        if held not in (n - 1, n):
            raise CacheError(f"the cache holds {held} rows, the text has {n} tokens; give the cache of this very text")
        kept = Rows.of(from_transformers(cache, tokens.ids[:held]))
        done = run_rows(model, kept, tokens.ids[-1:], (n - 1,))
        rows = kept if held == n else kept.replaced(done.rows, history=())
        return cls(model, text, tokens, rows, done.hidden, n, build_tokens=1)

    # --- what it is -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        mark = "exact" if self.exact else f"approximate ({'; '.join(self.history)})"
        fields = ", ".join(f"{k}={v!r}" for k, v in self.values.items())
        return f"EditableContext({len(self)} tokens, {fields}, {mark})"

    @property
    def values(self) -> Mapping[str, str]:
        """Current value of every field: that of a later line where one updates it."""
        return self.text.current

    @property
    def exact(self) -> bool:
        """Every row equals a fresh prefill of what the prompt says."""
        return self.exact_rows == len(self)

    @property
    def history(self) -> tuple[str, ...]:
        """What makes it approximate; empty when exact."""
        return self.rows.history

    @property
    def key(self) -> str:
        """Name under which the rows may be stored: an approximate context never has the key of an exact one.

        It covers model, type, tokens and, where approximate, the history.
        """
        mark = "exact" if self.exact else f"approximate:{self.history}"
        facts = (self.model.revision, str(self.model.dtype), self.tokens.ids, mark)
        return f"{'exact' if self.exact else 'approximate'}-{hashlib.sha256(repr(facts).encode()).hexdigest()}"

    def cache(self) -> KVCache:
        """One plain cache with the mark. Copies the rows unless they lie in one piece."""
        return replace(self.rows.join(), history=() if self.exact else self.history)

    # --- editing ----------------------------------------------------------------------------------------------------------

    def edit(self, field: str, value: str, method: str | EditMethod = "auto", **options: Any) -> Edited:
        """Change a field.

        Args:
            field: its name.
            value: the new value, of any number of tokens.
            method: a method, or its name with K (``selective@16``).
            options: of the method, where it is named.

        Returns:
            The new context and a report; this context stays as it is.

        Raises:
            EditError: the field, the value or the method do not fit; nothing else is done in its place.

        Cost: as the report says.
        """
        made = resolve(method, **options) if isinstance(method, str) else method
        started = time.perf_counter()
        edit = Edit(self, field, value, made.label, made.errata)
        if made.length_preserving:
            edit.require_equal_length()
        outcome = made.apply(edit)
        ms = 1e3 * (time.perf_counter() - started)
        return self._edited(edit, made, outcome, ms)

    def plan(self, field: str, value: str, method: str | PlannedMethod = "auto", **options: Any) -> Plan:
        """Choose rows once, for edits of this field to any value (pass the plan to the method).

        Raises:
            EditError: the method does not plan.
        """
        made = resolve(method, **options) if isinstance(method, str) else method
        if not isinstance(made, PlannedMethod):
            raise EditError(f"{made.label} chooses no rows, so there is nothing to plan")
        return made.make_plan(Edit(self, field, value, made.label, made.errata))

    def _edited(self, edit: Edit, method: EditMethod, outcome: Outcome, ms: float) -> Edited:
        n = len(outcome.tokens)
        first = edit.first if outcome.first is None else outcome.first
        exact_rows = exact_prefix(self.exact_rows, first, (*outcome.run, *outcome.donor), n)
        exact = exact_rows == n
        history = () if exact else outcome.rows.history
        rows = Rows(outcome.rows.segments, history)
        report = EditReport(
            method=method.label,
            field=edit.name,
            old=self.values[edit.name],
            new=edit.value,
            actions=row_actions(outcome),
            tokens_run=edit.meter.repair,
            planning_tokens=edit.meter.planning,
            prompt_tokens=n,
            suffix_tokens=edit.n - edit.first,
            exact=exact,
            history=history,
            surgery=outcome.surgery,
            appended_only=all(r >= self.tokens.tail for r in outcome.run) and not outcome.donor,
            warnings=outcome.warnings,
            facts=outcome.facts,
            ms=ms - edit.meter.planning_ms,
            planning_ms=edit.meter.planning_ms,
        )
        context = replace(
            self,
            text=outcome.text,
            tokens=outcome.tokens,
            rows=rows,
            hidden=outcome.hidden,
            exact_rows=exact_rows,
            touched=() if exact else tuple(sorted({*self.touched, *edit.edited})),
            dependencies=outcome.dependencies,
            reports=(*self.reports, report),
        )
        return Edited(context, report)

    # --- reading and continuing -------------------------------------------------------------------------------------------

    def next_logits(self) -> Float[Tensor, " vocab"]:
        """Logits of the next token. Cost: one unembedding."""
        return self.model.next_logits(self.hidden)

    def answer_id(self, word: str) -> int:
        """First token of a word right behind the prompt.

        Raises:
            AnswerError: the word merges with the end of the prompt.
        """
        tokenizer = self.model.tokenizer
        if self.text.pinned:
            return encode(tokenizer, word, templated=True)[0]
        text = self.tokens.text
        for lead in ("", " "):
            ids = encode(tokenizer, text + lead + word, templated=True)
            if ids[: len(self)] == self.tokens.ids and len(ids) > len(self) and (lead or not text[-1:].isalnum()):
                return ids[len(self)]
        raise AnswerError(
            f"answer {word!r} changes the tokens at the end of the prompt; end the prompt with another cue"
        )

    def decide(self, answers: Sequence[str]) -> dict[str, float]:
        """Probability of each answer's first token among the answers given.

        Raises:
            AnswerError: two answers share it.
        """
        ids = [self.answer_id(word) for word in answers]
        if len(set(ids)) != len(ids):
            raise AnswerError(f"answers {list(answers)} share a first token with this tokenizer; choose other words")
        shares = torch.softmax(self.model.answer_logits(self.hidden, ids), dim=-1)
        return dict(zip(answers, shares.tolist(), strict=True))

    def append(self, token_ids: Sequence[int]) -> "EditableContext":
        """Run further tokens behind the prompt; the mark stays. Cost: the tokens."""
        n = len(self)
        at = range(n, n + len(token_ids))
        recorder = None
        if self.dependencies is not None:
            recorder = Recorder(self.model.geometry.n_layers, n + len(token_ids), self.dependencies)
        done = run_rows(self.model, self.rows, list(token_ids), at, watch=recorder)
        made = self.extended(done.rows, done.hidden)
        return made if recorder is None else replace(made, dependencies=recorder.done())

    def extended(self, rows: KVCache, hidden: Tensor) -> "EditableContext":
        """This context with rows that were run behind it; the mark stays, as they were computed from its rows."""
        return replace(
            self,
            text=self.text.followed_by(rows.token_ids),
            tokens=replace(self.tokens, ids=(*self.tokens.ids, *rows.token_ids)),
            rows=self.rows.replaced(rows, history=self.history),
            hidden=hidden,
            exact_rows=self.exact_rows + (len(rows) if self.exact else 0),
            dependencies=None,
        )

    def continue_with(self, text: str) -> "EditableContext":
        """Append text (a further turn, a tool result). It is encoded on its own, behind what is cached.

        Raises:
            EditError: the text is empty.

        Cost: its tokens.
        """
        if not text:
            raise EditError("there is no text to continue with")
        return self.append(encode(self.model.tokenizer, text, templated=True))

    def generate(
        self, max_tokens: int, *, temperature: float = 0.0, seed: int | None = None, stop: Sequence[int] | None = None
    ) -> "Generated":
        """Decode behind the prompt, greedily or sampled; see :func:`notelens.edits.generate.generate`."""
        from notelens.edits.generate import generate

        return generate(self, max_tokens, temperature=temperature, seed=seed, stop=stop)

    def verify(self, level: str = "exact", **options: Any) -> "Verification":
        """Check the rows against the prompt; see :func:`notelens.edits.verify.verify`."""
        from notelens.edits.verify import verify

        return verify(self, level, **options)

    def recorded(self) -> "EditableContext":
        """This context with a record of which rows read which. Cost: one prefill; the rows stay as they are."""
        recorder = Recorder(self.model.geometry.n_layers, len(self))
        run_rows(self.model, None, self.tokens.ids, range(len(self)), watch=recorder)
        return replace(self, dependencies=recorder.done(), build_tokens=self.build_tokens + len(self))

    def generate_inputs(self) -> dict[str, Any]:
        """What transformers' ``model.generate`` takes: ids, and a cache of all rows but the last, which it runs itself.

        The cache is a copy; it carries no mark, so check :attr:`exact` before you store what comes out of it.
        """
        n = len(self)
        store = to_transformers(Rows(self.rows.between(0, n - 1)).join())
        ids = torch.tensor([self.tokens.ids], device=self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": store}
