"""``compose``: parts in, one context out."""

from collections.abc import Sequence
from dataclasses import replace

from notelens.compose.base import Composed, Composer
from notelens.compose.parts import Part, check_composed, merged_borders, resolve
from notelens.compose.registry import composer
from notelens.models.base import NoteModel


def compose(model: NoteModel, parts: Sequence[Part], *, method: str | Composer = "shift") -> Composed:
    """Join any mix of text, contexts, caches and skills into one context (paper, section on composing).

    Args:
        model: runs the text and whatever the composer recomputes.
        parts: in order: text (run on top of everything before it), token ids, :class:`~notelens.context.Context`,
            :class:`~notelens.cache.kv.KVCache`, :class:`~notelens.compose.skill.Skill`, another composition, or lists of
            these; a part may be used again. The first part alone may begin with a beginning-of-sequence token.
        method: a composer by name (``shift``, ``seam@4``, ``cacheblend@0.15``, ...) or as an object.

    Returns:
        Rows at positions 0, 1, 2, ..., where each part stands, what it cost, and an honest mark.

    Raises:
        ComposeError: a part is empty, of an unknown kind, belongs to another model, holds a beginning-of-sequence token
            behind the first, or all together exceed the model's positions.
        ArtefactError: a skill belongs to another model, tokenizer, type or RoPE table.
        UnknownNameError: no such composer.

    Cost: see :class:`~notelens.compose.base.Cost`; parts are never changed.
    """
    chosen = composer(method)
    chunks = resolve(model, parts)
    composed = check_composed(chosen.join(model, chunks), chunks)
    return replace(composed, merged=merged_borders(model, chunks))


__all__ = ["compose"]
