"""Rows run again on top of cached ones: the primitive under every repair of a cache.

The given tokens run in one pass at their positions. Each sees the cached rows before it (except those it stands for) and the
new rows before it, through every layer's own window. The pass goes through the model's own code: a cache object of ours hands
out the cached rows of one layer at a time, and a function registered with transformers' attention interface masks by position,
so rows may stand anywhere and the order of columns does not matter. Works for whatever a layer stores, because only the model
interprets it.
"""

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from notelens.cache.kv import KVCache
from notelens.cache.room import Room, room_behind
from notelens.cache.rows import Rows, Segment
from notelens.errors import CacheError, NonFiniteError, PatchError, UnsupportedModelError
from notelens.intervene.narrowing import Narrowing, deviation, narrowed
from notelens.intervene.switch import attention_switched
from notelens.models.base import NoteModel

KERNEL = "notelens_rows"
QUERY_BYTES = 256 * 2**20
"""Memory for attention scores held at once, where the plain softmax runs instead of the fused kernel."""

Watch = Callable[[int, Tensor, Float[Tensor, "head query column"], Tensor], None]
"""Called as ``(layer, query positions, probabilities, column positions)`` for every block of queries."""


@dataclass(frozen=True)
class RowsRun:
    """What a pass left behind.

    Attributes:
        rows: keys and values of the tokens that ran, at their positions.
        hidden: final-norm output at the last of them, ``[d_model]``.
        n_tokens: tokens run.
        tokens_run: the same, averaged over layers: a row that stops half way counts a half.
        survivors: positions that ran through all layers.
    """

    rows: KVCache
    hidden: Float[Tensor, " d_model"]
    n_tokens: int
    tokens_run: float
    survivors: tuple[int, ...]


@dataclass
class _Pass:
    """State of one pass, read by the attention function; ``running`` indexes the tokens that are still running."""

    query: Int[Tensor, " query"]
    columns: Int[Tensor, " column"]
    apart: bool
    windows: tuple[int | None, ...]
    watch: Watch | None
    calls: list[int]
    cached: Rows | None
    store: "_LayeredCache"
    narrow: Narrowing | None
    running: Tensor
    ran: list[Tensor]
    keep: Tensor | None = None
    masks: dict[int | None, Bool[Tensor, "query column"] | None] = field(default_factory=dict)

    def mask(self, layer: int) -> Bool[Tensor, "query column"] | None:
        """What every query may see, ``None`` where it is everything."""
        window = self.windows[layer]
        if window not in self.masks:
            back = self.query[:, None] - self.columns[None, :]
            seen = back >= 0 if window is None else (back >= 0) & (back < window)
            if self.apart:
                n = len(self.query)
                seen[:, :-n] &= back[:, :-n] > 0
                seen[:, -n:] &= torch.eye(n, dtype=torch.bool, device=seen.device)
            self.masks[window] = None if bool(seen.all()) else seen
        return self.masks[window]

    def drop(self, layer: int) -> None:
        """Let those rows go on to the next layer that ``narrow`` chooses; the others are read as they were cached."""
        assert self.narrow is not None and self.cached is not None
        place = torch.searchsorted(self.cached.positions.to(self.query.device), self.query)
        old = [t[:, place] for t in self.cached.layer(layer)]
        keep = self.narrow(layer, deviation(self.store.new[layer], old), self.query)
        if len(keep) == len(self.query):
            return
        self.keep, self.query, self.running = keep, self.query[keep], self.running[keep]
        base = _base(self.cached, self.query.tolist(), False)
        self.store.base = Rows(base) if base else None
        self.columns = torch.cat([*_positions(base, self.query.device), self.query])
        self.masks.clear()


_ACTIVE: contextvars.ContextVar[_Pass | None] = contextvars.ContextVar("notelens_rows_pass", default=None)


class _LayeredCache(Cache):
    """Hands a layer its cached rows followed by the new ones, and keeps the new ones."""

    def __init__(self, base: tuple[Segment, ...], room: Room | None = None) -> None:
        super().__init__(layers=[])
        self.base = Rows(base) if base else None
        self.room = room
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Cached and new rows of a layer."""
        self.new[layer_idx] = (key_states[0].detach(), value_states[0].detach())
        if self.base is None:
            return key_states, value_states
        if self.room is not None:
            free = self.room.free(layer_idx, key_states.shape[2])
            for target, new in zip(free, self.new[layer_idx], strict=True):
                target.copy_(new)
            keys, values = self.room.upto(layer_idx, self.room.filled + key_states.shape[2])
        else:
            keys, values = self.base.layer(layer_idx, extra=self.new[layer_idx])
        return keys[None], values[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows in front of the new ones."""
        return 0 if self.base is None else len(self.base)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset for a mask (the attention function makes its own)."""
        return self.get_seq_length() + query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops rows."""
        return []


