"""Does a cheap way of computing something decide as the full way does? Agreement, logit distances, share of a gap closed.

Agreement with a reference says little where the reference is wrong (both may fail alike) and nothing where one of them
always answers the same. So agreement is counted overall *and* where the reference is right, and a constant column is flagged:
its cell is empty, whatever the number in it.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from notelens.errors import InputError
from notelens.stats.bootstrap import cluster_statistic
from notelens.stats.estimate import UNDEFINED, Clusters, Estimate, Floats, cluster_index, floats, same_length
from notelens.stats.rates import cluster_rate

CONSTANT_REFERENCE = "constant_reference"
"""The reference gives one and the same answer to every instance: agreement with it says nothing."""
CONSTANT_ANSWER = "constant_answer"
"""The method gives one and the same answer to every instance: agreement is a matter of the mix of right answers."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of a method with a reference.

    Attributes:
        overall: rate over all instances.
        given_right: rate over instances that the reference gets right; undefined where right answers are not known.
        reference_right, method_right: rates of right answers; undefined where these are not known.
        by_chance: agreement expected from the two columns' own frequencies if they were unrelated.
        flags: :data:`CONSTANT_REFERENCE`, :data:`CONSTANT_ANSWER`; with either the cell is empty.
    """

    overall: Estimate
    given_right: Estimate
    reference_right: Estimate
    method_right: Estimate
    by_chance: float | None
    flags: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether the numbers say nothing because a column is constant, or there are no instances."""
        return bool(self.flags) or self.overall.n == 0


def agreement(
    reference: Sequence[Hashable],
    method: Sequence[Hashable],
    right: Sequence[Hashable] | None = None,
    clusters: Clusters | None = None,
    level: float = 0.95,
) -> Agreement:
    """Agreement of answers, overall and where the reference is right.

    Args:
        reference: answer of the reference (full prefill) to each instance.
        method: answer of the method.
        right: right answers, where they are known.
        clusters: one label per instance; every instance its own cluster when ``None``.
        level: nominal coverage of the intervals (Wilson at the effective n, :func:`~notelens.stats.rates.cluster_rate`).

    Raises:
        InputError: lengths differ.
    """
    same_length(reference=len(reference), method=len(method), right=len(reference if right is None else right))
    labels = list(clusters) if clusters is not None else list(range(len(reference)))
    same_length(reference=len(reference), clusters=len(labels))
    n = len(reference)
    flags: list[str] = []
    if n > 1 and len(set(reference)) == 1:
        flags.append(CONSTANT_REFERENCE)
    if n > 1 and len(set(method)) == 1:
        flags.append(CONSTANT_ANSWER)

    def rate(outcomes: list[bool], where: list[int]) -> Estimate:
        found = cluster_rate([outcomes[i] for i in where], [labels[i] for i in where], level)
        return replace(found, flags=(*found.flags, *flags))

    everywhere = list(range(n))
    same = [a == b for a, b in zip(reference, method, strict=True)]
    undefined = Estimate(None, None, None, 0, 0, "wilson", level, (UNDEFINED,))
    given_right = reference_right = method_right = undefined
    if right is not None:
        hit = [a == r for a, r in zip(reference, right, strict=True)]
        given_right = rate(same, [i for i in everywhere if hit[i]])
        reference_right = rate(hit, everywhere)
        method_right = rate([a == r for a, r in zip(method, right, strict=True)], everywhere)
    first, second = Counter(reference), Counter(method)
    by_chance = math.fsum(first[a] * second[a] for a in first) / n**2 if n else None
    return Agreement(rate(same, everywhere), given_right, reference_right, method_right, by_chance, tuple(flags))


@dataclass(frozen=True)
class LogitDistance:
    """How far one vector of logits is from another.

    Attributes:
        cosine: of the two vectors, each less its own mean (a constant added to all logits changes no probability, but an
            uncentred cosine).
        kl: Kullback-Leibler divergence of the second's distribution from the first's, in nats.
        top1: whether both have the same largest entry.
        max_abs: largest difference after centring.
    """

    cosine: float
    kl: float
    top1: bool
    max_abs: float


def logit_distance(
    reference: npt.NDArray[Any] | Sequence[float], other: npt.NDArray[Any] | Sequence[float]
) -> LogitDistance:
    """Distance of two vectors of logits over one vocabulary.

    Raises:
        InputError: lengths differ, fewer than two entries, a value is not finite, or a vector is constant (its centred
            cosine does not exist).
    """
    a, b = floats("reference", np.asarray(reference)), floats("other", np.asarray(other))
    same_length(reference=len(a), other=len(b))
    if len(a) < 2:
        raise InputError(f"{len(a)} logits have no direction; give a whole vocabulary")
    x, y = a - a.mean(), b - b.mean()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    if size == 0.0:
        raise InputError("all logits of a vector are equal; its centred cosine does not exist")
    p, q = _log_softmax(a), _log_softmax(b)
    return LogitDistance(
        cosine=float(np.clip((x @ y) / size, -1.0, 1.0)),
        kl=max(0.0, float(np.exp(p) @ (p - q))),
        top1=int(a.argmax()) == int(b.argmax()),
        max_abs=float(np.abs(x - y).max()),
    )


def _log_softmax(x: Floats) -> Floats:
    shifted = x - x.max()
    return shifted - math.log(float(np.exp(shifted).sum()))


def gap_recovered(
    floor: Sequence[bool],
    method: Sequence[bool],
    ceiling: Sequence[bool],
    clusters: Clusters | None = None,
    *,
    seed: int = 0,
) -> Estimate:
    """Share of the gap between ``floor`` and ``ceiling`` that a method closes (PGR), on the same instances.

    ``(rate of method - rate of floor) / (rate of ceiling - rate of floor)`` with a cluster bootstrap over instances.

    Args:
        floor: right without the context.
        method: right with the method.
        ceiling: right with the whole context prefilled.
        clusters: one label per instance.
        seed: of the bootstrap.

    Returns:
        The share; undefined where floor and ceiling have the same rate.

    Raises:
        InputError: lengths differ.
    """
    same_length(floor=len(floor), method=len(method), ceiling=len(ceiling))
    index, n_clusters = cluster_index(clusters, len(floor))
    totals = np.zeros((n_clusters, 3))
    for column, outcomes in enumerate((floor, method, ceiling)):
        np.add.at(totals[:, column], index, np.asarray(outcomes, dtype=np.float64))

    def share(sums: Floats) -> Floats:
        low, found, high = sums.T
        return np.divide(found - low, high - low, out=np.full(len(sums), np.nan), where=high != low)

    return cluster_statistic(totals, share, len(floor), seed=seed)


__all__ = [
    "CONSTANT_ANSWER",
    "CONSTANT_REFERENCE",
    "Agreement",
    "LogitDistance",
    "agreement",
    "gap_recovered",
    "logit_distance",
]
