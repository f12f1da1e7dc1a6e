"""Lines that an edit adds to a prompt: what errata and hoisted fields have in common."""

from collections.abc import Sequence

from notelens.cache.rows import Rows
from notelens.edits.base import Edit, Outcome
from notelens.edits.edit import placed
from notelens.edits.text import FieldText, Node, Tokens, common_prefix
from notelens.errors import FieldError, SeamError
from notelens.spans import encode

ERRATUM = "Update: the {label} is now {value}.\n"
SEAM = 4
"""How many rows in front of a new line may change because its first characters merge with theirs."""


def label_of(name: str) -> str:
    """What a field is called in a sentence."""
    return name.replace("_", " ")


def fill(template: str, name: str, value: str, label: str | None = None) -> str:
    """The template with ``{label}`` and ``{value}``.

    Raises:
        FieldError: it has another slot, or no ``{value}``.
    """
    if "{value}" not in template:
        raise FieldError(f"the template {template!r} does not say the value; it needs {{value}}")
    try:
        return template.format(label=label or label_of(name), value=value)
    except (KeyError, IndexError, ValueError) as e:
        raise FieldError(f"the template {template!r} may only hold {{label}} and {{value}}: {e}") from e


def with_line(edit: Edit, text: FieldText, line: str, mark: str, *, drop: bool) -> tuple[FieldText, Tokens]:
    """The text with a line in front of its tail, or behind everything where tokens have been appended.

    Raises:
        SeamError: the line changes tokens well in front of it.
    """
    tokenizer = edit.model.tokenizer
    if text.pinned:
        made = text.followed_by(encode(tokenizer, line, templated=True))
        return made, made.tokenise(tokenizer)
    before = text.tokenise(tokenizer)
    made = text.with_line([Node(line, mark=mark)], drop=mark if drop else "")
    after = made.tokenise(tokenizer)
    shared = common_prefix(before.ids, after.ids)
    had = any(n.mark == mark for n in text.nodes)
    if shared < before.tail - SEAM and not (drop and had):
        raise SeamError(
            f"{edit.method}: the new line changes the tokens from row {shared} on, {before.tail - shared} rows in front of it; "
            "let the template begin with a new line"
        )
    return made, after


def run_line(edit: Edit, text: FieldText, tokens: Tokens, *, fresh: Sequence[int], surgery: str) -> Outcome:
    """Run the rows from the first one that the line changed, and the rows in ``fresh``, on the kept ones.

    Args:
        fresh: rows in front of the line that are run too (the field's), in the coordinates of ``tokens``.
    """
    start = edit.new if fresh else edit.old
    cut = min(common_prefix(start.ids, tokens.ids), len(tokens) - 1)
    at = tuple(sorted({*(p for p in fresh if p < cut), *range(cut, len(tokens))}))
    kept = Rows(edit.base) if fresh else edit.context.rows
    own = {p for p in at if p < cut}
    drop = [i for i, p in enumerate(kept.positions.tolist()) if p >= cut or p in own]
    base = kept.without(drop)
    known = edit.dependencies if fresh else edit.context.dependencies
    done, record = edit.forward(base, at, tokens=tokens, known=known)
    history = (*edit.context.rows.history, f"{edit.method}: {edit.name}")
    made = placed(base, done.rows, history)
    still = tuple(p for p in edit.moved if p < cut and p not in own) if fresh else ()
    return Outcome(
        made,
        done.hidden,
        text,
        tokens,
        at,
        moved=still,
        surgery=surgery,
        dependencies=record,
        first=min(cut, edit.first) if fresh else cut,
    )
