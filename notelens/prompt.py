"""Tokenised prompts with named spans, and pairs of prompts that differ in one span only.

Words (DESIGN section 2): the *field* is the span whose value may change, the *trigger* the rule tokens that flip the
conclusion while the field stays, the *decision position* the last token of the prompt, at which the answer is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from notelens.errors import AnswerError, PairError, SpanError

Axis = Literal["field", "trigger"]


@dataclass(frozen=True)
class Span:
    """A half-open range of token positions ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise SpanError(f"span [{self.start}, {self.stop}) is empty or negative")

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of the span, ascending."""
        return tuple(range(self.start, self.stop))


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt.

    Attributes:
        id: unique within a task; stable across processes.
        text: the rendered text that was tokenised.
        token_ids: ids of the whole prompt; the last one is the decision position.
        tokens: the text of each token (lossy for partial characters; for display only).
        spans: named spans. ``"field"`` and ``"trigger"`` may have several parts; all of them are token ranges.
        regions: a label for every token (``template``, ``system``, ``record``, ``field``, ``filler``, ``rule``,
            ``trigger``, ``request``); same length as ``token_ids``.
        anchors: named single positions at which probes read, e.g. ``rule_end``, ``before_request``, ``before_decision``,
            ``decision``.
        answer: the word that is right for this prompt.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    spans: Mapping[str, tuple[Span, ...]]
    regions: tuple[str, ...]
    anchors: Mapping[str, int]
    answer: str

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if n < 2:
            raise SpanError(f"prompt {self.id!r} has {n} tokens; at least 2 are needed")
        if len(self.tokens) != n or len(self.regions) != n:
            raise SpanError(
                f"prompt {self.id!r}: {n} token ids, {len(self.tokens)} token texts, {len(self.regions)} regions"
            )
        for name, parts in self.spans.items():
            for part in parts:
                if part.stop > n:
                    raise SpanError(f"prompt {self.id!r}: span {name!r} ends at {part.stop} of {n} tokens")
        for name, pos in self.anchors.items():
            if not 0 <= pos < n:
                raise SpanError(f"prompt {self.id!r}: anchor {name!r} is at {pos} of {n} tokens")
        object.__setattr__(self, "spans", MappingProxyType(dict(self.spans)))
        object.__setattr__(self, "anchors", MappingProxyType(dict(self.anchors)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def decision(self) -> int:
        """The decision position (the last token)."""
        return len(self.token_ids) - 1

    def positions(self, name: str) -> tuple[int, ...]:
        """All positions of the named span, ascending.

        Raises:
            SpanError: the prompt has no such span; the message lists those it has.
        """
        if name not in self.spans:
            raise SpanError(f"prompt {self.id!r} has no span {name!r}; it has {', '.join(sorted(self.spans))}")
        return tuple(p for part in self.spans[name] for p in part.positions)

    def after(self, name: str) -> tuple[int, ...]:
        """Positions behind the last token of the named span, up to but excluding the decision position."""
        return tuple(range(self.positions(name)[-1] + 1, self.decision))


@dataclass(frozen=True)
class Pair:
    """Two prompts of equal length that differ only inside one named span and have different right answers.

    Attributes:
        id: unique within a task.
        cluster: what instances are resampled by (the scenario family).
        form: rule form (``two_clause``, ``polarity``, ``swapped``, ``negated``, or ``custom``).
        old, new: the prompt before and after the change. ``old.answer`` is right for ``old``.
        axis: which span differs: ``"field"``, or ``"trigger"`` with the field byte-identical.
        answer_ids: first token of ``old.answer`` and of ``new.answer`` in the answer position.
        meta: further facts for the record (values, trigger, filler group).
    """

    id: str
    cluster: str
    form: str
    old: Prompt
    new: Prompt
    axis: Axis
    answer_ids: tuple[int, int]
    meta: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])

    def __post_init__(self) -> None:
        if self.answer_ids[0] == self.answer_ids[1]:
            raise AnswerError(
                f"pair {self.id!r}: answers {self.old.answer!r} and {self.new.answer!r} share their first token "
                f"({self.answer_ids[0]}) with this tokenizer; choose words that start differently"
            )
        differing = self.differing
        allowed = set(self.old.positions(self.axis)) & set(self.new.positions(self.axis))
        outside = [p for p in differing if p not in allowed]
        if outside:
            shown = ", ".join(f"{p} ({self.old.tokens[p]!r} / {self.new.tokens[p]!r})" for p in outside[:2])
            raise PairError(
                f"pair {self.id!r} differs outside the {self.axis} span, at position {shown}"
                f"{' and others' if len(outside) > 2 else ''}; only the {self.axis} may differ"
            )
        if not differing:
            raise PairError(f"pair {self.id!r}: the two prompts have identical tokens")

    @property
    def differing(self) -> tuple[int, ...]:
        """Positions whose token ids differ.

        Raises:
            PairError: the prompts differ in length.
        """
        if len(self.old) != len(self.new):
            raise PairError(
                f"pair {self.id!r}: prompts have {len(self.old)} and {len(self.new)} tokens; pick values of equal token "
                "length (an isolated swap needs aligned rows)"
            )
        pairs: Sequence[tuple[int, int]] = list(zip(self.old.token_ids, self.new.token_ids, strict=True))
        return tuple(i for i, (a, b) in enumerate(pairs) if a != b)

    def reversed(self) -> "Pair":
        """The same pair with old and new exchanged."""
        first, second = self.answer_ids
        return Pair(f"{self.id}~", self.cluster, self.form, self.new, self.old, self.axis, (second, first), self.meta)
