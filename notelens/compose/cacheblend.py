"""CacheBlend (Yao et al., arXiv:2405.16444): recompute the rows whose keys and values deviate most, layer by layer."""

import math

import torch
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.compose.base import Chunk, Composer, Placed, fits_here, shifted
from notelens.errors import ComposeError
from notelens.intervene.rerun import rerun_rows
from notelens.models.base import NoteModel

FIRST_LAYERS = 2
"""Layers that all rows run through: in layer 0 moved rows are right, layer 1 is the first in which they deviate."""
WIDEST, NARROWEST = 1.25, 0.75
"""Share of rows behind the first layers and in the last one, in units of ``r``: the mean is ``r``."""


class CacheBlend(Composer):
    """Reposition, run all rows through two layers, and go on with the share ``r`` that deviates most.

    The deviation of a row is the squared distance of its new keys and values from the moved ones, relative to their size.
    It is measured anew in every layer, and the share shrinks from 1.25 r to 0.75 r, so that rows which turn out right drop
    out and keep their moved rows from there on. The budget counts the first layers: ``r`` plus up to
    ``2 / n_layers`` of the chunk.

    Args:
        r: share of rows, above 0 and up to 1; at 1 everything is recomputed and the result is exact.

    Raises:
        ComposeError: ``r`` is out of range.
    """

    name = "cacheblend"
    paper_ref = "section on composing: related methods (CacheBlend)"
    parameter = "share of rows recomputed in each layer"

    def __init__(self, r: float = 0.15) -> None:
        if not 0.0 < r <= 1.0:
            raise ComposeError(f"cacheblend@{r}: the share must be above 0 and at most 1")
        self.r = r

    @property
    def method(self) -> str:
        """``cacheblend@r``."""
        return f"{self.name}@{self.r:g}"

    @classmethod
    def parse(cls, value: str | None) -> "CacheBlend":
        """From ``cacheblend@r``."""
        try:
            return cls() if value is None else cls(float(value))
        except ValueError as e:
            raise ComposeError(f"cacheblend@{value}: the share must be a number above 0 and at most 1") from e

    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Move the rows, then recompute those that deviate."""
        moved = shifted(model, before, chunk)
        if fits_here(before, chunk):
            return Placed(moved, 0.0)
        start, n_layers = len(moved) - len(chunk), model.geometry.n_layers

        def narrow(layer: int, deviation: Tensor, rows: Tensor) -> Tensor:
            n = self._rows(layer + 1, n_layers, len(chunk))
            if n >= len(rows):
                return torch.arange(len(rows), device=rows.device)
            order = torch.argsort(deviation, descending=True, stable=True)
            return order[:n].sort().values

        out = rerun_rows(model, moved, range(start, start + len(chunk)), narrow=narrow)
        if len(out.survivors) == len(chunk):
            history = before.history if before is not None else ()
            whole = out.cache.replace_tensors(out.cache.keys, out.cache.values, history=history)
            return Placed(whole, out.tokens_run, out.hidden)
        history = (*moved.history, f"{chunk.label}: {self.r:g} of its rows recomputed by deviation")
        return Placed(moved.replace_tensors(out.cache.keys, out.cache.values, history=history), out.tokens_run)

    def _rows(self, layer: int, n_layers: int, n: int) -> int:
        """How many rows run in a layer."""
        if layer < FIRST_LAYERS or self.r == 1.0:
            return n
        last = max(n_layers - 1 - FIRST_LAYERS, 1)
        share = self.r * (WIDEST + (NARROWEST - WIDEST) * (layer - FIRST_LAYERS) / last)
        return min(n, max(1, math.ceil(share * n - 1e-9)))
