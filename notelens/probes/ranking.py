"""Rankings of positions by their individual effects, made from rows of a map and nothing else."""

import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

from notelens.errors import InputError
from notelens.probes.aggregators import slots
from notelens.probes.rows import Row

KS = (1, 2, 4, 8, 16, 32, 64)


def check_ks(ks: Sequence[int]) -> tuple[int, ...]:
    """``ks`` as a tuple.

    Raises:
        InputError: they are not rising whole numbers from 1 on.
    """
    whole = [k for k in ks if isinstance(k, int) and not isinstance(k, bool) and k > 0]
    if not whole or len(whole) != len(ks) or list(ks) != sorted(set(whole)):
        raise InputError(
            f"numbers of positions {list(ks)!r} must be whole, positive and rising, for instance {list(KS)}"
        )
    return tuple(ks)


def ranked(positions: Sequence[int], effects: Sequence[float]) -> list[int]:
    """Positions by falling effect; equal effects in order of position."""
    order = sorted(zip(positions, effects, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return [position for position, _ in order]


def halves(groups: Sequence[str]) -> dict[str, int]:
    """0 or 1 for every group: sorted groups take turns, so that families spread over both halves."""
    return {group: i % 2 for i, group in enumerate(sorted(set(groups)))}


def numbers(row: Row, key: str) -> list[Any]:
    """A list stored in a row."""
    return list(cast(Sequence[Any], row.values[key]))


def split_rankings(rows: Sequence[Row]) -> dict[tuple[str, str], list[int]]:
    """Rankings of each (item, direction) by the mean effects of the *other* half of the instances.

    Positions are matched across prompts by slot: by region, run, token text and occurrence, or, where the other half
    has no such token, by region, run, kind of token and distance from the run's end. Positions without any match come
    last, the later one first. Missing where there is only one group or the other half has no usable row.

    Args:
        rows: of a map, with ``tokens``, ``regions``, ``positions`` and ``effects``, and ``group`` in their meta.
    """
    usable = [r for r in rows if r.excluded is None]
    half = halves([str(r.meta["group"]) for r in rows])
    sums: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in usable:
        names = slots(numbers(row, "tokens"), numbers(row, "regions"))
        table = sums[half[str(row.meta["group"])], row.direction]
        for position, effect in zip(numbers(row, "positions"), numbers(row, "effects"), strict=True):
            for name in names[position]:
                table[name].append(effect)
    found: dict[tuple[str, str], list[int]] = {}
    for row in usable:
        table = sums.get((1 - half[str(row.meta["group"])], row.direction))
        if table:
            means = {name: math.fsum(v) / len(v) for name, v in table.items()}
            names = slots(numbers(row, "tokens"), numbers(row, "regions"))
            matched = {p: names[p][0] in means for p in numbers(row, "positions")}
            scores = {p: means.get(names[p][not same], -math.inf) for p, same in matched.items()}
            found[row.item, row.direction] = sorted(scores, key=lambda p: (-scores[p], not matched[p], -p))
    return found


def random_draws(positions: Sequence[int], k: int, n_draws: int, key: str) -> list[tuple[int, ...]]:
    """``n_draws`` sets of ``k`` positions; the same for the same key in every process.

    Raises:
        InputError: fewer than ``k`` positions.
    """
    if k > len(positions):
        raise InputError(f"{k} positions cannot be drawn from {len(positions)}")
    rng = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    return [tuple(sorted(rng.sample(list(positions), k))) for _ in range(n_draws)]
