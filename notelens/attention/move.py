"""Moving cached rows to other positions (paper, section on composing)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from notelens.attention.base import AttentionAdapter
from notelens.attention.mrope import AXES
from notelens.cache.kv import KVCache
from notelens.cache.room import Room
from notelens.errors import CacheError, UnsupportedModelError

if TYPE_CHECKING:
    from notelens.models.base import NoteModel


def adapters(model: "NoteModel") -> list[AttentionAdapter]:
    """The adapter of every layer of a model."""
    return [model.family.attention(model.hf, layer) for layer in range(model.geometry.n_layers)]


def move_rows(model: "NoteModel", cache: KVCache, positions: Int[Tensor, " pos"] | int) -> KVCache:
    """Rows of ``cache`` at other absolute positions: keys turned by the difference, per layer, values untouched.

    What turns is the business of the layer's adapter (``notelens.attention``): nothing in layers without RoPE, the rotary slice
    of a latent cache, all axes alike under M-RoPE. A recurrent state is never moved: it is left out of the result, and
    ``notelens.intervene.rescan`` computes it again.

    Args:
        model: the model whose rows these are.
        cache: the rows, which stay unchanged.
        positions: the new position of every row, strictly increasing, int64 ``[pos]``; or one number to add to all.

    Returns:
        A cache with the same history plus what was moved; the same object where nothing moves.

    Raises:
        CacheError: another model's cache, another number of positions than rows, positions that do not increase, one beyond
            the model's, or rows that would need another frequency table.
        UnsupportedModelError: rows of this representation cannot be moved.

    Cost: one rotation of every key that moves; no forward pass.
    """
    new = cache.positions + positions if isinstance(positions, int) else positions.to(cache.positions)
    delta = _checked(model, cache, new)
    if not bool(delta.any()):
        return cache
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for adapter, key, value in zip(adapters(model), cache.keys, cache.values, strict=True):
        key, value = adapter.move(key, value, delta)
        keys.append(key)
        values.append(value)
    low, high = int(delta.min()), int(delta.max())
    note = f"{int((delta != 0).sum())} rows moved by {low if low == high else f'{low}..{high}'}"
    if cache.states:
        note += "; recurrent state left behind"
    return KVCache(tuple(keys), tuple(values), new, cache.token_ids, (*cache.history, note))


def move_rows_into(model: "NoteModel", cache: KVCache, positions: Int[Tensor, " pos"], room: Room) -> None:
    """As :func:`move_rows`, written into memory behind the rows that are there: each row is read once and written once.

    Args:
        model, cache, positions: as for :func:`move_rows`.
        room: memory apart from the rows of ``cache``; its ``grown`` hands the rows out.

    Raises:
        CacheError, UnsupportedModelError: as :func:`move_rows`.

    Cost: one rotation of every key that moves, one copy of everything else; no forward pass.
    """
    delta = _checked(model, cache, positions)
    if not bool(delta.any()):
        room.write(cache)
        return
    for layer, adapter in enumerate(adapters(model)):
        adapter.move_into(cache.keys[layer], cache.values[layer], delta, room.free(layer, len(cache)))


def _checked(model: "NoteModel", cache: KVCache, new: Tensor) -> Tensor:
    """By how much every row would move, once it is known that it may."""
    if new.shape != cache.positions.shape:
        raise CacheError(f"{len(cache)} rows but {tuple(new.shape)} positions to move them to")
    model.geometry.check(cache, model.name)
    delta = new - cache.positions
    if not bool(delta.any()):
        return delta
    if len(new) and int(new[-1]) >= model.geometry.max_positions:
        why = f" ({model.geometry.limit})" if model.geometry.limit else ""
        raise CacheError(f"position {int(new[-1])} is beyond the {model.geometry.max_positions} of {model.name}{why}")
    for adapter in adapters(model):
        adapter.check(cache.positions, new)
    return delta


def move_along(model: "NoteModel", cache: KVCache, rows: Sequence[int], delta: int, axis: str) -> KVCache:
    """Rows of an image or video moved along one M-RoPE axis; their place in the sequence and the other axes stay.

    Args:
        model: a model with M-RoPE.
        cache: the rows, which stay unchanged.
        rows: which of them belong to the image.
        delta: positions to move by.
        axis: ``temporal``, ``height`` or ``width``.

    Raises:
        UnsupportedModelError: a layer has no such axes.
        CacheError: no such axis or row.
    """
    if axis not in AXES:
        raise CacheError(f"unknown axis {axis!r}; known: {', '.join(AXES)}")
    if any(not 0 <= r < len(cache) for r in rows):
        raise CacheError(f"rows {sorted(rows)[:4]} of a cache with {len(cache)} rows")
    model.geometry.check(cache, model.name)
    steps = torch.zeros(3, len(cache), dtype=torch.int64)
    steps[AXES.index(axis), list(rows)] = delta
    keys: list[Tensor] = []
    for layer, adapter in enumerate(adapters(model)):
        if adapter.facts.axes is None:
            raise UnsupportedModelError(f"layer {layer} of {model.name} has one position axis; use move_rows")
        keys.append(adapter.move(cache.keys[layer], cache.values[layer], steps)[0])
    note = f"{len(set(rows))} rows moved by {delta} along the {axis} axis"
    return cache.replace_tensors(keys, cache.values, history=(*cache.history, note))


def readable_rows(model: "NoteModel", cache: KVCache, reader: int | None = None) -> Bool[Tensor, "layer pos"]:
    """Which rows a token at position ``reader`` (behind the cache when ``None``) can attend to, per layer."""
    at = cache.next_position if reader is None else reader
    return torch.stack([adapter.readable(cache.positions, at) for adapter in adapters(model)])


def check_readable(
    model: "NoteModel", cache: KVCache, rows: Sequence[int], reader: int | None = None
) -> tuple[int, ...]:
    """Layers in which the reader still sees every one of ``rows``.

    Raises:
        CacheError: a row does not exist, or no layer sees them all; the message names the windows.
    """
    if not rows or any(not 0 <= r < len(cache) for r in rows):
        raise CacheError(f"rows {list(rows)[:4]} of a cache with {len(cache)} rows")
    seen = readable_rows(model, cache, reader)[:, list(rows)].all(1)
    layers = tuple(int(i) for i in seen.nonzero()[:, 0])
    if not layers:
        at = cache.next_position if reader is None else reader
        windows = sorted({w for w in (g.window for g in model.geometry.layers) if w is not None})
        raise CacheError(
            f"rows {min(rows)}..{max(rows)} are not readable from position {at} in any layer of {model.name}: its windows "
            f"reach back {', '.join(map(str, windows))} positions. Recompute the suffix, or edit rows within the window"
        )
    return layers


__all__ = ["adapters", "check_readable", "move_along", "move_rows", "move_rows_into", "readable_rows"]
