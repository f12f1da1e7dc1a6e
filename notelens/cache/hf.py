"""The only place that knows how transformers stores caches.

A plain ``DynamicCache`` without a config keeps every row in every layer, also where a layer attends through a sliding
window only; the attention mask enforces the window. That is what notelens needs, because rows are addressed by position.
Other caches (static, quantised, offloaded, sliding, hybrid) are read where all their rows are there, and refused by name where
they are not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    QuantizedLayer,
    StaticLayer,
)

from notelens.cache.kv import KVCache, RecurrentState
from notelens.cache.ops import slice_rows
from notelens.errors import CacheError, UnsupportedModelError

CONVERSIONS: tuple[tuple[str, str, str], ...] = tuple(
    (kind, what, f"tests/test_cache_conversion.py::test_{proof}")
    for kind, what, proof in (
        ("DynamicCache()", "read and written", "pairs_go_in_and_come_out_again"),
        (
            "DynamicCache(config)",
            "read; refused where a window dropped rows",
            "a_sliding_cache_that_dropped_rows_is_refused",
        ),
        ("DynamicCache of a hybrid", "read with its recurrent state", "a_recurrent_state_is_read_with_its_rows"),
        ("offloaded", "read, onto one device", "an_offloaded_cache_is_read"),
        ("StaticCache", "read; refused where a window dropped rows", "a_static_cache_is_read_up_to_its_counter"),
        ("QuantizedCache", "dequantised, marked approximate", "a_quantised_cache_is_dequantised_and_says_so"),
        ("fp8 rows", "read with their scale only", "fp8_rows_need_their_scale_and_count_saturation"),
        ("EncoderDecoderCache, recurrent, unknown", "refused", "what_has_no_rows_is_refused"),
    )
)
"""Kinds of caches, what becomes of them, and the test that shows it."""


def _hybrid_layers(n: int) -> list[CacheLayerMixin | LinearAttentionCacheLayerMixin]:
    """Empty layers that keep full rows and a recurrent state."""
    return [LinearAttentionAndFullAttentionLayer() for _ in range(n)]


def empty_cache(n_hybrid: int = 0) -> DynamicCache:
    """A transformers cache that keeps full rows in every layer.

    Args:
        n_hybrid: number of layers that also keep a recurrent state; 0 for models without.
    """
    out = DynamicCache()
    if n_hybrid:
        out.layers = _hybrid_layers(n_hybrid)
    return out


def to_transformers(cache: KVCache, *, batch: int = 1, share: bool = False) -> DynamicCache:
    """A transformers cache with the rows of ``cache``, repeated ``batch`` times; ``cache`` stays unchanged.

    The recurrent state behind the last row goes with it, where there is one.

    Args:
        cache: the rows.
        batch: how often each is repeated.
        share: hand the tensors over instead of a copy. A dynamic layer appends by making new tensors, so running a model leaves
            ``cache`` as it is; whoever writes into the layers' tensors must not ask for it.
    """
    state = cache.states.get(len(cache))
    out = DynamicCache()
    out.layers = [DynamicLayer() for _ in cache.keys] if state is None else _hybrid_layers(cache.n_layers)
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        k, v = (t.unsqueeze(0).expand(batch, -1, -1, -1) for t in (k, v))
        if share:
            store: Any = out.layers[layer]
            store.lazy_initialization(k, v)
            store.keys, store.values = k, v
        else:
            out.update(k, v, layer)
        if state is not None:
            _put_state(out.layers[layer], state.conv[layer], state.scan[layer], batch)
    return out


def _put_state(store: Any, conv: torch.Tensor, scan: torch.Tensor, batch: int) -> None:
    """Give a layer a recurrent state, repeated ``batch`` times; the state is copied, because layers write into theirs."""
    conv, scan = (t.expand(batch, *t.shape[1:]) for t in (conv, scan))
    store.update_conv_state(conv.clone(), conv_kernel_size=conv.shape[-1])
    store.update_recurrent_state(scan.clone())


def recurrent_state(cache: Cache, batch_index: int = 0) -> RecurrentState | None:
    """The recurrent state that the layers of a transformers cache hold now; ``None`` where they have none."""
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if not layers or len(layers) != len(cache.layers):
        return None
    take = slice(batch_index, batch_index + 1)
    pairs = [(layer.conv_states[0], layer.recurrent_states[0]) for layer in layers]
    if any(conv is None or scan is None for conv, scan in pairs):
        return None
    return RecurrentState(
        tuple(conv[take].detach().clone() for conv, _ in pairs), tuple(scan[take].detach().clone() for _, scan in pairs)
    )


def from_transformers(cache: Any, token_ids: Sequence[int], *, start: int = 0, batch_index: int = 0) -> KVCache:
    """Read a transformers cache: dynamic, static, offloaded, quantised or hybrid.

    Args:
        cache: the cache after a forward pass.
        token_ids: all ids it has seen, in order; the number of rows is taken from the cache's own counter and compared.
        start: absolute position of the first row.
        batch_index: which sequence of a batch.

    Returns:
        Rows as full tensors on one device. Rows of a static or dynamic cache are views of it; those of a quantised cache are
        dequantised and carry a note that says so.

    Raises:
        UnsupportedModelError: a layer stores something else than keys and values per token.
        CacheError: a layer holds fewer rows than tokens (a sliding cache that dropped rows, or a cache that the model
            ignored in silence), or the batch has no such sequence.
    """
    if isinstance(cache, EncoderDecoderCache):
        raise UnsupportedModelError(
            "an encoder-decoder cache holds rows of an encoder that reads in both directions; use a decoder-only model"
        )
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UnsupportedModelError(
            f"a {type(cache).__name__} is not a transformers cache of layers; pass the past_key_values of a forward pass"
        )
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    history: tuple[str, ...] = ()
    for layer, store in enumerate(layers):
        k, v, note = _rows(store, layer, len(token_ids))
        if not 0 <= batch_index < k.shape[0]:
            raise CacheError(f"sequence {batch_index} of a batch of {k.shape[0]}")
        keys.append(k[batch_index].detach())
        values.append(v[batch_index].detach())
        history = (note,) if note else history
    if not keys:
        raise CacheError(f"the cache is empty after {len(token_ids)} tokens: the model ignored it")
    device = keys[0].device  # offloaded layers rest on the CPU
    keys, values = [k.to(device) for k in keys], [v.to(device) for v in values]
    positions = torch.arange(start, start + len(token_ids), dtype=torch.int64)
    state = recurrent_state(cache, batch_index)
    states = {len(token_ids): state} if state is not None else {}
    return KVCache(tuple(keys), tuple(values), positions, tuple(token_ids), history, states)


def _rows(store: Any, layer: int, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Rows of all tokens in one layer, ``[batch, kv_head, pos, width]``, and what was done to get them."""
    kind, note = type(store).__name__, ""
    k, v = getattr(store, "keys", None), getattr(store, "values", None)
    if isinstance(store, QuantizedLayer):
        if not store.is_initialized:
            raise CacheError(f"layer {layer} of the cache is empty after {n_tokens} tokens: the model ignored it")
        k, v = _dequantised(store)
        note = f"rows dequantised from {getattr(store, 'nbits', '?')} bits ({kind})"
    elif isinstance(store, StaticLayer) and store.is_initialized:
        # seen tokens, not buffer length and never the content of rows: a row of zeros is a row
        seen = int(store.get_seq_length())
        if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and seen <= k.shape[2]:
            k, v = k[:, :, :seen], v[:, :, :seen]
        else:
            raise CacheError(_dropped(layer, kind, 0 if k is None else k.shape[2], seen))
    if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor) or k.ndim != 4 or v.ndim != 4:
        raise UnsupportedModelError(
            f"layer {layer} of the cache is a {kind} without plain keys and values; a recurrent state or an unknown layout has "
            "no row per token to read"
        )
    if k.dtype.itemsize == 1 or not k.is_floating_point():
        raise UnsupportedModelError(
            f"layer {layer} of the cache stores {k.dtype}; dequantise it first with its scale "
            "(notelens.cache.fp8.dequantise), because a scale is never guessed"
        )
    if k.shape[2] != n_tokens:
        raise CacheError(_dropped(layer, kind, k.shape[2], n_tokens))
    return k, v, note


