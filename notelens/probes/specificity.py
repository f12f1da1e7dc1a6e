"""Spatial specificity: how few positions carry the decision, and which tokens they are.

Claim: the notes are concentrated: the few positions with the largest individual effects recover most of the decision,
as many random positions next to nothing.

Falsifier: top-8 recovery close to random-8, or top-8 recovery that disappears when the ranking is made elsewhere.

Stage ``map``: every position behind the field is swapped alone, in both directions.

Stage ``topk``: the first k positions of a ranking are swapped together. A ranking made on the row that it is evaluated
on is selected for that row, so three are reported beside each other:

* ``own``: individual effects of the same pair and direction (what the paper does);
* ``split_half``: mean effects over the *other* half of the instances (split by group), matched by the same token in the
  same region, or by the distance from the region's end;
* ``cross_direction``: individual effects of the same pair in the opposite direction.

Control: at least 20 random sets of k positions per pair and direction, seeded by the item's id.

A k beyond the number of positions is clipped, noted in ``k_used`` and left out of the aggregates.

Cost for each pair: 2 prefills, about 2 x (positions + 170) one-token readers in two batches for each direction.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from notelens.context import ContextStore
from notelens.errors import InputError
from notelens.intervene.engine import Site
from notelens.probes.aggregators import is_aggregator, repeats, token_classes
from notelens.probes.base import (
    DIRECTIONS,
    Aggregate,
    Direction,
    Item,
    Probe,
    Row,
    Swapped,
    check_fired,
    check_pairs,
    end_values,
    field_and_downstream,
    opposite,
    pair_meta,
    pairs_along,
    rounded,
    single_effects,
    site_values,
    swap_pair,
)
from notelens.probes.ranking import KS, check_ks, numbers, random_draws, ranked, split_rankings
from notelens.probes.specificity_lines import specificity_lines
from notelens.prompt import Pair
from notelens.tasks.base import Instance

RANKINGS = ("own", "split_half", "cross_direction")
MIN_DRAWS = 20


class Specificity(Probe):
    """Top-k against random-k positions, and the kinds of tokens that carry the effect.

    Args:
        ks: numbers of positions, rising.
        n_draws: random sets for each k, at least 20.
        pairs_per_instance: 1 uses the first version of the rule only, 2 both where the instance has them.
        seed: of the random sets.

    Raises:
        InputError: ``ks`` are not rising positive numbers, ``n_draws`` is below 20, or ``pairs_per_instance`` is
            neither 1 nor 2.
    """

    name = "specificity"
    paper_ref = "app:deepmech (iii), tab:deepmech, fig:mech(b)"
    claim = "The few positions with the largest individual effects carry the decision, as many random ones do not."
    falsifier = "Top-8 recovery close to random-8, or gone when the ranking is made on other instances."
    stages = ("map", "topk")

    def __init__(
        self, *, ks: Sequence[int] = KS, n_draws: int = MIN_DRAWS, pairs_per_instance: int = 1, seed: int = 0
    ) -> None:
        self.ks = check_ks(ks)
        if n_draws < MIN_DRAWS:
            raise InputError(f"n_draws is {n_draws}; a random control needs at least {MIN_DRAWS} draws")
        self.n_draws = n_draws
        self.pairs_per_instance = check_pairs(pairs_per_instance)
        self.seed = seed

    def items(self, instances: Sequence[Instance], stage: str, earlier: Sequence[Row]) -> list[Item]:
        """One item per pair along the field axis; those of ``topk`` carry the rankings made from the map.

        Raises:
            InputError: stage ``topk`` without the map of a pair.
        """
        found = pairs_along(instances, "field", per_instance=self.pairs_per_instance)
        if stage == "map":
            return [Item(pair.id, stage, (instance, pair)) for instance, pair in found]
        maps = {(r.item, r.direction): r for r in earlier if r.stage == "map"}
        split = split_rankings(list(maps.values()))
        items: list[Item] = []
        for instance, pair in found:
            missing = [d for d in DIRECTIONS if (pair.id, d) not in maps]
            if missing:
                raise InputError(
                    f"stage 'topk' needs the {missing[0]} map row of {pair.id!r}; measure stage 'map' first"
                )
            rankings = {d: self._rankings(maps, split, pair.id, d) for d in DIRECTIONS}
            items.append(Item(f"{pair.id}/topk", stage, (instance, pair, rankings)))
        return items

    @staticmethod
    def _rankings(
        maps: dict[tuple[str, str], Row], split: dict[tuple[str, str], list[int]], item: str, direction: Direction
    ) -> dict[str, list[int]]:
        row, other = maps[item, direction], maps[item, opposite(direction)]
        made: dict[str, list[int]] = {}
        if row.excluded is None:
            made["own"] = ranked(numbers(row, "positions"), numbers(row, "effects"))
        if other.excluded is None:
            made["cross_direction"] = ranked(numbers(other, "positions"), numbers(other, "effects"))
        if (item, direction) in split:
            made["split_half"] = split[item, direction]
        return made

    def measure(self, store: ContextStore, item: Item) -> list[Row]:
        """Two rows: denoising and noising."""
        return self._map(store, item) if item.stage == "map" else self._topk(store, item)

    def _map(self, store: ContextStore, item: Item) -> list[Row]:
        instance, pair = item.payload
        field, downstream = field_and_downstream(pair)
        singles = single_effects(store, pair)
        rows: list[Row] = []
        every = Site(
            (*field, *downstream)
        )  # where the decision reads the field itself, rows behind it may move nothing
        for direction, both in swap_pair(store, pair, [Site(downstream), every]).items():
            check_fired(both, f"specificity {pair.id}")
            swapped = replace(both, recoveries=both.recoveries[:1])
            values = end_values(swapped) | _token_facts(pair, direction, downstream, instance)
            values["field_positions"] = list(field)
            if swapped.excluded is None:
                values |= site_values(swapped, ["all"])
                effects = rounded(r.value for r in singles[direction].recoveries)
                values |= {"field_effects": effects[: len(field)], "effects": effects[len(field) :]}
            meta = pair_meta(instance, pair)
            rows.append(Row(item.id, item.stage, pair.cluster, direction, swapped.excluded, values, meta))
        return rows

    def _topk(self, store: ContextStore, item: Item) -> list[Row]:
        instance, pair, rankings = item.payload
        _, downstream = field_and_downstream(pair)
        used = [min(k, len(downstream)) for k in self.ks]
        plans: dict[Direction, list[tuple[str, int, Site]]] = {}
        for direction in DIRECTIONS:
            plan = plans[direction] = []
            for at, k in enumerate(used):
                plan += [(name, at, Site(tuple(order[:k]))) for name, order in rankings[direction].items()]
                draws = self.n_draws if self.ks[at] <= len(downstream) else 1
                key = f"{self.seed}/{item.id}/{direction}/{self.ks[at]}"
                plan += [("random", at, Site(draw)) for draw in random_draws(downstream, k, draws, key)]
        rows: list[Row] = []
        sites: dict[Direction, Sequence[Site]] = {d: [site for _, _, site in plan] for d, plan in plans.items()}
        for direction, swapped in swap_pair(store, pair, sites).items():
            values: dict[str, Any] = end_values(swapped) | {"k": list(self.ks), "k_used": used}
            if swapped.excluded is None:
                values |= _by_k(swapped, plans[direction], len(used))
            meta = pair_meta(instance, pair) | {"n_positions": len(downstream)}
            rows.append(Row(item.id, item.stage, pair.cluster, direction, swapped.excluded, values, meta))
        return rows

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Top-k and random-k recovery and flips, shares of token kinds with their base rates."""
        return specificity_lines(self.name, rows, self.ks, RANKINGS, seed=seed)


