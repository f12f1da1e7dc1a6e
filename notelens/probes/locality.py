"""Locality: does the decision read the field, or what was written behind it?

Claim: putting the new field's own rows into a stale cache changes nothing, putting every later row there changes the
decision completely. Denoising says what is *sufficient* for the new decision, noising what is *necessary* to keep it.

Falsifier: field-only recovery clearly above 0, or full-downstream recovery clearly below 1.

Sites of one pair along the field axis (the decision token itself is the reader and is never patched):

* ``field_only``: the rows of the field;
* ``full_downstream``: every later row that is not the field's;
* ``full``: both. The rows in front of the field have seen the same tokens on both sides, so this is the donor's cache
  and recovery must be 1 up to rounding; ``identity_rate`` says for how many rows it is (quantised caches fail here).

Cost for each pair: 2 prefills and 8 one-token readers.
"""

from collections.abc import Sequence

from notelens.context import ContextStore
from notelens.intervene.engine import Site
from notelens.probes.base import (
    Aggregate,
    Item,
    Probe,
    Row,
    check_fired,
    check_pairs,
    end_values,
    ends_lines,
    field_and_downstream,
    mean_lines,
    pair_meta,
    pairs_along,
    rate_lines,
    site_values,
    swap_pair,
)
from notelens.prompt import Pair
from notelens.tasks.base import Instance

SITES = ("field_only", "full_downstream", "full")
IDENTITY_TOLERANCE = 0.02
"""How far the recovery of all rows may be from 1: float32 gives 1e-6, bf16 with chunked kernels up to about 0.01."""


def locality_sites(pair: Pair) -> tuple[Site, ...]:
    """The three sites of a pair along the field axis, in the order of :data:`SITES`."""
    field, downstream = field_and_downstream(pair)
    return Site(field), Site(downstream), Site((*field, *downstream))


class Locality(Probe):
    """Field-only against full-downstream recovery.

    Args:
        pairs_per_instance: 1 uses the first version of the rule only, 2 both where the instance has them.

    Raises:
        InputError: ``pairs_per_instance`` is neither 1 nor 2.
    """

    name = "locality"
    paper_ref = "sec:mechanism (1), fig:mech(a)"
    claim = "The decision does not read the field: its rows alone recover nothing, the rows behind it everything."
    falsifier = "Field-only recovery clearly above 0, or full-downstream recovery clearly below 1."

    def __init__(self, *, pairs_per_instance: int = 2) -> None:
        self.pairs_per_instance = check_pairs(pairs_per_instance)

    def items(self, instances: Sequence[Instance], stage: str, earlier: Sequence[Row]) -> list[Item]:
        """One item per pair along the field axis."""
        found = pairs_along(instances, "field", per_instance=self.pairs_per_instance)
        return [Item(pair.id, stage, (instance, pair)) for instance, pair in found]

    def measure(self, store: ContextStore, item: Item) -> list[Row]:
        """Two rows: denoising and noising.

        Raises:
            PatchError: no swap, not even one of all rows, moved the margin.
        """
        instance, pair = item.payload
        rows: list[Row] = []
        for direction, swapped in swap_pair(store, pair, locality_sites(pair)).items():
            check_fired(swapped, f"locality {pair.id}")
            values = end_values(swapped) | site_values(swapped, SITES)
            if swapped.excluded is None:
                values["identity"] = abs(swapped.recoveries[2].value - 1.0) <= IDENTITY_TOLERANCE
            meta = pair_meta(instance, pair)
            rows.append(Row(item.id, item.stage, pair.cluster, direction, swapped.excluded, values, meta))
        return rows

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Recoveries, flips and two-way probabilities by site."""
        name = self.name
        lines = mean_lines(name, rows, {"field_only_recovery": "field_only_recovery"}, seed=seed)
        lines += mean_lines(
            name,
            rows,
            {"full_downstream_recovery": "full_downstream_recovery"},
            control="field_only_recovery",
            seed=seed,
        )
        lines += mean_lines(name, rows, {"full_recovery": "full_recovery"}, seed=seed)
        lines += rate_lines(name, rows, {"full_downstream_flipped": "flip_rate"})
        for site in SITES:
            lines += rate_lines(name, rows, {f"{site}_flipped": "flip_rate"}, params={"site": site})
            metrics = {f"{site}_probability": "patched_probability"}
            lines += mean_lines(name, rows, metrics, unit="probability", params={"site": site}, seed=seed)
        lines += rate_lines(name, rows, {"identity": "identity_rate"})
        return lines + ends_lines(name, rows, seed=seed)
