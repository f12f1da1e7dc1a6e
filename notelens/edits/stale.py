"""Nothing is repaired: the baseline that every repair must beat."""

from notelens.cache.rows import Rows
from notelens.edits.base import Edit, EditMethod, Outcome


class Stale(EditMethod):
    """Keep every row as it is, although the text changed."""

    name = "stale"
    paper_ref = "section 4 (editable), row stale"
    length_preserving = True
    append_only = True
    exact_when = "never"

    def apply(self, edit: Edit) -> Outcome:
        """Rows and last output stay those of the old value. Cost: nothing."""
        rows = Rows(edit.context.rows.segments, (*edit.context.rows.history, f"stale: {edit.name}"))
        return Outcome(
            rows, edit.context.hidden, edit.text, edit.new, (), dependencies=edit.context.dependencies,
            warnings=("rows and decision are those of the old value",),
        )  # fmt: skip
