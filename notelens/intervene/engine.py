"""Swaps of cached rows, all of them in one batch over one shared base cache.

*Isolated* swap: rows of keys and values are replaced and only the reader runs; every other row stays. *In-forward* swap: rows
are replaced while the prompt is being prefilled, so that later rows and layers are computed from the replaced ones. Both are
exact up to rounding; :mod:`notelens.intervene.kernel` has the arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.cache.ops import Parts, check_aligned
from notelens.errors import NonFiniteError, PatchError
from notelens.intervene.attended import attended
from notelens.intervene.kernel import KERNEL, Batch, RowPatches, engine_attention, run_readers
from notelens.models.base import NoteModel

Mode = Literal["isolated", "in_forward"]
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
        reader: index into the readers of the call.
        hide: row indices that the reader does not see (attention knockout); none of them is among ``positions``.
        hide_layers: half-open band of layers in which they are hidden; all when ``None``.
    """

    positions: tuple[int, ...]
    layers: tuple[int, int] | None = None
    kv_heads: tuple[int, ...] | None = None
    parts: Parts = "kv"
    donor: int = 0
    reader: int = 0
    hide: tuple[int, ...] = ()
    hide_layers: tuple[int, int] | None = None


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
        """The last ``n`` tokens of ``cache``, re-run on the rows in front of them.

        Raises:
            PatchError: nothing would be left to read.
        """
        if not 0 < n < len(cache):
            raise PatchError(f"a reader of {n} tokens on a cache of {len(cache)} rows leaves nothing to read")
        return cls(len(cache) - n, cache.token_ids[-n:], tuple(answer_ids))

    def check(self, cache: KVCache) -> None:
        """Check that this reader can run on ``cache``.

        Raises:
            PatchError: no tokens, no answers, or rows to read that the cache does not have.
        """
        if not self.token_ids or not self.answer_ids:
            raise PatchError("a reader needs at least one token and one answer id")
        if not 0 < self.start <= len(cache):
            raise PatchError(f"the reader starts behind {self.start} rows of a cache that has {len(cache)}")


@dataclass(frozen=True)
class SwapEffects:
    """Answer logits behind every patched reader.

    Attributes:
        logits: ``[site, answer]`` float32, in the order of the sites.
        baselines: ``[reader, answer]`` float32, the unpatched recipient run in the same way.
        mode: ``isolated`` or ``in_forward``.
        n_readers: readers actually run, baselines included (sites whose rows equal the recipient's bit for bit return the
            baseline itself without a run).
        n_tokens: tokens actually run.
    """

    logits: Float[Tensor, "site answer"]
    baselines: Float[Tensor, "reader answer"]
    mode: Mode
    n_readers: int
    n_tokens: int

    @property
    def baseline(self) -> Float[Tensor, " answer"]:
        """Logits of the unpatched recipient, where there is one reader."""
        if len(self.baselines) != 1:
            raise PatchError(f"there are {len(self.baselines)} readers; use baselines")
        return self.baselines[0]


@dataclass(frozen=True)
class _Live:
    """A site that changes something: its place in the result, its rows, where its run starts and in which layer."""

    index: int
    site: Site
    rows: tuple[int, ...]
    low: int
    start: int
    ids: tuple[int, ...]


