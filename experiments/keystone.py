"""Does editing a spliced skill work as editing a prefilled prompt does? ``python -m experiments.keystone CONFIG``.

The keystone of the paper: editing and composing act on the same notes, so they combine. A skill holds a record with a mutable
field (``inside: record``), or record and policy and with them the notes of the conclusion (``record_and_policy``); it was
compiled alone, moved and spliced. Then the field changes, and every edit method of :mod:`notelens.edits` repairs the composed
context. The same edit is made in a context that was prefilled as a whole (*recomputed*).

Hypothesis: for every method, recovery in the composed context equals that in the recomputed one within 0.1.

Falsifier: a method with ``recovery_gap`` above 0.1 although decisions flip in the recomputed context; a method that never flips
says nothing (``flips``).

Each context has its own ends: composed with the old against composed with the new value, and prefilled with either. Recovery
is the share of the way between its own ends; cases whose ends are not right in *both* contexts are excluded and counted.
``auto`` and ``chain`` read a record of which rows read which; it is taken from a full prefill of the prompt, in both
contexts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from experiments.compose_cases import sections
from experiments.edit_arms import Arm, Bench, Row
from experiments.edit_cases import Case, gated_cases, instance_cases
from experiments.edit_harness import EditConfig, Line, Stage, Sums, main
from experiments.organism_cases import organism_cases
from notelens.cache.rows import Rows
from notelens.compose import Composed, compile_skill, compose
from notelens.edits.context import EditableContext
from notelens.models.base import NoteModel
from notelens.prompt import Prompt
from notelens.stats import Estimate, cluster_bootstrap, cluster_rate, tost_paired
from notelens.tasks import TASKS

Inside = Literal["record", "record_and_policy"]
METRICS = (
    "competence",
    "recovery",
    "recovery_composed",
    "recovery_gap",
    "flip_rate",
    "flip_rate_composed",
    "same_decision",
)


class KeystoneConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        inside: what the skill holds.
        arms: edit methods, see :mod:`experiments.edit_arms`.
        composer: how the skill is spliced.
        margin: largest difference of mean recoveries that counts as equivalent.
        kinds: of the organisms' language.
    """

    inside: tuple[Inside, ...] = ("record", "record_and_policy")
    arms: tuple[str, ...] = Field(min_length=1)
    composer: str = "shift"
    margin: float = Field(default=0.1, gt=0.0)
    kinds: tuple[str, ...] | None = None


class ComposedBench(Bench):
    """A bench whose ends are composed: the skill with the old, and the skill with the new value.

    Donors of a transplant are rows of a full prefill, as in the other context.

    Args:
        model: runs everything.
        case: what changes.
        inside: what the skill holds.
        composer: how it is spliced.

    Cost: two compositions and two prefills, one of them with a record of reads.
    """

    def __init__(self, model: NoteModel, case: Case, inside: Inside, composer: str) -> None:
        super().__init__(model, case)
        self.recorded = _composed(self.recorded, case.old, inside, composer)
        self.plain = replace(self.recorded, dependencies=None)
        new = _composed(
            self.fresh, case.new, inside, composer
        )  # `fresh`, which donors come from, stays an exact prefill
        self.before, self.after = self.decide(self.plain), self.decide(new)


def _composed(context: EditableContext, prompt: Prompt, inside: Inside, composer: str) -> EditableContext:
    """The context with rows that were composed instead of prefilled."""
    found = composed_prompt(context.model, prompt, inside, composer)
    start = next(p.start for p in found.pieces if p.spliced)
    exact = len(found) if found.exact else start
    return replace(context, rows=Rows.of(found.cache), hidden=found.read(context.model), exact_rows=exact)


def composed_prompt(model: NoteModel, prompt: Prompt, inside: Inside, composer: str) -> Composed:
    """A prompt, record first, with its record (and policy) as a skill that was compiled alone."""
    s = sections(prompt, "value_first")
    body, rest = (s.first, (*s.second, *s.request)) if inside == "record" else ((*s.first, *s.second), s.request)
    return compose(model, [list(s.head), compile_skill(model, body, name="record"), list(rest)], method=composer)


