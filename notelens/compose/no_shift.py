"""Control: rows keep the rotation of where they were computed, though they stand elsewhere."""

import torch

from notelens.cache.kv import KVCache
from notelens.compose.base import Chunk, Composer, Placed, fits_here, joined
from notelens.models.base import NoteModel


class NoShift(Composer):
    """Splice rows without turning their keys. What ``shift`` gains over this is what repositioning is worth."""

    name = "no_shift"
    paper_ref = "section on composing: control without re-rotation"
    repositions = False

    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Put the rows behind ``before`` under new positions, keys as they are."""
        rows = chunk.rows
        assert rows is not None
        start = len(before) if before is not None else 0
        history: tuple[str, ...] = ()
        if not fits_here(before, chunk):
            wrong = start - int(rows.positions[0])
            history = (f"{chunk.label}: {len(chunk)} rows from elsewhere, keys {wrong} positions behind", *rows.history)
        positions = torch.arange(start, start + len(chunk), dtype=torch.int64)
        labelled = KVCache(rows.keys, rows.values, positions, rows.token_ids, rows.history)
        return Placed(joined(before, labelled, history, chunk.total), 0.0)