def swap_effects(
    model: NoteModel,
    recipient: KVCache,
    donors: Sequence[KVCache],
    sites: Sequence[Site],
    reader: Reader | Sequence[Reader],
    *,
    mode: Mode = "isolated",
    prefix: int = 1,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    max_chunk: int = MAX_CHUNK,
) -> SwapEffects:
    """Answer logits of the readers on ``recipient`` with each site's rows taken from its donor.

    Args:
        model: runs the readers; its attention must go through transformers' attention interface.
        recipient: base cache; read once per layer for all sites, never copied or changed.
        donors: caches aligned with ``recipient`` (same length and positions).
        sites: what to replace; each is one patched reader.
        reader: tokens to run and answers to read; several must have the same number of answers.
        mode: ``isolated`` runs the reader only; ``in_forward`` re-runs everything from the first patched row on, with the
            patched rows held at the donor's (whole rows: keys and values of all heads).
        prefix: how many leading tokens donors must share with the recipient; state the first position of the field for
            the strictest check, 0 where the field itself stands first.
        budget_bytes: bound on attention scores and activations of one chunk of readers.
        max_chunk: most readers in one chunk.

    Returns:
        Logits per site in the given order, and those of the unpatched recipient. Rows that equal the recipient's bit for
        bit are not patched; a site of such rows only returns the baseline itself.

    Raises:
        PatchError: caches are not aligned or begin differently, a site is out of range, or a reader does not fit.
        UnsupportedModelError: the model's attention did not go through the interface.
        NonFiniteError: a logit is NaN or infinite.

    Cost: isolated, one reader per site over shared rows (a position map of a prompt costs about one prefill of it);
    in-forward, the suffix behind the site's first row. No cache is copied; only answer rows of the unembedding are computed;
    layers below a chunk's first patched one are run once.
    """
    readers = [reader] if isinstance(reader, Reader) else list(reader)
    _check(model, recipient, donors, sites, readers, mode, prefix)
    recipient, donors, sites = attended(model, recipient, donors, sites, readers, mode)
    changed = [_Changed(recipient, d) for d in donors]
    live = [entry for i, site in enumerate(sites) if (entry := _live(i, site, recipient, changed, readers, mode))]
    # the unpatched readers run in the same batches; they share every layer with the others, so they ask for the last one
    last = recipient.n_layers - 1
    live += [_Live(len(sites) + i, Site((), reader=i), (), last, r.start, r.token_ids) for i, r in enumerate(readers)]
    # readers of one chunk must have the same tokens to run and the same rows to see; low layers first to share them
    live.sort(key=lambda e: (e.start, len(e.ids), e.low, e.site.reader))
    out = torch.empty(len(sites) + len(readers), len(readers[0].answer_ids))
    n_tokens = 0
    buffers: dict[str, Tensor] = {}  # for the largest chunk; later ones find it there
    with torch.no_grad(), engine_attention(model):
        for part in _chunks(model, live, budget_bytes, max_chunk):
            out[[e.index for e in part]] = _run(model, recipient, donors, part, readers, buffers)
            n_tokens += sum(len(e.ids) for e in part)
    base = out[len(sites) :].clone()
    done = {e.index for e in live}
    for i, site in enumerate(sites):
        if i not in done:
            out[i] = base[site.reader]
    out = out[: len(sites)].clone()
    if not bool(torch.isfinite(out).all() and torch.isfinite(base).all()):
        raise NonFiniteError("answer logits are not finite; check the model's dtype and the caches for overflow")
    return SwapEffects(out, base, mode, len(live), n_tokens)


def check_ends(
    model: NoteModel, recipient: KVCache, donors: Sequence[KVCache], readers: Sequence[Reader], *, prefix: int = 1
) -> None:
    """Check that donors and readers fit the recipient, and the recipient the model.

    Raises:
        PatchError: another model's cache, caches that are not aligned or begin differently, or a reader that does not fit.
    """
    n_layers = model.geometry.n_layers
    if recipient.n_layers != n_layers:
        raise PatchError(f"the cache has {recipient.n_layers} layers, the model {n_layers}; use a cache of this model")
    for reader in readers:
        reader.check(recipient)
    for donor in donors:
        check_aligned(recipient, donor, prefix=prefix)


