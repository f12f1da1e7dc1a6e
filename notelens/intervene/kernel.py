"""Attention of many readers over one shared base cache; the part of the patch engine that runs inside the model.

Every reader of a batch attends to the same base rows except for a few that are patched, and to the rows of its own tokens.
Scores against the base keys are one matrix product per stored head for all readers; patched columns are overwritten with
scores against the donor's keys before the softmax; the output is ``probs @ V_base`` plus the donor-minus-base correction on
the patched columns. Nothing is subtracted after the softmax, so attention sinks do not cancel.

The function is registered with transformers' attention interface. It reads its state from a context variable, which only
:func:`run_readers` sets; the model's own attention is restored afterwards, also after an exception.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from notelens.cache.hf import reader_cache
from notelens.cache.kv import KVCache
from notelens.errors import PatchError, UnsupportedModelError
from notelens.intervene.switch import attention_switched
from notelens.models.base import NoteModel

KERNEL = "notelens_swap"


@dataclass(frozen=True)
class RowPatches:
    """Flat list of (reader, row) pairs of a batch, with what applies to each.

    Attributes:
        reader: index of the reader in the batch.
        row: row of the base cache, or, at and beyond ``n_base``, row of the reader's own tokens.
        donor: index of the donor.
        low, high: half-open band of layers.
        use_k, use_v: which parts are replaced.
        heads: ``[pair, kv_head]``.
        hide: the reader does not see the row at all (then nothing of it is replaced).
    """

    reader: Int[Tensor, " pair"]
    row: Int[Tensor, " pair"]
    donor: Int[Tensor, " pair"]
    low: Int[Tensor, " pair"]
    high: Int[Tensor, " pair"]
    use_k: Bool[Tensor, " pair"]
    use_v: Bool[Tensor, " pair"]
    heads: Bool[Tensor, "pair kv_head"]
    hide: Bool[Tensor, " pair"]

    def at(self, layer: int) -> "RowPatches | None":
        """The pairs that are active in a layer; ``None`` when there are none."""
        chosen = ((self.low <= layer) & (layer < self.high)).nonzero()[:, 0]
        if len(chosen) == len(self.low):
            return self
        return self.pick(chosen)

    def pick(self, chosen: Tensor) -> "RowPatches | None":
        """The chosen pairs; ``None`` when there are none."""
        if len(chosen) == 0:
            return None
        return RowPatches(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class HeadPatches:
    """Head outputs that are replaced behind attention, before the output projection.

    Attributes:
        reader, layer, head: flat lists.
        donor: donor head outputs ``[layer, head, d_value]`` at the reader's last token.
    """

    reader: Int[Tensor, " pair"]
    layer: Int[Tensor, " pair"]
    head: Int[Tensor, " pair"]
    donor: Float[Tensor, "layer head d_value"]


@dataclass
class Batch:
    """One batch of readers and what happens to each of them.

    Attributes:
        base: shared rows.
        n_base: how many of them exist for the readers.
        positions: absolute position of every token of the readers, ``[1 or reader, query]``.
        own_rows: row of the whole prompt that each own token is, ``[1 or reader, query]``; base rows at these places are
            hidden from all queries. ``None`` where own tokens simply follow the base rows.
        donors: caches that patched rows come from.
        rows: patched rows.
        heads: patched head outputs.
        record: keep head outputs and attention of the last token of reader 0.
        buffers: memory for scores and probabilities. They are the largest tensors here, and fresh pages for them in every
            layer cost as much time as the arithmetic; batches run one after the other may share one dictionary.
    """

    base: KVCache
    n_base: int
    positions: Int[Tensor, "readers query"]
    own_rows: Int[Tensor, "readers query"] | None = None
    donors: Sequence[KVCache] = ()
    rows: RowPatches | None = None
    heads: HeadPatches | None = None
    record: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict)
    windows: tuple[int | None, ...] = ()
    calls: list[int] = field(default_factory=list)
    recorded_heads: dict[int, Float[Tensor, "head d_value"]] = field(default_factory=dict)
    recorded_attention: dict[int, Float[Tensor, "head base"]] = field(default_factory=dict)
    _hidden: dict[int | None, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "reader head query d_key"],
        key: Float[Tensor, "reader kv_head query d_key"],
        value: Float[Tensor, "reader kv_head query d_value"],
        scaling: float,
        softcap: float | None,
        sinks: Float[Tensor, " head"] | None,
    ) -> Float[Tensor, "reader head query d_value"]:
        """Attention of all readers in one layer; ``key`` and ``value`` are the readers' own rows."""
        self.calls[layer] += 1
        base_k, base_v = self.base.keys[layer][:, : self.n_base], self.base.values[layer][:, : self.n_base]
        n_readers, n_heads, n_query, d_key = query.shape
        n_kv, n_base = base_k.shape[0], self.n_base
        per_kv = n_heads // n_kv * n_query  # query rows of one reader that read one stored head
        patches = self.rows.at(layer) if self.rows is not None else None
        own_patches = patches.pick((patches.row >= n_base).nonzero()[:, 0]) if patches is not None else None
        if own_patches is not None:
            key, value = self._patch_own(own_patches, layer, key, value)
            assert patches is not None
            patches = patches.pick((patches.row < n_base).nonzero()[:, 0])
        grouped = (query * scaling).reshape(n_readers, n_kv, per_kv, d_key).transpose(0, 1)
        # own columns are appended as empty keys, so that one buffer holds all scores and one softmax normalises it
        padded = torch.cat([base_k, base_k.new_zeros(n_kv, n_query, d_key)], dim=1)
        scores = self._buffer("scores", (n_kv, n_readers * per_kv, n_base + n_query), grouped)
        torch.bmm(grouped.reshape(n_kv, n_readers * per_kv, d_key), padded.transpose(1, 2), out=scores)
        scores = scores.view(n_kv, n_readers, per_kv, n_base + n_query)
        scores[..., n_base:] = torch.einsum("hbgd,bhrd->hbgr", grouped, key)
        new_v: Tensor | None = None
        hidden = patches.pick(patches.hide.nonzero()[:, 0]) if patches is not None else None
        if hidden is not None:
            assert patches is not None
            patches = patches.pick((~patches.hide).nonzero()[:, 0])
        if patches is not None:
            new_k, new_v = self._donor_rows(patches, layer)
            scores[:, patches.reader, :, patches.row] = torch.einsum("hmgd,hmd->mhg", grouped[:, patches.reader], new_k)
        scores = scores.float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        self._mask_(scores, layer, n_heads // n_kv)
        if hidden is not None:
            scores[:, hidden.reader, :, hidden.row] = float("-inf")
        if sinks is not None:
            sink = sinks.to(scores).view(n_kv, 1, -1, 1).expand(-1, n_readers, -1, n_query)
            scores = torch.cat([scores, sink.reshape(n_kv, n_readers, per_kv, 1)], dim=-1)
        probs = torch.softmax(scores, dim=-1, out=self._buffer("probs", scores.shape, scores)).to(base_v.dtype)
        on_base = probs[..., :n_base]
        if n_base:
            out = torch.bmm(on_base.reshape(n_kv, n_readers * per_kv, n_base), base_v)
            out = out.view(n_kv, n_readers, per_kv, -1)
        else:
            out = base_v.new_zeros(n_kv, n_readers, per_kv, base_v.shape[-1])
        out += torch.einsum("hbgr,bhrd->hbgd", probs[..., n_base : n_base + n_query], value)
        if patches is not None and new_v is not None:
            moved = on_base[:, patches.reader, :, patches.row]  # [pair, kv_head, query row]
            delta = torch.einsum("mhg,hmd->hmgd", moved, new_v - base_v[:, patches.row])
            out.index_add_(1, patches.reader, delta)
        out = out.transpose(0, 1).reshape(n_readers, n_heads, n_query, -1)
        if self.record:
            self.recorded_heads[layer] = out[0, :, -1].clone()
            self.recorded_attention[layer] = on_base[:, 0].reshape(n_heads, n_query, n_base)[:, -1].clone()
        if self.heads is not None:
            chosen = (self.heads.layer == layer).nonzero()[:, 0]
            if len(chosen):
                out = out.clone()
                head = self.heads.head[chosen]
                out[self.heads.reader[chosen], head, -1] = self.heads.donor[layer, head].to(out.dtype)
        return out

    def _buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Uninitialised memory, the same for all layers (and for all batches that share ``buffers``)."""
        size, found = math.prod(shape), self.buffers.get(name)
        if found is None or found.numel() < size or (found.dtype, found.device) != (like.dtype, like.device):
            self.buffers[name] = found = like.new_empty(size)
        return found[:size].view(shape)

    def _patch_own(self, patches: RowPatches, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Own rows with patched ones in place (in-forward swaps)."""
        new_k, new_v = self._donor_rows(patches, layer)
        key, value = key.clone(), value.clone()
        key[patches.reader, :, patches.row - self.n_base] = new_k.transpose(0, 1)
        value[patches.reader, :, patches.row - self.n_base] = new_v.transpose(0, 1)
        return key, value

    def _donor_rows(self, patches: RowPatches, layer: int) -> tuple[Tensor, Tensor]:
        """Rows that stand in for the recipient's: keys and values, ``[kv_head, pair, width]``."""
        rows: list[Tensor] = []
        for name, use in (("keys", patches.use_k), ("values", patches.use_v)):
            if len(self.donors) == 1:
                new = getattr(self.donors[0], name)[layer][:, patches.row]
            else:
                stacked = torch.stack([getattr(d, name)[layer] for d in self.donors])
                new = stacked[patches.donor, :, patches.row].transpose(0, 1)
            wanted = (patches.heads & use[:, None]).T[:, :, None]
            if not bool(wanted.all()):
                new = torch.where(wanted, new, getattr(self.base, name)[layer][:, patches.row])
            rows.append(new)
        return rows[0], rows[1]

    def _mask_(self, scores: Float[Tensor, "kv_head reader query_row column"], layer: int, group: int) -> None:
        """Hide later tokens, rows outside the window, and base rows that own tokens stand for; in place."""
        window = self.windows[layer]
        if window not in self._hidden:
            self._hidden[window] = self._hide(window, scores.device)
        n_query = self.positions.shape[1]
        for hidden, columns in zip(
            self._hidden[window], (slice(0, self.n_base), slice(self.n_base, None)), strict=True
        ):
            if hidden is not None:
                view = scores[..., columns].view(*scores.shape[:2], group, n_query, -1)
                view.masked_fill_(hidden[None, :, None], float("-inf"))

    def _hide(self, window: int | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """What is hidden among base rows and among own rows, ``[1 or reader, query, row]``; ``None`` where nothing is."""
        query = self.positions[:, :, None]
        own = query - self.positions[:, None, :]
        own_hidden = own < 0 if window is None else (own < 0) | (own >= window)
        base = query - self.base.positions[: self.n_base].to(device)
        base_hidden = torch.zeros_like(base, dtype=torch.bool) if window is None else base >= window
        if self.own_rows is not None:
            replaced = (torch.arange(self.n_base, device=device) == self.own_rows[:, :, None]).any(1)
            base_hidden = base_hidden | (base < 0) | replaced[:, None]
        return (base_hidden if bool(base_hidden.any()) else None), (own_hidden if bool(own_hidden.any()) else None)


_ACTIVE: contextvars.ContextVar[Batch | None] = contextvars.ContextVar("notelens_swap_batch", default=None)


def _swap_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers; other keywords (dropout, window) are the engine's business."""
    batch = _ACTIVE.get()
    if batch is None:
        raise PatchError(
            f"attention {KERNEL!r} only runs inside the patch engine; set another attention implementation"
        )
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"{type(module).__name__} has no layer index; the engine cannot tell its layer")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = batch.attend(layer, query, key, value, scale, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The engine masks by itself."""


AttentionInterface.register(KERNEL, _swap_attention)
AttentionMaskInterface.register(KERNEL, _no_mask)


def engine_attention(model: NoteModel) -> contextlib.AbstractContextManager[None]:
    """Switch a model to the engine's attention, and back in any case."""
    return attention_switched(model, KERNEL)


def run_readers(
    model: NoteModel, batch: Batch, token_ids: Int[Tensor, "readers query"], *, n_readers: int, first_layer: int = 0
) -> Float[Tensor, "reader d_model"]:
    """Run a batch inside :func:`engine_attention`; returns final-norm outputs at the last token of every reader.

    Args:
        token_ids: of every reader, or one row for all.
        n_readers: size of the batch.
        first_layer: layers below are the same for all readers and run once.

    Raises:
        UnsupportedModelError: the model's attention did not go through the interface.
    """
    n_layers = model.geometry.n_layers
    batch.windows = tuple(layer.window for layer in model.geometry.layers)
    batch.calls = [0] * n_layers
    shared = first_layer > 0 and token_ids.shape[0] == 1 and batch.positions.shape[0] == 1
    ids = token_ids if shared else token_ids.expand(n_readers, -1)
    sizes = [1 if shared and layer < first_layer else n_readers for layer in range(n_layers)]
    token = _ACTIVE.set(batch)
    try:
        with _expand_at(model, first_layer, n_readers) if shared else contextlib.nullcontext():
            hidden = model.family.decoder(model.hf)(
                input_ids=ids,
                position_ids=batch.positions,
                past_key_values=reader_cache(batch.base, batch.n_base, sizes, recurrent=model.family.recurrent),
                use_cache=True,
            ).last_hidden_state
    finally:
        _ACTIVE.reset(token)
    if batch.calls != [1] * n_layers:
        raise UnsupportedModelError(
            f"{model.name}: the patch engine was called {batch.calls} times per layer instead of once; this model's "
            "attention does not go through transformers' attention interface, so isolated swaps cannot be measured on it"
        )
    return hidden[:, -1]


@contextlib.contextmanager
def _expand_at(model: NoteModel, layer: int, n_readers: int) -> Iterator[None]:
    """Repeat the hidden states for all readers where they enter ``layer``."""

    def expand(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0].expand(n_readers, -1, -1), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].expand(n_readers, -1, -1)}

    handle = model.family.layers(model.hf)[layer].register_forward_pre_hook(expand, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
