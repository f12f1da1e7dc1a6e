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

Cost for each pair: 4 prefills and about 2 x (positions + 26) one-token readers.
"""

from collections.abc import Sequence
from dataclasses import replace

from notelens.context import ContextStore
from notelens.intervene.engine import Site
from notelens.probes.base import (
    Aggregate,
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
    opposite,
    pair_meta,
    pairs_along,
    rate_lines,
    rounded,
    single_effects,
    swap_pair,
)
from notelens.probes.ranking import check_ks, ranked
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
        field, downstream = field_and_downstream(pair)
        behind_rule = tuple(p for p in downstream if p > _rule_end(pair))
        singles = single_effects(store, pair)
        found = swap_pair(store, pair, [Site(downstream), Site(behind_rule)])
        rows: list[Row] = []
        for direction, swapped in found.items():
            whole, behind = swapped.recoveries
            values = end_values(swapped) | {"followed": _follows(whole)}
            other = found[opposite(direction)]
            if swapped.excluded is None and other.excluded is None:
                values |= _values("", whole) | _values("after_rule_", behind)
                effects = singles[opposite(direction)].recoveries[len(field) :]
                order = ranked(downstream, rounded(r.value for r in effects))
                values |= self._other_sites(store, instance, pair, swapped, order, behind_rule)
            meta = pair_meta(instance, pair) | {"n_positions": len(downstream)}
            rows.append(Row(item.id, item.stage, pair.cluster, direction, swapped.excluded, values, meta))
        return rows

    def _other_sites(
        self, store: ContextStore, instance: Instance, pair: Pair, swapped: Swapped, order: Sequence[int],
        behind_rule: Sequence[int],
    ) -> dict[str, Json]:  # fmt: skip
        """Doses, and the prompts with the other rule and with both changed where the grid has them; one batch."""
        oriented, downstream = ends(pair, swapped.direction), sorted(order)
        chosen = {"ranked": order, "end": downstream[::-1], "front": downstream}
        sites = [Site(tuple(chosen[name][:k])) for name in ORDERS for k in self.doses]
        donors = [store.donor(oriented.old, oriented.new)]
        (f, r), live = next((cell, p) for cell, p in instance.cells.items() if p is oriented.old)
        grid: dict[str, Prompt] = {}
        for name, cell, positions in (
            ("trigger", (f, 1 - r), behind_rule),
            ("same_conclusion", (1 - f, 1 - r), downstream),
        ):
            same = instance.conclusion.get(cell) == instance.conclusion[f, r]
            if cell in instance.cells and same == (name == "same_conclusion"):
                grid[name] = instance.cells[cell]
                every = tuple(range(oriented.old.decision))  # the donor itself, whose margin is needed too
                sites += [Site(tuple(positions), donor=len(donors)), Site(every, donor=len(donors))]
                donors.append(store.get(grid[name]).cache)
        _, patched = margins(store, store.get(live), donors, sites, oriented.answer_ids)
        values: dict[str, Json] = {"doses": list(self.doses)}
        fits = [k <= len(downstream) for k in self.doses]
        for at, name in enumerate(ORDERS):
            block = patched[at * len(fits) : (at + 1) * len(fits)]
            mine = [Recovery(swapped.recipient, swapped.donor, m) for m in block]
            values[f"{name}_recovery"] = [round(r.value, 6) if f else None for r, f in zip(mine, fits, strict=True)]
            values[f"{name}_followed"] = [_follows(r) if f else None for r, f in zip(mine, fits, strict=True)]
        rest = patched[len(ORDERS) * len(fits) :]
        last = dict(zip(grid, zip(rest[::2], rest[1::2], strict=True), strict=True))
        for name in ("trigger", "same_conclusion"):
            if name in grid:
                margin, own = last[name]
                values |= _donor_values(name, Recovery(swapped.recipient, own, margin), swapped)
            else:
                values[f"{name}_excluded"] = "the form has no second rule"
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


def _donor_values(name: str, recovery: Recovery, swapped: Swapped) -> dict[str, Json]:
    """What the other prompts of the grid did; only the reason where they do not decide right themselves."""
    if name == "trigger":
        excluded = exclusion(recovery.recipient, recovery.donor)
        return {f"{name}_excluded": excluded} | ({} if excluded else _values(f"{name}_", recovery))
    if recovery.donor >= 0:
        return {f"{name}_excluded": "donor wrong"}
    gap = swapped.donor - swapped.recipient
    shift = (recovery.patched - recovery.recipient) / gap
    return {f"{name}_excluded": None, f"{name}_flipped": recovery.patched > 0, f"{name}_shift": shift}


def _part(rows: Sequence[Row], name: str) -> list[Row]:
    """Rows for one donor, excluded where this donor is missing or wrong."""
    return [
        r if r.excluded is not None or r.values[f"{name}_excluded"] is None
        else replace(r, excluded=str(r.values[f"{name}_excluded"]))
        for r in rows
    ]  # fmt: skip