@torch.no_grad()
def run_rows(
    model: NoteModel,
    cached: Rows | None,
    token_ids: Sequence[int],
    at: Sequence[int],
    *,
    apart: bool = False,
    watch: Watch | None = None,
    narrow: Narrowing | None = None,
    room: Room | None = None,
) -> RowsRun:
    """Run tokens at positions ``at`` on top of cached rows, in one pass.

    Args:
        model: an admitted model.
        cached: rows that stay; those at positions in ``at`` are not seen. ``None`` for a prefill.
        token_ids: ids of the tokens to run.
        at: their absolute positions, strictly increasing.
        apart: every token sees the *cached* rows before it and itself, none of the other new rows (a consistency check of
            single rows).
        watch: called with attention probabilities; costs the plain softmax instead of the fused kernel.
        narrow: which rows go on from layer to layer (it is told their positions); the others keep their *cached* rows from
            there on, and are read by them.
        room: memory that holds all of ``cached`` and nothing else: new rows are written behind them, and no layer is copied
            (see :func:`extend`).

    Raises:
        PatchError: no tokens, other positions than tokens, positions that do not increase, or rows to narrow that are not
            cached.
        CacheError: a position beyond the model's, or a cache of another model.
        UnsupportedModelError: a hybrid, whose recurrent layers cannot run scattered rows; or the model's attention does not go
            through the interface, or the cache was ignored.
        NonFiniteError: the output is NaN or infinite.

    Cost: ``len(token_ids)`` tokens; rows of one layer are copied at a time, none is kept. ``cached`` stays unchanged.
    """
    if not token_ids or len(token_ids) != len(at) or any(b <= a for a, b in pairwise(at)):
        raise PatchError(f"{len(token_ids)} tokens for {len(at)} positions, which must strictly increase")
    if at[0] < 0 or at[-1] >= model.geometry.max_positions:
        raise CacheError(f"positions {at[0]}..{at[-1]} exceed the {model.geometry.max_positions} of {model.name}")
    n_layers = model.geometry.n_layers
    if cached is not None and cached.n_layers != n_layers:
        raise CacheError(f"the cache has {cached.n_layers} layers, {model.name} has {n_layers}")
    if model.family.recurrent:
        raise UnsupportedModelError(
            f"{model.name} has recurrent layers, which read every token in order; scattered rows cannot be run again in them. "
            "Prefill the changed prompt in full"
        )
    if narrow is not None and (apart or cached is None or not set(at) <= set(cached.positions.tolist())):
        raise PatchError("rows can only be narrowed where all of them are cached, and not with apart")
    if narrow is not None and room is not None:
        raise PatchError("rows that are narrowed are cached ones; they are not written behind the others")
    base = _base(cached, at, apart)
    device = model.device
    query = torch.tensor(list(at), device=device)
    store = _LayeredCache(base, room)
    state = _Pass(
        query=query,
        columns=torch.cat([*_positions(base, device), query]),
        apart=apart,
        windows=tuple(layer.window for layer in model.geometry.layers),
        watch=watch,
        calls=[0] * n_layers,
        cached=cached,
        store=store,
        narrow=narrow,
        running=torch.arange(len(at), device=device),
        ran=[],
    )
    token = _ACTIVE.set(state)
    try:
        with attention_switched(model, KERNEL), contextlib.nullcontext() if narrow is None else narrowed(model, state):
            out = model.family.decoder(model.hf)(
                input_ids=torch.tensor([list(token_ids)], device=device),
                position_ids=query[None],
                past_key_values=store,
                use_cache=True,
            )
    finally:
        _ACTIVE.reset(token)
    if state.calls != [1] * n_layers or len(store.new) != n_layers:
        raise UnsupportedModelError(
            f"{model.name}: attention ran {state.calls} times per layer and {len(store.new)} of {n_layers} layers used the "
            "cache; rows can only be run again where both go through transformers' interfaces"
        )
    hidden = out.last_hidden_state[0, -1].detach()
    if not bool(torch.isfinite(out.last_hidden_state).all()):
        raise NonFiniteError(f"{model.name}: the output of {len(token_ids)} rows is not finite ({model.dtype})")
    layers = [_whole(state, i, query) for i in range(n_layers)]
    keys, values = (tuple(part) for part in zip(*layers, strict=True))
    rows = KVCache(keys, values, query.cpu(), tuple(int(i) for i in token_ids))
    computed = sum(map(len, state.ran)) / n_layers
    return RowsRun(rows, hidden, len(token_ids), computed, tuple(state.query.tolist()))


