"""Seam repair: the first rows of each chunk are computed again where they stand."""

from notelens.cache.kv import KVCache
from notelens.compose.base import Chunk, Composer, Placed, fits_here, shifted, whole_number
from notelens.errors import ComposeError
from notelens.intervene.rerun import rerun_rows
from notelens.models.base import NoteModel


class Seam(Composer):
    """Reposition, then recompute the first ``k`` rows of every chunk that did not come with the right past.

    Args:
        k: rows per chunk; a shorter chunk is recomputed as a whole.

    Raises:
        ComposeError: ``k`` is below 1.
    """

    name = "seam"
    paper_ref = "section on composing: seam repair"
    parameter = "rows recomputed at the start of each chunk"

    def __init__(self, k: int = 4) -> None:
        if k < 1:
            raise ComposeError(f"{self.name}@{k}: at least one row must be recomputed; without any it is 'shift'")
        self.k = k

    @property
    def method(self) -> str:
        """``seam@k``."""
        return f"{self.name}@{self.k}"

    @classmethod
    def parse(cls, value: str | None) -> "Seam":
        """From ``seam@k``."""
        return cls(whole_number(cls.name, value, 4))

    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Move the rows, then run the first ``k`` of them on what stands before."""
        moved = shifted(model, before, chunk)
        if fits_here(before, chunk) or not self.repairs(before):
            return Placed(moved, 0.0)
        start, k = len(moved) - len(chunk), min(self.k, len(chunk))
        out = rerun_rows(model, moved, range(start, start + k))
        if k == len(chunk):  # nothing of the chunk is left, so nothing of its past is
            history = before.history if before is not None else ()
            return Placed(out.cache.replace_tensors(out.cache.keys, out.cache.values, history=history), k, out.hidden)
        history = (*moved.history, f"{chunk.label}: its first {k} rows recomputed in place")
        return Placed(moved.replace_tensors(out.cache.keys, out.cache.values, history=history), out.tokens_run)

    def repairs(self, before: KVCache | None) -> bool:
        """Whether a chunk behind ``before`` is repaired."""
        return True
