"""False-note injection: a live prompt says one thing, the rows behind it another; what does the model do?

Claim: the decision follows the notes against what the visible prompt says.

Falsifier: a decision that stays with the live prompt, or one that also flips when the injected notes come from a prompt
with the same conclusion.

The recipient is the live prompt, with its own field, template and decision token. Numerically ``recovery`` without
params is locality's full-downstream swap; what this probe adds is the decision itself (``follow_rate``), a control,
notes that contradict *everything* visible, and the dose:

* params ``{}``: rows behind the field, from the prompt with the other field value (the paper's probe; the rule's rows
  are among them);
* ``{"notes": "after_rule"}``: only rows behind field *and* rule, so that both stay live;
* ``{"donor": "trigger", "notes": "after_rule"}``: the same rows from the prompt with the same field and the other rule;
* ``same_conclusion_flip_rate`` and ``same_conclusion_shift``: rows behind the field from the prompt in which both field
  and rule differ, so that the conclusion is the same: must not flip. The shift is a share of the field pair's gap;
* ``{"dose": k, "order": ...}``: only k rows: ``ranked`` (by single-position effects of the same pair in the *opposite*
  direction, so that the ranking is not selected on what it is evaluated on), ``end`` (the last k in front of the
  decision) or ``front`` (the first k behind the field).

``follow_rate``: the patched decision is the donor's; ``flip_rate``: it also was the recipient's before. Over rows whose
both ends are right they agree; ``{"rows": "all"}`` counts following over every row, right or not.

Cost for each pair: 4 prefills and about 2 x (positions + 25) one-token readers.
"""

from collections.abc import Sequence
from dataclasses import replace

from notelens.context import ContextStore
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
    ends,
    ends_lines,
    field_and_downstream,
    margins,
    mean_lines,
    pair_meta,
    pairs_along,
    rate_lines,
    rounded,
    swap_pair,
)
from notelens.probes.ranking import check_ks, opposite, ranked
from notelens.prompt import Pair, Prompt
from notelens.readout import Recovery, exclusion
from notelens.tasks.base import Instance

DOSES = (1, 2, 4, 8, 16, 32)
ORDERS = ("ranked", "end", "front")
CLIPPED = "fewer positions than the dose"