def _by_k(swapped: Swapped, plan: Sequence[tuple[str, int, Site]], n_ks: int) -> dict[str, Any]:
    """Mean recovery and flip rate of every kind of set, by k, and the range over random draws."""
    grouped: dict[str, list[list[int]]] = {}
    for i, (name, at, _) in enumerate(plan):
        grouped.setdefault(name, [[] for _ in range(n_ks)])[at].append(i)
    values: dict[str, Any] = {}
    for name, by_k in grouped.items():
        found = [[swapped.recoveries[i] for i in indices] for indices in by_k]
        values[f"{name}_recovery"] = rounded(sum(r.value for r in f) / len(f) for f in found)
        values[f"{name}_flipped"] = rounded(sum(r.flipped for r in f) / len(f) for f in found)
        if name == "random":
            values["random_range"] = [rounded((min(r.value for r in f), max(r.value for r in f))) for f in found]
    return values


def _token_facts(pair: Pair, direction: Direction, downstream: Sequence[int], instance: Instance) -> dict[str, Any]:
    """What a heat strip and the shares of token kinds need to know of the recipient's prompt."""
    prompt = pair.old if direction == "denoising" else pair.new
    kinds = token_classes(prompt)
    words = [
        *("".join(p.tokens[i] for i in p.positions("field")) for p in (pair.old, pair.new)),
        *instance.answers,
    ]
    again = repeats(prompt.tokens, words)
    return {
        "tokens": list(prompt.tokens),
        "regions": list(prompt.regions),
        "positions": list(downstream),
        "kinds": [kinds[p] for p in downstream],
        "aggregator": [is_aggregator(kinds[p]) for p in downstream],
        "repeats": [again[p] for p in downstream],
        "trigger_positions": list(prompt.positions("trigger")) if "trigger" in prompt.spans else [],
        "rule_positions": list(prompt.positions("rule")) if "rule" in prompt.spans else [],
    }
