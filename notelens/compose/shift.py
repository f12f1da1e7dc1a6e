"""Reposition only: keys are turned to where they stand, values and everything else stay."""

from notelens.cache.kv import KVCache
from notelens.compose.base import Chunk, Composer, Placed, shifted
from notelens.models.base import NoteModel


class Shift(Composer):
    """Splice rows as they were compiled, with keys rotated by the difference of positions; no token is run."""

    name = "shift"
    paper_ref = "section on composing: reposition"

    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Move the rows and put them behind ``before``."""
        return Placed(shifted(model, before, chunk), 0.0)
