"""Attention knockout: what the decision does when it cannot see rows behind the field.

Two states of the cache, each in both directions of a pair:

* *intact*: the prompt as it was prefilled. If the decision reads the notes, hiding them must hurt it more than hiding as many
  random rows (``p_kept_by_masked_fraction``).
* *stale*: the field's own rows are those of the other value and every note still says the old thing, as after an in-place
  refresh. If stale notes hold the decision back, hiding them lets it follow the new field
  (``p_safe_by_masked_fraction``), and hiding as many random rows does not.

The direction of the effect in the stale state is the point: the paper's text speaks of a decision that is lost, its records
of one that becomes right; here both states are measured. Hidden rows are also not available for their own content, so with
all of them hidden the rule is out of sight too and the decision can be anything: read the fractions below 1.

Rows are ranked by their single-row effects in the *opposite* direction of the pair, so that the ranking is not selected on
what it is evaluated on. Layer thirds hide the same quarter of the rows in some layers only; their control hides as many
random rows in the same layers.

Claim: the decision reads the notes; without the strongest of them a stale cache decides by the new field.

Falsifier: hiding the strongest rows changes no more decisions than hiding random ones.

Cost for each pair: 2 prefills and about 2 x (positions + 75) one-token readers.
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
    check_pairs,
    end_values,
    ends_lines,
    field_and_downstream,
    mean_lines,
    opposite,
    pair_meta,
    pairs_along,
    rate_lines,
    rounded,
    single_effects,
    swap_pair,
)
from notelens.probes.ranking import numbers, random_draws, ranked
from notelens.tasks.base import Instance

FRACTIONS = (0.1, 0.25, 0.5, 0.75, 1.0)
BANDS = ("early", "mid", "late", "all")
BAND_FRACTION = 0.25
MIN_DRAWS = 5
STATES = ("kept", "safe")
"""``kept``: the intact prompt still gives its own answer. ``safe``: the stale one gives the answer of the new field."""
MISSING = "not measured"


def band_layers(band: str, n_layers: int) -> tuple[int, int] | None:
    """Half-open band of layers: a third of them, or all (``None``).

    Raises:
        InputError: fewer layers than thirds.
    """
    if band == "all":
        return None
    if n_layers < 3:
        raise InputError(f"a model of {n_layers} layers has no thirds; pass bands=['all']")
    at = BANDS.index(band)
    return (at * n_layers // 3, (at + 1) * n_layers // 3)


class Knockout(Probe):
    """Decisions with rows hidden from the decision token: the strongest ones against as many random ones.

    Args:
        fractions: shares of the rows behind the field, rising, above 0 and at most 1.
        bands: out of ``early``, ``mid``, ``late`` (thirds of the layers) and ``all``; those that the model has when ``None``
            (two layers have no thirds).
        n_draws: random sets for each share and band, at least 5.
        pairs_per_instance: 1 uses the first version of the rule only, 2 both where the instance has them.
        seed: of the random sets.

    Raises:
        InputError: an argument is out of range.
    """

    name = "knockout"
    paper_ref = "sec:mechanism (4)"
    claim = "The decision reads the notes; without the strongest of them a stale cache decides by the new field."
    falsifier = "Hiding the strongest rows changes no more decisions than hiding as many random ones."

    def __init__(
        self,
        *,
        fractions: Sequence[float] = FRACTIONS,
        bands: Sequence[str] | None = None,
        n_draws: int = MIN_DRAWS,
        pairs_per_instance: int = 1,
        seed: int = 0,
    ) -> None:
        good = [f for f in fractions if isinstance(f, int | float) and not isinstance(f, bool) and 0 < f <= 1]
        if not good or len(good) != len(fractions) or list(fractions) != sorted(set(good)):
            raise InputError(f"fractions {list(fractions)!r} must rise, above 0 and at most 1: {list(FRACTIONS)}")
        unknown = [b for b in bands or () if b not in BANDS]
        if unknown or isinstance(bands, str) or len(set(bands or ())) != len(bands or ()):
            raise InputError(
                f"bands {list(bands or ())!r}: a list of distinct bands out of {', '.join(BANDS)} is needed"
            )
        if n_draws < MIN_DRAWS:
            raise InputError(f"n_draws is {n_draws}; a random control needs at least {MIN_DRAWS} draws here")
        self.fractions = tuple(float(f) for f in fractions)
        self.bands = None if bands is None else tuple(bands)
        self.n_draws, self.seed = n_draws, seed
        self.pairs_per_instance = check_pairs(pairs_per_instance)

    def items(self, instances: Sequence[Instance], stage: str, earlier: Sequence[Row]) -> list[Item]:
        """One item per pair along the field axis."""
        found = pairs_along(instances, "field", per_instance=self.pairs_per_instance)
        return [Item(pair.id, stage, (instance, pair)) for instance, pair in found]

    def measure(self, store: ContextStore, item: Item) -> list[Row]:
        """Two rows, one for each prompt of the pair as the recipient."""
        instance, pair = item.payload
        field, downstream = field_and_downstream(pair)
        n_layers = store.model.geometry.n_layers
        bands = self.bands if self.bands is not None else BANDS if n_layers >= 3 else ("all",)
        single = single_effects(store, pair)
        sites: dict[Direction, list[Site]] = {}
        for direction in DIRECTIONS:
            effects = single[opposite(direction)].recoveries[len(field) :]
            order = ranked(downstream, rounded(r.value for r in effects))
            key = f"{self.seed}/{item.id}/{direction}"
            sites[direction] = self._sites(n_layers, bands, field, order, key)
        rows: list[Row] = []
        for direction, swapped in swap_pair(store, pair, sites).items():
            values: dict[str, Any] = end_values(swapped) | {
                "fractions": list(self.fractions),
                "bands": list(bands),
            }
            if swapped.excluded is None:
                values |= self._values(swapped, len(bands))
            meta = pair_meta(instance, pair) | {"n_positions": len(downstream)}
            rows.append(Row(item.id, item.stage, pair.cluster, direction, swapped.excluded, values, meta))
        return rows

    def _sites(
        self, n_layers: int, bands: Sequence[str], field: Sequence[int], order: Sequence[int], key: str
    ) -> list[Site]:
        """The field alone; then for every cell the strongest rows and random ones, in both states."""
        sites = [Site(tuple(field))]
        cells: list[tuple[float, tuple[int, int] | None]] = [(f, None) for f in self.fractions]
        cells += [(BAND_FRACTION, band_layers(band, n_layers)) for band in bands]
        for fraction, layers in cells:
            k = max(1, round(fraction * len(order)))
            draws = random_draws(sorted(order), k, self.n_draws, f"{key}/{k}/{layers}")
            for rows in (tuple(order[:k]), *draws):
                sites += [Site(own, hide=rows, hide_layers=layers) for own in ((), tuple(field))]
        return sites

    def _values(self, swapped: Swapped, n_bands: int) -> dict[str, Json]:
        """Decisions by cell and state: of the strongest rows (true or false) and of random ones (share)."""
        margins = [r.patched for r in swapped.recoveries]
        gap = swapped.donor - swapped.recipient
        values: dict[str, Json] = {"refreshed_safe": margins[0] > 0, "refreshed_margin": margins[0]}
        width = 2 * (1 + self.n_draws)
        blocks = [margins[1 + i * width : 1 + (i + 1) * width] for i in range(len(self.fractions) + n_bands)]
        for prefix, chosen in (("", blocks[: len(self.fractions)]), ("band_", blocks[len(self.fractions) :])):
            for at, state in enumerate(STATES):
                found = [[m < 0 if state == "kept" else m > 0 for m in block[at::2]] for block in chosen]
                values[f"{prefix}{state}"] = [f[0] for f in found]
                values[f"{prefix}{state}_random"] = rounded(sum(f[1:]) / self.n_draws for f in found)
                shift = [(block[at] - swapped.recipient) / gap for block in chosen]
                values[f"{prefix}{state}_shift"] = rounded(shift)
        return values

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Decisions by hidden share and by layer third, their controls, and the shift of the margin."""
        lines: list[Aggregate] = []
        bands = [str(b) for b in numbers(rows[0], "bands")] if rows else []
        for state in reversed(STATES):
            by_fraction = [({"at_masked_fraction": f}, at) for at, f in enumerate(self.fractions)]
            lines += self._lines(rows, state, "", f"p_{state}_by_masked_fraction", by_fraction, seed)
            by_band = [({"at_band": b}, at) for at, b in enumerate(bands)]
            lines += self._lines(rows, state, "band_", f"p_{state}_by_masked_layer_third", by_band, seed)
        lines += rate_lines(self.name, rows, {"refreshed_safe": "p_safe_refreshed"})
        return lines + ends_lines(self.name, rows, seed=seed)

    def _lines(
        self, rows: Sequence[Row], state: str, prefix: str, metric: str, cells: Sequence[tuple[dict[str, Any], int]],
        seed: int,
    ) -> list[Aggregate]:  # fmt: skip
        name, lines = self.name, list[Aggregate]()
        for params, at in cells:
            chosen = at_index(rows, f"{prefix}{state}", at, MISSING)
            lines += rate_lines(name, chosen, {"value": metric}, params=params, control=f"{metric}_random")
        for key, suffix, unit in (("_random", "_random", "fraction"), ("_shift", "_shift", "recovery")):
            for params, at in cells:
                chosen = at_index(rows, f"{prefix}{state}{key}", at, MISSING)
                lines += mean_lines(name, chosen, {"value": f"{metric}{suffix}"}, unit=unit, params=params, seed=seed)
        return lines
