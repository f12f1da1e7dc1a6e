"""Rows copied from a fresh prefill: what a perfect repair of these rows would do. For analysis; it needs the donor."""

from collections.abc import Mapping, Sequence
from typing import Any

from notelens.cache.kv import KVCache
from notelens.cache.ops import select_rows
from notelens.edits.base import Edit, Outcome, Plan, PlannedMethod
from notelens.edits.edit import placed
from notelens.edits.ranking import check_ranking, scores, top
from notelens.errors import EditError


class Transplant(PlannedMethod):
    """Copy the field's rows and the K best rows from a fresh prefill of the new prompt, then run the last row.

    Args:
        ranking, answers, seed, plan: as for ``selective``.
        donor: rows of a fresh prefill of the new prompt, where the caller has them already.
    """

    name = "transplant"
    paper_ref = "section 4 (editable); transplant is not recompute: arXiv:2609.17983"
    exact_when = "covers_all_rows"
    takes_k = True

    def __init__(
        self,
        *,
        ranking: str = "effect",
        answers: Sequence[str] | None = None,
        seed: int = 0,
        plan: Plan | None = None,
        donor: KVCache | None = None,
    ) -> None:
        check_ranking(ranking)
        self.ranking, self.answers, self.seed, self.plan, self.donor = ranking, answers, seed, plan, donor

    def choose(self, edit: Edit) -> tuple[Sequence[int], Mapping[str, Any]]:
        """The K rows behind the field with the highest score.

        Raises:
            BudgetError: there are fewer.
        """
        k = self.count(edit)
        return top(scores(edit, self.ranking, self.answers, self.seed), edit.behind, k), {"ranking": self.ranking}

    def repair(self, edit: Edit, rows: Sequence[int]) -> Outcome:
        """Copy the rows, run the last one. Cost: one token, and a prefill of the new prompt where no donor was given.

        Raises:
            EditError: the donor holds other tokens than the new prompt, or is approximate.
            WindowError: the last row sees none of the copied rows, in any layer.
        """
        donor = self.donor if self.donor is not None else edit.donor(planning=False).rows
        if tuple(donor.token_ids) != edit.new.ids or donor.history:
            raise EditError(
                f"{self.label}: the donor is not an exact prefill of the new prompt; leave it out or make one"
            )
        taken = tuple(sorted({*rows, *edit.edited}))
        edit.check_window((*taken, edit.last))
        part = select_rows(donor, taken)
        history = (*edit.context.rows.history, f"{self.label}: {edit.name}")
        patched = placed(edit.base, part, history)
        done, record = edit.forward(patched.segments, (edit.last,))
        made = patched.replaced(done.rows, history=history)
        moved = tuple(p for p in edit.moved if p not in {*taken, edit.last})
        return Outcome(
            made, done.hidden, edit.text, edit.new, (edit.last,), donor=taken, moved=moved, dependencies=record,
            warnings=("needs a fresh prefill of the new prompt: for analysis, not a saving",),
        )  # fmt: skip
