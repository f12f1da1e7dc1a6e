"""Pure operations on caches. Each returns a new cache; none changes its arguments."""

from collections.abc import Sequence
from typing import Literal

import torch

from notelens.cache.kv import KVCache
from notelens.errors import CacheError, PatchError

Parts = Literal["kv", "k", "v"]


def slice_rows(cache: KVCache, start: int, stop: int) -> KVCache:
    """Rows ``[start, stop)``; ``start`` 0 keeps an exact cache exact, anything else marks it as a chunk.

    Raises:
        CacheError: the range is empty or not within the rows.
    """
    if not 0 <= start < stop <= len(cache):
        raise CacheError(f"rows [{start}, {stop}) of a cache with {len(cache)} rows")
    history = cache.history if start == 0 else (*cache.history, f"rows {start}..{stop} of {len(cache)}")
    return KVCache(
        tuple(k[:, start:stop] for k in cache.keys),
        tuple(v[:, start:stop] for v in cache.values),
        cache.positions[start:stop],
        cache.token_ids[start:stop],
        history,
        {n: state for n, state in cache.states.items() if start == 0 and n <= stop},
    )


def select_rows(cache: KVCache, rows: Sequence[int]) -> KVCache:
    """The given rows, in ascending order; the result is approximate unless the rows are a prefix.

    Raises:
        CacheError: a row is out of range, repeated, or not ascending.
    """
    if any(not 0 <= r < len(cache) for r in rows) or list(rows) != sorted(set(rows)):
        raise CacheError(f"rows {list(rows)[:8]} must ascend within 0..{len(cache) - 1}")
    index = torch.tensor(list(rows), device=cache.device)
    prefix = list(rows) == list(range(len(rows)))
    return KVCache(
        tuple(k.index_select(1, index) for k in cache.keys),
        tuple(v.index_select(1, index) for v in cache.values),
        cache.positions[index.to(cache.positions.device)],
        tuple(cache.token_ids[r] for r in rows),
        cache.history if prefix else (*cache.history, f"{len(rows)} of {len(cache)} rows kept"),
    )


def check_aligned(recipient: KVCache, donor: KVCache, *, prefix: int = 0) -> None:
    """Check that rows of ``donor`` can stand in for rows of ``recipient``.

    Args:
        prefix: how many leading tokens the two must have in common.

    Raises:
        PatchError: they differ in length, positions, layers, shape, dtype or device, or within the prefix.
    """
    if len(recipient) != len(donor):
        raise PatchError(
            f"recipient has {len(recipient)} rows, donor {len(donor)}; an isolated swap needs prompts of equal token "
            "length (pick values that tokenise to the same number of tokens)"
        )
    if recipient.n_layers != donor.n_layers:
        raise PatchError(f"recipient has {recipient.n_layers} layers, donor {donor.n_layers}; use caches of one model")
    if not torch.equal(recipient.positions, donor.positions):
        raise PatchError("recipient and donor rows stand at different positions")
    for layer in range(recipient.n_layers):
        if recipient.keys[layer].shape != donor.keys[layer].shape or (
            recipient.values[layer].shape != donor.values[layer].shape
        ):
            raise PatchError(f"layer {layer}: recipient and donor rows differ in shape; use caches of one model")
    if recipient.dtype != donor.dtype or recipient.device != donor.device:
        raise PatchError(f"recipient is {recipient.dtype} on {recipient.device}, donor {donor.dtype} on {donor.device}")
    shared = list(zip(recipient.token_ids[:prefix], donor.token_ids[:prefix], strict=True))
    other = next((i for i, (a, b) in enumerate(shared) if a != b), None)
    if other is not None:
        raise PatchError(
            f"recipient and donor have different prefixes: token {other} is {shared[other][0]} in one and "
            f"{shared[other][1]} in the other, and the first {prefix} must be the same. Render both with the same "
            "beginning and system text; where the field itself stands there, pass the number of tokens before it as prefix"
        )


def replace_rows(
    recipient: KVCache,
    donor: KVCache,
    rows: Sequence[int],
    *,
    layers: tuple[int, int] | None = None,
    kv_heads: Sequence[int] | None = None,
    parts: Parts = "kv",
) -> KVCache:
    """``recipient`` with the given rows taken from ``donor``.

    Args:
        rows: row indices, any order.
        layers: half-open band of layers; all when ``None``.
        kv_heads: key-value heads; all when ``None``.
        parts: keys, values, or both.

    Raises:
        PatchError: caches are not aligned, or a row, layer or head does not exist.
    """
    check_aligned(recipient, donor)
    low, high = layers if layers is not None else (0, recipient.n_layers)
    if not 0 <= low < high <= recipient.n_layers:
        raise PatchError(f"layer band [{low}, {high}) of {recipient.n_layers} layers is empty or out of range")
    if not rows:
        raise PatchError("no rows to replace")
    for row in rows:
        if not 0 <= row < len(recipient):
            raise PatchError(f"row {row} is outside the cache (0..{len(recipient) - 1})")
    index = torch.tensor(sorted(set(rows)), device=recipient.device)
    keys, values = list(recipient.keys), list(recipient.values)
    for layer in range(low, high):
        n_heads = keys[layer].shape[0]
        heads = list(range(n_heads)) if kv_heads is None else list(kv_heads)
        if any(not 0 <= h < n_heads for h in heads):
            raise PatchError(f"layer {layer} has key-value heads 0..{n_heads - 1}, asked for {heads}")
        for name, store, source in (("k", keys, donor.keys), ("v", values, donor.values)):
            if name in parts:
                tensor = store[layer].clone()
                for head in heads:
                    tensor[head, index] = source[layer][head, index]
                store[layer] = tensor
    note = f"rows {sorted(set(rows))[0]}..{sorted(set(rows))[-1]} ({len(set(rows))}) from a donor"
    return recipient.replace_tensors(keys, values, history=(*recipient.history, note))


def concat(first: KVCache, second: KVCache, *, history: tuple[str, ...]) -> KVCache:
    """Rows of ``first`` followed by rows of ``second``.

    Args:
        history: what the joined cache is; empty only when the caller knows it to be exact (``second`` was run on top of
            ``first``).

    Raises:
        CacheError: positions would not increase, or the caches do not fit each other.
    """
    if first.n_layers != second.n_layers:
        raise CacheError(f"cannot join caches of {first.n_layers} and {second.n_layers} layers")
    return KVCache(
        tuple(torch.cat([a, b], dim=1) for a, b in zip(first.keys, second.keys, strict=True)),
        tuple(torch.cat([a, b], dim=1) for a, b in zip(first.values, second.values, strict=True)),
        torch.cat([first.positions, second.positions]),
        (*first.token_ids, *second.token_ids),
        history,
    )


def max_difference(a: KVCache, b: KVCache) -> float:
    """Largest absolute difference between rows of two aligned caches.

    Raises:
        PatchError: the caches are not aligned.
    """
    check_aligned(a, b)
    return max(
        float((x.float() - y.float()).abs().max())
        for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    )


def equal_within(a: KVCache, b: KVCache, atol: float) -> bool:
    """Whether ids and positions are equal and rows differ by at most ``atol``."""
    return a.token_ids == b.token_ids and torch.equal(a.positions, b.positions) and max_difference(a, b) <= atol
