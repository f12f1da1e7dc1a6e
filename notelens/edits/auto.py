"""The planner: edit, what copied it, the rule that read the copies, what concluded from the rule, in one pass in order.

A repair has to follow the chain by which the value travelled: rows right behind the field copy it, rule rows read the copies,
delimiters, template tokens or whatever stands right behind the rule conclude from it. Which rows lie on such a chain is known
from the prefill, where the context recorded which rows read which (:class:`~notelens.edits.dependencies.Dependencies`). The
planner scores every row by its strongest chain from the field to the reader and takes whole lines (a clause read in half is not
read at all), each with the rows right behind it, until the budget is spent. All chosen rows run in one pass in order of
position, so each sees the repaired rows in front of it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from notelens.edits.base import Edit, Plan, PlannedMethod
from notelens.edits.dependencies import required
from notelens.errors import BudgetError, EditError

BASE_TOKENS, SHARE = 40, 0.10
"""Default budget: so many tokens and so much of the suffix; 17 % of it at 600 tokens, 12 % at 2,000. Chosen on SmolLM2-135M
with families of the training split (seed 7, 300 tokens, n = 18), where 20 % of the suffix was right in every case, but after
part of the evaluation at 300 tokens had been seen; it has not been evaluated as such."""
LINE_SHARE = 0.6
"""Part of what is left behind field, line and tail that whole lines may take; the rest goes to single rows."""
BEHIND = 2
"""Rows behind a chosen line that run with it. A conclusion is written behind the clause that names it, and which clause that is
depends on the value: reads of the old prompt cannot show where the new conclusion will stand. Chosen on organisms with words of
the training split (seed 7, 150 and 600 tokens)."""
LONG_LINE = 40
"""Lines of more rows are also cut behind sentences and clauses."""


class Auto(PlannedMethod):
    """Run the lines and single rows on the strongest chains from the field to the last row, within a budget.

    Args:
        budget: most tokens to run, as a number or as a share of the suffix; by default 40 and 10 % of the suffix.
        plan: rows chosen earlier.
    """

    name = "auto"
    paper_ref = "section 4 (editable), planner"
    exact_when = "covers_all_rows"

    def __init__(self, *, budget: int | float | None = None, plan: Plan | None = None) -> None:
        if budget is not None and (budget <= 0 or (isinstance(budget, float) and budget > 1)):
            raise EditError(
                f"budget {budget} is neither a positive number of tokens nor a share of the suffix up to 1.0"
            )
        self.budget, self.plan = budget, plan

    def allowed(self, edit: Edit) -> int:
        """The budget in tokens."""
        suffix = edit.n - edit.first
        if self.budget is None:
            return min(suffix, BASE_TOKENS + round(SHARE * suffix))
        return self.budget if isinstance(self.budget, int) else max(1, round(self.budget * suffix))

    def choose(self, edit: Edit) -> tuple[Sequence[int], Mapping[str, Any]]:
        """Rows on the chain. Cost: no token.

        Raises:
            BudgetError: field, rest of its line and tail alone need more than the budget.
            EditError: the context has no record of which rows read which.
        """
        score = required(edit.dependencies).chain(edit.edited, [edit.last])
        allowed = self.allowed(edit)
        lines = line_ranges(edit)
        behind = set(edit.behind)
        must = set(range(edit.new.tail, edit.last)) & behind
        for a, b in lines:
            if any(a <= p < b for p in edit.edited):
                must |= set(range(a, b)) & behind
        need = len(must) + len(edit.edited) + 1
        if need > allowed:
            raise BudgetError(
                f"{self.name}: the field, its line and the tail need {need} tokens, the budget is {allowed}; raise the budget "
                "or use in_place, erratum or full_suffix"
            )
        chosen = set(must)
        groups = [(a, b) for a, b in lines if any(p in behind and p not in chosen for p in range(a, b))]
        worth = sorted(groups, key=lambda g: (-max(float(score[p]) for p in range(*g) if p in behind - must), g[0]))
        taken, room = 0, need + round(LINE_SHARE * (allowed - need))
        for a, b in worth:
            group = {p for p in range(a, b + BEHIND) if p in behind} - chosen
            if len(chosen) + len(group) + len(edit.edited) + 1 <= room:
                chosen |= group
                taken += 1
        rest = sorted(behind - chosen, key=lambda p: (-float(score[p]), p))
        chosen |= set(rest[: allowed - len(chosen) - len(edit.edited) - 1])
        return sorted(chosen), {"budget": allowed, "lines": taken}


def line_ranges(edit: Edit) -> list[tuple[int, int]]:
    """Rows of every line of the new prompt, the row that ends it included; long lines are cut behind clauses."""
    texts = [str(edit.model.tokenizer.decode([token])) for token in edit.new.ids]
    found: list[tuple[int, int]] = []
    start = 0
    for p, text in enumerate(texts):
        if "\n" in text or p == edit.n - 1:
            found += _clauses(texts, start, p + 1)
            start = p + 1
    return found


def _clauses(texts: Sequence[str], start: int, stop: int) -> list[tuple[int, int]]:
    if stop - start <= LONG_LINE:
        return [(start, stop)]
    cuts = [p + 1 for p in range(start, stop - 1) if texts[p].strip() in (".", ";", ",", ":", "!", "?")]
    return list(pairwise([start, *cuts, stop]))
