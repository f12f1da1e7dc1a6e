"""A contiguous window around the rows that carry the conclusion, found by the note map."""

from collections.abc import Mapping, Sequence
from typing import Any

from notelens.edits.base import Edit, Plan, PlannedMethod
from notelens.edits.ranking import check_ranking, scores, window


class CarrierWindow(PlannedMethod):
    """Run the field and the K neighbouring rows that together score highest.

    Args:
        ranking, answers, seed, plan: as for ``selective``; ``random`` gives a random contiguous span.
    """

    name = "carrier_window"
    paper_ref = "arXiv:2609.17983 (contiguous spans)"
    exact_when = "covers_all_rows"
    takes_k = True

    def __init__(
        self,
        *,
        ranking: str = "effect",
        answers: Sequence[str] | None = None,
        seed: int = 0,
        plan: Plan | None = None,
    ) -> None:
        check_ranking(ranking)
        self.ranking, self.answers, self.seed, self.plan = ranking, answers, seed, plan

    def choose(self, edit: Edit) -> tuple[Sequence[int], Mapping[str, Any]]:
        """The window of K rows behind the field with the largest sum of positive scores.

        Raises:
            BudgetError: there are fewer.
        """
        k, rows = self.count(edit), list(edit.behind)
        found = window(scores(edit, self.ranking, self.answers, self.seed), rows, k, at_random=self.ranking == "random")
        return found, {"ranking": self.ranking, "window": (found[0], found[-1])}
