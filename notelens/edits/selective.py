"""The K rows that matter most, by one of several rankings, run again in the stale cache."""

from collections.abc import Mapping, Sequence
from typing import Any

from notelens.edits.base import Edit, Plan, PlannedMethod
from notelens.edits.ranking import check_ranking, scores, top


class Selective(PlannedMethod):
    """Run the field and the K best rows behind it, in order.

    Args:
        ranking: ``effect`` (note map), ``attention``, ``deviation`` (CacheBlend), ``chain``, ``structure`` or ``random``.
        answers: answers for old and new value, for ``effect``.
        seed: for ``random``.
        plan: rows chosen earlier.

    Raises:
        EditError: no such ranking.
    """

    name = "selective"
    paper_ref = "section 4 (editable), row selective@K; deviation: CacheBlend, arXiv:2405.16444"
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
        """The K rows behind the field with the highest score.

        Raises:
            BudgetError: there are fewer.
        """
        k = self.count(edit)
        return top(scores(edit, self.ranking, self.answers, self.seed), edit.behind, k), {"ranking": self.ranking}
