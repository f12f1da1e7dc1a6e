"""Fitting a link: how the rows of a skill change when they see what precedes them, as a linear map of a few of them.

For one skill and many calibration contexts, ``T`` holds how each context changes the skill's rows (prefilled behind the
context, less as compiled), ``O`` how it changes a few *link rows* when only these are run again in the composed cache. Both are
taken in the skill's own frame: keys are turned back to the positions of compiling, so contexts may have any length. Then

    T - mean(T)  ~  (O - mean(O)) W V,

a ridge regression in its dual form (as many unknowns as contexts), with targets cut to their leading directions ``V``. Layers
are scaled to equal weight. The ridge is chosen by what matters: on contexts held out of the fit, the next-token distribution of
a reader behind the corrected rows must match the one behind prefilled rows (Kullback-Leibler divergence). Nothing is trained by
gradients, and no answer is ever looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from notelens.attention.move import move_rows
from notelens.cache.kv import KVCache
from notelens.cache.ops import select_rows
from notelens.compose.base import Chunk, shifted
from notelens.compose.join import compose
from notelens.compose.parts import Part
from notelens.compose.skill import Skill, text_ids
from notelens.errors import ComposeError
from notelens.intervene.rerun import rerun_rows
from notelens.models.base import NoteModel
from notelens.stats.agreement import logit_distance

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridges tried, in units of the mean diagonal of the Gram matrix of the link rows' changes."""
N_FOLDS = 4
MIN_CONTEXTS = 4


@dataclass(frozen=True)
class Calibration:
    """One calibration context.

    Attributes:
        before: parts in front of the skill, as for :func:`~notelens.compose.join.compose`.
        after: text (or ids) that reads behind it.
    """

    before: Sequence[Part]
    after: str | Sequence[int]


@dataclass(frozen=True)
class Link:
    """A fitted link of one skill.

    Attributes:
        name, key: of the skill.
        start: position of its first row in its own frame.
        rows: link rows, indices into the skill.
        observed_mean, weights: mean change of the link rows ``[observed]``, and the map ``[observed, rank]``.
        mean, basis: mean change of all rows ``[target]``, and the directions ``[rank, target]``.
        ridge: chosen.
        n_contexts: calibration contexts.
        reader_kl: by ridge, mean divergence of held-out readers from prefilled ones, in nats; ``uncorrected`` beside them.
    """

    name: str
    key: str
    start: int
    rows: tuple[int, ...]
    observed_mean: Float[Tensor, " observed"]
    weights: Float[Tensor, "observed rank"]
    mean: Float[Tensor, " target"]
    basis: Float[Tensor, "rank target"]
    ridge: float
    n_contexts: int
    reader_kl: dict[str, float]

    def __str__(self) -> str:
        return (
            f"corrected by a rank-{len(self.basis)} link on {len(self.rows)} rows, fitted on {self.n_contexts} contexts"
        )

    def change(self, observed: Float[Tensor, " observed"]) -> Float[Tensor, " target"]:
        """Predicted change of all rows from the change of the link rows."""
        return self.mean + ((observed - self.observed_mean) @ self.weights) @ self.basis


@dataclass(frozen=True)
class _Sample:
    """A calibration context, run.

    Attributes:
        stale, full: everything up to and with the skill, moved in and prefilled.
        after: ids of the reader.
        logits: next-token logits of the reader behind ``full``.
    """

    stale: KVCache
    full: KVCache
    after: tuple[int, ...]
    logits: np.ndarray


