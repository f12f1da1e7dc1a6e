"""The only place that knows how transformers stores caches.

A plain ``DynamicCache`` without a config keeps every row in every layer, also where a layer attends through a sliding
window only; the attention mask enforces the window. That is what notelens needs, because rows are addressed by position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from notelens.cache.kv import KVCache
from notelens.errors import CacheError, UnsupportedModelError


def empty_cache() -> DynamicCache:
    """A transformers cache that keeps full rows in every layer."""
    return DynamicCache()


def to_transformers(cache: KVCache, *, batch: int = 1) -> DynamicCache:
    """A transformers cache with a copy of the rows of ``cache``, repeated ``batch`` times; ``cache`` stays unchanged."""
    out = DynamicCache()
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        out.update(k.unsqueeze(0).expand(batch, -1, -1, -1), v.unsqueeze(0).expand(batch, -1, -1, -1), layer)
    return out


def from_transformers(
    cache: DynamicCache, token_ids: Sequence[int], *, start: int = 0, batch_index: int = 0
) -> KVCache:
    """Read a transformers cache.

    Args:
        cache: the cache after a forward pass.
        token_ids: all ids it has seen, in order.
        start: absolute position of the first row.
        batch_index: which sequence of a batch.

    Raises:
        UnsupportedModelError: a layer is not a plain key-value layer.
        CacheError: a layer holds fewer rows than tokens (a sliding cache that dropped rows, or a cache that the model
            ignored in silence).
    """
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer, store in enumerate(cache.layers):
        k, v = getattr(store, "keys", None), getattr(store, "values", None)
        if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor) or k.ndim != 4:
            raise UnsupportedModelError(
                f"layer {layer} of the cache is a {type(store).__name__} without plain keys and values; "
                "recurrent and quantised layers need their own adapter"
            )
        if k.shape[2] != len(token_ids):
            raise CacheError(
                f"layer {layer} of the cache holds {k.shape[2]} rows for {len(token_ids)} tokens; "
                "pass a DynamicCache() made without a config, which keeps all rows"
            )
        keys.append(k[batch_index].detach())
        values.append(v[batch_index].detach())
    if not keys:
        raise CacheError(f"the cache is empty after {len(token_ids)} tokens: the model ignored it")
    positions = torch.arange(start, start + len(token_ids), dtype=torch.int64)
    return KVCache(tuple(keys), tuple(values), positions, tuple(token_ids))


class ReadOnlyCache(Cache):
    """Stands in for a cache of ``length`` rows that the attention function reads from elsewhere.

    ``update`` stores nothing and hands the new rows straight to attention. Used by the patch engine, which keeps one base
    cache for all readers.
    """

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new rows to attention; nothing is stored."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows in front of the reader."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset for a mask (the engine makes its own)."""
        return self.length + query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops rows."""
        return []


def leaf_cache(cache: KVCache) -> tuple[DynamicCache, list[torch.Tensor], list[torch.Tensor]]:
    """A transformers cache whose rows are fresh leaf tensors that require gradients, with those leaves.

    Returns:
        The cache, the key leaves and the value leaves, ``[1, kv_head, pos, width]`` per layer.
    """
    out = DynamicCache()
    keys = [k.detach().clone().unsqueeze(0).requires_grad_(True) for k in cache.keys]
    values = [v.detach().clone().unsqueeze(0).requires_grad_(True) for v in cache.values]
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        out.update(k, v, layer)
    return out, keys, values