class Injection(Probe):
    """Whether the decision follows notes of another prompt in a live one, and at what dose.

    Args:
        doses: numbers of injected positions, rising.
        pairs_per_instance: 1 uses the first version of the rule only, 2 both where the instance has them.

    Raises:
        InputError: ``doses`` are not rising positive numbers, or ``pairs_per_instance`` is neither 1 nor 2.
    """

    name = "injection"
    paper_ref = "app:deepmech (iv)"
    claim = "The decision follows injected notes against the visible field and rule."
    falsifier = "Decisions that stay with the live prompt, or that flip under notes of the same conclusion too."

    def __init__(self, *, doses: Sequence[int] = DOSES, pairs_per_instance: int = 1) -> None:
        self.doses = check_ks(doses)
        self.pairs_per_instance = check_pairs(pairs_per_instance)

    def items(self, instances: Sequence[Instance], stage: str, earlier: Sequence[Row]) -> list[Item]:
        """One item per pair along the field axis."""
        found = pairs_along(instances, "field", per_instance=self.pairs_per_instance)
        return [Item(pair.id, stage, (instance, pair)) for instance, pair in found]

    def measure(self, store: ContextStore, item: Item) -> list[Row]:
        """Two rows: the old prompt live with notes of the new one, and the reverse."""
        instance, pair = item.payload
        _, downstream = field_and_downstream(pair)
        singles = [Site((p,)) for p in downstream]
        maps = {d: swap_pair(store, pair, singles, d) for d in DIRECTIONS}
        rankings = {
            d: ranked(downstream, rounded(r.value for r in m.recoveries)) for d, m in maps.items() if not m.excluded
        }
        rows: list[Row] = []
        for direction in DIRECTIONS:
            swapped = maps[direction]
            notes = Site(downstream)
            behind_rule = Site(tuple(p for p in downstream if p > _rule_end(pair)))
            whole = swap_pair(store, pair, [notes, behind_rule], direction)
            values = end_values(whole) | {"followed": _follows(whole.recoveries[0])}
            if whole.excluded is None:
                values |= _values("", whole.recoveries[0]) | _values("after_rule_", whole.recoveries[1])
                order = rankings[opposite(direction)]
                values |= self._doses(store, pair, direction, order, downstream)
                values |= self._other_donors(store, instance, pair, swapped, notes, behind_rule)
            meta = pair_meta(instance, pair) | {"n_positions": len(downstream)}
            rows.append(Row(item.id, item.stage, pair.cluster, direction, whole.excluded, values, meta))
        return rows

    def _doses(
        self, store: ContextStore, pair: Pair, direction: Direction, order: Sequence[int], downstream: Sequence[int]
    ) -> dict[str, Json]:
        """Recovery and following by order and dose; ``None`` where there are fewer positions than the dose."""
        chosen = {
            "ranked": [tuple(order[:k]) for k in self.doses],
            "end": [tuple(downstream[-k:]) for k in self.doses],
            "front": [tuple(downstream[:k]) for k in self.doses],
        }
        sites = [Site(positions) for name in ORDERS for positions in chosen[name]]
        found = swap_pair(store, pair, sites, direction).recoveries
        values: dict[str, Json] = {"doses": list(self.doses)}
        for at, name in enumerate(ORDERS):
            mine = found[at * len(self.doses) : (at + 1) * len(self.doses)]
            fits = [k <= len(downstream) for k in self.doses]
            values[f"{name}_recovery"] = [round(r.value, 6) if f else None for r, f in zip(mine, fits, strict=True)]
            values[f"{name}_followed"] = [_follows(r) if f else None for r, f in zip(mine, fits, strict=True)]
        return values

    @staticmethod
    def _other_donors(
        store: ContextStore, instance: Instance, pair: Pair, swapped: Swapped, notes: Site, behind_rule: Site
    ) -> dict[str, Json]:
        """The prompt with the other rule, and the one in which field and rule both differ, where the grid has them."""
        oriented = ends(pair, swapped.direction)
        (f, r), live = next((cell, p) for cell, p in instance.cells.items() if p is oriented.old)
        values: dict[str, Json] = {}
        missing = "the form has no second rule"
        for name, cell, same in (("trigger", (f, 1 - r), False), ("same_conclusion", (1 - f, 1 - r), True)):
            fits = cell in instance.cells and (instance.conclusion[cell] == instance.conclusion[f, r]) == same
            if not fits or len(instance.cells[cell]) != len(live):
                values[f"{name}_excluded"] = missing
                continue
            donor = store.get(instance.cells[cell])
            site = notes if same else behind_rule
            _, (patched,) = margins(store, store.get(live), [donor.cache], [site], oriented.answer_ids)
            own, _ = margins(store, donor, [], [], oriented.answer_ids)
            if same:
                values[f"{name}_excluded"] = None if own < 0 else "donor wrong"
                if own < 0:
                    values[f"{name}_flipped"] = patched > 0
                    values[f"{name}_shift"] = (patched - swapped.recipient) / (swapped.donor - swapped.recipient)
            else:
                values[f"{name}_excluded"] = exclusion(swapped.recipient, own)
                if values[f"{name}_excluded"] is None:
                    values |= _values(f"{name}_", Recovery(swapped.recipient, own, patched))
        return values

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Following at full dose, with everything visible live, under the control, and by dose."""
        name = self.name
        lines = mean_lines(name, rows, {"recovery": "recovery"}, control="same_conclusion_shift", seed=seed)
        lines += rate_lines(name, rows, {"followed": "follow_rate"}, control="same_conclusion_flip_rate")
        lines += rate_lines(name, rows, {"flipped": "flip_rate"}, control="same_conclusion_flip_rate")
        same = _part(rows, "same_conclusion")
        lines += rate_lines(name, same, {"same_conclusion_flipped": "same_conclusion_flip_rate"})
        lines += mean_lines(name, same, {"same_conclusion_shift": "same_conclusion_shift"}, seed=seed)
        lines += rate_lines(name, rows, {"followed": "follow_rate"}, include_excluded=True, params={"rows": "all"})
        parts: tuple[tuple[dict[str, Json], str, list[Row]], ...] = (
            ({"notes": "after_rule"}, "after_rule_", list(rows)),
            ({"donor": "trigger", "notes": "after_rule"}, "trigger_", _part(rows, "trigger")),
        )
        for params, prefix, chosen in parts:
            lines += mean_lines(name, chosen, {f"{prefix}recovery": "recovery"}, params=params, seed=seed)
            lines += rate_lines(name, chosen, {f"{prefix}flipped": "follow_rate"}, params=params)
            lines += rate_lines(name, chosen, {f"{prefix}flipped": "flip_rate"}, params=params)
        for order in ORDERS:
            for at, dose in enumerate(self.doses):
                params = {"dose": dose, "order": order}
                chosen = at_index(rows, f"{order}_recovery", at, CLIPPED)
                lines += mean_lines(name, chosen, {"value": "recovery"}, params=params, seed=seed)
                chosen = at_index(rows, f"{order}_followed", at, CLIPPED)
                lines += rate_lines(name, chosen, {"value": "follow_rate"}, params=params)
                if order == "ranked":
                    lines += rate_lines(name, chosen, {"value": "flip_rate"}, params=params)
        return lines + ends_lines(name, rows, seed=seed)


def _rule_end(pair: Pair) -> int:
    """Last position of the rule, or -1 where the prompts name no rule."""
    prompts: tuple[Prompt, Prompt] = (pair.old, pair.new)
    return max(p.positions("rule")[-1] if "rule" in p.spans else -1 for p in prompts)


def _follows(recovery: Recovery) -> bool:
    """The patched decision is the donor's own decision, right or wrong."""
    return recovery.patched * recovery.donor > 0


def _values(prefix: str, recovery: Recovery) -> dict[str, Json]:
    return {
        f"{prefix}recovery": recovery.value,
        f"{prefix}flipped": recovery.flipped,
        f"{prefix}margin": recovery.patched,
        f"{prefix}probability": recovery.probability,
    }


def _part(rows: Sequence[Row], name: str) -> list[Row]:
    """Rows for one donor, excluded where this donor is missing or wrong."""
    return [
        r if r.excluded is not None or r.values[f"{name}_excluded"] is None
        else replace(r, excluded=str(r.values[f"{name}_excluded"]))
        for r in rows
    ]  # fmt: skip
