"""The whole prompt again: always right, never cheap."""

from notelens.cache.rows import Rows
from notelens.edits.base import Edit, EditMethod, Outcome


class FullPrefill(EditMethod):
    """Run every token of the new prompt from nothing."""

    name = "full_prefill"
    paper_ref = "section 4 (editable), row full prefill"
    exact_when = "always"
    errata = "drop"

    def apply(self, edit: Edit) -> Outcome:
        """A fresh context. Cost: all tokens of the new prompt."""
        at = tuple(range(edit.n))
        done, record = edit.forward((), at)
        return Outcome(Rows.of(done.rows), done.hidden, edit.text, edit.new, at, dependencies=record)
