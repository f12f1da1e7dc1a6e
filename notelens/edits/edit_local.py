"""The rows right behind the edit (arXiv:2609.17983)."""

from notelens.edits.base import Edit, EditMethod, Outcome
from notelens.errors import BudgetError


class EditLocal(EditMethod):
    """Run the field and the K rows right behind each of its mentions."""

    name = "edit_local"
    paper_ref = "arXiv:2609.17983"
    exact_when = "covers_all_rows"
    takes_k = True

    def apply(self, edit: Edit) -> Outcome:
        """Rows that two mentions have in common are run once. Cost: field, at most K rows per mention, and the last row.

        Raises:
            BudgetError: fewer than K rows stand behind the field.
        """
        k = self.count(edit)
        rows = {p for span in edit.new.mentions[edit.name] for p in range(span.stop, span.stop + k)}
        chosen = rows & set(edit.behind)
        if not chosen and k:
            raise BudgetError(f"{self.label}: no row stands behind field {edit.name!r}; use in_place")
        return edit.run(chosen, note=f"{self.label}: {edit.name}")
