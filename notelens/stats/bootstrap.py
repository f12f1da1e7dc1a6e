"""Bootstrap intervals that resample whole clusters."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from notelens.errors import InputError
from notelens.stats.estimate import (
    BCA_UNDEFINED,
    DEGENERATE_RESAMPLES,
    N_RESAMPLES,
    ROUNDING,
    SINGLE_INSTANCE,
    UNDEFINED,
    ZERO_WIDTH,
    Clusters,
    Estimate,
    Floats,
    check_level,
    cluster_flags,
    cluster_index,
    cluster_sums,
    floats,
    same_length,
)

_CHUNK = 2_000_000
"""Largest number of elements of one block of resamples (16 MB of float64)."""


def _resamples(n_clusters: int, n_resamples: int, seed: int, width: int) -> Iterator[Floats]:
    """Blocks of ``[resamples, clusters]``: how often each cluster is drawn; ``width`` columns are worked on per row."""
    if n_resamples < 1:
        raise InputError(f"n_resamples is {n_resamples}; at least 1 is needed")
    most = max(1, _CHUNK // max(width, n_clusters))
    if n_resamples <= most:
        yield _one_block(n_clusters, n_resamples, seed)
        return
    rng = np.random.default_rng(seed)
    for done in range(0, n_resamples, most):
        yield _draw(rng, min(n_resamples - done, most), n_clusters)


def _draw(rng: np.random.Generator, rows: int, n_clusters: int) -> Floats:
    drawn = rng.integers(n_clusters, size=(rows, n_clusters)) + n_clusters * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * n_clusters).reshape(rows, n_clusters).astype(np.float64)


@lru_cache(maxsize=4)
def _one_block(n_clusters: int, n_resamples: int, seed: int) -> Floats:
    """All resamples at once, read-only: the hundreds of lines of a table have the same clusters and the same seed."""
    block = _draw(np.random.default_rng(seed), n_resamples, n_clusters)
    block.setflags(write=False)
    return block


def _weighted_medians(ordered: Floats, weights: Floats) -> Floats:
    """Median of ascending ``ordered`` under each row of integer ``weights``."""
    cumulative = np.cumsum(weights, axis=1)
    total = cumulative[:, -1:]
    lower = (cumulative < np.ceil(total / 2)).sum(axis=1)
    upper = (cumulative < np.floor(total / 2) + 1).sum(axis=1)
    return (ordered[lower] + ordered[upper]) / 2


def _bca_levels(
    value: float, boot: Floats, jackknife: Floats, tail: float, tolerance: float
) -> tuple[float, float] | None:
    """Adjusted quantile levels, or ``None`` where bias or acceleration do not exist; ties count half."""
    normal = NormalDist()
    below = float(((boot < value - tolerance).mean() + (boot <= value + tolerance).mean()) / 2)
    deviation = jackknife.mean() - jackknife
    spread = float((deviation**2).sum())
    if not 0.0 < below < 1.0 or float(np.ptp(jackknife)) <= tolerance:
        return None
    bias = normal.inv_cdf(below)
    acceleration = float((deviation**3).sum()) / (6.0 * spread**1.5)
    levels: list[float] = []
    for z in (normal.inv_cdf(tail), normal.inv_cdf(1.0 - tail)):
        denominator = 1.0 - acceleration * (bias + z)
        if denominator <= 0.0:
            return None
        levels.append(normal.cdf(bias + (bias + z) / denominator))
    return levels[0], levels[1]


def _interval(
    value: float, boot: Floats, jackknife: Floats | None, level: float, tolerance: float, flags: list[str]
) -> tuple[float, float, str]:
    """Interval and the name of its method; adds to ``flags``. Numbers closer than ``tolerance`` count as equal."""
    method = "percentile" if jackknife is None else "bca"
    if float(np.ptp(boot)) <= tolerance:
        flags.append(ZERO_WIDTH)
        return value, value, method
    tail = (1.0 - level) / 2.0
    levels: tuple[float, float] | None = (tail, 1.0 - tail)
    if jackknife is not None:
        levels = _bca_levels(value, boot, jackknife, tail, tolerance)
        if levels is None:
            flags.append(BCA_UNDEFINED)
            levels, method = (tail, 1.0 - tail), "percentile"
    lo, hi = (float(q) for q in np.quantile(boot, levels))
    if lo == hi:
        flags.append(ZERO_WIDTH)
    return lo, hi, method


def cluster_bootstrap(
    values: Sequence[float] | npt.NDArray[Any],
    clusters: Clusters | None = None,
    statistic: Literal["mean", "median"] = "mean",
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    method: Literal["bca", "percentile"] = "bca",
    level: float = 0.95,
) -> Estimate:
    """Mean or median over instances with a bootstrap interval that resamples whole clusters.

    Args:
        values: one number per instance, any unit.
        clusters: one label per instance; ``None`` makes every instance its own cluster. The order of instances does
            not matter; the draws are tied to the sorted labels.
        statistic: of the pooled instances, so that larger clusters weigh more.
        n_resamples: draws of as many clusters as there are, with replacement.
        seed: of the draws; equal seeds give equal intervals.
        method: ``"bca"`` (bias-corrected and accelerated, acceleration from leaving out one cluster at a time) or
            ``"percentile"``. Where BCa does not exist the percentile interval is returned, named and flagged.
        level: nominal coverage.

    Returns:
        The estimate; with one cluster the instances are resampled and the result is flagged.

    Raises:
        InputError: a value is not finite (its index is named), or lengths differ.

    References:
        Efron 1987, JASA 82:171 (BCa); Davison and Hinkley 1997, section 3.8 (clusters).
    """
    check_level(level)
    if method not in ("bca", "percentile"):
        raise InputError(f"method is {method!r}; known: 'bca', 'percentile'")
    x = floats("values", values)
    index, n_clusters = cluster_index(clusters, len(x))
    if len(x) == 0:
        return Estimate(None, None, None, 0, 0, method, level, (UNDEFINED,))
    flags = cluster_flags(n_clusters)
    if len(x) == 1:
        return Estimate(float(x[0]), None, None, 1, 1, method, level, (SINGLE_INSTANCE,))
    if clusters is None or n_clusters == 1:  # instances are drawn; their rank names them, whatever their order
        unit, n_units = np.argsort(np.argsort(x, kind="stable"), kind="stable"), len(x)
    else:
        unit, n_units = index, n_clusters
    if statistic == "mean":
        sums, counts = cluster_sums(x, unit, n_units), np.bincount(unit, minlength=n_units).astype(np.float64)
        value = math.fsum(x.tolist()) / len(x)
        boot = np.concatenate([(w @ sums) / (w @ counts) for w in _resamples(n_units, n_resamples, seed, n_units)])
        jackknife = (sums.sum() - sums) / (counts.sum() - counts)
    elif statistic == "median":
        order = np.argsort(x, kind="stable")
        ordered, unit = x[order], unit[order]
        value = float(np.median(x))
        blocks = _resamples(n_units, n_resamples, seed, len(x))
        boot = np.concatenate([_weighted_medians(ordered, w[:, unit]) for w in blocks])
        jackknife = np.array([float(np.median(ordered[unit != j])) for j in range(n_units)])
    else:
        raise InputError(f"statistic is {statistic!r}; known: 'mean', 'median'")
    tolerance = ROUNDING * float(np.abs(x).max())
    lo, hi, used = _interval(value, boot, jackknife if method == "bca" else None, level, tolerance, flags)
    return Estimate(value, lo, hi, len(x), n_clusters, used, level, tuple(flags))


def paired_difference(
    a: Sequence[float] | npt.NDArray[Any],
    b: Sequence[float] | npt.NDArray[Any],
    clusters: Clusters | None = None,
    statistic: Literal["mean", "median"] = "mean",
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    method: Literal["bca", "percentile"] = "bca",
    level: float = 0.95,
) -> Estimate:
    """Mean or median of ``a - b`` over paired instances; arguments and result as :func:`cluster_bootstrap`."""
    x, y = floats("a", a), floats("b", b)
    same_length(a=len(x), b=len(y))
    return cluster_bootstrap(x - y, clusters, statistic, n_resamples=n_resamples, seed=seed, method=method, level=level)


def _centred_ranks(x: Floats, weights: Floats) -> Floats:
    """Mid-ranks of ``x`` when instance i occurs ``weights[:, i]`` times, minus their weighted mean."""
    level = np.unique(x, return_inverse=True)[1]
    order = np.argsort(level, kind="stable")
    starts = np.flatnonzero(np.diff(level[order], prepend=-1))
    per_level = np.add.reduceat(weights[:, order], starts, axis=1)
    rank = np.cumsum(per_level, axis=1) - (per_level - 1) / 2
    ranks = rank[:, level]
    return ranks - (weights * ranks).sum(axis=1, keepdims=True) / weights.sum(axis=1, keepdims=True)


def _spearman(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Rank correlation under each row of ``weights``; NaN where a variable is constant."""
    a, b = _centred_ranks(x, weights), _centred_ranks(y, weights)
    scale = np.sqrt((weights * a * a).sum(axis=1) * (weights * b * b).sum(axis=1))
    covariance = (weights * a * b).sum(axis=1)
    return np.divide(covariance, scale, out=np.full(len(scale), np.nan), where=scale > 0)


