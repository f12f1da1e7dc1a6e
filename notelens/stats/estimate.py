"""The value that every interval returns, its flags, and the checks that all of them share."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from notelens.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Clusters = Sequence[Hashable]

UNDEFINED = "undefined"
"""No instance, or a statistic that does not exist for these data: value and interval are ``None``."""
SINGLE_INSTANCE = "single_instance"
"""One instance: the value exists, an interval does not."""
ZERO_WIDTH = "zero_width"
"""``lo == hi`` although n > 1: every resample gave the same value. Find out why before it is printed."""
FEW_CLUSTERS = "few_clusters"
"""Fewer than 5 clusters: the interval is too short to be trusted."""
ONE_CLUSTER = "one_cluster"
"""All instances are in one cluster: instances were resampled instead, which ignores how alike they are."""
BCA_UNDEFINED = "bca_undefined"
"""The bias or acceleration of BCa does not exist; ``method`` says which interval was reported in its place."""
DEGENERATE_RESAMPLES = "degenerate_resamples"
"""The statistic does not exist in some resamples (for instance a constant variable); they were left out."""
ICC_UNDEFINED = "icc_undefined"
"""The correlation inside clusters cannot be estimated; n was used as it is."""

MIN_CLUSTERS = 5
N_RESAMPLES = 10_000

ROUNDING = 32 * float(np.finfo(np.float64).eps)
"""Spread, relative to the largest value, below which numbers are equal up to the rounding of their sums."""


@dataclass(frozen=True)
class Estimate:
    """A value with its interval.

    Attributes:
        value: point estimate; ``None`` when undefined.
        lo, hi: ends of the interval; ``None`` when there is none.
        n: instances that entered.
        n_clusters: clusters they fall into.
        method: how the interval was made.
        level: nominal coverage.
        flags: constants of this module.
    """

    value: float | None
    lo: float | None
    hi: float | None
    n: int
    n_clusters: int
    method: str
    level: float = 0.95
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("value", "lo", "hi"):
            number: float | None = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise InputError(f"estimate has {name} = {number}; undefined numbers are None")

    def __str__(self) -> str:
        if self.value is None:
            return f"undefined (n={self.n})"
        interval = "" if self.lo is None or self.hi is None else f" [{self.lo:.3f}, {self.hi:.3f}]"
        return f"{self.value:.3f}{interval}, n={self.n} in {self.n_clusters} clusters"


def floats(name: str, values: Sequence[float] | npt.NDArray[Any]) -> Floats:
    """One-dimensional finite float64 array; raises InputError with the index of the first value that is not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise InputError(f"{name} has {array.ndim} dimensions; one is needed")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise InputError(f"{name}[{bad[0]}] is {values[int(bad[0])]!r}; exclude undefined instances and count them")
    return array


def same_length(**columns: int) -> None:
    """Raise InputError, naming every column, unless all lengths are equal."""
    if len(set(columns.values())) > 1:
        raise InputError("unequal lengths: " + ", ".join(f"{name} has {n}" for name, n in columns.items()))


def check_level(level: float) -> None:
    """Raise InputError unless ``0 < level < 1``."""
    if not 0.0 < level < 1.0:
        raise InputError(f"level is {level}; it must lie between 0 and 1")


def cluster_index(clusters: Clusters | None, n: int) -> tuple[Ints, int]:
    """Index of each instance's cluster (clusters ordered by label) and the number of clusters."""
    if clusters is None:
        return np.arange(n, dtype=np.int64), n
    same_length(values=n, clusters=len(clusters))
    for i, label in enumerate(clusters):
        if label != label:
            raise InputError(f"clusters[{i}] is {label!r}, which equals nothing, itself included")
    labels = sorted(set(clusters), key=lambda c: (str(c), type(c).__name__))
    position = {label: i for i, label in enumerate(labels)}
    return np.array([position[c] for c in clusters], dtype=np.int64), len(labels)


def cluster_sums(values: Floats, index: Ints, n_clusters: int) -> Floats:
    """Sum per cluster; exactly rounded, so that the order of instances cannot matter."""
    order = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index, minlength=n_clusters))[:-1]
    return np.array([math.fsum(part) for part in np.split(values[order], ends)])


def cluster_flags(n_clusters: int) -> list[str]:
    """Flags that follow from the number of clusters alone."""
    return [FEW_CLUSTERS] * (n_clusters < MIN_CLUSTERS) + [ONE_CLUSTER] * (n_clusters == 1)
