"""Rows of a cache computed again where they stand, and kept: :func:`~notelens.intervene.run_rows.run_rows` on a whole cache.

The rows run together in one pass, in order: each sees what stands before it in the cache, with the recomputed rows in place
of the old ones. Rows that are not run stay as they are, so what comes out is exact only where everything before a row was.
Fewer rows may go on from one layer to the next (:data:`~notelens.intervene.narrowing.Narrowing`); a row that stops keeps its
old rows from there on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.cache.rows import Rows
from notelens.errors import CacheError, PatchError, UnsupportedModelError
from notelens.intervene.narrowing import Narrowing
from notelens.intervene.run_rows import run_rows
from notelens.models.base import NoteModel


@dataclass(frozen=True)
class Rerun:
    """What a rerun gives.

    Attributes:
        cache: the cache with the recomputed rows in place; its history is that of the old one.
        tokens_run: rows computed, averaged over layers, so that a row which runs half of the layers counts a half.
        hidden: final-norm output of the last row that ran through all layers ``[d_model]``.
        survivors: rows that ran through all layers.
    """

    cache: KVCache
    tokens_run: float
    hidden: Float[Tensor, " d_model"]
    survivors: tuple[int, ...]


def rerun_rows(model: NoteModel, cache: KVCache, rows: Sequence[int], *, narrow: Narrowing | None = None) -> Rerun:
    """Compute rows of ``cache`` again where they stand (paper, section on composing: seam repair).

    Args:
        model: runs the rows.
        cache: all rows; stays unchanged. Its last rows need not be among those that run.
        rows: indices of the rows to run, any order.
        narrow: which of them go on to the next layer; all when ``None``.

    Raises:
        PatchError: no rows, a row that does not exist, or a cache of another model.
        UnsupportedModelError: the cache stores rows of another shape than the model, or the model is a hybrid.
        NonFiniteError: the output holds NaN or infinity.

    Cost: ``len(rows)`` tokens, less what ``narrow`` drops.
    """
    n, n_layers = len(cache), model.geometry.n_layers
    chosen = sorted(set(rows))
    if cache.n_layers != n_layers:
        raise PatchError(f"the cache has {cache.n_layers} layers, {model.name} has {n_layers}")
    if not chosen or chosen[0] < 0 or chosen[-1] >= n:
        raise PatchError(f"rows {chosen[:4]} to run again; there are rows 0..{n - 1}")
    try:
        model.geometry.check(cache, model.name)
    except CacheError as e:
        raise UnsupportedModelError(f"{e}; rows of this representation cannot be run again in place") from e
    positions = cache.positions.tolist()
    index = {p: i for i, p in enumerate(positions)}

    def by_index(layer: int, deviation: Tensor, at: Tensor) -> Tensor:
        assert narrow is not None
        return narrow(layer, deviation, torch.tensor([index[p] for p in at.tolist()], device=at.device))

    done = run_rows(
        model,
        Rows.of(cache),
        [cache.token_ids[r] for r in chosen],
        [positions[r] for r in chosen],
        narrow=None if narrow is None else by_index,
    )
    keys, values = ([t.clone() for t in part] for part in (cache.keys, cache.values))
    for layer in range(n_layers):
        keys[layer][:, chosen], values[layer][:, chosen] = done.rows.keys[layer], done.rows.values[layer]
    new = cache.replace_tensors(keys, values, history=cache.history)
    return Rerun(new, done.tokens_run, done.hidden, tuple(index[p] for p in done.survivors))


__all__ = ["Narrowing", "Rerun", "rerun_rows"]
