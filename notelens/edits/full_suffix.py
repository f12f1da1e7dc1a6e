"""Everything from the first changed row on: what a serving engine with prefix caching does."""

from notelens.edits.base import Edit, EditMethod, Outcome


class FullSuffix(EditMethod):
    """Keep the rows in front of the first changed one, run all others."""

    name = "full_suffix"
    paper_ref = "section 4 (editable), row full suffix recompute"
    exact_when = "prefix_exact"
    errata = "drop"

    def apply(self, edit: Edit) -> Outcome:
        """Equal to a full prefill where the kept rows were. Cost: all tokens from the first changed one on."""
        kept = edit.context.rows.between(0, edit.first)
        at = tuple(range(edit.first, edit.n))
        return edit.run(at, base=kept, with_field=False, note=f"{self.name}: {edit.name} on an approximate prefix")