def _dequantised(store: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of an initialised ``QuantizedLayer`` (whose own ``_dequantize`` is abstract and declares no type)."""
    k, v = store._dequantize(store._quantized_keys), store._dequantize(store._quantized_values)
    k, v = store._apply_pending_reorder(k, v)
    if store.keys.numel():  # the newest rows wait unquantised
        k, v = torch.cat([k, store.keys.to(k)], dim=2), torch.cat([v, store.values.to(v)], dim=2)
    return k, v


def _dropped(layer: int, kind: str, n_rows: int, n_tokens: int) -> str:
    return (
        f"layer {layer} of the cache ({kind}) holds {n_rows} rows for {n_tokens} tokens; pass a DynamicCache() made without a "
        "config, which keeps all rows"
    )


def crop(cache: KVCache, n_rows: int) -> KVCache:
    """The first ``n_rows`` rows; unchanged where there are as many.

    Raises:
        CacheError: a negative number, or more rows than there are.
    """
    if not 0 < n_rows <= len(cache):
        raise CacheError(
            f"{n_rows} rows of a cache that has {len(cache)}; a cache cannot be cropped to nothing or to more"
        )
    return cache if n_rows == len(cache) else slice_rows(cache, 0, n_rows)


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


def reader_cache(base: KVCache, length: int, batch: Sequence[int], *, recurrent: bool) -> ReadOnlyCache:
    """A cache for readers behind the first ``length`` rows of ``base``.

    Args:
        batch: number of readers in every layer; lower layers may run once for all.
        recurrent: the model is a hybrid, whose readers continue from a recurrent state of their own.

    Raises:
        CacheError: a hybrid without the state behind ``length`` rows.
    """
    out = ReadOnlyCache(length)
    if not recurrent or length == 0:
        if recurrent:
            out.layers = _hybrid_layers(len(batch))
        return out
    state = base.states.get(length)
    if state is None:
        raise CacheError(
            f"no recurrent state is stored behind row {length - 1}; notelens.intervene.rescan.rescan computes it from the rows"
        )
    out.layers = _hybrid_layers(len(batch))
    for store, conv, scan, n in zip(out.layers, state.conv, state.scan, batch, strict=True):
        _put_state(store, conv, scan, n)
    return out


class HeldRows(DynamicCache):
    """A hybrid's cache whose attention reads given rows, while recurrent layers scan the tokens (see ``rescan``)."""

    def __init__(self, rows: KVCache) -> None:
        super().__init__()
        self.rows, self.start, self.stop = rows, 0, 0
        self.layers = _hybrid_layers(rows.n_layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows in front of the tokens that are scanned."""
        return self.start

    def scan_to(self, stop: int) -> None:
        """Announce the next stretch of rows."""
        self.start, self.stop = self.stop, stop

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset for a mask."""
        return self.stop, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The held rows in place of the computed ones."""
        return self.rows.keys[layer_idx][None, :, : self.stop], self.rows.values[layer_idx][None, :, : self.stop]


def leaf_cache(cache: KVCache) -> tuple[DynamicCache, list[torch.Tensor], list[torch.Tensor]]:
    """A transformers cache whose rows are fresh leaf tensors that require gradients, with those leaves.

    Returns:
        The cache, the key leaves and the value leaves, ``[1, kv_head, pos, width]`` per layer.

    Raises:
        UnsupportedModelError: a hybrid's cache, whose state would carry gradients past the rows.
    """
    if cache.states:
        raise UnsupportedModelError(
            "gradients to rows are not taken in hybrids: the recurrent state carries the same tokens past them"
        )
    out = DynamicCache()
    keys = [k.detach().clone().unsqueeze(0).requires_grad_(True) for k in cache.keys]
    values = [v.detach().clone().unsqueeze(0).requires_grad_(True) for v in cache.values]
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        out.update(k, v, layer)
    return out, keys, values
