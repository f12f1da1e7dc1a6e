"""Many policies at once, and policies that contradict each other: ``python -m experiments.multi_skill CONFIG``.

Each policy is a skill of its own, compiled alone; n of them stand in a row, one of which is about the record's field. The
others are distractors: policies of other families. ``conflict`` adds, behind it, a second policy for the same field that says
the opposite, which was compiled alone too. Full prefill reads the second policy knowing the first; a spliced one does not.

Hypothesis: with distractors, composed decisions agree with full prefill where that is right in at least 0.95, at every n. For
conflicting policies nothing is promised, as no answer is right: agreement with full prefill is reported beside that of an
unrelated skill, and a column that is constant is flagged.

Falsifier: agreement given full prefill right that falls below 0.95 with n, or is no higher than ``unrelated``.
"""

import random
from typing import Any

from pydantic import Field

from experiments.compose_cases import Chunk, Pool, SkillCase, chosen_cell, sections, task_of
from experiments.compose_harness import METRICS, ComposeConfig, Decisions
from experiments.edit_harness import Stage, main
from notelens.errors import TaskError
from notelens.models.base import NoteModel


class MultiConfig(ComposeConfig):
    """Configuration of this experiment.

    Attributes:
        counts: skills in a row.
        conflicts: whether a second policy for the same field contradicts the first.
    """

    counts: tuple[int, ...] = Field(min_length=1)
    conflicts: tuple[bool, ...] = (False, True)


class MultiSkill(Decisions):
    """Decisions under n skills, distractors and conflicts."""

    name = "multi_skill"

    def stages(self, config: MultiConfig) -> list[Stage]:
        """One per number of skills, without and with a conflict."""
        return [
            Stage(f"skills{n}{'_conflict' * c}", {"skills": n, "conflict": c}, {"skills": n, "conflict": c})
            for c in config.conflicts
            for n in config.counts
            if n > 1 or not c
        ]


def multi_cases(model: NoteModel, config: MultiConfig, stage: Stage) -> list[SkillCase]:
    """Cases with so many skills.

    Raises:
        TaskError: no form has a second rule to conflict with the first.
    """
    task: Any = task_of(config.task, **config.options(order="rule_first"))
    n, conflict = stage.source["skills"], stage.source["conflict"]
    pool = Pool(task.instances(model.tokenizer, 4 * len(task.families), config.seed + 1), "rule_first")
    found: list[SkillCase] = []
    for instance in task.instances(model.tokenizer, config.n, config.seed):
        if conflict and (0, 1) not in instance.cells:
            continue
        cell = chosen_cell(instance, config.seed)
        key = f"{config.seed}/{instance.id}"
        s = sections(instance.cells[cell], "rule_first")
        own = [Chunk(s.first, "policy")]
        if conflict:
            own.append(Chunk(sections(instance.cells[cell[0], 1 - cell[1]], "rule_first").first, "opposite"))
        others = pool.others(instance, key)
        row: list[Chunk] = [Chunk(others[i % len(others)].first, f"other{i}") for i in range(n - len(own))]
        places = sorted(random.Random(key).choices(range(len(row) + 1), k=len(own)))
        for chunk, at in zip(reversed(own), reversed(places), strict=True):
            row.insert(at, chunk)
        found.append(
            SkillCase(
                instance.id, instance.family, instance.form,
                (Chunk(s.head), *row, Chunk((*s.second, *s.request))), instance.answer_ids,
                None if conflict else instance.conclusion[cell], {"policy": pool.like(instance, s, key).first},
                {"cell": list(cell), "places": places},
            )
        )  # fmt: skip
    if not found:
        raise TaskError(f"none of the forms {list(config.forms)} has a second rule to conflict with the first")
    return found


if __name__ == "__main__":
    main(MultiSkill(), MultiConfig, METRICS, source=multi_cases)
