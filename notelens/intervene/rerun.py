"""Rows of a cache computed again where they stand, and kept.

The rows run together in one pass, in order: each sees what stands before it in the cache, with the recomputed rows in place
of the old ones. Rows that are not run stay as they are, so what comes out is exact only where everything before a row was.
Fewer rows may go on from one layer to the next (:class:`Narrowing`); a row that stops keeps its old rows from there on.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.errors import NonFiniteError, PatchError, UnsupportedModelError
from notelens.intervene.kernel import Batch, engine_attention, run_readers
from notelens.models.base import NoteModel

QUERY_BYTES = 256 * 2**20
"""Memory for the attention scores of one slice of queries."""

Narrowing = Callable[[int, Tensor, Tensor], Tensor]
"""``(layer, deviation, rows)``: which entries of ``rows`` (indices into it, ascending) run in the next layer. ``deviation`` is
the squared distance of the new from the old keys and values of each of them in this layer, relative to the old."""


@dataclass(frozen=True)
class Rerun:
    """What a rerun gives.

    Attributes:
        cache: the cache with the recomputed rows in place; its history is that of the old one.
        tokens_run: rows computed, averaged over layers, so that a row which runs half of the layers counts a half.
        hidden: final-norm output of the last row that ran through all layers ``[d_model]``.
        survivors: rows that ran through all layers.
    """

    cache: KVCache
    tokens_run: float
    hidden: Float[Tensor, " d_model"]
    survivors: tuple[int, ...]


@dataclass
class _Rows(Batch):
    """One reader whose own tokens stand at rows of the base cache."""

    at: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    narrow: Narrowing | None = None
    keep: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    computed: int = 0

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of the own tokens over the base cache with their own rows put in."""
        self.calls[layer] += 1
        old_k, old_v = self.base.keys[layer], self.base.values[layer]
        if key[0].shape != old_k[:, self.at].shape or value[0].shape != old_v[:, self.at].shape:
            raise UnsupportedModelError(
                f"layer {layer} attends over rows of shape {tuple(key.shape[1:])}, its cache stores "
                f"{tuple(old_k[:, self.at].shape)}; rows of this representation cannot be run again in place"
            )
        self.computed += len(self.at)
        k, v = old_k.clone(), old_v.clone()
        k[:, self.at], v[:, self.at] = key[0], value[0]
        self.keys.append(k)
        self.values.append(v)
        out = torch.empty((*query.shape[:-1], v.shape[-1]), dtype=v.dtype, device=v.device)
        last = int(self.at[-1]) + 1
        k, v = k[:, :last], v[:, :last]
        n_heads, n_kv = query.shape[1], k.shape[0]
        step = max(1, QUERY_BYTES // (4 * n_heads * last))
        seen = torch.arange(last, device=k.device)
        where = self.base.positions.to(k.device)
        for low in range(0, len(self.at), step):
            part = slice(low, low + step)
            rows = self.at[part]
            q = (query[0, :, part] * scaling).reshape(n_kv, -1, query.shape[-1])
            scores = torch.bmm(q, k.transpose(1, 2)).view(n_kv, n_heads // n_kv, len(rows), last).float()
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            hidden = seen > rows[:, None]
            window = self.windows[layer]
            if window is not None:
                hidden = hidden | (where[rows][:, None] - where[:last] >= window)
            scores.masked_fill_(hidden, float("-inf"))
            if sinks is not None:
                sink = sinks.to(scores).view(n_kv, -1, 1, 1).expand(-1, -1, len(rows), 1)
                scores = torch.cat([scores, sink], dim=-1)
            probs = torch.softmax(scores, dim=-1)[..., :last].to(v.dtype)
            mixed = torch.bmm(probs.reshape(n_kv, -1, last), v)
            out[0, :, part] = mixed.view(n_heads, len(rows), -1)
        if self.narrow is not None and layer + 1 < len(self.windows):
            deviation = sum(
                (new[0] - old[:, self.at]).float().square().sum((0, 2))
                / old[:, self.at].float().square().sum((0, 2)).clamp_min(1e-12)
                for new, old in ((key, old_k), (value, old_v))
            )
            assert isinstance(deviation, Tensor)
            keep = self.narrow(layer, deviation, self.at)
            self.keep = None if len(keep) == len(self.at) else keep
            self.at = self.at[keep]
        return out


def rerun_rows(model: NoteModel, cache: KVCache, rows: Sequence[int], *, narrow: Narrowing | None = None) -> Rerun:
    """Compute rows of ``cache`` again where they stand (paper, section on composing: seam repair).

    Args:
        model: runs the rows.
        cache: all rows; stays unchanged. Its last rows need not be among those that run.
        rows: indices of the rows to run, any order.
        narrow: which of them go on to the next layer; all when ``None``.

    Raises:
        PatchError: no rows, a row that does not exist, or a cache of another model.
        UnsupportedModelError: the attention works on other rows than the cache stores.
        NonFiniteError: the output holds NaN or infinity.

    Cost: ``len(rows)`` tokens, less what ``narrow`` drops.
    """
    n, n_layers = len(cache), model.geometry.n_layers
    chosen = sorted(set(rows))
    if cache.n_layers != n_layers:
        raise PatchError(f"the cache has {cache.n_layers} layers, {model.name} has {n_layers}")
    if not chosen or chosen[0] < 0 or chosen[-1] >= n:
        raise PatchError(f"rows {chosen[:4]} to run again; there are rows 0..{n - 1}")
    at = torch.tensor(chosen, device=cache.device)
    positions = cache.positions.to(cache.device)[at][None]
    ids = torch.tensor([cache.token_ids[r] for r in chosen], device=cache.device)[None]
    batch = _Rows(cache, n, positions, at=at, narrow=narrow)
    with torch.no_grad(), engine_attention(model), _narrowing(model, batch):
        hidden = run_readers(model, batch, ids, n_readers=1)[0]
    if not bool(torch.isfinite(hidden).all()):
        raise NonFiniteError(f"{model.name}: the output of {len(chosen)} rows run again is not finite")
    new = cache.replace_tensors(batch.keys, batch.values, history=cache.history)
    return Rerun(new, batch.computed / n_layers, hidden.detach(), tuple(batch.at.tolist()))


@contextlib.contextmanager
def _narrowing(model: NoteModel, batch: _Rows) -> Iterator[None]:
    """Drop what does not go on from the inputs of every layer; the hooks come off in any case."""
    if batch.narrow is None:
        yield
        return
    dropped: list[tuple[int, Tensor]] = []

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if batch.keep is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            dropped.append((hidden.shape[1], batch.keep))
            batch.keep = None
        # the hidden states carry the last narrowing only, what the model repeats for every layer all of them
        hidden, *rest = args if args else (kwargs["hidden_states"],)
        if dropped and hidden.shape[1] == dropped[-1][0]:
            hidden = hidden[:, dropped[-1][1]]
        out = {k: _cut(v, dropped) for k, v in kwargs.items() if k != "hidden_states"}
        if args:
            return (hidden, *(_cut(a, dropped) for a in rest)), out
        return (), {"hidden_states": hidden, **out}

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in model.family.layers(model.hf)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut(value: Any, dropped: Sequence[tuple[int, Tensor]]) -> Any:
    """Tensors with one entry per token ``[1, token, ...]`` without the tokens that stopped."""
    if isinstance(value, tuple | list):
        return type(value)(_cut(v, dropped) for v in value)
    if isinstance(value, dict):
        return {k: _cut(v, dropped) for k, v in value.items()}
    if isinstance(value, Tensor) and value.ndim >= 2 and dropped and value.shape[1] == dropped[0][0]:
        for _, keep in dropped:
            value = value[:, keep]
    return value


__all__ = ["Narrowing", "Rerun", "rerun_rows"]
