"""Checking cached rows against the prompt they stand for."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING

import torch

from notelens.cache.kv import KVCache
from notelens.cache.rows import Rows
from notelens.errors import EditError
from notelens.intervene.run_rows import run_rows
from notelens.registry import nearest

if TYPE_CHECKING:
    from notelens.edits.context import EditableContext

LEVELS = ("exact", "spot", "decision")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference of a row, relative to the largest entry of its layer, that still counts as equal: what another order of
summation does (float32: seen 1e-5 over 30 layers)."""
BLOCK = 64
"""Rows that the exact check runs at a time; it stops behind the first block with a difference."""


@dataclass(frozen=True)
class Verification:
    """What a check found.

    Attributes:
        level: ``exact``, ``spot`` or ``decision``.
        passed: no difference was found.
        exact: every row is proven equal to a fresh prefill (only the exact check can say so).
        rows_proven: rows that need no run, because nothing they attend to has changed.
        rows_checked: rows that were run.
        first_difference: first row that differs, or ``None``.
        max_difference: largest relative difference seen (``decision``: of logits, in logits).
        detection: chance that a spot check finds a fault if a ``share`` of the rows is inconsistent; 1 for an exact check.
        share: the share that ``detection`` is for.
        same_decision: ``decision`` only: the next token is that of a fresh prefill.
        margin: ``decision`` only: distance of the two largest logits in the fresh prefill (small: a near-tie).
        tokens_run: cost.
        context: the context, with the exact mark where the exact check passed.
    """

    level: str
    passed: bool
    exact: bool
    rows_proven: int
    rows_checked: int
    first_difference: int | None
    max_difference: float
    detection: float
    share: float
    same_decision: bool | None
    margin: float | None
    tokens_run: int
    context: "EditableContext"


def verify(
    context: "EditableContext",
    level: str = "exact",
    *,
    rows: int = 16,
    share: float = 0.2,
    seed: int = 0,
    tolerance: float | None = None,
) -> Verification:
    """Check a context.

    Args:
        level: ``exact`` runs all rows that are not proven, in blocks, and stops at the first difference. ``spot`` runs
            ``rows`` random ones, each on the cached rows in front of it: rows that all agree with those in front of them are
            a fresh prefill. ``decision`` compares the next token with a full prefill of the same tokens.
        rows: of the spot check.
        share: share of inconsistent rows that ``detection`` is stated for.
        seed: of the choice of rows.
        tolerance: relative difference that counts as equal; by default one per dtype.

    Raises:
        EditError: no such level, or a number out of range.

    Cost: ``tokens_run``.
    """
    if level not in LEVELS:
        raise EditError(f"unknown level {level!r}; {nearest(level, list(LEVELS))}")
    if rows < 1 or not 0 < share <= 1:
        raise EditError(f"a spot check needs at least 1 row and a share in (0, 1]; got {rows} and {share}")
    atol = TOLERANCE[context.model.dtype] if tolerance is None else tolerance
    if level == "exact":
        return _exact(context, atol)
    return _spot(context, rows, share, seed, atol) if level == "spot" else _decision(context)


def unproven(context: "EditableContext") -> tuple[int, ...]:
    """Rows that could differ from a fresh prefill: those behind the exact ones that a change can reach.

    Where every layer has a window, a difference travels at most one window a layer.
    """
    n = len(context)
    windows = [layer.window for layer in context.model.geometry.layers]
    if any(w is None for w in windows):
        return tuple(range(context.exact_rows, n))
    reach = sum(w - 1 for w in windows if w is not None)
    sources = {*context.touched, *_differing(context)}
    return tuple(p for p in range(context.exact_rows, n) if any(0 <= p - s <= reach for s in sources))


def _differing(context: "EditableContext") -> list[int]:
    held = context.rows.token_ids
    return [i for i, (a, b) in enumerate(zip(held, context.tokens.ids, strict=True)) if a != b]


