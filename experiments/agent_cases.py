"""Cases of the experiments on agents: sessions in which a field changes, and the prefills that they are compared with."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from experiments.edit_cases import Case
from experiments.edit_harness import EditConfig, Stage, cases_of
from notelens.edits.context import EditableContext
from notelens.edits.lines import ERRATUM, fill
from notelens.edits.text import FieldText, Node
from notelens.errors import SpanError
from notelens.models.base import NoteModel
from notelens.prompt import Prompt

FULL = "full_prefill"
"""The baseline: a prefill of the corrected prompt."""


class AgentConfig(EditConfig):
    """What every experiment on agents is told.

    Attributes:
        arms: see the module.
        turns: of a session; the first has no update.
        pattern: ``toggle`` changes the field at every turn, ``random`` draws its value, so that some turns change nothing.
        lengths: tokens of the prompts.
        between: share of the filler between field and rule.
        gate: least oracle accuracy.
        margin: largest difference of success that counts as equal.
    """

    arms: tuple[str, ...]
    turns: int = Field(default=12, ge=2)
    pattern: Literal["toggle", "random"] = "random"
    lengths: tuple[int | None, ...] = (None,)
    between: float | None = None
    gate: float = Field(default=0.8, ge=0, le=1)
    margin: float = Field(default=0.02, gt=0)

    @field_validator("arms")
    @classmethod
    def _no_baseline(cls, arms: tuple[str, ...]) -> tuple[str, ...]:
        """The baseline always runs; as an arm it would be counted twice."""
        if FULL in arms:
            raise ValueError(f"{FULL} is the baseline of every case; leave it out of the arms")
        return arms


@dataclass(frozen=True)
class SessionCase:
    """A session: a prompt whose field takes values in a given order.

    Attributes:
        id, family: of the case; intervals resample cases.
        prompts: one per value; they differ in the field only.
        name: of the field.
        values, answers, answer_ids: one each per value.
        order: index of the value at each turn.
    """

    id: str
    family: str
    prompts: tuple[Prompt, ...]
    name: str
    values: tuple[str, ...]
    answers: tuple[str, ...]
    answer_ids: tuple[int, ...]
    order: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])


def session_case(case: Case, turns: int, pattern: str, seed: int) -> SessionCase:
    """A session in which the field of an editing case changes at the turns that ``pattern`` says."""
    rng = random.Random(f"{seed}/{case.id}/order")
    order = [0]
    while len(order) < turns:
        order.append(1 - order[-1] if pattern == "toggle" else rng.randrange(2))
    return SessionCase(
        case.id, case.family, (case.old, case.new), case.name, case.values, case.answers, case.answer_ids, tuple(order),
        dict(case.meta),
    )  # fmt: skip


def session_cases(model: NoteModel, config: AgentConfig, stage: Stage) -> list[SessionCase]:
    """Sessions of a stage, over the cases of the editing experiments."""
    turns = int(stage.params.get("turns", config.turns))
    source = {k: v for k, v in stage.source.items() if k != "turns"}
    found = cases_of(model, config, replace(stage, source=source))
    return [session_case(case, turns, config.pattern, config.seed) for case in found]


def length_stages(config: AgentConfig) -> list[Stage]:
    """One per prompt length."""
    more = {"between": config.between} if config.task in ("gated", "organism") else {}
    return [
        Stage(f"length{n}", {"length": n, "turns": config.turns}, ({"length": n, **more} if more else {}))
        for n in config.lengths
    ]


# --- baselines --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefill:
    """A prefill of one prompt: next token, logits, tokens, time to the logits."""

    top: int
    logits: np.ndarray
    tokens: int
    ms: float


def prefill(model: NoteModel, text: FieldText) -> Prefill:
    """Prefill a text from nothing and read the next token."""
    started = time.perf_counter()
    made = EditableContext.build(model, text, record=False)
    logits = made.next_logits()
    ms = 1e3 * (time.perf_counter() - started)
    return Prefill(int(logits.argmax()), logits.float().cpu().numpy(), len(made), ms)


@dataclass(frozen=True)
class Baselines:
    """Prefills of a case, one per value: corrected, and with the errata that an agent would have appended."""

    corrected: tuple[Prefill, ...]
    errata: tuple[Prefill, ...]

    @classmethod
    def of(cls, model: NoteModel, case: SessionCase) -> "Baselines":
        """Cost: two prefills per value."""
        tokenizer = model.tokenizer
        texts = [FieldText.from_prompt(tokenizer, p, {"field": case.name}) for p in case.prompts]
        first = texts[case.order[0]]
        lines = [fill(ERRATUM, case.name, v) for v in case.values]
        known = [first.with_line([Node(line)]) for line in lines]
        errata: list[Prefill] = []
        for text in known:
            try:
                errata.append(prefill(model, text))
            except SpanError:  # a vocabulary without the words of the line: there is no such baseline
                break
        return cls(tuple(prefill(model, t) for t in texts), tuple(errata))

    def with_errata(self, case: SessionCase, turn: int) -> Prefill | None:
        """The prompt of a turn with errata, without any until a value has changed; ``None`` where there are none."""
        if not self.errata:
            return None
        v = case.order[turn]
        return self.errata[v] if any(w != case.order[0] for w in case.order[: turn + 1]) else self.corrected[v]

    def right(self, case: SessionCase) -> list[bool]:
        """Whether the corrected prompt is answered right, per value that the session uses."""
        return [self.corrected[v].top == case.answer_ids[v] for v in sorted(set(case.order))]


__all__ = [
    "FULL",
    "AgentConfig",
    "Baselines",
    "Prefill",
    "SessionCase",
    "length_stages",
    "prefill",
    "session_case",
    "session_cases",
]