def _whole(state: _Pass, layer: int, at: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a layer at all positions: those that ran, and the cached ones of those that had stopped."""
    ran, new = state.ran[layer], state.store.new[layer]
    if len(ran) == len(at):
        return new
    assert state.cached is not None
    place = torch.searchsorted(state.cached.positions.to(at.device), at)
    keys, values = (t[:, place] for t in state.cached.layer(layer))  # indexing copies
    keys[:, ran], values[:, ran] = new
    return keys, values


def _positions(base: Sequence[Segment], device: torch.device) -> list[Tensor]:
    """Positions of every segment."""
    return [s.source.positions[s.start : s.stop].to(device) for s in base]


def extend(model: NoteModel, before: KVCache, token_ids: Sequence[int]) -> tuple[KVCache, Float[Tensor, " d_model"]]:
    """Tokens run behind a cache, their rows written into its memory; with the final-norm output of the last one.

    Args:
        before: a cache; its memory is grown where it ends there, otherwise its rows are copied once.
        token_ids: run at the positions behind it.

    Raises:
        as :func:`run_rows`.

    Cost: the tokens. Attention reads the rows where they are.
    """
    room, before = room_behind(before, len(token_ids))
    start = before.next_position
    at = range(start, start + len(token_ids))
    done = run_rows(model, Rows.of(before), token_ids, at, room=room)
    return room.grown(before, done.rows.positions, done.rows.token_ids, before.history), done.hidden


def _base(cached: Rows | None, at: Sequence[int], apart: bool) -> tuple[Segment, ...]:
    """Cached rows that a token at one of the positions can see."""
    if cached is None:
        return ()
    last, own = at[-1], set() if apart else set(at)
    unseen = [i for i, p in enumerate(cached.positions.tolist()) if p in own or p > last]
    return cached.without(unseen) if unseen else cached.segments


def _attend(
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
    """The function registered with transformers; masks by position, knows soft caps and sinks."""
    state = _ACTIVE.get()
    if state is None:
        raise PatchError(f"attention {KERNEL!r} only runs inside run_rows; set another attention implementation")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"{type(module).__name__} has no layer index; its window cannot be told")
    state.calls[layer] += 1
    state.ran.append(state.running)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _mixed(state, layer, query, key, value, scale, softcap, s_aux)
    if state.narrow is not None and layer + 1 < len(state.windows):
        state.drop(layer)
    return out, None


def _mixed(
    state: _Pass,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention of the running rows over all columns, ``[1, query, head, d_value]``."""
    mask = state.mask(layer)
    if softcap is None and s_aux is None and state.watch is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()
    n_heads, n_kv, n_query = query.shape[1], key.shape[1], query.shape[2]
    blocks: list[Tensor] = []
    step = max(1, QUERY_BYTES // (4 * n_heads * key.shape[2]))
    for start in range(0, n_query, step):
        part = query[0, :, start : start + step] * scale
        grouped = part.reshape(n_kv, n_heads // n_kv * part.shape[1], -1)
        scores = torch.bmm(grouped, key[0].transpose(1, 2)).view(n_heads, part.shape[1], -1).float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores.masked_fill_(~mask[start : start + step], float("-inf"))
        if s_aux is not None:
            sink = s_aux.to(scores).view(-1, 1, 1).expand(-1, part.shape[1], 1)
            probs = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        else:
            probs = torch.softmax(scores, dim=-1)
        if state.watch is not None:
            state.watch(layer, state.query[start : start + step], probs, state.columns)
        mixed = torch.bmm(probs.to(value.dtype).view(n_kv, -1, probs.shape[-1]), value[0])
        blocks.append(mixed.view(n_heads, part.shape[1], -1))
    return torch.cat(blocks, dim=1).transpose(0, 1)[None].contiguous()


def _no_mask(*_: Any, **__: Any) -> None:
    """The attention function masks by itself."""


AttentionInterface.register(KERNEL, _attend)
AttentionMaskInterface.register(KERNEL, _no_mask)


__all__ = ["KERNEL", "RowsRun", "Watch", "extend", "run_rows"]
