"""What is behind a session: its state, which is one value, and the one place where a new state is put in."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from notelens.agents.accounts import SessionReport, Turn
from notelens.agents.anchor import Check, Never, Policy
from notelens.agents.prompt import Changed, check_room, fresh
from notelens.edits.context import EditableContext
from notelens.edits.resolve import resolve
from notelens.edits.text import FieldText
from notelens.errors import AgentError
from notelens.models.base import NoteModel


@dataclass(frozen=True)
class ToolResult:
    """What a tool gives back.

    Attributes:
        text: a line for the log of the conversation.
        updates: fields whose values the call has changed.
    """

    text: str
    updates: Mapping[str, str] = field(default_factory=dict[str, str])


Tool = Callable[..., "ToolResult | str"]


@dataclass(frozen=True)
class Reply:
    """What the model says.

    Attributes:
        token: its next token, as a word.
        token_id: id of it.
        answer: the likeliest of the answers that were asked for; ``None`` where none were.
        scores: probability of every such answer among them.
        text: what was generated; empty where nothing was.
        logits: of the next token, ``[vocab]``.
        turn: what it cost.
    """

    token: str
    token_id: int
    answer: str | None
    scores: Mapping[str, float]
    text: str
    logits: Float[Tensor, " vocab"]
    turn: Turn


@dataclass(frozen=True)
class State:
    """Everything about a session that changes; a value. ``updates``: calls since the last fresh prefill."""

    context: EditableContext
    request: str
    turns: tuple[Turn, ...]
    updates: int = 0


class SessionCore:
    """State, accounts and policy of a session; callers use :class:`~notelens.agents.session.Session`."""

    model: NoteModel
    method: str
    options: dict[str, Any]
    reanchoring: Policy
    tools: dict[str, Tool]
    _closing: str
    _state: State

    def _begin(
        self,
        model: NoteModel,
        text: FieldText,
        request: str,
        method: str,
        options: Mapping[str, Any] | None,
        reanchor: Policy | None,
        tools: Mapping[str, Tool] | None,
    ) -> None:
        resolve(method, **(options or {}))  # refuses what it does not know before anything is run
        tail = "".join(n.text for n in text.nodes[text.tail :])
        if any(n.field for n in text.nodes[text.tail :]) or not tail.startswith(request):
            raise AgentError(f"the request {request!r} must end the prompt and may not hold a field")
        self.model = model
        self.method, self.options = method, dict(options or {})
        self.reanchoring: Policy = reanchor or Never()
        self.tools = dict(tools or {})
        self._closing = tail[len(request) :]

    def _record(self, record: bool | None) -> bool:
        return self.method.partition("@")[0] == "auto" if record is None else record

    def _start(self, context: EditableContext, request: str, ms: float) -> None:
        turn = self._turn(
            "build", context, ms, tokens=context.build_tokens, reused=max(0, len(context) - context.build_tokens)
        )
        self._state = State(context, request, (turn,))

    # --- what it is -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._state.context)

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in self.values.items())
        mark = "exact" if self.exact else "approximate"
        turn = len(self._state.turns) - 1
        return f"Session({self.model.name}, {len(self)} tokens, {fields}, {self.method}, {mark}, turn {turn})"

    @property
    def context(self) -> EditableContext:
        """The prompt as it is cached now; a value that never changes."""
        return self._state.context

    @property
    def values(self) -> Mapping[str, str]:
        """Current value of every field."""
        return self.context.values

    @property
    def exact(self) -> bool:
        """Every row equals a fresh prefill of what the prompt says."""
        return self.context.exact

    def report(self) -> SessionReport:
        """Cost and mark, turn by turn."""
        return SessionReport(self._state.turns, self.exact, self.context.history)

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _changed(self, kind: str, changed: Changed, started: float, detail: str, *, counts: bool = True) -> Turn:
        """Ask the policy, then commit: the only way in which changed fields become the session's."""
        context, tokens = changed.context, changed.tokens_run
        updates = self._state.updates + counts
        found = self.reanchoring.check(context, updates) if counts else Check(False)
        if found.due:
            context = fresh(context, context.values)
            tokens, updates = tokens + len(context), 0
        turn = self._turn(
            kind, context, passed_ms(started), tokens=tokens, reused=0 if found.due else changed.reused, detail=detail,
            planning=changed.planning_tokens, check=found,
        )  # fmt: skip
        self._commit(replace(self._state, context=context, turns=(*self._state.turns, turn), updates=updates))
        return turn

    def _turn(
        self,
        kind: str,
        context: EditableContext,
        ms: float,
        *,
        tokens: int,
        reused: int,
        planning: int = 0,
        decoded: int = 0,
        check: Check | None = None,
        detail: str = "",
    ) -> Turn:
        check_room(self.model, len(context))
        return Turn(
            kind, tokens, ms, len(context), reused, sum(context.rows.storages().values()), context.exact, planning,
            check.tokens if check is not None else 0, decoded, context.history,
            check.drift if check is not None else None, check is not None and check.due, detail,
        )  # fmt: skip

    def _commit(self, state: State) -> None:
        """The last step of every call, and the only one that changes the session."""
        self._state = state


def passed_ms(started: float) -> float:
    """Milliseconds since ``time.perf_counter()`` gave ``started``."""
    return 1e3 * (time.perf_counter() - started)


def leading(tokenizer: Any, text: str, ids: Sequence[int]) -> str:
    """The beginning of ``text`` that decodes from ``ids``, white space at its ends left out."""
    squeezed = "".join(str(tokenizer.decode(list(ids))).split())
    at = seen = 0
    while at < len(text) and seen < len(squeezed):
        if not text[at].isspace():
            if text[at].lower() != squeezed[seen].lower():
                raise AgentError(f"the prompt's request {squeezed[:40]!r} does not begin its end {text[:40]!r}")
            seen += 1
        at += 1
    return text[:at]


__all__ = ["Reply", "SessionCore", "State", "Tool", "ToolResult", "leading", "passed_ms"]
