"""Hypothesis tests and corrections for many of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from notelens.errors import InputError
from notelens.stats.estimate import (
    ROUNDING,
    UNDEFINED,
    ZERO_WIDTH,
    Clusters,
    Floats,
    cluster_flags,
    cluster_index,
    cluster_sums,
    floats,
)


@dataclass(frozen=True)
class Equivalence:
    """Result of two one-sided tests.

    Attributes:
        value: mean difference; ``None`` when there are no data.
        lo, hi: the (1 - 2 alpha) interval that corresponds to the test; ``None`` when undefined.
        p_above: p-value against "the mean is at or below -margin".
        p_below: p-value against "the mean is at or above +margin".
        p: the larger of the two, the p-value of equivalence.
        equivalent: ``p < alpha``.
        margin, alpha, n, n_clusters, flags: as given or counted.
    """

    value: float | None
    lo: float | None
    hi: float | None
    p_above: float | None
    p_below: float | None
    p: float | None
    equivalent: bool
    margin: float
    alpha: float
    n: int
    n_clusters: int
    flags: tuple[str, ...] = ()


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact p-value of McNemar's test for paired yes/no outcomes.

    Args:
        b: pairs that are yes under the first condition only.
        c: pairs that are yes under the second condition only.

    Returns:
        Twice the binomial tail at 1/2, at most 1; 1 when no pair is discordant.

    Raises:
        InputError: a count is negative.
    """
    if b < 0 or c < 0:
        raise InputError(f"discordant counts {b} and {c}; they cannot be negative")
    n = b + c
    tail = sum(math.comb(n, i) for i in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2**n)


def _student_cdf(x: float, df: int) -> float:
    from scipy import special  # pyright: ignore[reportMissingTypeStubs]  # scipy ships no types

    return float(special.stdtr(df, x))


def _student_quantile(p: float, df: int) -> float:
    from scipy import special  # pyright: ignore[reportMissingTypeStubs]  # scipy ships no types

    return float(special.stdtrit(df, p))


def tost_paired(
    diffs: Sequence[float] | npt.NDArray[Any],
    margin: float,
    clusters: Clusters | None = None,
    alpha: float = 0.05,
) -> Equivalence:
    """Test that the mean paired difference lies inside ``(-margin, margin)`` (two one-sided t tests).

    The standard error is that of a ratio of cluster sums to cluster sizes, with clusters - 1 degrees of freedom;
    without clusters it is the ordinary paired t test.

    Args:
        diffs: one difference per instance.
        margin: largest difference that counts as equivalent, in the unit of ``diffs``; positive.
        clusters: one label per instance; ``None`` makes every instance its own cluster.
        alpha: size of each one-sided test.

    Returns:
        The result; undefined (``p`` is ``None``, not equivalent) with fewer than two clusters.

    Raises:
        InputError: a difference is not finite, lengths differ, or margin or alpha are out of range.

    References:
        Schuirmann 1987, J. Pharmacokinetics and Biopharmaceutics 15:657.
    """
    if not (margin > 0 and math.isfinite(margin)):
        raise InputError(f"margin is {margin}; it must be positive and finite")
    if not 0.0 < alpha < 0.5:
        raise InputError(f"alpha is {alpha}; it must lie between 0 and 0.5")
    x = floats("diffs", diffs)
    index, n_clusters = cluster_index(clusters, len(x))
    n = len(x)
    value = math.fsum(x.tolist()) / n if n else None
    if value is None or n_clusters < 2:
        flags = (UNDEFINED, *(cluster_flags(n_clusters) if n else ()))
        return Equivalence(value, None, None, None, None, None, False, margin, alpha, n, n_clusters, flags)
    flags = cluster_flags(n_clusters)
    residual = cluster_sums(x - value, index, n_clusters)
    se = math.sqrt(n_clusters / (n_clusters - 1) * math.fsum((residual**2).tolist())) / n
    df = n_clusters - 1
    if se <= ROUNDING * float(np.abs(x).max()):
        flags.append(ZERO_WIDTH)
        lo = hi = value
        p_above, p_below = float(value <= -margin), float(value >= margin)
    else:
        half = _student_quantile(1 - alpha, df) * se
        lo, hi = value - half, value + half
        p_above = _student_cdf(-(value + margin) / se, df)
        p_below = _student_cdf((value - margin) / se, df)
    p = max(p_above, p_below)
    return Equivalence(value, lo, hi, p_above, p_below, p, p < alpha, margin, alpha, n, n_clusters, tuple(flags))


def _pvalues(pvalues: Sequence[float]) -> Floats:
    p = floats("pvalues", pvalues)
    bad = np.flatnonzero((p < 0.0) | (p > 1.0))
    if bad.size:
        raise InputError(f"pvalues[{bad[0]}] is {p[bad[0]]}; it must lie in [0, 1]")
    return p


def holm(pvalues: Sequence[float]) -> list[float]:
    """Adjust p-values, in the given order, to control the family-wise error rate (Holm 1979)."""
    p = _pvalues(pvalues)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1.0)
    return [float(a) for a in adjusted]


def benjamini_hochberg(pvalues: Sequence[float]) -> list[float]:
    """Adjust p-values, in the given order, to control the false discovery rate (Benjamini and Hochberg 1995)."""
    p = _pvalues(pvalues)
    order = np.argsort(p, kind="stable")
    steps = p[order] * len(p) / np.arange(1, len(p) + 1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.minimum.accumulate(steps[::-1])[::-1], 1.0)
    return [float(a) for a in adjusted]
