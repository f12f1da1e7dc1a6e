"""Placebo: rows from a donor that says the same. Whatever this moves is not the note.

Claim: rows behind the field that come from a prompt with the same value and the same conclusion leave the decision.

Falsifier: a placebo recovery that is not small against the recovery of the real donor.

Donors, each in ``params["donor"]``:

* ``other_filler``: the same prompt with irrelevant tokens of the filler exchanged among themselves (digits, or else
  capitalised words, in reverse order): same length, same bag of tokens, same field, rule and conclusion;
* ``rerun``: the same prompt, prefilled again behind its field, as prefix caching does. It differs by rounding only and is
  the noise floor;
* ``same_conclusion``: the prompt in which field *and* rule differ, so that the conclusion is the same. It is a harder
  placebo than the two above, because its rows hold other copies of the field's and the rule's words, and its own margin
  differs from the recipient's.

A placebo has no gap of its own: the shift of the margin is divided by the gap of the field pair, so that the numbers
can be read against locality's. Signs cancel in a mean, hence ``abs_recovery`` beside ``recovery``.

Cost for each pair: 4 prefills shared with other probes, 4 of the tokens behind the field, and 14 one-token readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from notelens.cache.kv import KVCache
from notelens.cache.ops import slice_rows
from notelens.context import Context, ContextStore
from notelens.errors import InputError
from notelens.intervene.engine import Site
from notelens.probes.aggregators import repeats, token_classes
from notelens.probes.base import (
    DIRECTIONS,
    Aggregate,
    Direction,
    Item,
    Json,
    Probe,
    Row,
    Swapped,
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
)
from notelens.prompt import Pair, Prompt
from notelens.readout import exclusion
from notelens.tasks.base import Instance

DONORS = ("other_filler", "rerun", "same_conclusion")


class Placebo(Probe):
    """Rows from donors with the same value and conclusion.

    Args:
        donors: which placebos, out of ``other_filler``, ``rerun``, ``same_conclusion``.
        pairs_per_instance: 1 uses the first version of the rule only, 2 both where the instance has them.

    Raises:
        InputError: a donor is unknown or listed twice, or ``pairs_per_instance`` is neither 1 nor 2.
    """

    name = "placebo"
    paper_ref = "control of sec:mechanism (1); not in the paper"
    claim = "Rows from a prompt that says the same leave the decision where it is."
    falsifier = "Placebo recovery beyond 0.02, or any flip."

    def __init__(self, *, donors: Sequence[str] = DONORS, pairs_per_instance: int = 1) -> None:
        unknown = [d for d in donors if d not in DONORS]
        if unknown or not donors or isinstance(donors, str) or len(set(donors)) != len(donors):
            raise InputError(f"donors {list(donors)!r}: a list of distinct donors out of {', '.join(DONORS)} is needed")
        self.donors = tuple(d for d in DONORS if d in donors)
        self.pairs_per_instance = check_pairs(pairs_per_instance)

    def items(self, instances: Sequence[Instance], stage: str, earlier: Sequence[Row]) -> list[Item]:
        """One item per pair along the field axis."""
        found = pairs_along(instances, "field", per_instance=self.pairs_per_instance)
        return [Item(pair.id, stage, (instance, pair)) for instance, pair in found]

    def measure(self, store: ContextStore, item: Item) -> list[Row]:
        """One row per direction and donor."""
        instance, pair = item.payload
        _, downstream = field_and_downstream(pair)
        runs = {d: self._run(store, instance, ends(pair, d), downstream) for d in DIRECTIONS}
        return [
            row
            for direction in DIRECTIONS
            for row in self._rows(item, direction, runs[direction], donor=-runs[opposite(direction)].recipient)
        ]

    def _run(self, store: ContextStore, instance: Instance, oriented: Pair, downstream: Sequence[int]) -> "_Run":
        """One recipient with the notes of every placebo, and with all of its rows (its own decision); one batch."""
        recipient = store.get(oriented.old)
        donors = {name: placebo_donor(store, instance, recipient, name) for name in self.donors}
        caches = [found for found in donors.values() if isinstance(found, KVCache)]
        every = tuple(range(oriented.old.decision))
        sites = [Site(which, donor=i) for i in range(len(caches)) for which in (tuple(downstream), every)]
        base, patched = margins(store, recipient, caches, sites, oriented.answer_ids)
        found = iter(zip(patched[::2], patched[1::2], strict=True))
        return _Run(base, {n: next(found) if isinstance(d, KVCache) else d for n, d in donors.items()})

    @staticmethod
    def _rows(item: Item, direction: Direction, run: "_Run", *, donor: float) -> list[Row]:
        instance, pair = item.payload
        real = Swapped(direction, run.recipient, donor, exclusion(run.recipient, donor), ())
        rows: list[Row] = []
        for name, found in run.placebos.items():
            values: dict[str, Json] = end_values(real)
            excluded = real.excluded
            if isinstance(found, str):
                excluded = excluded or found
            else:
                margin, own = found
                values["placebo_margin"] = own
                excluded = excluded or (None if own < 0 else "placebo donor wrong")
                if excluded is None:
                    recovery = (margin - real.recipient) / (real.donor - real.recipient)
                    values |= {
                        "recovery": recovery,
                        "abs_recovery": abs(recovery),
                        "abs_shift": abs(margin - real.recipient),
                        "flipped": margin > 0,
                    }
            meta = pair_meta(instance, pair) | {"donor": name}
            rows.append(Row(item.id, item.stage, pair.cluster, direction, excluded, values, meta))
        return rows

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Mean and mean absolute recovery, flips, and the shift in logits, by donor."""
        name = self.name
        lines: list[Aggregate] = []
        donors = [d for d in self.donors if any(r.meta["donor"] == d for r in rows)]
        by_donor = {d: [r for r in rows if r.meta["donor"] == d] for d in donors}
        for metric, unit in (("recovery", "recovery"), ("abs_recovery", "recovery"), ("abs_shift", "logit")):
            for donor in donors:
                params = {"donor": donor}
                lines += mean_lines(name, by_donor[donor], {metric: metric}, unit=unit, params=params, seed=seed)
        for donor in donors:
            lines += rate_lines(name, by_donor[donor], {"flipped": "flip_rate"}, params={"donor": donor})
        return lines + (ends_lines(name, by_donor[donors[0]], seed=seed) if donors else [])