def _check(
    model: NoteModel,
    recipient: KVCache,
    donors: Sequence[KVCache],
    sites: Sequence[Site],
    readers: Sequence[Reader],
    mode: Mode,
    prefix: int,
) -> None:
    n_layers, n_kv = model.geometry.n_layers, recipient.keys[0].shape[0]
    if mode not in ("isolated", "in_forward"):
        raise PatchError(f"unknown mode {mode!r}; known: isolated, in_forward")
    if not readers or len({len(r.answer_ids) for r in readers}) != 1:
        raise PatchError("give at least one reader; several must read the same number of answers")
    if mode == "in_forward" and recipient.next_position != len(recipient):
        raise PatchError("in-forward swaps re-run the prompt, so the cache must hold every row from position 0 on")
    check_ends(model, recipient, donors, readers, prefix=prefix)
    for site in sites:
        if not 0 <= site.reader < len(readers):
            raise PatchError(f"site names reader {site.reader} of {len(readers)}")
        if site.positions and not 0 <= site.donor < len(donors):
            raise PatchError(f"site names donor {site.donor} of {len(donors)}")
        start = readers[site.reader].start
        bad = [p for p in (*site.positions, *site.hide) if not 0 <= p < start]
        if bad:
            raise PatchError(f"position {bad[0]} is outside the rows that the reader sees (0..{start - 1})")
        for low, high in (site.layers or (0, n_layers), site.hide_layers or (0, n_layers)):
            if not 0 <= low < high <= n_layers:
                raise PatchError(f"layer band [{low}, {high}) of {n_layers} layers is empty or out of range")
        both = set(site.positions) & set(site.hide)
        if both:
            raise PatchError(
                f"position {min(both)} is to be replaced and hidden; a site can do one of the two to a row"
            )
        heads = [h for h in site.kv_heads or () if not 0 <= h < n_kv]
        if heads or site.kv_heads == ():
            raise PatchError(
                f"key-value head {heads[0] if heads else '()'} does not exist: the model stores {n_kv} key-value heads "
                "(query heads share them)"
            )
        if site.parts not in ("kv", "k", "v"):
            raise PatchError(f"parts {site.parts!r} are unknown; known: 'kv', 'k', 'v'")
        if mode == "in_forward" and (site.kv_heads is not None or site.parts != "kv"):
            raise PatchError("in-forward swaps replace whole rows; leave kv_heads and parts at their defaults")
        if mode == "in_forward" and site.hide:
            raise PatchError("rows are hidden from the reader only, so hide goes with isolated swaps")


class _Changed:
    """Which rows of a donor differ from the recipient's at all."""

    def __init__(self, recipient: KVCache, donor: KVCache) -> None:
        parts = ((recipient.keys, donor.keys), (recipient.values, donor.values))
        found = [torch.stack([(a != b).any(-1) for a, b in zip(x, y, strict=True)]) for x, y in parts]
        self._rows: Bool[Tensor, "part layer kv_head pos"] = torch.stack(found).cpu()
        self._known: dict[tuple[object, ...], list[bool]] = {}

    def at(self, site: Site) -> list[bool]:
        """Per position, whether a row differs in the layers, heads and parts of a site (thousands of sites share them)."""
        key = (site.parts, site.layers, site.kv_heads)
        if key not in self._known:
            which = [i for i, part in enumerate("kv") if part in site.parts]
            rows = self._rows[which, slice(*(site.layers or (None, None)))].any(0).any(0)
            rows = rows if site.kv_heads is None else rows[list(site.kv_heads)]
            self._known[key] = rows.any(0).tolist()
        return self._known[key]


def _live(
    index: int, site: Site, recipient: KVCache, changed: Sequence[_Changed], readers: Sequence[Reader], mode: Mode
) -> _Live | None:
    """What has to be run for a site; ``None`` where its rows equal the recipient's."""
    moved = changed[site.donor].at(site) if site.positions else []
    rows = tuple(p for p in sorted(set(site.positions)) if moved[p])
    if not rows and not site.hide:
        return None
    reader = readers[site.reader]
    if mode == "isolated":
        bands = ([site.layers] if rows else []) + ([site.hide_layers] if site.hide else [])
        low = min(band[0] if band is not None else 0 for band in bands)
        return _Live(index, site, rows, low, reader.start, reader.token_ids)
    low = site.layers[0] if site.layers is not None else 0
    # behind the first changed row every row would be computed anew, so rows that equal the recipient's are held too
    held = tuple(p for p in sorted(set(site.positions)) if p >= rows[0])
    return _Live(index, site, held, low, held[0], (*recipient.token_ids[held[0] : reader.start], *reader.token_ids))


