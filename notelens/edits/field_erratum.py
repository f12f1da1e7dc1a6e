"""The field's rows refreshed and a correction appended; what stands between them stays stale."""

from notelens.edits.base import Edit, EditMethod, Outcome
from notelens.edits.lines import ERRATUM, fill, run_line, with_line


class FieldErratum(EditMethod):
    """Run the field with the new value, append a correction, run it with the tail.

    Args:
        template, label, stack: as for ``erratum``.
    """

    name = "field_erratum"
    paper_ref = "section 4 (editable), row field + erratum"
    exact_when = "covers_all_rows"
    errata = "replace"

    def __init__(self, *, template: str = ERRATUM, label: str | None = None, stack: bool = False) -> None:
        fill(template, "field", "value", label)
        self.template, self.label_text, self.stack = template, label, stack

    def apply(self, edit: Edit) -> Outcome:
        """Field and correction agree, notes in between do not. Cost: the field, the line and the tail.

        Raises:
            SeamError: the line merges with the text in front of it.
        """
        line = fill(self.template, edit.name, edit.value, self.label_text)
        text, tokens = with_line(edit, edit.text, line, f"erratum:{edit.name}", drop=not self.stack)
        return run_line(
            edit,
            text.with_update(edit.name, edit.value),
            tokens,
            fresh=edit.edited,
            surgery=f"a line was added: {line.strip()!r}",
        )
