"""Does a number change with time? Least-squares slopes whose interval resamples whole clusters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from notelens.stats.bootstrap import cluster_statistic
from notelens.stats.estimate import Clusters, Estimate, Floats, cluster_index, cluster_sums, floats, same_length


def cluster_slope(
    x: Sequence[float] | npt.NDArray[Any],
    y: Sequence[float] | npt.NDArray[Any],
    clusters: Clusters | None = None,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """Ordinary least-squares slope of ``y`` on ``x`` with a percentile interval over clusters (sessions).

    Args:
        x: time (turn number) of every observation.
        y: what is observed; a yes/no value as 1 and 0 gives the change of a rate per turn.
        clusters: one label per observation; every observation its own cluster when ``None``.
        seed: of the bootstrap.
        level: nominal coverage.

    Returns:
        The slope in units of ``y`` per unit of ``x``; undefined where ``x`` does not vary.

    Raises:
        InputError: lengths differ, or a value is not finite.
    """
    a, b = floats("x", x), floats("y", y)
    same_length(x=len(a), y=len(b))
    index, n_clusters = cluster_index(clusters, len(a))
    centred = a - a.mean() if len(a) else a
    columns = (np.ones_like(a), centred, b, centred * centred, centred * b)
    totals = np.stack([cluster_sums(c, index, n_clusters) for c in columns], axis=1)

    def slope(sums: Floats) -> Floats:
        n, sx, sy, sxx, sxy = sums.T
        below = n * sxx - sx * sx
        found = below > 1e-12 * np.maximum(n * sxx, 1e-300)
        return np.divide(n * sxy - sx * sy, below, out=np.full(len(sums), np.nan), where=found)

    return cluster_statistic(totals, slope, len(a), seed=seed, level=level)


__all__ = ["cluster_slope"]
