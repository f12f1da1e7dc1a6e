"""Bootstrap of series whose neighbours resemble each other, such as the waiting times of requests in one queue."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from notelens.errors import InputError
from notelens.stats.estimate import (
    DEGENERATE_RESAMPLES,
    N_RESAMPLES,
    ROUNDING,
    SINGLE_INSTANCE,
    UNDEFINED,
    ZERO_WIDTH,
    Estimate,
    Floats,
    check_level,
    floats,
)

_CHUNK = 2_000_000
"""Largest number of elements of one block of resamples (16 MB of float64)."""


def block_length(n: int) -> int:
    """Neighbours that are resampled together: the cube root of n, rounded up."""
    return max(1, round(np.ceil(n ** (1 / 3) - 1e-9)))


def block_statistic(
    samples: Sequence[Sequence[float] | npt.NDArray[Any]],
    statistic: Callable[..., Floats],
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """A statistic of one or several independent series with a percentile interval over circular blocks.

    Each series is resampled on its own, in blocks of :func:`block_length` neighbours that may run over its end, so that
    the resemblance of neighbours stays in the resamples.

    Args:
        samples: series in their order in time.
        statistic: maps one ``[resample, n]`` array per series to ``[resample]`` numbers; NaN where it does not exist.
        n_resamples: draws.
        seed: of the draws; equal seeds give equal intervals.
        level: nominal coverage.

    Returns:
        The estimate; its n is that of the shortest series.

    Raises:
        InputError: a value is not finite, or there is no series.

    References:
        Politis and Romano 1992, "A circular block-resampling procedure for stationary data".
    """
    check_level(level)
    if not samples or n_resamples < 1:
        raise InputError(f"{len(samples)} series and {n_resamples} resamples; at least one of each is needed")
    series = [floats(f"series {i}", s) for i, s in enumerate(samples)]
    n = min(len(s) for s in series)
    method = "circular blocks, percentile"
    if n == 0:
        return Estimate(None, None, None, 0, 0, method, level, (UNDEFINED,))
    value = float(statistic(*(s[None, :] for s in series))[0])
    if not np.isfinite(value):
        return Estimate(None, None, None, n, n, method, level, (UNDEFINED,))
    if n == 1:
        return Estimate(value, None, None, 1, 1, method, level, (SINGLE_INSTANCE,))
    rngs = [np.random.default_rng([seed, i]) for i in range(len(series))]
    most = max(1, _CHUNK // max(len(s) for s in series))
    found: list[Floats] = []
    for done in range(0, n_resamples, most):
        rows = min(n_resamples - done, most)
        found.append(statistic(*(_resample(s, rows, rng) for s, rng in zip(series, rngs, strict=True))))
    boot = np.concatenate(found)
    known = boot[np.isfinite(boot)]
    flags = [DEGENERATE_RESAMPLES] * (len(known) < len(boot))
    if not len(known):
        return Estimate(value, None, None, n, n, method, level, (*flags, UNDEFINED))
    if float(np.ptp(known)) <= ROUNDING * abs(value):
        return Estimate(value, value, value, n, n, method, level, (*flags, ZERO_WIDTH))
    lo, hi = (float(q) for q in np.quantile(known, ((1 - level) / 2, (1 + level) / 2)))
    return Estimate(value, lo, hi, n, n, method, level, tuple(flags))


def _resample(values: Floats, rows: int, rng: np.random.Generator) -> Floats:
    """``[rows, n]`` draws of whole blocks, cut to n."""
    n = len(values)
    length = block_length(n)
    starts = rng.integers(n, size=(rows, -(-n // length)))
    at = (starts[:, :, None] + np.arange(length)) % n
    return values[at.reshape(rows, -1)[:, :n]]
