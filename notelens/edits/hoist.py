"""The field moved to the end of the prompt, where later edits are cheap. Changes the prompt, and says so."""

from dataclasses import replace

from notelens.edits.base import Edit, EditMethod, Outcome
from notelens.edits.lines import fill, run_line
from notelens.edits.text import FieldText, Node
from notelens.errors import EditError, FieldError

LINE = "The {label} is {value}.\n"
PLACE = "given below"


class Hoist(EditMethod):
    """Say the value in a line in front of the tail, and refer to it where it stood.

    Args:
        template: of the line, with ``{label}`` and ``{value}``.
        label: what the field is called; its name with spaces when ``None``.
        place: what stands in the field's old places.
    """

    name = "hoist"
    paper_ref = "section 4 (editable), row hoist"
    exact_when = "prefix_exact"

    def __init__(self, *, template: str = LINE, label: str | None = None, place: str = PLACE) -> None:
        fill(template, "field", "value", label)
        self.template, self.label_text, self.place = template, label, place

    def apply(self, edit: Edit) -> Outcome:
        """Exact for its own tokens. Cost: the first time everything behind the field's old place, later the line and the tail.

        Raises:
            EditError: tokens have been appended behind the prompt, so nothing can be moved in front of them.
            FieldError: the field is part of another one.
        """
        if edit.text.pinned:
            raise EditError(f"{self.name}: tokens stand behind the prompt already; use erratum or full_suffix")
        mark = f"hoisted:{edit.name}"
        there = any(n.mark == mark for n in edit.text.nodes)
        text = edit.text if there else self.move(edit.text, edit.name, mark)
        tokens = text.tokenise(edit.model.tokenizer)
        surgery = "the field stands at the end already" if there else "the field was moved to the end of the prompt"
        return run_line(edit, text, tokens, fresh=(), surgery=surgery)

    def move(self, text: FieldText, name: str, mark: str) -> FieldText:
        """The text with the field at its end."""
        own = [n for n in text.nodes if n.field and n.text == name]
        if not own:
            raise FieldError(f"{self.name}: field {name!r} is part of another field; hoist that one")
        before, after = fill(self.template, name, "\0", self.label_text).split("\0")
        moved = replace(text, nodes=tuple(Node(self.place, mark=mark) if n in own else n for n in text.nodes))
        return moved.with_line([Node(before, mark=mark), Node(name, field=True, mark=mark), Node(after, mark=mark)])
