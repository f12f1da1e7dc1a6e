"""How many rows at the seam have to be computed again? ``python -m experiments.seam CONFIG``.

Two arrangements. ``policy_first``: the policy is a skill, record and request are run behind it; its reader sees everything,
and nothing is lost by splicing. ``record_first``: the record is run, and the policy behind it is a skill that was compiled
without it; a full prefill writes the conclusion into rows of the policy, a spliced policy has none (a split two-hop chain).

Hypothesis: ``seam@k`` and ``epic@k`` change nothing in the first arrangement, and in the second recover what ``shift`` loses
only once k reaches the rows that hold the conclusion, which stand at the *end* of the policy: recomputing the first rows is
the wrong place.

Falsifier: in ``record_first``, ``pgr`` of ``seam@k`` above 0.7 with k a quarter of the policy or less.

The share of the gap between the text alone and full prefill (``pgr``) is reported for every k, with the recompute share.
"""

from typing import Any, Literal

from pydantic import Field

from experiments.compose_cases import Chunk, Pool, SkillCase, chosen_cell, sections, task_of
from experiments.compose_harness import METRICS, ComposeConfig, Decisions
from experiments.edit_harness import Stage, main
from notelens.models.base import NoteModel

Arrangement = Literal["policy_first", "record_first"]


class SeamConfig(ComposeConfig):
    """Configuration of this experiment.

    Attributes:
        ks: rows per chunk that are computed again.
        arrangements: whether the policy stands before or behind the record.
    """

    methods: tuple[str, ...] = ("shift",)
    ks: tuple[int, ...] = Field(min_length=1)
    arrangements: tuple[Arrangement, ...] = ("policy_first", "record_first")


class SeamSweep(Decisions):
    """``seam@k`` and ``epic@k`` over k."""

    name = "seam"

    def stages(self, config: SeamConfig) -> list[Stage]:
        """One per arrangement."""
        return [Stage(a, {"arrangement": a}, {"arrangement": a}) for a in config.arrangements]

    def methods(self, config: SeamConfig) -> list[str]:
        """Those of the configuration, and both ways of refreshing k rows."""
        return [*config.methods, *(f"{name}@{k}" for k in config.ks for name in ("seam", "epic"))]


def seam_cases(model: NoteModel, config: SeamConfig, stage: Stage) -> list[SkillCase]:
    """Cases of an arrangement."""
    order = "rule_first" if stage.source["arrangement"] == "policy_first" else "value_first"
    task: Any = task_of(config.task, **config.options(order=order))
    pool = Pool(task.instances(model.tokenizer, 4 * len(task.families), config.seed + 1), order)
    found: list[SkillCase] = []
    for instance in task.instances(model.tokenizer, config.n, config.seed):
        cell = chosen_cell(instance, config.seed)
        s = sections(instance.cells[cell], order)
        other = pool.like(instance, s, f"{config.seed}/{instance.id}")
        if order == "rule_first":
            chunks = (Chunk(s.head), Chunk(s.first, "policy"), Chunk((*s.second, *s.request)))
            control = other.first
        else:
            chunks = (Chunk((*s.head, *s.first)), Chunk(s.second, "policy"), Chunk(s.request))
            control = other.second
        found.append(
            SkillCase(
                instance.id, instance.family, instance.form, chunks, instance.answer_ids, instance.conclusion[cell],
                {"policy": control}, {"cell": list(cell)},
            )
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main(SeamSweep(), SeamConfig, METRICS, source=seam_cases)
