"""Facts as skills: documents that are spliced, and references across them. ``python -m experiments.facts_rag CONFIG``.

Three arrangements, hard in this order. ``fact``: the record is a skill, among records of other families as skills of their
own; policy and request are run behind them. ``across``: record *and* policy are skills, compiled apart; only the request is
run, and it has to bring both together. ``chain``: as ``across``, with the policy in front of the record, so that a full
prefill writes the conclusion into rows of the record.

Hypothesis: ``fact`` composes as it is (agreement given full prefill right at least 0.95), because the reader of the notes is
run behind them. ``across`` and ``chain`` lose what full prefill wrote into the second chunk.

Falsifier: ``fact`` below 0.95; or ``across`` and ``chain`` without a loss (then the conclusion is not written at prefill).
"""

from typing import Any, Literal

from experiments.compose_cases import Chunk, Order, Pool, SkillCase, chosen_cell, sections, shuffled, task_of
from experiments.compose_harness import METRICS, ComposeConfig, Decisions
from experiments.edit_harness import Stage, main
from notelens.models.base import NoteModel

Arrangement = Literal["fact", "across", "chain"]


class FactsConfig(ComposeConfig):
    """Configuration of this experiment.

    Attributes:
        documents: records in a row, the one that is asked about among them.
        arrangements: which chunks are skills.
    """

    documents: tuple[int, ...] = (1, 4)
    arrangements: tuple[Arrangement, ...] = ("fact", "across", "chain")


class FactsRag(Decisions):
    """Decisions over spliced documents."""

    name = "facts_rag"

    def stages(self, config: FactsConfig) -> list[Stage]:
        """One per arrangement and number of documents."""
        return [
            Stage(f"{a}_documents{n}", {"arrangement": a, "documents": n}, {"arrangement": a, "documents": n})
            for a in config.arrangements
            for n in config.documents
        ]


def facts_cases(model: NoteModel, config: FactsConfig, stage: Stage) -> list[SkillCase]:
    """Cases of an arrangement."""
    arrangement, n = stage.source["arrangement"], stage.source["documents"]
    order: Order = "rule_first" if arrangement == "chain" else "value_first"
    task: Any = task_of(config.task, **config.options(order=order))
    pool = Pool(task.instances(model.tokenizer, 4 * len(task.families), config.seed + 1), order)
    found: list[SkillCase] = []
    for instance in task.instances(model.tokenizer, config.n, config.seed):
        cell = chosen_cell(instance, config.seed)
        # the control says the opposite: the record of the other field value, so that agreement by chance is seen
        s, flipped = (sections(instance.cells[c], order) for c in (cell, (1 - cell[0], cell[1])))
        key = f"{config.seed}/{instance.id}"
        others = pool.others(instance, key)
        record, control, policy = (
            (s.second, flipped.second, s.first) if order == "rule_first" else (s.first, flipped.first, s.second)
        )
        documents = [
            Chunk(o.second if order == "rule_first" else o.first, f"document{i}")
            for i, o in enumerate(others[i % len(others)] for i in range(n - 1))
        ]
        documents.insert(shuffled(range(n), key)[0], Chunk(record, "record"))
        if arrangement == "fact":
            chunks = [Chunk(s.head), *documents, Chunk((*policy, *s.request))]
        elif arrangement == "across":
            chunks = [Chunk(s.head), *documents, Chunk(policy, "policy"), Chunk(s.request)]
        else:
            chunks = [Chunk(s.head), Chunk(policy, "policy"), *documents, Chunk(s.request)]
        found.append(
            SkillCase(
                instance.id, instance.family, instance.form, tuple(chunks), instance.answer_ids,
                instance.conclusion[cell], {"record": control}, {"cell": list(cell)},
            )
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main(FactsRag(), FactsConfig, METRICS, source=facts_cases)
