"""References: the rows of a chunk that need what stands in front of it are named, and only these are computed again."""

from collections.abc import Iterable, Sequence

from notelens.cache.kv import KVCache
from notelens.compose.base import Chunk, Composer, Placed, fits_here, shifted
from notelens.compose.skill import Skill
from notelens.errors import ComposeError
from notelens.intervene.rerun import rerun_rows
from notelens.models.base import NoteModel


class References(Composer):
    """Reposition, then recompute the rows that refer to other chunks (paper, section on user memory: what a split loses).

    A line that refers to a fact in another chunk concludes from it where it is prefilled: in its own rows. Compiled apart it
    concluded without the fact, and rows at a seam, or rows that deviate much, are not those rows. Rows of other skills, and
    rows behind the named ones in the same skill, stay as they were compiled. A skill that nobody named is moved only.

    Args:
        lines: skills, each with the texts in it that refer to something in front of the skill.

    Raises:
        ComposeError: a text that its skill does not hold, or one that is there twice.

    Cost: the tokens of the named lines.
    """

    name = "references"
    paper_ref = "section on user memory: facts that refer to each other (ours)"

    def __init__(self, lines: Iterable[tuple[Skill, Sequence[str]]] = (), *, model: NoteModel | None = None) -> None:
        self.rows: dict[str, frozenset[int]] = {}
        for skill, texts in lines:
            if model is None:
                raise ComposeError("References needs model=..., whose tokenizer finds the lines in the skills")
            found = {row for text in texts for row in rows_of(model, skill, text)}
            self.rows[skill.key] = self.rows.get(skill.key, frozenset()) | found

    @classmethod
    def at(cls, rows: Iterable[tuple[Skill, Iterable[int]]]) -> "References":
        """From indices of rows within each skill.

        Raises:
            ComposeError: a row that the skill does not have.
        """
        made = cls()
        for skill, chosen in rows:
            own = frozenset(chosen)
            if wrong := sorted(r for r in own if not 0 <= r < len(skill)):
                raise ComposeError(f"skill {skill.name!r} has rows 0..{len(skill) - 1}, there is no {wrong[0]}")
            made.rows[skill.key] = made.rows.get(skill.key, frozenset()) | own
        return made

    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Move the rows, then run the named ones on what stands before.

        Raises:
            ComposeError: nothing was named in any skill.
        """
        moved = shifted(model, before, chunk)
        if before is None or fits_here(before, chunk):
            return Placed(moved, 0.0)
        if not any(self.rows.values()):
            raise ComposeError(
                f"{chunk.label}: 'references' needs to know which lines refer to other parts; pass "
                "References([(skill, [line, ...])], model=model) as the method, or use 'shift'"
            )
        named = self.rows.get(chunk.skill.key, frozenset()) if chunk.skill is not None else frozenset[int]()
        if not named:
            return Placed(moved, 0.0)
        start = len(moved) - len(chunk)
        out = rerun_rows(model, moved, sorted(start + r for r in named))
        if len(named) == len(chunk):  # nothing of the chunk is left, so nothing of its past is
            cache = out.cache.replace_tensors(out.cache.keys, out.cache.values, history=before.history)
            return Placed(cache, len(named), out.hidden)
        history = (*moved.history, f"{chunk.label}: {len(named)} rows that refer to other parts recomputed in place")
        return Placed(moved.replace_tensors(out.cache.keys, out.cache.values, history=history), out.tokens_run)


def rows_of(model: NoteModel, skill: Skill, text: str) -> range:
    """Rows of the one place where a skill holds the tokens of ``text``.

    Raises:
        ComposeError: it is not there, or more than once.
    """
    ids = tuple(int(i) for i in model.tokenizer.encode(text, add_special_tokens=False))
    if not ids:
        raise ComposeError(f"an empty text refers to nothing in skill {skill.name!r}")
    own, n = skill.token_ids, len(ids)
    starts = [i for i in range(len(own) - n + 1) if own[i : i + n] == ids]
    if len(starts) != 1:
        there = f"holds {len(starts)} times" if starts else "does not hold"
        raise ComposeError(
            f"skill {skill.name!r} {there} the tokens of {text[:60]!r}; name a whole line with its line break that stands "
            "there once, or rows by their indices (References.at)"
        )
    return range(starts[0], starts[0] + n)


__all__ = ["References", "rows_of"]
