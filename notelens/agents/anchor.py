"""When to pay for a fresh prefill of a prompt that has been repaired approximately again and again."""

from dataclasses import dataclass
from typing import Protocol

from notelens.edits.context import EditableContext
from notelens.errors import AgentError


@dataclass(frozen=True)
class Check:
    """What a policy says.

    Attributes:
        due: pay for a fresh prefill now.
        tokens: run to find out.
        drift: largest relative difference of a checked row from what the rows in front of it give; infinite where a row still
            holds the token of an old value; ``None`` where nothing was measured.
    """

    due: bool
    tokens: int = 0
    drift: float | None = None


class Policy(Protocol):
    """A re-anchoring policy; asked behind every update."""

    def check(self, context: EditableContext, updates: int) -> Check:
        """Whether to re-anchor, ``updates`` calls after the last fresh prefill."""
        ...


def clean(context: EditableContext) -> bool:
    """A fresh prefill of the corrected prompt would give the very same rows: exact, and no line updates a field."""
    return context.exact and not context.text.updates


@dataclass(frozen=True)
class Never:
    """Never re-anchor."""

    def check(self, context: EditableContext, updates: int) -> Check:
        """Not due. Cost: nothing."""
        return Check(False)


@dataclass(frozen=True)
class EveryTurns:
    """Re-anchor behind every ``n``-th update.

    Raises:
        AgentError: ``n`` is below 1.
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise AgentError(
                f"re-anchoring every {self.n} turns cannot be done; give a number from 1 on, or use Never()"
            )

    def check(self, context: EditableContext, updates: int) -> Check:
        """Due by count, where there is anything to gain. Cost: nothing."""
        return Check(updates >= self.n and not clean(context))


@dataclass(frozen=True)
class OnDrift:
    """Re-anchor where a spot check (:func:`~notelens.edits.verify.verify`) finds a difference above a bound.

    Args:
        bound: largest relative difference that is tolerated; measure it on exact and on repaired contexts of the model.
        rows: rows checked.
        every: check behind every so many updates.
        seed: of the choice of rows; the number of updates is added to it, so that checks differ.

    Raises:
        AgentError: a number is out of range.
    """

    bound: float
    rows: int = 16
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.bound >= 0 or self.rows < 1 or self.every < 1:
            raise AgentError(
                f"OnDrift needs a bound of at least 0, 1 row and 1 turn; got {self.bound}, {self.rows} and {self.every}"
            )

    def check(self, context: EditableContext, updates: int) -> Check:
        """Due where the drift is above the bound. Cost: the checked rows; nothing where the rows are exact.

        A row that still holds the token of an old value is infinite drift, and found without running anything.
        """
        if clean(context) or updates % self.every:
            return Check(False)
        if context.rows.token_ids != context.tokens.ids:
            return Check(True, 0, float("inf"))
        if context.exact:
            return Check(False, 0, 0.0)
        found = context.verify("spot", rows=self.rows, seed=self.seed + updates)
        return Check(found.max_difference > self.bound, found.tokens_run, found.max_difference)


__all__ = ["Check", "EveryTurns", "Never", "OnDrift", "Policy", "clean"]
