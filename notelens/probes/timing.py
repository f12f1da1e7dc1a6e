"""Write before read: at which depth the conclusion is in the notes, and at which the decision token has settled.

Claim: the conclusion can be read from the notes in earlier layers than the decision commits to it.

Falsifier: a write depth that is not below the commit depth, or a shuffled control above chance.

Nothing is patched (``swap`` is ``none``). Residual index 0 is the embedding and index l the output of layer l; a depth
is an index over the number of layers.

Stage ``commit``, per pair along the field axis: the logit-lens margin at the decision position, layer by layer, of
*both* prompts. A pair commits at the first index from which both margins keep their final signs. One prompt alone
would have the right sign by chance half of the time from the first layer on. Pairs that are not decided right are
excluded and counted.

Stage ``read_out``, per form set and family: linear probes (:mod:`~notelens.probes.linear`) at several anchors, for the
conclusion, the field's value, the repetition confound and shuffled conclusions (:mod:`~notelens.probes.timing_labels`).

Form sets: ``swapped`` (the rule names both values, so repetition tells nothing), ``polarity`` (the published design)
and ``polarity+negated`` (both pooled, which makes repetition and conclusion orthogonal).

Groupings: ``held_out_instances`` (folds within a family that never split a filler group) and ``leave_one_family_out``
(trained on all other families; values differ between families, so the field has no read-out there).

The conclusion is a direction in the residuals of *given* answer words. Where groups of a family use other words, a probe
must also generalise over words, from few prompts: ``answer_pairs`` (1: fixed words) says so, and above 1 an undefined
write depth is no evidence that nothing is written. The published design has fixed words, and one trigger whose match
decides them, so that repetition and conclusion coincide: that confound shows only with fixed words, too.

Cost: one prefill per prompt, then about 5 ms for each layer, anchor, family and fold.
"""

import weakref
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from notelens.context import ContextStore
from notelens.errors import InputError, SpanError, TaskError
from notelens.probes.base import Aggregate, Item, Json, Probe, Row, pair_meta, pairs_along, rounded
from notelens.probes.linear import Fold, ReadOut, group_folds
from notelens.probes.timing_labels import Sample, agreement, make_labels, settled
from notelens.probes.timing_lines import timing_lines
from notelens.prompt import Prompt
from notelens.readout import exclusion
from notelens.tasks.base import Instance

FORM_SETS = ("swapped", "polarity", "polarity+negated")
HELD_OUT, LEAVE_OUT = "held_out_instances", "leave_one_family_out"
ANCHORS = ("before_decision", "before_request", "request_end", "rule_end", "decision")