def rank_correlation(
    x: Sequence[float] | npt.NDArray[Any],
    y: Sequence[float] | npt.NDArray[Any],
    clusters: Clusters | None = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """Spearman's rank correlation (mid-ranks for ties) with a percentile interval over resampled clusters.

    Ranks are made anew in every resample. Undefined for fewer than three instances or a constant variable; resamples in
    which a variable is constant are left out and flagged.

    Raises:
        InputError: a value is not finite (its index is named), or lengths differ.
    """
    check_level(level)
    a, b = floats("x", x), floats("y", y)
    same_length(x=len(a), y=len(b))
    index, n_clusters = cluster_index(clusters, len(a))
    n, method = len(a), "percentile"
    if n < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Estimate(None, None, None, n, n_clusters, method, level, (UNDEFINED,))
    if clusters is None or n_clusters == 1:  # instances are drawn; sorting makes the draws independent of their order
        order = np.lexsort((b, a))
        unit, n_units = np.arange(n), n
    else:
        order = np.lexsort((b, a, index))
        unit, n_units = index[order], n_clusters
    a, b = a[order], b[order]
    flags = cluster_flags(n_clusters)
    value = float(_spearman(a, b, np.ones((1, n)))[0])
    boot = np.concatenate([_spearman(a, b, w[:, unit]) for w in _resamples(n_units, n_resamples, seed, n)])
    defined = boot[np.isfinite(boot)]
    if len(defined) < len(boot):
        flags.append(DEGENERATE_RESAMPLES)
    if len(defined) == 0:
        return Estimate(value, None, None, n, n_clusters, method, level, tuple(flags))
    lo, hi, used = _interval(value, defined, None, level, ROUNDING, flags)
    return Estimate(value, lo, hi, n, n_clusters, used, level, tuple(flags))


def cluster_statistic(
    totals: Sequence[Sequence[float]] | npt.NDArray[Any],
    statistic: Callable[[Floats], Floats],
    n: int,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """Any statistic of summed totals with a percentile interval that resamples whole clusters.

    For statistics that are not a mean, such as the first layer from which a pooled accuracy stays above a threshold.

    Args:
        totals: ``[cluster, column]``: what each cluster contributes to the sums (hits per layer, trials, ...).
        statistic: maps summed totals ``[resample, column]`` to one number each; NaN where it does not exist.
        n: instances behind the totals, for the estimate.
        n_resamples: draws of as many clusters as there are, with replacement.
        seed: of the draws; the clusters' order matters, so pass them sorted by label.
        level: nominal coverage.

    Returns:
        The estimate. Resamples in which the statistic does not exist are left out, flagged, and counted in ``method``.
        One cluster cannot be resampled: then there is no interval.

    Raises:
        InputError: totals are not a table of finite numbers.
    """
    check_level(level)
    table = np.asarray(totals, dtype=np.float64)
    if table.ndim != 2 or not np.isfinite(table).all():
        raise InputError(f"totals have shape {table.shape}; a table of finite numbers is needed, one row per cluster")
    n_clusters = len(table)
    if n_clusters == 0:
        return Estimate(None, None, None, n, 0, "percentile", level, (UNDEFINED,))
    flags = cluster_flags(n_clusters)
    value = float(statistic(table.sum(axis=0, keepdims=True))[0])
    if not math.isfinite(value):
        return Estimate(None, None, None, n, n_clusters, "percentile", level, (UNDEFINED, *flags))
    if n_clusters == 1:
        return Estimate(value, None, None, n, 1, "percentile", level, tuple(flags))
    blocks = _resamples(n_clusters, n_resamples, seed, table.shape[1])
    boot = np.concatenate([statistic(weights @ table) for weights in blocks])
    defined = boot[np.isfinite(boot)]
    method = "percentile"
    if len(defined) < len(boot):
        flags.append(DEGENERATE_RESAMPLES)
        method += f", undefined in {len(boot) - len(defined)} of {len(boot)} resamples"
    if len(defined) == 0:
        return Estimate(value, None, None, n, n_clusters, method, level, tuple(flags))
    lo, hi, _ = _interval(value, defined, None, level, ROUNDING * max(1.0, abs(value)), flags)
    return Estimate(value, lo, hi, n, n_clusters, method, level, tuple(flags))