def _chunks(model: NoteModel, live: Sequence[_Live], budget_bytes: int, max_chunk: int) -> list[list[_Live]]:
    """Neighbours that share start and length, as many as fit the budget."""
    layer, out = model.geometry.layers[0], list[list[_Live]]()
    used, size = 0, torch.finfo(model.dtype).bits // 8
    for entry in live:
        n_query = len(entry.ids)
        scores = 2 * 4 * layer.n_heads * n_query * (entry.start + n_query)
        rows = (
            size * (len(entry.rows) + len(entry.site.hide)) * layer.n_kv_heads * (3 * layer.d_key + 3 * layer.d_value)
        )
        cost = scores + rows + 4 * size * n_query * 4 * model.geometry.d_model
        fits = out and len(out[-1]) < max_chunk and used + cost <= budget_bytes
        if fits and (out[-1][0].start, len(out[-1][0].ids)) == (entry.start, n_query):
            out[-1].append(entry)
            used += cost
        else:
            out.append([entry])
            used = cost
    return out


def _run(
    model: NoteModel,
    recipient: KVCache,
    donors: Sequence[KVCache],
    part: Sequence[_Live],
    readers: Sequence[Reader],
    buffers: dict[str, Tensor],
) -> Tensor:
    """Answer logits ``[entry, answer]`` of one chunk; ``buffers`` is memory that chunks share."""
    device, n_layers, n_kv = recipient.device, model.geometry.n_layers, recipient.keys[0].shape[0]
    first = part[0]
    begin = int(recipient.positions[first.start - 1]) + 1 if first.start else int(recipient.positions[0])
    positions = torch.arange(begin, begin + len(first.ids), device=device)[None]
    pairs = [(i, row, e.site, False) for i, e in enumerate(part) for row in e.rows]
    pairs += [(i, row, e.site, True) for i, e in enumerate(part) for row in sorted(set(e.site.hide))]
    rows: RowPatches | None = None
    if pairs:
        bands = [(site.hide_layers if hide else site.layers) or (0, n_layers) for _, _, site, hide in pairs]
        every = [True] * n_kv
        heads = [every if s.kv_heads is None else [h in s.kv_heads for h in range(n_kv)] for _, _, s, _ in pairs]

        def column(values: Sequence[int | bool | list[bool]]) -> Tensor:
            return torch.tensor(values, device=device)

        rows = RowPatches(
            reader=column([i for i, _, _, _ in pairs]),
            row=column([row for _, row, _, _ in pairs]),
            donor=column([site.donor for _, _, site, _ in pairs]),
            low=column([low for low, _ in bands]),
            high=column([high for _, high in bands]),
            use_k=column(["k" in site.parts for _, _, site, _ in pairs]),
            use_v=column(["v" in site.parts for _, _, site, _ in pairs]),
            heads=column(heads),
            hide=column([hide for _, _, _, hide in pairs]),
        )
    batch = Batch(recipient, first.start, positions, donors=donors, rows=rows, buffers=buffers)
    same = all(e.ids == first.ids for e in part)
    ids = torch.tensor([first.ids] if same else [e.ids for e in part], device=device)
    hidden = run_readers(model, batch, ids, n_readers=len(part), first_layer=min(e.low for e in part) if same else 0)
    answers = [readers[e.site.reader].answer_ids for e in part]
    if all(a == answers[0] for a in answers):
        return model.answer_logits(hidden, answers[0]).float().cpu()
    return torch.stack([model.answer_logits(h, a) for h, a in zip(hidden, answers, strict=True)]).float().cpu()


__all__ = ["KERNEL", "Mode", "Reader", "Site", "SwapEffects", "check_ends", "swap_effects"]
