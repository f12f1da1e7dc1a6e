"""Rows of a skill, turned to where they stand, written into an engine's blocks by the engine's own writer.

How a block stores keys and values is the business of the attention backend: vLLM's CPU backend alone has four arrangements,
one of which (AMX) interleaves the keys of neighbouring tokens. So rows are handed to the function with which the backend stores
the rows it computes, ``do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)``, and no arrangement is assumed here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from notelens.cache.artefact import SkillFile
from notelens.errors import CacheError, UnsupportedModelError
from notelens.rope import Pairing, rotate


def rows_at(
    skill: SkillFile, layer: int, first: int, n: int, position: int, pairing: Pairing = "half"
) -> tuple[Tensor, Tensor]:
    """Rows ``[first, first + n)`` of a skill at positions ``position, position + 1, ...``.

    Args:
        skill: its file.
        layer: of the model.
        first, n: which rows.
        position: of the first of them.
        pairing: which channels of a key turn together.

    Returns:
        Keys ``[kv_head, n, d_key]`` and values ``[kv_head, n, d_value]``, as ``Skill.at`` of the library gives them.

    Raises:
        CacheError: the skill has no such rows, or the position is negative.
    """
    h = skill.header
    if not (0 <= first < first + n <= len(h.token_ids) and position >= 0):
        raise CacheError(f"rows [{first}, {first + n}) of skill {h.name!r} ({len(h.token_ids)} rows) at {position}")
    keys, values = skill.keys[layer][:, first : first + n], skill.values[layer][:, first : first + n]
    table = h.model.tables[layer]
    if table is None:
        return keys, values
    if h.scheme == "rotated":
        steps: int | Tensor = position - (h.start + first)
        if steps == 0:
            return keys, values
    else:
        steps = torch.arange(position, position + n, dtype=torch.int64)
    return rotate(keys, steps, torch.tensor(h.model.frequencies[table]), pairing=pairing), values


def slots(block_ids: Sequence[int], block_size: int, position: int, n: int) -> Tensor:
    """Where tokens ``position, ..., position + n - 1`` of a request are stored: int64 ``[n]``, block times size plus offset.

    Raises:
        CacheError: the request has fewer blocks.
    """
    at = torch.arange(position, position + n, dtype=torch.int64)
    if n < 1 or position < 0 or int(at[-1]) // block_size >= len(block_ids):
        raise CacheError(
            f"tokens {position}..{position + n - 1} are not within {len(block_ids)} blocks of {block_size}"
        )
    return torch.tensor(list(block_ids), dtype=torch.int64)[at // block_size] * block_size + at % block_size


def write_rows(layer: Any, keys: Tensor, values: Tensor, where: Tensor) -> None:
    """Store rows in a layer's blocks.

    Args:
        layer: the engine's attention layer, with its ``impl`` and ``kv_cache``.
        keys, values: ``[kv_head, n, d]``.
        where: slots, int64 ``[n]``.

    Raises:
        UnsupportedModelError: the backend has no writer of its own, or its blocks are of another type.
    """
    write = getattr(layer.impl, "do_kv_cache_update", None)
    cache = layer.kv_cache
    if write is None or not isinstance(cache, Tensor):
        raise UnsupportedModelError(
            f"attention backend {type(layer.impl).__name__} does not store rows by do_kv_cache_update; use another backend"
        )
    if cache.dtype != keys.dtype:
        raise UnsupportedModelError(f"blocks hold {cache.dtype}, the skill {keys.dtype}")
    key, value = (t.transpose(0, 1).to(cache.device).contiguous() for t in (keys, values))
    write(layer, key, value, cache, where.to(cache.device))


__all__ = ["rows_at", "slots", "write_rows"]
