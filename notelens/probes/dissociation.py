"""Dissociation of field and conclusion: the field stays byte for byte, the rule turns the conclusion over.

Claim: what is cached is the conclusion, not the field's value: with an unchanged field, the rows of the changed rule
tokens alone recover nothing, the rows behind them everything. Denoising says *sufficient*, noising *necessary*.

Falsifier: trigger-only recovery clearly above 0, or notes recovery clearly below 1.

Sites of one pair along the trigger axis (the decision token is the reader and is never patched):

* ``trigger_only``: the rows whose token ids differ;
* ``rule_only``: every row of the rule, the trigger included;
* ``notes``: every row behind the last differing token;
* ``notes_after_rule``: every row behind the rule, so that the visible rule stays the recipient's as a whole;
* ``full``: every row from the first differing token on, which is the donor's cache and must give 1.

Rule forms: ``polarity`` (one named value, "if the label is X then ..., otherwise ..."), ``swapped`` (two clauses whose
actions change places) and ``negated`` ("if the label is not X ..."). In ``swapped`` the rule names both values, so the
conclusion cannot be told from whether it repeats the field's token.

Cost for each pair: 2 prefills and 12 one-token readers.
"""

from collections.abc import Sequence

from notelens.context import ContextStore
from notelens.errors import InputError
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
    mean_lines,
    pair_meta,
    pairs_along,
    rate_lines,
    site_values,
    swap_pair,
)
from notelens.prompt import Pair
from notelens.tasks.base import Instance

SITES = ("trigger_only", "rule_only", "notes", "notes_after_rule", "full")
FORMS = ("polarity", "swapped", "negated")


def dissociation_sites(pair: Pair) -> tuple[Site, ...]:
    """The sites of a pair along the trigger axis, in the order of :data:`SITES`."""
    differing, stop = pair.differing, pair.old.decision
    rule = pair.old.positions("rule")
    return (
        Site(differing),
        Site(rule),
        Site(tuple(range(differing[-1] + 1, stop))),
        Site(tuple(range(rule[-1] + 1, stop))),
        Site(tuple(range(differing[0], stop))),
    )


class Dissociation(Probe):
    """Rule tokens alone against notes, the field being identical.

    Args:
        forms: rule forms to use, out of those that have two versions of the rule.
        pairs_per_instance: 1 uses the first field value only, 2 both.

    Raises:
        InputError: a form is unknown or listed twice, or ``pairs_per_instance`` is neither 1 nor 2.
    """

    name = "dissociation"
    paper_ref = "app:deepmech (i), tab:deepmech"
    claim = "With an identical field, the changed rule tokens alone recover nothing, the notes behind them everything."
    falsifier = "Trigger-only recovery clearly above 0, or notes recovery clearly below 1."

    def __init__(self, *, forms: Sequence[str] = FORMS, pairs_per_instance: int = 2) -> None:
        unknown = [form for form in forms if form not in FORMS]
        if unknown or not forms or isinstance(forms, str) or len(set(forms)) != len(forms):
            raise InputError(f"forms {list(forms)!r}: a list of distinct forms out of {', '.join(FORMS)} is needed")
        self.forms = tuple(forms)
        self.pairs_per_instance = check_pairs(pairs_per_instance)

    def items(self, instances: Sequence[Instance], stage: str, earlier: Sequence[Row]) -> list[Item]:
        """One item per pair along the trigger axis."""
        found = pairs_along(instances, "trigger", per_instance=self.pairs_per_instance, forms=self.forms)
        return [Item(pair.id, stage, (instance, pair)) for instance, pair in found]

    def measure(self, store: ContextStore, item: Item) -> list[Row]:
        """Two rows: denoising and noising.

        Raises:
            PatchError: no swap, not even one of all rows, moved the margin.
        """
        instance, pair = item.payload
        rows: list[Row] = []
        for direction, swapped in swap_pair(store, pair, dissociation_sites(pair)).items():
            check_fired(swapped, f"dissociation {pair.id}")
            values = end_values(swapped) | site_values(swapped, SITES)
            meta = pair_meta(instance, pair)
            rows.append(Row(item.id, item.stage, pair.cluster, direction, swapped.excluded, values, meta))
        return rows

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Recoveries pooled over forms and by form, flips, two-way probabilities."""
        name = self.name
        forms = [f for f in self.forms if any(r.meta["form"] == f for r in rows)]
        groups = [({}, list(rows)), *(({"form": f}, [r for r in rows if r.meta["form"] == f]) for f in forms)]
        lines: list[Aggregate] = []
        for params, chosen in groups:
            for site in SITES:
                control = "trigger_only_recovery" if site.startswith("notes") else None
                metrics = {f"{site}_recovery": f"{site}_recovery"}
                lines += mean_lines(name, chosen, metrics, params=params, control=control, seed=seed)
        for params, chosen in groups:
            lines += rate_lines(name, chosen, {"notes_flipped": "flip_rate"}, params=params)
        for site in SITES:
            lines += rate_lines(name, rows, {f"{site}_flipped": "flip_rate"}, params={"site": site})
            metrics = {f"{site}_probability": "patched_probability"}
            lines += mean_lines(name, rows, metrics, unit="probability", params={"site": site}, seed=seed)
        lines += ends_lines(name, rows, seed=seed)
        for params, chosen in groups[1:]:
            lines += rate_lines(name, chosen, {"competent": "competence"}, include_excluded=True, params=params)
        return lines
