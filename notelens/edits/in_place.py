"""The field's own rows and nothing else: the naive edit, which the paper shows to fail."""

from notelens.edits.base import Edit, EditMethod, Outcome


class InPlace(EditMethod):
    """Run the field's rows with the new value; whatever was written behind them stays."""

    name = "in_place"
    paper_ref = "section 4 (editable), row in place"
    exact_when = "covers_all_rows"

    def apply(self, edit: Edit) -> Outcome:
        """Rows behind a field of another length are shifted. Cost: the field's tokens and the last one.

        Raises:
            WindowError: the field has left every layer's window.
        """
        return edit.run((), note=f"{self.name}: {edit.name}")
