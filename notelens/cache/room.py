"""Memory for the rows of a sequence that grows: every row is written once and never moved.

A :class:`~notelens.cache.kv.KVCache` is a value, so joining two of them copies both. A composition knows its length in advance:
it takes memory for all rows at the beginning, and each part writes its rows behind those that are there. What has been handed
out are views, and a row is never written twice: only the cache that ends where the memory is filled may grow into it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.errors import CacheError


class Room:
    """Memory for ``capacity`` rows in every layer.

    Args:
        like: a cache with the shapes, type and device of the rows.
        capacity: how many rows fit.

    Attributes:
        keys, values: per layer, ``[kv_head, capacity, width]``; rows behind ``filled`` are uninitialised.
        filled: rows written so far.
    """

    def __init__(self, like: KVCache, capacity: int) -> None:
        self.capacity, self.filled = capacity, 0
        self.keys = [k.new_empty((k.shape[0], capacity, k.shape[2])) for k in like.keys]
        self.values = [v.new_empty((v.shape[0], capacity, v.shape[2])) for v in like.values]

    def free(self, layer: int, n: int) -> tuple[Tensor, Tensor]:
        """The next ``n`` rows of a layer, to be written; :meth:`grown` hands them out."""
        stop = self.filled + n
        return self.keys[layer][:, self.filled : stop], self.values[layer][:, self.filled : stop]

    def upto(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """The first ``stop`` rows of a layer."""
        return self.keys[layer][:, :stop], self.values[layer][:, :stop]

    def write(self, rows: KVCache) -> None:
        """Copy rows behind those that are there; :meth:`grown` hands them out."""
        for layer, (k, v) in enumerate(zip(rows.keys, rows.values, strict=True)):
            key, value = self.free(layer, len(rows))
            key.copy_(k)
            value.copy_(v)

    def grown(
        self, before: KVCache | None, positions: Tensor, token_ids: Sequence[int], history: tuple[str, ...]
    ) -> KVCache:
        """``before`` with the rows that were just written behind it.

        Args:
            before: a cache that ends where this memory is filled; ``None`` where nothing is written yet.
            positions, token_ids: of the new rows.
            history: of the grown cache.

        Raises:
            CacheError: ``before`` ends elsewhere, or the rows do not fit.
        """
        start, stop = len(before) if before is not None else 0, self.filled + len(token_ids)
        if start != self.filled or stop > self.capacity:
            raise CacheError(
                f"memory of {self.capacity} rows is filled up to {self.filled}; {len(token_ids)} rows behind {start} do not "
                "belong there"
            )
        self.filled = stop
        if before is not None:
            positions, token_ids = torch.cat([before.positions, positions]), (*before.token_ids, *token_ids)
        layers = [self.upto(layer, stop) for layer in range(len(self.keys))]
        keys, values = zip(*layers, strict=True)
        return KVCache(tuple(keys), tuple(values), positions, tuple(token_ids), history, room=self)


def room_behind(before: KVCache, n: int, capacity: int = 0) -> tuple[Room, KVCache]:
    """Memory for ``n`` rows behind ``before``, and ``before`` as it stands in it.

    Args:
        capacity: rows that the whole sequence will have; only as many as are needed now when smaller.

    Cost: nothing where ``before`` ends where its memory is filled and the rows fit; otherwise a copy of its rows.
    """
    room = before.room
    if room is not None and room.filled == len(before) and len(before) + n <= room.capacity:
        return room, before
    room = Room(before, max(capacity, len(before) + n))
    room.write(before)
    moved = room.grown(None, before.positions, before.token_ids, before.history)
    return room, replace(moved, states=before.states)


__all__ = ["Room", "room_behind"]