def _gaps(cached: Rows, fresh: KVCache, at: Sequence[int]) -> torch.Tensor:
    """Largest difference of every checked row, relative to the largest entry of its layer, ``[row]``."""
    worst = torch.zeros(len(at))
    for layer in range(fresh.n_layers):
        for held, new in zip(cached.layer(layer), (fresh.keys[layer], fresh.values[layer]), strict=True):
            old = held[:, list(at)].float()
            scale = new.float().abs().max().clamp(min=1e-12)
            worst = torch.maximum(worst, ((old - new.float()).abs().amax((0, 2)) / scale).cpu())
    return worst


def _exact(context: "EditableContext", tolerance: float) -> Verification:
    """Block by block: the rows in front of a block are proven by then, so a block that agrees is proven too."""
    at, run, worst, first = unproven(context), 0, 0.0, None
    held = context.rows.token_ids
    for start in range(0, len(at), BLOCK):
        block = at[start : start + BLOCK]
        wrong = [p for p in block if held[p] != context.tokens.ids[p]]
        if wrong:
            first, worst = wrong[0], float("inf")
            break
        done = run_rows(context.model, context.rows, [context.tokens.ids[p] for p in block], block)
        run += done.n_tokens
        gaps = _gaps(context.rows, done.rows, block)
        worst = max(worst, float(gaps.max()))
        if worst > tolerance:
            first = block[int((gaps > tolerance).nonzero()[0])]
            break
    good = first is None
    n = len(context)
    proven = context
    if good and not context.exact:
        proven = replace(context, rows=Rows(context.rows.segments), exact_rows=n, touched=())
    return Verification(
        "exact", good, good, n - len(at), run, first, worst, 1.0, 1.0 / max(1, len(at)), None, None, run, proven
    )


def _spot(context: "EditableContext", rows: int, share: float, seed: int, tolerance: float) -> Verification:
    """Every chosen row on the cached rows in front of it, all in one pass that does not let them see each other."""
    at = unproven(context)
    n = len(context)
    if not at:
        return Verification("spot", True, context.exact, n, 0, None, 0.0, 1.0, share, None, None, 0, context)
    chosen = sorted(random.Random(f"{seed}/{n}").sample(at, min(rows, len(at))))
    held = context.rows.token_ids
    wrong = [p for p in chosen if held[p] != context.tokens.ids[p]]
    done = run_rows(context.model, context.rows, [context.tokens.ids[p] for p in chosen], chosen, apart=True)
    gaps = _gaps(context.rows, done.rows, chosen)
    bad = sorted({*wrong, *(p for p, g in zip(chosen, gaps.tolist(), strict=True) if g > tolerance)})
    return Verification(
        "spot", not bad, False, n - len(at), len(chosen), bad[0] if bad else None, float(gaps.max()),
        detection(len(at), len(chosen), share), share, None, None, done.n_tokens, context,
    )  # fmt: skip


def detection(n: int, checked: int, share: float) -> float:
    """Chance that ``checked`` of ``n`` rows hold at least one of the ``ceil(share n)`` inconsistent ones (hypergeometric)."""
    bad = max(1, -int(-share * n // 1))
    return 1.0 - comb(n - bad, checked) / comb(n, checked)


def _decision(context: "EditableContext") -> Verification:
    n = len(context)
    fresh = run_rows(context.model, None, context.tokens.ids, range(n))
    ours, theirs = context.next_logits(), context.model.next_logits(fresh.hidden)
    top = theirs.topk(2).values
    same = int(ours.argmax()) == int(theirs.argmax())
    gap = float((ours - theirs).abs().max())
    return Verification(
        "decision", same, False, context.exact_rows, n, None, gap, 1.0 if same else 0.0, 1.0, same, float(top[0] - top[1]),
        n, context,
    )  # fmt: skip


__all__ = ["LEVELS", "Verification", "detection", "unproven", "verify"]