class Keystone:
    """Every edit, in a composed and in a recomputed context."""

    name = "keystone"

    def stages(self, config: KeystoneConfig) -> list[Stage]:
        """One per content of the skill."""
        return [Stage(inside, {"inside": inside}, {}) for inside in config.inside]

    def measure(self, model: NoteModel, config: KeystoneConfig, stage: Stage, case: Case) -> list[Row]:
        """All arms on one case, in both contexts."""
        inside: Any = stage.params["inside"]
        plain, composed = Bench(model, case), ComposedBench(model, case, inside, config.composer)
        wrong = plain.excluded or (composed.excluded and f"composed: {composed.excluded}")
        facts = {**plain.facts(), "excluded": wrong}
        ends: Row = {
            **facts, "method": "ends", "composed_old_margin": composed.before.margin,
            "composed_new_margin": composed.after.margin,
        }  # fmt: skip
        if wrong is not None:
            return [ends]
        return [ends, *(self._row(facts, plain, composed, Arm.parse(text)) for text in config.arms)]

    def _row(self, facts: Row, plain: Bench, composed: ComposedBench, arm: Arm) -> Row:
        there, here = plain.row(arm), composed.row(arm)
        refused = there["excluded"] or here["excluded"]
        row: Row = {**facts, "method": arm.text, "excluded": refused}
        if refused is not None:
            return row
        for name in ("recovery", "flipped", "right", "margin", "tokens_run"):
            row |= {name: there[name], f"{name}_composed": here[name]}
        return {
            **row,
            "same_decision": there["flipped"] == here["flipped"],
            "gap": here["recovery"] - there["recovery"],
        }

    def aggregate(self, config: KeystoneConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Recovery and flips in both contexts, and how far they are apart."""
        sums = Sums(self.name, config, stage, rows)
        sums.competence("ends")
        lost = [r["excluded"] for r in rows if r["method"] == "ends" and r["excluded"] is not None]
        for method in dict.fromkeys(r["method"] for r in rows if r["method"] != "ends"):
            own = [r for r in rows if r["method"] == method]
            found = [r for r in own if r["excluded"] is None]
            clusters = [r["family"] for r in found]
            out = [*lost, *(r["excluded"] for r in own if r["excluded"] is not None)]
            flips = sum(r["flipped"] for r in found)
            for metric, key in (
                ("recovery", "recovery"),
                ("recovery_composed", "recovery_composed"),
                ("recovery_gap", "gap"),
            ):
                e = cluster_bootstrap([r[key] for r in found], clusters, seed=config.seed)
                sums.add(metric, method, e, excluded=out, unit="recovery", flips=flips)
            apart = cluster_bootstrap([abs(r["gap"]) for r in found], clusters, seed=config.seed)
            sums.add("recovery_distance", method, apart, excluded=out, unit="recovery, absolute, per case", flips=flips)
            for metric, key in (
                ("flip_rate", "flipped"), ("flip_rate_composed", "flipped_composed"), ("p_correct", "right"),
                ("p_correct_composed", "right_composed"), ("same_decision", "same_decision"),
            ):  # fmt: skip
                sums.add(
                    metric, method, cluster_rate([bool(r[key]) for r in found], clusters), excluded=out, flips=flips
                )
            test = tost_paired([r["gap"] for r in found], config.margin, clusters)
            e = Estimate(test.value, test.lo, test.hi, test.n, test.n_clusters, "tost", 1 - 2 * test.alpha, test.flags)
            more = {"params": {"margin": config.margin}, "p": test.p, "equivalent": test.equivalent, "flips": flips}
            sums.add("equivalence", method, e, excluded=out, unit="recovery", **more)
        return sums.lines


def keystone_cases(model: NoteModel, config: KeystoneConfig, stage: Stage) -> list[Case]:
    """Cases with the record in front of the policy."""
    if config.task == "gated":
        return gated_cases(model.tokenizer, config.n, config.seed, split=config.split, forms=config.forms)
    if config.task == "organism":
        return organism_cases(
            model.tokenizer,
            config.n,
            config.seed,
            split=config.split,
            kinds=config.kinds or ("gated",),
            forms=config.forms,
        )
    options = {"kinds": config.kinds} if config.kinds is not None else {}
    task: Any = TASKS.get(config.task)(split=config.split, forms=config.forms, order="value_first", **options)
    return instance_cases(task.instances(model.tokenizer, config.n, config.seed), config.seed)


if __name__ == "__main__":
    main(Keystone(), KeystoneConfig, METRICS, source=keystone_cases)
