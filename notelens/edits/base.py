"""What an edit method is and what it declares.

A method gets an :class:`~notelens.edits.edit.Edit` (the old context, the new text, how rows match) and returns an
:class:`~notelens.edits.report.Outcome`. Everything that runs goes through the edit's meter, so cost is what was really run. A
method that cannot do what was asked raises; it never hands over to another method (DESIGN section 7).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from notelens.edits.edit import Edit
from notelens.edits.report import Errata, ExactWhen, Outcome, Plan
from notelens.errors import BudgetError, EditError


class EditMethod(ABC):
    """Base class. A subclass declares what it is and implements :meth:`apply`.

    Class attributes:
        name: registry name.
        paper_ref: where it comes from.
        length_preserving: it needs a new value of as many tokens as the old one.
        append_only: rows in front of the tail are kept as they are.
        exact_when: when its result equals a fresh prefill of its own tokens.
        errata: what it does where a line already updates the field.
        takes_k: it is written ``name@K``, K rows or a share such as ``15%``.
    """

    name: ClassVar[str]
    paper_ref: ClassVar[str]
    length_preserving: ClassVar[bool] = False
    append_only: ClassVar[bool] = False
    exact_when: ClassVar[ExactWhen] = "never"
    errata: ClassVar[Errata] = "refuse"
    takes_k: ClassVar[bool] = False
    k: int | float = 0

    @abstractmethod
    def apply(self, edit: Edit) -> Outcome:
        """Make the edit.

        Raises:
            EditError: it is not possible; the message names the alternatives.
        """

    @property
    def label(self) -> str:
        """Name with K, as in a table."""
        if not self.takes_k:
            return self.name
        return f"{self.name}@{self.k}" if isinstance(self.k, int) else f"{self.name}@{self.k:.0%}"

    def count(self, edit: Edit) -> int:
        """K in rows.

        Raises:
            BudgetError: there are fewer rows behind the field.
        """
        n = len(edit.behind)
        k = self.k if isinstance(self.k, int) else max(1, round(self.k * n))
        if k > n:
            raise BudgetError(
                f"{self.label}: only {n} rows stand behind field {edit.name!r}; use a smaller K or full_suffix"
            )
        return k


class PlannedMethod(EditMethod):
    """A method that first chooses rows, which :meth:`repair` then repairs.

    Args:
        plan: from :meth:`~notelens.edits.context.EditableContext.plan`; the rows are then not chosen anew.
    """

    plan: Plan | None = None

    @abstractmethod
    def choose(self, edit: Edit) -> tuple[Sequence[int], Mapping[str, Any]]:
        """Rows of the new prompt behind the field, and facts about how they were found. Runs are booked as planning."""

    def repair(self, edit: Edit, rows: Sequence[int]) -> Outcome:
        """Run the chosen rows again."""
        return edit.run(rows, note=f"{self.label}: {edit.name}")

    def make_plan(self, edit: Edit) -> Plan:
        """Choose rows and book time and tokens."""
        started = time.perf_counter()
        rows, facts = self.choose(edit)
        ms = 1e3 * (time.perf_counter() - started)
        edit.meter.planning_ms += ms
        old = tuple(sorted(edit.old_row[p] for p in rows if p in edit.old_row))
        return Plan(edit.name, self.label, old, edit.meter.planning, ms, facts)

    def apply(self, edit: Edit) -> Outcome:
        """Choose rows unless a plan was given, then repair them.

        Raises:
            EditError: the plan is for another field, or names rows that the prompt does not have.
        """
        plan = self.plan if self.plan is not None else self.make_plan(edit)
        if plan.field != edit.name:
            raise EditError(f"the plan is for field {plan.field!r}, not {edit.name!r}; make one for this field")
        gone = [p for p in plan.rows if p not in edit.new_row]
        if gone:
            raise EditError(f"the plan names row {gone[0]}, which is not a row outside the field; make a new plan")
        outcome = self.repair(edit, [edit.new_row[p] for p in plan.rows])
        return replace(outcome, facts={**plan.facts, **outcome.facts, "plan": plan})


__all__ = ["Edit", "EditMethod", "ExactWhen", "Outcome", "Plan", "PlannedMethod"]
