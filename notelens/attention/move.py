"""Moving cached rows to other positions (paper, section on composing)."""

from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.errors import CacheError
from notelens.rope import rotate

if TYPE_CHECKING:
    from notelens.models.base import NoteModel


def move_rows(model: "NoteModel", cache: KVCache, positions: Int[Tensor, " pos"] | int) -> KVCache:
    """Rows of ``cache`` at other absolute positions: keys turned by the difference, per layer, values untouched.

    Args:
        model: the model whose rows these are.
        cache: the rows, which stay unchanged.
        positions: the new position of every row, strictly increasing, int64 ``[pos]``; or one number to add to all.

    Returns:
        A cache with the same history plus what was moved; the same object where nothing moves.

    Raises:
        CacheError: another number of positions than rows, positions that do not increase, or one beyond the model's.

    Cost: one rotation of every key that moves; no forward pass.
    """
    new = cache.positions + positions if isinstance(positions, int) else positions.to(cache.positions)
    if new.shape != cache.positions.shape:
        raise CacheError(f"{len(cache)} rows but {tuple(new.shape)} positions to move them to")
    delta = new - cache.positions
    if not bool(delta.any()):
        return cache
    if len(new) and int(new[-1]) >= model.geometry.max_positions:
        raise CacheError(f"position {int(new[-1])} is beyond the {model.geometry.max_positions} of {model.name}")
    keys: list[Tensor] = []
    for layer, key in enumerate(cache.keys):
        inv_freq = model.family.inv_freq(model.hf, layer)
        keys.append(key if inv_freq is None else rotate(key, delta.to(key.device), inv_freq))
    low, high = int(delta.min()), int(delta.max())
    note = f"{int((delta != 0).sum())} rows moved by {low if low == high else f'{low}..{high}'}"
    return KVCache(tuple(keys), cache.values, new, cache.token_ids, (*cache.history, note))


__all__ = ["move_rows"]