class Timing(Probe):
    """Depth of the written conclusion against depth of the committed decision.

    Args:
        form_sets: rule forms to pool, joined by ``+``; sets that the instances do not cover are left out.
        groupings: ``held_out_instances``, ``leave_one_family_out``.
        anchors: where to read; every standard anchor that all prompts have when ``None``.
        n_folds: folds within a family.
        n_shuffles: shuffled labels, all read in the same fits.
        alpha: ridge penalty for one standardised feature.
        threshold: accuracy from which the conclusion counts as written.
        seed: of the shuffles.

    Raises:
        InputError: an argument is out of range; numbers are in the text.
    """

    name = "timing"
    paper_ref = "app:deepmech (ii)"
    claim = "The conclusion is decodable from the notes at a smaller depth than the one at which the decision commits."
    falsifier = "Write depth not below commit depth, or a shuffled control above chance."
    swap = "none"
    stages = ("commit", "read_out")

    def __init__(
        self,
        *,
        form_sets: Sequence[str] = FORM_SETS,
        groupings: Sequence[str] = (HELD_OUT, LEAVE_OUT),
        anchors: Sequence[str] | None = None,
        n_folds: int = 3,
        n_shuffles: int = 20,
        alpha: float = 1.0,
        threshold: float = 0.95,
        seed: int = 0,
    ) -> None:
        for what, given in (("form_sets", form_sets), ("groupings", groupings), ("anchors", anchors or ANCHORS)):
            if isinstance(given, str) or not given or len(set(given)) != len(given):
                raise InputError(f"{what} is {given!r}; a list of distinct names is needed")
        unknown = [g for g in groupings if g not in (HELD_OUT, LEAVE_OUT)]
        if unknown:
            raise InputError(f"unknown grouping {unknown[0]!r}; there are {HELD_OUT} and {LEAVE_OUT}")
        if n_folds < 2 or n_shuffles < 1 or not alpha > 0 or not 0.5 < threshold <= 1:
            raise InputError(
                f"n_folds {n_folds} (at least 2), n_shuffles {n_shuffles} (at least 1), alpha {alpha} (above 0), "
                f"threshold {threshold} (above 0.5, at most 1)"
            )
        self.form_sets, self.groupings = tuple(form_sets), tuple(groupings)
        self.anchors = None if anchors is None else tuple(anchors)
        self.n_folds, self.n_shuffles, self.alpha = n_folds, n_shuffles, alpha
        self.threshold, self.seed = threshold, seed
        self._memo: weakref.WeakKeyDictionary[ContextStore, dict[Hashable, npt.NDArray[np.float32]]] = (
            weakref.WeakKeyDictionary()
        )

    def items(self, instances: Sequence[Instance], stage: str, earlier: Sequence[Row]) -> list[Item]:
        """Pairs for ``commit``; (form set, grouping, family) for ``read_out``.

        Raises:
            TaskError: no form set is covered.
            InputError: a family has fewer groups than folds, or there is one family only for leave-one-family-out.
            SpanError: an anchor was asked for that a prompt does not have.
        """
        covered = {i.form for i in instances}
        sets = [s for s in self.form_sets if set(s.split("+")) <= covered]
        if not sets:
            raise TaskError(
                f"form sets {', '.join(self.form_sets)} are not covered by forms {', '.join(sorted(covered))}"
            )
        if stage == "commit":
            forms = sorted({form for s in sets for form in s.split("+")})
            return [Item(pair.id, stage, (i, pair)) for i, pair in pairs_along(instances, "field", forms=forms)]
        anchors = self._usable_anchors(instances)
        items: list[Item] = []
        for grouping in self.groupings:
            for form_set in sets:
                chosen = tuple(i for i in instances if i.form in form_set.split("+"))
                families = sorted({i.family for i in chosen})
                if grouping == LEAVE_OUT and len(families) < 2:
                    raise InputError(
                        f"{len(families)} family ({families[0]}) of form {form_set}: {LEAVE_OUT} needs at least 2; "
                        f"pass groupings=[{HELD_OUT!r}]"
                    )
                for family in families:
                    own = tuple(i for i in chosen if i.family == family)
                    n_groups = len({i.group for i in own})
                    if grouping == HELD_OUT and n_groups < self.n_folds:
                        raise InputError(
                            f"family {family!r} has {n_groups} groups of form {form_set}, but n_folds is "
                            f"{self.n_folds}; measure more instances or use fewer folds"
                        )
                    used = own if grouping == HELD_OUT else chosen
                    items.append(
                        Item(f"{form_set}/{grouping}/{family}", stage, (form_set, grouping, family, used, anchors))
                    )
        return items

    def _usable_anchors(self, instances: Sequence[Instance]) -> tuple[str, ...]:
        shared = set.intersection(*(set(p.anchors) for i in instances for p in i.cells.values()))
        missing = [a for a in self.anchors or () if a not in shared]
        if missing:
            raise SpanError(f"no anchor {missing[0]!r} in every prompt; shared ones: {', '.join(sorted(shared))}")
        return self.anchors or tuple(a for a in ANCHORS if a in shared)

    def measure(self, store: ContextStore, item: Item) -> list[Row]:
        """One row per pair, or one row per anchor of a (form set, grouping, family)."""
        return self._commit(store, item) if item.stage == "commit" else self._read_out(store, item)

    @staticmethod
    def _commit(store: ContextStore, item: Item) -> list[Row]:
        instance, pair = item.payload
        old, new = store.get(pair.old), store.get(pair.new)
        ends = [store.model.answer_logits(c.hidden, pair.answer_ids).float().tolist() for c in (old, new)]
        recipient, donor = (float(b - a) for a, b in ends)
        lens = [store.model.lens_logits(c.residual("decision"), pair.answer_ids).float() for c in (old, new)]
        before, after = ((logits[:, 1] - logits[:, 0]).tolist() for logits in lens)
        excluded = exclusion(recipient, donor)
        values: dict[str, Json] = {
            "recipient_margin": recipient,
            "donor_margin": donor,
            "margin_gap": donor - recipient,
            "competent": recipient < 0 < donor,
            "flipped": recipient * donor < 0,
            "old_margins": rounded(before),
            "new_margins": rounded(after),
            "n_layers": len(before) - 1,
        }
        if excluded is None:
            layer = max(settled(before), settled(after))
            values |= {"commit_layer": layer, "commit_depth": layer / (len(before) - 1)}
        return [Row(item.id, item.stage, pair.cluster, "", excluded, values, pair_meta(instance, pair))]

    def _read_out(self, store: ContextStore, item: Item) -> list[Row]:
        form_set, grouping, family, instances, anchors = item.payload
        samples: list[Sample] = [(i, cell, i.cells[cell]) for i in instances for cell in sorted(i.cells)]
        groups, folds = self._folds(samples, grouping, family)
        key = f"{self.seed}/{item.id}"
        labels = make_labels(samples, key, n_shuffles=self.n_shuffles, with_field=grouping == HELD_OUT)
        readout = ReadOut(labels, groups, folds, alpha=self.alpha)
        features = np.stack([self._residuals(store, p, anchors) for _, _, p in samples])
        rows: list[Row] = []
        for at, anchor in enumerate(anchors):
            tallies = [readout.score(features[:, at, layer].astype(np.float64)) for layer in range(features.shape[2])]
            values: dict[str, Json] = {
                "n_layers": features.shape[2] - 1,
                "n_prompts": len(samples),
                "n_groups": len({i.group for i in instances}),
                "answer_pairs": len({i.answers for i in instances if i.family == family}),
                "converged": readout.converged,
                "repetition_agreement": agreement(labels),
            }
            for name in ("conclusion", "field", "repetition"):
                if name in labels:
                    values[f"{name}_correct"] = [t[name].correct for t in tallies]
                    values[f"{name}_total"] = tallies[0][name].total
                    values[f"{name}_skipped"] = dict(tallies[0][name].skipped)
            shuffles = [n for n in labels if n.startswith("shuffled")]
            values["shuffled_correct"] = [[t[n].correct for t in tallies] for n in shuffles]
            values["shuffled_total"] = [tallies[0][n].total for n in shuffles]
            skipped = tallies[0]["conclusion"].skipped
            excluded = None if tallies[0]["conclusion"].total else f"undefined: {next(iter(skipped), 'no sample')}"
            meta: dict[str, Json] = {"form": form_set, "grouping": grouping, "anchor": anchor}
            rows.append(Row(item.id, item.stage, family, "", excluded, values, meta))
        return rows

    def _folds(self, samples: Sequence[Sample], grouping: str, family: str) -> tuple[list[str], list[Fold]]:
        """Groups that must not be split, and the folds."""
        if grouping == HELD_OUT:
            groups = [i.group for i, _, _ in samples]
            return groups, group_folds(groups, self.n_folds)
        families = [i.family for i, _, _ in samples]
        inside = np.array([f == family for f in families])
        return families, [(np.flatnonzero(~inside), np.flatnonzero(inside))]

    def _residuals(self, store: ContextStore, prompt: Prompt, anchors: Sequence[str]) -> npt.NDArray[np.float32]:
        """``[anchor, layer, d_model]``, kept for the life of the store: only these rows, not the caches."""
        held = self._memo.setdefault(store, {})
        key = (prompt.token_ids, tuple(prompt.anchors[a] for a in anchors))
        if key not in held:
            context = store.get(prompt)
            held[key] = np.stack([context.residual(a).float().cpu().numpy() for a in anchors])
        return held[key]

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Depths, accuracies, the shuffled control and the difference between commit and write."""
        return timing_lines(self.name, rows, self.threshold, seed=seed)
