"""How the decision builds up along the prompt: recovery against the share of rows behind the field that are exchanged.

Claim: notes are spread over the rows behind the field and the last of them already hold most of the decision.

Falsifier: the last rows recover no more than as many random ones, or the first ones as much as the last.

Sites of one pair along the field axis, for every share of the rows behind the field (at least one row):

* ``suffix_recovery``: the last rows, those in front of the decision;
* ``prefix_recovery_curve``: the first ones, right behind the field;
* ``random_recovery``: the matched control, as many rows drawn at random.

Recovery need not rise with the share: rows of the other prompt can contradict those that stay. ``rows`` counts how many were
exchanged, since a share of 0.02 is one row of a short prompt and ten of a long one.

Cost for each pair: 2 prefills and 2 x (2 + draws) x shares one-token readers.
"""

from collections.abc import Sequence
from typing import Any

from notelens.context import ContextStore
from notelens.errors import InputError
from notelens.intervene.engine import Site
from notelens.probes.base import (
    DIRECTIONS,
    Aggregate,
    Direction,
    Item,
    Json,
    Probe,
    Row,
    Swapped,
    at_index,
    check_fired,
    check_pairs,
    end_values,
    ends_lines,
    field_and_downstream,
    mean_lines,
    pair_meta,
    pairs_along,
    rate_lines,
    rounded,
    swap_pair,
)
from notelens.probes.ranking import random_draws
from notelens.tasks.base import Instance

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Those of the paper's records."""
MIN_DRAWS = 5
MISSING = "no recovery at this share"


class SuffixConcentration(Probe):
    """Recovery against the share of rows behind the field, from the back, from the front and at random.

    Args:
        shares: of the rows between field and decision, rising, above 0 and at most 1; the last one must be 1.
        n_draws: random sets for each share, at least 5.
        pairs_per_instance: 1 uses the first version of the rule only, 2 both where the instance has them.
        seed: of the random sets.

    Raises:
        InputError: ``shares`` do not rise to 1, too few draws, or ``pairs_per_instance`` is neither 1 nor 2.
    """

    name = "suffix_concentration"
    paper_ref = "sec:mechanism (2), fig:overview(b)"
    claim = "The last rows in front of the decision hold most of it; random rows of the same number do not."
    falsifier = "The last rows recover no more than as many random ones, or than the first ones behind the field."

    def __init__(
        self, *, shares: Sequence[float] = SHARES, n_draws: int = MIN_DRAWS, pairs_per_instance: int = 1, seed: int = 0
    ) -> None:
        good = [s for s in shares if isinstance(s, int | float) and not isinstance(s, bool) and 0 < s <= 1]
        if not good or len(good) != len(shares) or list(shares) != sorted(set(good)) or good[-1] != 1:
            raise InputError(f"shares {list(shares)!r} must rise from above 0 to 1, for instance {list(SHARES)}")
        if n_draws < MIN_DRAWS:
            raise InputError(f"n_draws is {n_draws}; a random control needs at least {MIN_DRAWS} draws here")
        self.shares = tuple(float(s) for s in shares)
        self.n_draws, self.seed = n_draws, seed
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
        field, downstream = field_and_downstream(pair)
        counts = [max(1, round(share * len(downstream))) for share in self.shares]
        sites: dict[Direction, list[Site]] = {}
        for direction in DIRECTIONS:
            mine = sites[direction] = []
            for k in counts:
                draws = random_draws(downstream, k, self.n_draws, f"{self.seed}/{item.id}/{direction}/{k}")
                mine += [Site(downstream[-k:]), Site(downstream[:k]), *(Site(draw) for draw in draws)]
            mine.append(Site((*field, *downstream)))  # moves the margin also where only the field is read
        rows: list[Row] = []
        for direction, swapped in swap_pair(store, pair, sites).items():
            check_fired(swapped, f"{self.name} {pair.id}")
            values: dict[str, Any] = end_values(swapped) | {"shares": list(self.shares), "rows": counts}
            if swapped.excluded is None:
                values |= self._curves(swapped)
            meta = pair_meta(instance, pair) | {"n_positions": len(downstream)}
            rows.append(Row(item.id, item.stage, pair.cluster, direction, swapped.excluded, values, meta))
        return rows

    def _curves(self, swapped: Swapped) -> dict[str, Json]:
        """Recoveries by share; of the random sets their mean."""
        width = 2 + self.n_draws
        blocks = [swapped.recoveries[i * width : (i + 1) * width] for i in range(len(self.shares))]
        return {
            "suffix_recovery": rounded(b[0].value for b in blocks),
            "suffix_flipped": [b[0].flipped for b in blocks],
            "prefix_recovery": rounded(b[1].value for b in blocks),
            "prefix_flipped": [b[1].flipped for b in blocks],
            "random_recovery": rounded(sum(r.value for r in b[2:]) / self.n_draws for b in blocks),
        }

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """The three curves, flips along them, and the numbers of rows."""
        name = self.name
        lines: list[Aggregate] = []
        curves: tuple[tuple[str, str, str, str | None], ...] = (
            ("suffix_recovery", "suffix_recovery", "at_fraction", "random_recovery"),
            ("prefix_recovery", "prefix_recovery_curve", "prefix_fraction", "random_recovery"),
            ("random_recovery", "random_recovery", "fraction", None),
        )
        for key, metric, param, control in curves:
            for at, share in enumerate(self.shares):
                chosen = at_index(rows, key, at, MISSING)
                params: dict[str, Json] = {param: share}
                lines += mean_lines(name, chosen, {"value": metric}, params=params, control=control, seed=seed)
        for at, share in enumerate(self.shares):
            chosen = at_index(rows, "suffix_flipped", at, MISSING)
            lines += rate_lines(name, chosen, {"value": "flip_rate"}, params={"at_fraction": share})
        for at, share in enumerate(self.shares):
            chosen = at_index(rows, "rows", at, MISSING)
            lines += mean_lines(name, chosen, {"value": "rows"}, unit="count", params={"fraction": share}, seed=seed)
        return lines + ends_lines(name, rows, seed=seed)
