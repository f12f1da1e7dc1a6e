"""Intervals for rates."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from notelens.errors import InputError
from notelens.stats.estimate import (
    ICC_UNDEFINED,
    UNDEFINED,
    Clusters,
    Estimate,
    check_level,
    cluster_flags,
    cluster_index,
    cluster_sums,
    floats,
)


def _wilson(p: float, n: float, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return (0.0 if p == 0.0 else (centre - half) / scale), (1.0 if p == 1.0 else (centre + half) / scale)


def wilson(k: int, n: int, level: float = 0.95) -> Estimate:
    """Rate ``k / n`` with Wilson's score interval, for independent instances.

    It ignores clustering; use :func:`cluster_rate` when instances share scenarios.

    Raises:
        InputError: not ``0 <= k <= n``.

    References:
        Wilson 1927, JASA 22:209; Newcombe 1998, Statistics in Medicine 17:857.
    """
    if not 0 <= k <= n:
        raise InputError(f"{k} successes out of {n}")
    check_level(level)
    if n == 0:
        return Estimate(None, None, None, 0, 0, "wilson", level, (UNDEFINED,))
    lo, hi = _wilson(k / n, n, level)
    return Estimate(k / n, lo, hi, n, n, "wilson", level)


def cluster_rate(outcomes: Sequence[bool], clusters: Clusters, level: float = 0.95) -> Estimate:
    """Rate of ``True`` with Wilson's interval at the effective sample size of clustered instances.

    The effective size is n divided by the design effect ``1 + (m - 1) * icc``, where m is the size-weighted mean
    cluster size and icc the ANOVA estimate of the correlation inside clusters, cut to [0, 1]. Where icc cannot be
    estimated (all outcomes equal, or one cluster) n is used as it is and the result flagged: the interval is then as
    optimistic as that of :func:`wilson`.

    Args:
        outcomes: one truth value per instance.
        clusters: one label per instance.
        level: nominal coverage.

    Raises:
        InputError: an outcome is not 0 or 1 (its index is named), or lengths differ.

    References:
        Korn and Graubard 1998, Survey Methodology 24:193; Donner and Klar 2000 (ANOVA estimate).
    """
    check_level(level)
    x = floats("outcomes", outcomes)
    bad = np.flatnonzero((x != 0.0) & (x != 1.0))
    if bad.size:
        raise InputError(f"outcomes[{bad[0]}] is {x[bad[0]]}; a rate needs True or False")
    index, n_clusters = cluster_index(clusters, len(x))
    n = len(x)
    if n == 0:
        return Estimate(None, None, None, 0, 0, "wilson", level, (UNDEFINED,))
    rate = float(x.sum()) / n
    flags = cluster_flags(n_clusters)
    effective = float(n)
    if 1 < n_clusters < n:
        sizes = np.bincount(index, minlength=n_clusters).astype(np.float64)
        rates = cluster_sums(x, index, n_clusters) / sizes
        between = float((sizes * (rates - rate) ** 2).sum()) / (n_clusters - 1)
        within = float((sizes * rates * (1 - rates)).sum()) / (n - n_clusters)
        size = (n - float((sizes**2).sum()) / n) / (n_clusters - 1)
        if between + within == 0.0:
            flags.append(ICC_UNDEFINED)
        else:
            icc = min(1.0, max(0.0, (between - within) / (between + (size - 1) * within)))
            effective = n / (1 + (float((sizes**2).sum()) / n - 1) * icc)
    elif n_clusters == 1:
        flags.append(ICC_UNDEFINED)
    lo, hi = _wilson(rate, effective, level)
    return Estimate(rate, lo, hi, n, n_clusters, "wilson, effective n", level, tuple(flags))
