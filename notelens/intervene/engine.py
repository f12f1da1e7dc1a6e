"""Isolated swaps, batched over one shared base cache.

An isolated swap replaces rows of cached keys and values and runs only the reader. With B patches of the same recipient the
readers differ in nothing but the patched rows, so no cache is copied: the scores of all readers against the base keys are
one matrix product per key-value head, the patched columns get the donor's scores before the softmax, and the output is
``probs @ V_base`` plus the donor-minus-base correction on the patched columns. This equals running each reader on its own
patched cache up to rounding. Nothing is subtracted after the softmax, so attention sinks do not cancel.

The engine goes through transformers' public attention interface and a cache object of ours; the model's own attention is
restored afterwards, also after an exception.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from notelens.cache.hf import ReadOnlyCache
from notelens.cache.kv import KVCache
from notelens.cache.ops import Parts, check_aligned
from notelens.errors import NonFiniteError, PatchError, UnsupportedModelError
from notelens.models.base import NoteModel

KERNEL = "notelens_swap"
DEFAULT_BUDGET_BYTES = 256 * 2**20
MAX_CHUNK = 512


@dataclass(frozen=True)
class Site:
    """Rows that one patch takes from a donor.

    Attributes:
        positions: row indices; an empty site is the unpatched recipient.
        layers: half-open band of layers; all when ``None``.
        kv_heads: key-value heads; all when ``None``.
        parts: keys, values, or both.
        donor: index into the donors of the call.
    """

    positions: tuple[int, ...]
    layers: tuple[int, int] | None = None
    kv_heads: tuple[int, ...] | None = None
    parts: Parts = "kv"
    donor: int = 0


@dataclass(frozen=True)
class Reader:
    """The tokens that are run on the patched rows, and the answers read behind the last of them.

    Attributes:
        start: number of cached rows the reader sees; its first token stands at the position behind them.
        token_ids: tokens to run.
        answer_ids: ids whose logits are returned.
    """

    start: int
    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @classmethod
    def last(cls, cache: KVCache, answer_ids: Sequence[int], n: int = 1) -> "Reader":
        """The last ``n`` tokens of ``cache``, re-run on the rows in front of them."""
        if not 0 < n < len(cache):
            raise PatchError(f"a reader of {n} tokens on a cache of {len(cache)} rows leaves nothing to read")
        return cls(len(cache) - n, cache.token_ids[-n:], tuple(answer_ids))


@dataclass(frozen=True)
class SwapEffects:
    """Answer logits behind every patched reader.

    Attributes:
        logits: ``[site, answer]`` float32, in the order of the sites.
        baseline: ``[answer]`` float32, the unpatched recipient run in the same way.
        mode: always ``"isolated"``: rows are replaced and only the reader runs.
        n_readers: readers actually run, the baseline included (sites whose rows equal the recipient's bit for bit return
            the baseline without a run).
    """

    logits: Float[Tensor, "site answer"]
    baseline: Float[Tensor, " answer"]
    mode: str
    n_readers: int


@dataclass(frozen=True)
class _Patches:
    """Flat list of (reader, row) pairs of one chunk, with what applies to each."""

    reader: Tensor
    row: Tensor
    donor: Tensor
    low: Tensor
    high: Tensor
    use_k: Tensor
    use_v: Tensor
    heads: Tensor  # [pair, kv_head] bool

    def at(self, layer: int) -> "_Patches | None":
        """The pairs that are active in a layer; ``None`` when there are none."""
        chosen = ((self.low <= layer) & (layer < self.high)).nonzero()[:, 0]
        if len(chosen) == len(self.low):
            return self
        if len(chosen) == 0:
            return None
        return _Patches(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class _Run:
    """State that the attention function reads while a chunk is running."""

    base: KVCache
    n_base: int
    donors: Sequence[KVCache]
    patches: _Patches | None
    windows: tuple[int | None, ...]
    query_positions: Tensor
    calls: list[int]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attention of all readers of a chunk.

        Args:
            query: ``[batch, head, query, d_key]``.
            key, value: the readers' own new rows, ``[batch, kv_head, query, width]``.

        Returns:
            ``[batch, head, query, d_value]``.
        """
        self.calls[layer] += 1
        base_k, base_v = self.base.keys[layer][:, : self.n_base], self.base.values[layer][:, : self.n_base]
        batch, n_heads, n_query, d_key = query.shape
        n_kv = base_k.shape[0]
        per_kv = n_heads // n_kv * n_query  # query rows that read one stored head, for one reader
        grouped = query.reshape(batch, n_kv, per_kv, d_key).transpose(0, 1)
        scores = torch.bmm(grouped.reshape(n_kv, batch * per_kv, d_key), base_k.transpose(1, 2)).float()
        scores = scores.view(n_kv, batch, per_kv, self.n_base)
        patches = self.patches.at(layer) if self.patches is not None else None
        new_v: Tensor | None = None
        if patches is not None:
            new_k, new_v = self._donor_rows(patches, layer)
            patched = torch.einsum("hmgd,hmd->mhg", grouped[:, patches.reader], new_k).float()
            scores[:, patches.reader, :, patches.row] = patched
        own = torch.einsum("bhgd,bhrd->hbgr", query.reshape(batch, n_kv, per_kv, d_key), key).float()
        scores, own = scores.mul_(scaling), own.mul_(scaling)
        if softcap is not None:
            scores, own = torch.tanh(scores / softcap) * softcap, torch.tanh(own / softcap) * softcap
        self._mask_(scores, own, layer, n_query)
        top = torch.maximum(scores.amax(-1, keepdim=True), own.amax(-1, keepdim=True))
        if sinks is not None:
            sink = sinks.float().view(n_kv, 1, n_heads // n_kv, 1).expand(-1, batch, -1, n_query)
            sink = sink.reshape(n_kv, batch, per_kv, 1)
            top = torch.maximum(top, sink)
        scores, own = scores.sub_(top).exp_(), own.sub_(top).exp_()
        total = scores.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sink - top).exp()
        weights = (scores / total).to(base_v.dtype)
        out = torch.bmm(weights.view(n_kv, batch * per_kv, self.n_base), base_v).view(n_kv, batch, per_kv, -1)
        out = out + torch.einsum("hbgr,bhrd->hbgd", (own / total).to(value.dtype), value)
        if patches is not None and new_v is not None:
            old_v = base_v[:, patches.row]
            moved = weights[:, patches.reader, :, patches.row]  # [pair, kv_head, query row]
            delta = torch.einsum("mhg,hmd->hmgd", moved, new_v - old_v)
            out = out.index_add(1, patches.reader, delta)
        return out.transpose(0, 1).reshape(batch, n_heads, n_query, -1)

    def _donor_rows(self, patches: _Patches, layer: int) -> tuple[Tensor, Tensor]:
        """Rows that replace the base rows of the pairs: keys and values ``[kv_head, pair, width]``."""
        rows: list[Tensor] = []
        for name, use in (("keys", patches.use_k), ("values", patches.use_v)):
            base = getattr(self.base, name)[layer]
            if len(self.donors) == 1:
                new = getattr(self.donors[0], name)[layer][:, patches.row]
            else:
                stacked = torch.stack([getattr(d, name)[layer] for d in self.donors])
                new = stacked[patches.donor, :, patches.row].transpose(0, 1)
            wanted = (patches.heads & use[:, None]).T[:, :, None]
            rows.append(new if bool(wanted.all()) else torch.where(wanted, new, base[:, patches.row]))
        return rows[0], rows[1]

    def _mask_(self, scores: Tensor, own: Tensor, layer: int, n_query: int) -> None:
        """Causality among the reader's own tokens and the layer's sliding window, in place."""
        window = self.windows[layer]
        query = self.query_positions.repeat(scores.shape[2] // n_query)
        if n_query > 1:
            offset = query[:, None] - self.query_positions[None, :]
            hidden = offset < 0 if window is None else (offset < 0) | (offset >= window)
            own.masked_fill_(hidden, float("-inf"))
        if window is not None:
            distance = query[:, None] - self.base.positions[: self.n_base].to(query.device)[None, :]
            scores.masked_fill_(distance >= window, float("-inf"))


_ACTIVE: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("notelens_swap_run", default=None)


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
    run = _ACTIVE.get()
    if run is None:
        raise PatchError(f"attention {KERNEL!r} only runs inside swap_effects; set another attention implementation")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"{type(module).__name__} has no layer index; the engine cannot tell its layer")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = run.attend(layer, query, key, value, scale, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The engine masks by itself."""


AttentionInterface.register(KERNEL, _swap_attention)
AttentionMaskInterface.register(KERNEL, _no_mask)


@contextlib.contextmanager
def _attention(hf: Any) -> Iterator[None]:
    """Switch a transformers model to the engine's attention, and back in any case."""
    before = hf.config._attn_implementation
    hf.set_attn_implementation(KERNEL)
    try:
        yield
    finally:
        hf.set_attn_implementation(before)


def _check(model: NoteModel, recipient: KVCache, donors: Sequence[KVCache], sites: Sequence[Site], reader: Reader) -> None:
    n_layers = model.geometry.n_layers
    if recipient.n_layers != n_layers:
        raise PatchError(f"the cache has {recipient.n_layers} layers, the model {n_layers}; use a cache of this model")
    if not reader.token_ids or not reader.answer_ids:
        raise PatchError("a reader needs at least one token and one answer id")
    if not 0 < reader.start <= len(recipient):
        raise PatchError(f"the reader starts behind {reader.start} rows of a cache that has {len(recipient)}")
    for donor in donors:
        check_aligned(recipient, donor)
    n_kv = recipient.keys[0].shape[0]
    for site in sites:
        if site.positions and not 0 <= site.donor < len(donors):
            raise PatchError(f"site names donor {site.donor} of {len(donors)}")
        bad = [p for p in site.positions if not 0 <= p < reader.start]
        if bad:
            raise PatchError(f"position {bad[0]} is outside the rows that the reader sees (0..{reader.start - 1})")
        low, high = site.layers or (0, n_layers)
        if not 0 <= low < high <= n_layers:
            raise PatchError(f"layer band [{low}, {high}) of {n_layers} layers is empty or out of range")
        heads = [h for h in site.kv_heads or () if not 0 <= h < n_kv]
        if heads or site.kv_heads == ():
            raise PatchError(
                f"key-value head {heads[0] if heads else '()'} does not exist: the model stores {n_kv} key-value heads "
                "(query heads share them)"
            )


def _changed_rows(recipient: KVCache, donor: KVCache) -> Tensor:
    """Which rows differ at all, per layer and part: ``[2, layer, pos]`` bool."""
    return torch.stack(
        [
            torch.stack([(a != b).any(-1).any(0) for a, b in zip(x, y, strict=True)])
            for x, y in ((recipient.keys, donor.keys), (recipient.values, donor.values))
        ]
    )


def swap_effects(
    model: NoteModel,
    recipient: KVCache,
    donors: Sequence[KVCache],
    sites: Sequence[Site],
    reader: Reader,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> SwapEffects:
    """Answer logits of the reader on ``recipient`` with each site's rows taken from its donor (isolated swaps).

    Args:
        model: runs the reader; its attention must go through transformers' attention interface.
        recipient: base cache; read once per layer for all sites, never copied or changed.
        donors: caches aligned with ``recipient`` (same length and positions).
        sites: what to replace; each is one patched reader.
        reader: tokens to run and answers to read.
        budget_bytes: bound on the attention scores and activations of one chunk of readers.

    Returns:
        Logits per site in the given order, and those of the unpatched recipient. Rows that equal the recipient's bit for
        bit are not patched; a site of such rows only returns the baseline itself.

    Raises:
        PatchError: caches are not aligned, a site is out of range, or the reader does not fit.
        UnsupportedModelError: the model's attention did not go through the interface.
        NonFiniteError: a logit is NaN or infinite.

    Cost: one reader's forward per site; no cache copy; only the answer rows of the unembedding.
    """
    _check(model, recipient, donors, sites, reader)
    n_layers, n_kv = model.geometry.n_layers, recipient.keys[0].shape[0]
    changed = [_changed_rows(recipient, d).cpu() for d in donors]
    live: list[tuple[int, Site, list[int]]] = []
    for index, site in enumerate(sites):
        low, high = site.layers or (0, n_layers)
        if site.positions:
            which = [i for i, part in enumerate("kv") if part in site.parts]
            moved = changed[site.donor][which, low:high].any(0).any(0)
            rows = [p for p in sorted(set(site.positions)) if bool(moved[p])]
            if rows:
                live.append((index, site, rows))
    live.sort(key=lambda entry: (entry[1].layers or (0, n_layers))[0])
    chunk = _chunk_size(model, reader, budget_bytes)
    out = torch.empty(len(sites), len(reader.answer_ids))
    with torch.no_grad(), _attention(model.hf):
        baseline = _run_chunk(model, recipient, donors, [], reader, n_layers, n_kv)[0]
        out[:] = baseline
        for start in range(0, len(live), chunk):
            part = live[start : start + chunk]
            logits = _run_chunk(model, recipient, donors, part, reader, n_layers, n_kv)
            out[[index for index, _, _ in part]] = logits
    if not bool(torch.isfinite(out).all() and torch.isfinite(baseline).all()):
        raise NonFiniteError("answer logits are not finite; check the model's dtype and the caches for overflow")
    return SwapEffects(out, baseline, "isolated", len(live) + 1)


def _chunk_size(model: NoteModel, reader: Reader, budget_bytes: int) -> int:
    """Readers whose scores and activations fit the budget (float32 scores, twice for temporaries)."""
    layer = model.geometry.layers[0]
    n_query = len(reader.token_ids)
    scores = 3 * 4 * layer.n_heads * n_query * reader.start
    hidden = 4 * n_query * 12 * model.geometry.d_model
    return max(1, min(MAX_CHUNK, budget_bytes // (scores + hidden)))


def _run_chunk(
    model: NoteModel,
    recipient: KVCache,
    donors: Sequence[KVCache],
    part: Sequence[tuple[int, Site, list[int]]],
    reader: Reader,
    n_layers: int,
    n_kv: int,
) -> Tensor:
    """Answer logits ``[len(part) or 1, answer]`` of one chunk of patched readers, or of the unpatched one."""
    device = recipient.device
    patches: _Patches | None = None
    first = 0
    if part:
        pairs = [(i, row, site) for i, (_, site, rows) in enumerate(part) for row in rows]
        bands = [site.layers or (0, n_layers) for _, _, site in pairs]
        first = min(low for low, _ in bands)
        heads = torch.tensor([[site.kv_heads is None or h in site.kv_heads for h in range(n_kv)] for _, _, site in pairs])

        def column(values: list[Any]) -> Tensor:
            return torch.tensor(values, device=device)

        patches = _Patches(
            column([i for i, _, _ in pairs]),
            column([row for _, row, _ in pairs]),
            column([site.donor for _, _, site in pairs]),
            column([low for low, _ in bands]),
            column([high for _, high in bands]),
            column(["k" in site.parts for _, _, site in pairs]),
            column(["v" in site.parts for _, _, site in pairs]),
            heads.to(device),
        )
    batch, n_query = max(1, len(part)), len(reader.token_ids)
    begin = int(recipient.positions[reader.start - 1]) + 1
    positions = torch.arange(begin, begin + n_query, device=device)
    windows = tuple(layer.window for layer in model.geometry.layers)
    run = _Run(recipient, reader.start, donors, patches, windows, positions, [0] * n_layers)
    shared = 1 if first > 0 else batch  # layers below the first patched one are run once for all readers
    ids = torch.tensor(reader.token_ids, device=device).expand(shared, -1)
    token = _ACTIVE.set(run)
    try:
        with _expand_at(model.family.layers(model.hf)[first], batch) if first > 0 else contextlib.nullcontext():
            hidden = model.family.decoder(model.hf)(
                input_ids=ids,
                position_ids=positions[None],
                past_key_values=ReadOnlyCache(reader.start),
                use_cache=True,
            ).last_hidden_state
    finally:
        _ACTIVE.reset(token)
    if run.calls != [1] * n_layers:
        raise UnsupportedModelError(
            f"{model.name}: the patch engine was called {run.calls} times per layer instead of once; this model's attention "
            "does not go through transformers' attention interface, so isolated swaps cannot be measured on it"
        )
    return model.answer_logits(hidden[:, -1], reader.answer_ids).float().cpu()


@contextlib.contextmanager
def _expand_at(layer: torch.nn.Module, batch: int) -> Iterator[None]:
    """Repeat the hidden states for all readers where they enter ``layer``."""

    def expand(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0].expand(batch, -1, -1), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].expand(batch, -1, -1)}

    handle = layer.register_forward_pre_hook(expand, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
