"""Cached rows as runs of shared storage: what an edit leaves alone is referred to, never copied."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.errors import CacheError


@dataclass(frozen=True)
class Segment:
    """Rows ``[start, stop)`` of a cache, by reference."""

    source: KVCache
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "Segment":
        """Rows ``[start, stop)`` of this segment."""
        return Segment(self.source, self.start + start, self.start + stop)


@dataclass(frozen=True)
class Rows:
    """The rows of one sequence, made of segments of several caches.

    A :class:`~notelens.cache.kv.KVCache` is one tensor per layer, so replacing one row of it copies all of them. Here the new
    row is a segment of its own between two references to the old tensors. Layers are put together one at a time when a model
    runs on them.

    Attributes:
        segments: in order of position.
        history: as in :class:`~notelens.cache.kv.KVCache`; those of the sources do not count.

    Raises:
        CacheError: there is no row, positions do not increase, or caches of different models are mixed.
    """

    segments: tuple[Segment, ...]
    history: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.segments or any(not 0 <= s.start < s.stop <= len(s.source) for s in self.segments):
            raise CacheError("rows need at least one segment, and every segment at least one row of its cache")
        first = self.segments[0].source
        for a, b in pairwise(self.segments):
            if int(a.source.positions[a.stop - 1]) >= int(b.source.positions[b.start]):
                raise CacheError(
                    f"rows at position {int(b.source.positions[b.start])} follow a row at "
                    f"{int(a.source.positions[a.stop - 1])}; positions must strictly increase"
                )
            other = b.source
            if (other.n_layers, other.dtype, other.device) != (first.n_layers, first.dtype, first.device):
                raise CacheError("rows of one sequence must come from one model, in one type, on one device")

    @classmethod
    def of(cls, cache: KVCache) -> "Rows":
        """All rows of a cache, by reference, with its history."""
        return cls((Segment(cache, 0, len(cache)),), cache.history)

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def exact(self) -> bool:
        """Whether all rows equal a fresh prefill of their tokens."""
        return not self.history

    @property
    def n_layers(self) -> int:
        """Number of layers that store rows."""
        return self.segments[0].source.n_layers

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token of every row: what the row was run with, also where the prompt says something else by now."""
        return tuple(i for s in self.segments for i in s.source.token_ids[s.start : s.stop])

    @property
    def positions(self) -> Tensor:
        """Absolute position of every row, int64 ``[pos]``."""
        return torch.cat([s.source.positions[s.start : s.stop] for s in self.segments])

    def layer(
        self, layer: int, *, extra: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Float[Tensor, "kv_head pos d_key"], Float[Tensor, "kv_head pos d_value"]]:
        """Keys and values of one layer, put together; ``extra`` rows are appended in the same copy."""
        keys = [s.source.keys[layer][:, s.start : s.stop] for s in self.segments]
        values = [s.source.values[layer][:, s.start : s.stop] for s in self.segments]
        if extra is not None:
            keys, values = [*keys, extra[0]], [*values, extra[1]]
        if len(keys) == 1:
            return keys[0], values[0]
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def join(self) -> KVCache:
        """One plain cache. Copies every row unless there is only one segment."""
        layers = [self.layer(i) for i in range(self.n_layers)]
        keys, values = (tuple(part) for part in zip(*layers, strict=True))
        return KVCache(keys, values, self.positions, self.token_ids, self.history)

    def between(self, start: int, stop: int) -> tuple[Segment, ...]:
        """Segments that hold rows ``[start, stop)``, cut to size; an empty range gives none."""
        found: list[Segment] = []
        at = 0
        for segment in self.segments:
            low, high = max(start - at, 0), min(stop - at, len(segment))
            if low < high:
                found.append(segment.part(low, high))
            at += len(segment)
        return tuple(found)

    def without(self, rows: Iterable[int]) -> tuple[Segment, ...]:
        """All segments but the given rows (by index); none when every row is given."""
        return tuple(s for a, b in runs(set(range(len(self))) - set(rows)) for s in self.between(a, b))

    def replaced(self, new: KVCache, *, history: tuple[str, ...]) -> "Rows":
        """These rows with those of ``new`` in their places, by position; positions that are not there yet are added."""
        taken = set(new.positions.tolist())
        held = [i for i, p in enumerate(self.positions.tolist()) if p in taken]
        return Rows(merge(self.without(held), new), history)

    def storages(self) -> dict[int, int]:
        """Bytes of every distinct storage these rows refer to, by address; shared storage has the same address."""
        tensors = {id(t): t for s in self.segments for t in (*s.source.keys, *s.source.values)}
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}

    def bytes_beyond(self, other: "Rows") -> int:
        """Bytes these rows hold that ``other`` does not already hold."""
        held = other.storages()
        return sum(n for address, n in self.storages().items() if address not in held)


def runs(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal half-open ranges of consecutive numbers, ascending."""
    found: list[tuple[int, int]] = []
    for row in sorted(set(rows)):
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return found


def merge(segments: Sequence[Segment], new: KVCache) -> tuple[Segment, ...]:
    """Segments and the rows of a cache in order of position; both are only referred to."""
    where = new.positions.tolist()
    pieces = [part for segment in segments for part in _opened(segment, where)]
    starts = [int(s.source.positions[s.start]) for s in pieces]
    cuts = [0, *(i for i in range(1, len(where)) if _split(where[i - 1], where[i], starts)), len(where)]
    pieces += [Segment(new, a, b) for a, b in pairwise(cuts)]
    return tuple(sorted(pieces, key=lambda s: int(s.source.positions[s.start])))


def _opened(segment: Segment, positions: Sequence[int]) -> list[Segment]:
    """A segment cut where positions fall into a gap of it."""
    own = segment.source.positions[segment.start : segment.stop].tolist()
    if own[-1] - own[0] == len(own) - 1:
        return [segment]
    cuts = sorted({bisect(own, p) for p in positions} - {0, len(own)})
    return [segment.part(a, b) for a, b in pairwise([0, *cuts, len(own)])]


def _split(low: int, high: int, starts: Sequence[int]) -> bool:
    return high != low + 1 and any(low < s < high for s in starts)