@dataclass(frozen=True)
class _Run:
    """One recipient: its unpatched margin, and by placebo (margin behind its notes, its own margin) or why there is none."""

    recipient: float
    placebos: dict[str, tuple[float, float] | str]


def placebo_donor(store: ContextStore, instance: Instance, recipient: Context, donor: str) -> KVCache | str:
    """The donor's cache, or why there is none. Rows in front of the first change are shared with the recipient."""
    prompt = recipient.prompt
    start = prompt.positions("field")[-1] + 1
    if donor == "same_conclusion":
        f, r = next(cell for cell, p in instance.cells.items() if p is prompt)
        other = (1 - f, 1 - r)
        if instance.conclusion.get(other) != instance.conclusion[f, r]:
            return "the form has no second rule"
        return store.get(instance.cells[other]).cache
    again = prompt if donor == "rerun" else filler_variant(prompt, instance.answers)
    if again is None:
        return "no filler to exchange"
    return store.model.prefill(again.token_ids[start:], slice_rows(recipient.cache, 0, start)).cache


def filler_variant(prompt: Prompt, answers: Sequence[str]) -> Prompt | None:
    """The prompt with irrelevant filler tokens behind the field in reverse order; ``None`` where nothing would change.

    Digits are exchanged with digits; where there are none, capitalised words with each other; else all other words.
    Tokens that spell the field's value or an answer stay. Made on token ids: the text is that of the tokens.
    """
    kinds = token_classes(prompt)
    words = ["".join(prompt.tokens[i] for i in prompt.positions("field")), *answers]
    kept = repeats(prompt.tokens, words)
    behind = [
        p for p in prompt.after("field") if prompt.regions[p] == "filler" and kinds[p] == "content" and not kept[p]
    ]
    texts = {p: prompt.tokens[p].strip() for p in behind}
    classes = (
        [p for p in behind if texts[p].isdigit()],
        [p for p in behind if texts[p][:1].isupper()],
        behind,
    )
    for chosen in classes:
        ids, tokens = list(prompt.token_ids), list(prompt.tokens)
        for target, source in zip(chosen, reversed(chosen), strict=True):
            ids[target], tokens[target] = prompt.token_ids[source], prompt.tokens[source]
        if tuple(ids) != prompt.token_ids:
            return Prompt(
                id=f"{prompt.id}/filler",
                text="".join(tokens),
                token_ids=tuple(ids),
                tokens=tuple(tokens),
                spans=prompt.spans,
                regions=prompt.regions,
                anchors=prompt.anchors,
                answer=prompt.answer,
            )
    return None
