"""What an edit leaves behind: rows, what happened to each of them, what it cost, whether it is exact."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from notelens.cache.rows import Rows, runs
from notelens.edits.dependencies import Dependencies
from notelens.edits.text import FieldText, Tokens

ExactWhen = Literal["always", "prefix_exact", "covers_all_rows", "never"]
"""``always``: whatever was there before. ``prefix_exact``: rows in front of what it runs were exact. ``covers_all_rows``: as
before, and it runs every row behind the field. ``never``: rows stay stale."""
Errata = Literal["refuse", "replace", "drop"]
"""What a method does where a line already updates the field: it cannot leave the line to contradict the new value."""
Action = Literal["kept", "moved", "run", "donor"]


@dataclass(frozen=True)
class RowAction:
    """What happened to rows ``[start, stop)`` of the new context."""

    start: int
    stop: int
    action: Action


@dataclass(frozen=True)
class EditReport:
    """What an edit really did.

    Attributes:
        method: its name, with K where it has one.
        field, old, new: what changed.
        actions: every row of the new context, in order.
        tokens_run: tokens run to repair the cache, the read-out of the last row included.
        planning_tokens: further tokens run to decide what to repair (0 where a plan was reused).
        prompt_tokens: rows of the new context.
        suffix_tokens: rows from the first changed one on: what a full suffix recompute runs.
        exact: every row equals a fresh prefill of the new context's tokens.
        history: why it is approximate; empty when exact.
        surgery: how the prompt itself was changed beyond the value, or empty.
        appended_only: every old row in front of the tail is still there, as it was.
        warnings: what the caller should know.
        facts: what the method wants to tell (plan, ranking).
        ms, planning_ms: wall time of repair and planning.
    """

    method: str
    field: str
    old: str
    new: str
    actions: tuple[RowAction, ...]
    tokens_run: int
    planning_tokens: int
    prompt_tokens: int
    suffix_tokens: int
    exact: bool
    history: tuple[str, ...]
    surgery: str
    appended_only: bool
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    ms: float = 0.0
    planning_ms: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Repair and planning."""
        return self.tokens_run + self.planning_tokens

    @property
    def recompute_share(self) -> float:
        """Tokens run, planning included, as a share of the prompt."""
        return self.total_tokens / self.prompt_tokens

    @property
    def suffix_share(self) -> float:
        """Tokens run, planning included, as a share of a full suffix recompute."""
        return self.total_tokens / self.suffix_tokens

    def rows(self, action: Action) -> tuple[int, ...]:
        """Rows with an action, ascending."""
        return tuple(r for a in self.actions if a.action == action for r in range(a.start, a.stop))


@dataclass(frozen=True)
class Outcome:
    """The repaired rows and the text they stand for.

    Attributes:
        rows: of the whole new context.
        hidden: final-norm output at its last row.
        text, tokens: of the new context.
        run: rows that were run, ascending.
        donor: rows copied from a fresh prefill.
        moved: rows that stand at another position than before.
        surgery, warnings, facts: as in the report.
        dependencies: record of the new context.
        first: first row that is not the old one; the field's first changed row when ``None``.
    """

    rows: Rows
    hidden: Tensor
    text: FieldText
    tokens: Tokens
    run: tuple[int, ...]
    donor: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    surgery: str = ""
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    dependencies: Dependencies | None = None
    first: int | None = None


@dataclass
class Meter:
    """Tokens run, in two purses, and the time that planning took."""

    repair: int = 0
    planning: int = 0
    planning_ms: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Which rows to repair, decided once and usable for other values of the same field.

    Attributes:
        field: the field it is for.
        method: what made it.
        rows: rows of the context it was made on, without the field's own.
        tokens: tokens run to make it.
        ms: wall time to make it.
        facts: how it was found.
    """

    field: str
    method: str
    rows: tuple[int, ...]
    tokens: int
    ms: float
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def exact_prefix(before: int, first: int, run: Iterable[int], n: int) -> int:
    """Leading rows that equal a fresh prefill after an edit.

    Args:
        before: how many there were.
        first: first row whose token changed.
        run: rows that were run in one pass on top of the rows in front of them.
        n: rows of the new prompt.
    """
    at, own = min(before, first), set(run)
    while at < n and at in own:
        at += 1
    return at


def row_actions(outcome: Outcome) -> tuple[RowAction, ...]:
    """Every row of an outcome with what happened to it, as ranges in order."""
    groups: dict[Action, set[int]] = {
        "run": set(outcome.run) - set(outcome.donor),
        "donor": set(outcome.donor),
        "moved": set(outcome.moved),
    }
    groups["kept"] = set(range(len(outcome.rows))) - set().union(*groups.values())
    found = [RowAction(a, b, action) for action, rows in groups.items() for a, b in runs(rows)]
    return tuple(sorted(found, key=lambda r: r.start))
