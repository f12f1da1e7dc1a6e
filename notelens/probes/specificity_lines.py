"""Table lines of the specificity probe: top-k against random-k, and which kinds of tokens carry the effect."""

from collections.abc import Sequence
from dataclasses import replace

from notelens.probes.base import (
    Aggregate,
    Row,
    at_index,
    ends_lines,
    mean_lines,
    rate_lines,
)
from notelens.probes.ranking import numbers, ranked

TOP = 8
CLIPPED = "fewer positions than k"


def specificity_lines(
    name: str, rows: Sequence[Row], ks: Sequence[int], rankings: Sequence[str], *, seed: int
) -> list[Aggregate]:
    """All lines; the default ones (k nearest to 8, own ranking) come first."""
    maps = [r for r in rows if r.stage == "map"]
    sets = [r for r in rows if r.stage == "topk"]
    first = min(ks, key=lambda k: (abs(k - TOP), k))
    order = [first, *(k for k in ks if k != first)]
    lines: list[Aggregate] = []
    for k in order:
        for ranking in rankings:
            chosen = _at_k(sets, f"{ranking}_recovery", ks, k)
            params = {"k": k, "ranking": ranking}
            lines += mean_lines(
                name, chosen, {"value": "topk_recovery"}, params=params, control="randk_recovery", seed=seed
            )
        chosen = _at_k(sets, "random_recovery", ks, k)
        lines += mean_lines(name, chosen, {"value": "randk_recovery"}, params={"k": k}, seed=seed)
    lines += rate_lines(name, maps, {"all_flipped": "flip_rate"})
    for k in order:
        for ranking in rankings:
            chosen = _at_k(sets, f"{ranking}_flipped", ks, k)
            lines += rate_lines(name, chosen, {"value": "flip_rate"}, params={"k": k, "ranking": ranking})
        chosen = _at_k(sets, "random_flipped", ks, k)
        params = {"k": k, "ranking": "random"}
        lines += mean_lines(name, chosen, {"value": "flip_rate"}, unit="fraction", params=params, seed=seed)
    lines += _share_lines(name, maps, seed=seed)
    return lines + ends_lines(name, maps, seed=seed)


def _at_k(rows: Sequence[Row], key: str, ks: Sequence[int], k: int) -> list[Row]:
    """Rows with entry ``k`` of a list as ``value``; rows with too few positions, or without this ranking, excluded."""
    index = list(ks).index(k)
    found: list[Row] = []
    for row, picked in zip(rows, at_index(rows, key, index, "no such ranking for this pair"), strict=True):
        clipped = picked.excluded is None and numbers(row, "k_used")[index] < k
        found.append(replace(picked, excluded=CLIPPED) if clipped else picked)
    return found


def _share_lines(name: str, maps: Sequence[Row], *, seed: int) -> list[Aggregate]:
    """Aggregators, repeated tokens, regions: their share of effect, of the strongest positions and of all positions."""
    regions = sorted({str(numbers(r, "regions")[p]) for r in maps for p in numbers(r, "positions")})
    shares = [r if r.excluded is not None else _shares(r, regions) for r in maps]
    lines: list[Aggregate] = []

    def mean(key: str, metric: str, control: str | None, **params: str | int) -> None:
        lines.extend(mean_lines(name, shares, {key: metric}, unit="share", params=params, control=control, seed=seed))

    for kind in ("aggregator", "repetition"):
        mean(f"{kind}_effect", f"{kind}_share", f"{kind}_base_rate")
        mean(f"{kind}_base", f"{kind}_base_rate", None)
        mean(f"{kind}_top", f"{kind}_share", f"{kind}_base_rate", among=f"top{TOP}")
    for region in regions:
        mean(f"effect/{region}", "region_share", "region_base_rate", region=region)
        mean(f"base/{region}", "region_base_rate", None, region=region)
        mean(f"top/{region}", "region_share", "region_base_rate", region=region, among=f"top{TOP}")
    return lines


def _shares(row: Row, regions: Sequence[str]) -> Row:
    """Shares of one map row, of its summed positive effect, of its 8 strongest positions and of all positions."""
    positions, effects = numbers(row, "positions"), [float(e) for e in numbers(row, "effects")]
    gains = [max(e, 0.0) for e in effects]
    if sum(gains) == 0.0:
        return replace(row, excluded="no position has a positive effect")
    top = set(ranked(positions, effects)[:TOP])
    region_of = [str(numbers(row, "regions")[p]) for p in positions]
    kinds = {
        ("aggregator_effect", "aggregator_base", "aggregator_top"): numbers(row, "aggregator"),
        ("repetition_effect", "repetition_base", "repetition_top"): numbers(row, "repeats"),
        **{(f"effect/{r}", f"base/{r}", f"top/{r}"): [name == r for name in region_of] for r in regions},
    }
    values: dict[str, float] = {}
    for (effect, base, strongest), inside in kinds.items():
        values[effect] = sum(g for g, i in zip(gains, inside, strict=True) if i) / sum(gains)
        values[base] = sum(map(bool, inside)) / len(inside)
        values[strongest] = sum(p in top for p, i in zip(positions, inside, strict=True) if i) / len(top)
    return replace(row, values=values)
