"""Run everything: the reference that every other composer is measured against."""

from collections.abc import Sequence
from typing import ClassVar

from notelens.cache.kv import KVCache
from notelens.compose.base import Chunk, Composed, Composer, Cost, Piece, Placed
from notelens.models.base import NoteModel


class FullPrefill(Composer):
    """One forward pass over the ids of all parts; nothing is reused, the result is exact."""

    name = "full_prefill"
    paper_ref = "section on composing: full prefill"
    exact_when: ClassVar[str] = "always"

    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Run the chunk's ids."""
        out = model.prefill(chunk.token_ids, before)
        return Placed(out.cache, float(len(chunk)), out.hidden)

    def join(self, model: NoteModel, chunks: Sequence[Chunk]) -> Composed:
        """All ids at once."""
        out = model.prefill([i for chunk in chunks for i in chunk.token_ids])
        pieces: list[Piece] = []
        n_spliced = n_text = 0
        for chunk in chunks:
            pieces.append(
                Piece(chunk.label, n_text + n_spliced, n_text + n_spliced + len(chunk), chunk.stored is not None)
            )
            n_spliced += len(chunk) if chunk.stored is not None else 0
            n_text += len(chunk) if chunk.stored is None else 0
        cost = Cost(len(out.cache), n_spliced, float(n_text), float(n_spliced))
        return Composed(out.cache, tuple(pieces), self.method, cost, out.hidden)