def fit_link(
    model: NoteModel, skill: Skill, calibrations: Sequence[Calibration], *, k: int = 8, rank: int = 16
) -> Link:
    """Fit the link of a skill (see the module).

    Args:
        model: runs the calibration contexts.
        skill: whose rows are corrected.
        calibrations: contexts like those of use, but never the ones that are evaluated.
        k: link rows, the recompute budget per use; those that change most, relative to their size, over the contexts.
        rank: directions kept, at most the number of contexts less one.

    Raises:
        ComposeError: fewer than 4 contexts, ``k`` or ``rank`` below 1, or a context without anything in front of the skill.

    Cost: per context two passes over the skill, its context and reader, and ``k`` rows; then a reader per ridge.
    """
    if len(calibrations) < MIN_CONTEXTS or k < 1 or rank < 1:
        raise ComposeError(
            f"a link needs at least {MIN_CONTEXTS} calibration contexts, one link row and one direction; got "
            f"{len(calibrations)}, {k}, {rank}"
        )
    skill.check(model)
    chunk = Chunk(skill.name, skill.token_ids, skill.onto(model).cache, skill.onto(model), model=model)
    start, n = int(skill.cache.positions[0]), len(skill)
    samples = [_run(model, chunk, c, i) for i, c in enumerate(calibrations)]
    targets = torch.stack([_flat(_difference(model, s.full, s.stale, range(n), n, start)) for s in samples])
    sizes = _row_changes(model, targets, n, chunk)
    rows = tuple(sorted(torch.argsort(sizes, descending=True, stable=True)[: min(k, n)].tolist()))
    observed = torch.stack([_observe(model, s.stale, n, rows, start)[0] for s in samples])
    folds = [list(range(f, len(samples), N_FOLDS)) for f in range(min(N_FOLDS, len(samples)))]
    kl = {f"{ridge:g}": list[float]() for ridge in RIDGES} | {"uncorrected": []}
    for held_out in folds:
        kept = [i for i in range(len(samples)) if i not in held_out]
        for ridge in RIDGES:
            trial = _solve(skill, start, rows, observed[kept], targets[kept], ridge, rank)
            for i in held_out:
                cache = _apply(model, samples[i].stale, n, trial, observed[i])
                kl[f"{ridge:g}"].append(_reader_kl(model, cache, samples[i]))
        kl["uncorrected"] += [_reader_kl(model, samples[i].stale, samples[i]) for i in held_out]
    means = {name: float(np.mean(values)) for name, values in kl.items()}
    best = min(RIDGES, key=lambda r: (means[f"{r:g}"], -r))
    fitted = _solve(skill, start, rows, observed, targets, best, rank)
    return Link(**{**fitted.__dict__, "reader_kl": means})


def corrected(model: NoteModel, moved: KVCache, n: int, link: Link) -> tuple[KVCache, float]:
    """A composed cache, whose last ``n`` rows are the link's skill, with these rows corrected; and the tokens that were run."""
    observed, tokens = _observe(model, moved, n, link.rows, link.start)
    return _apply(model, moved, n, link, observed), tokens


def _run(model: NoteModel, chunk: Chunk, calibration: Calibration, index: int) -> _Sample:
    before = compose(model, calibration.before, method="full_prefill").cache
    after = text_ids(model, calibration.after, f"the reader of calibration context {index}")
    full = model.prefill(chunk.token_ids, before).cache
    logits = model.next_logits(model.prefill(after, full).hidden).double().cpu().numpy()
    return _Sample(shifted(model, before, chunk), full, after, logits)


def _difference(
    model: NoteModel, new: KVCache, old: KVCache, rows: Sequence[int], n: int, start: int
) -> tuple[list[Tensor], list[Tensor]]:
    """``new - old`` at rows of the skill (the last ``n``), in the skill's own frame."""
    first = len(new) - n
    own = torch.tensor([start + r for r in rows])
    a, b = (move_rows(model, select_rows(c, [first + r for r in rows]), own) for c in (new, old))
    keys = [x.float() - y.float() for x, y in zip(a.keys, b.keys, strict=True)]
    return keys, [x.float() - y.float() for x, y in zip(a.values, b.values, strict=True)]


def _flat(rows: tuple[list[Tensor], list[Tensor]]) -> Tensor:
    return torch.cat([t.flatten() for t in (*rows[0], *rows[1])])


