"""A line that states the new value, appended; the field and everything behind it keep saying the old one."""

from notelens.edits.base import Edit, EditMethod, Outcome
from notelens.edits.lines import ERRATUM, fill, run_line, with_line


class Erratum(EditMethod):
    """Append a correction in front of the tail and run it with the tail.

    Args:
        template: with ``{label}`` and ``{value}``.
        label: what the field is called; its name with spaces when ``None``.
        stack: keep earlier errata of the field; otherwise the new one replaces them.
    """

    name = "erratum"
    paper_ref = "section 4 (editable), row erratum"
    append_only = True
    exact_when = "prefix_exact"
    errata = "replace"

    def __init__(self, *, template: str = ERRATUM, label: str | None = None, stack: bool = False) -> None:
        fill(template, "field", "value", label)
        self.template, self.label_text, self.stack = template, label, stack

    def apply(self, edit: Edit) -> Outcome:
        """The prompt holds old value and correction: exact for its own tokens. Cost: the line and the tail.

        Raises:
            SeamError: the line merges with the text in front of it.
        """
        line = fill(self.template, edit.name, edit.value, self.label_text)
        text, tokens = with_line(edit, edit.context.text, line, f"erratum:{edit.name}", drop=not self.stack)
        return run_line(
            edit,
            text.with_update(edit.name, edit.value),
            tokens,
            fresh=(),
            surgery=f"a line was added: {line.strip()!r}",
        )