def _observe(model: NoteModel, stale: KVCache, n: int, rows: Sequence[int], start: int) -> tuple[Tensor, float]:
    """How the link rows change when they are run again, and the tokens this ran."""
    first = len(stale) - n
    out = rerun_rows(model, stale, [first + r for r in rows])
    return _flat(_difference(model, out.cache, stale, rows, n, start)), out.tokens_run


def _row_changes(model: NoteModel, targets: Tensor, n: int, chunk: Chunk) -> Tensor:
    """Mean squared change of each row over contexts, relative to the layer's rows, summed over layers ``[n]``."""
    assert chunk.rows is not None
    total, at = torch.zeros(n), 0
    for tensor in (*chunk.rows.keys, *chunk.rows.values):
        part = targets[:, at : at + tensor.numel()].view(len(targets), *tensor.shape)
        total += part.square().mean(0).sum((0, 2)).cpu() / tensor.float().square().sum().clamp_min(1e-12).cpu()
        at += tensor.numel()
    return total


def _solve(
    skill: Skill, start: int, rows: tuple[int, ...], observed: Tensor, targets: Tensor, ridge: float, rank: int
) -> Link:
    """Ridge regression in its dual form, with targets cut to their leading directions."""
    o_mean, t_mean = observed.mean(0), targets.mean(0)
    o, t = observed - o_mean, targets - t_mean
    o_scale, t_scale = _scales(o, skill, len(rows)), _scales(t, skill, len(skill))
    o = o / o_scale
    gram = (o @ o.T).double()
    load = ridge * gram.diagonal().mean().clamp_min(1e-30)
    dual = torch.linalg.inv(gram + load * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    scaled = t / t_scale
    _, vectors = torch.linalg.eigh((scaled @ scaled.T).double())
    leading = vectors[:, -min(rank, len(t) - 1) :]  # eigh ascends
    weights = (o.T / o_scale[:, None]) @ (dual @ leading).float()
    return Link(
        skill.name, skill.key, start, rows, o_mean, weights, t_mean, leading.T.float() @ t, ridge, len(targets), {}
    )


def _scales(changes: Tensor, skill: Skill, n: int) -> Tensor:
    """One number per entry: the root mean square change of its layer's keys or values."""
    scales: list[Tensor] = []
    at = 0
    for tensor in (*skill.cache.keys, *skill.cache.values):
        size = tensor.shape[0] * n * tensor.shape[2]
        rms = changes[:, at : at + size].square().mean().sqrt().clamp_min(1e-6)
        scales.append(rms.expand(size))
        at += size
    return torch.cat(scales)


def _apply(model: NoteModel, stale: KVCache, n: int, link: Link, observed: Tensor) -> KVCache:
    """The cache with the predicted change added to its last ``n`` rows."""
    change, first, at = link.change(observed), len(stale) - n, 0
    parts: list[list[Tensor]] = []
    for tensors in (stale.keys, stale.values):
        parts.append([])
        for tensor in tensors:
            shape = (tensor.shape[0], n, tensor.shape[2])
            size = shape[0] * shape[1] * shape[2]
            parts[-1].append(change[at : at + size].view(shape).to(tensor.dtype))
            at += size
    own = torch.arange(link.start, link.start + n, dtype=torch.int64)
    ids = stale.token_ids[first:]
    # a rotation is linear: the change is turned to where the rows stand, and added there
    turned = move_rows(model, KVCache(tuple(parts[0]), tuple(parts[1]), own, ids), stale.positions[first:])
    keys, values = (
        [torch.cat([old[:, :first], old[:, first:] + new], dim=1) for old, new in zip(olds, news, strict=True)]
        for olds, news in ((stale.keys, turned.keys), (stale.values, turned.values))
    )
    return stale.replace_tensors(keys, values, history=stale.history)


def _reader_kl(model: NoteModel, cache: KVCache, sample: _Sample) -> float:
    logits = model.next_logits(model.prefill(sample.after, cache).hidden).double().cpu().numpy()
    return logit_distance(sample.logits, logits).kl


__all__ = ["Calibration", "Link", "corrected", "fit_link"]
