"""Does a policy that was compiled alone decide as a prefilled one? ``python -m experiments.compose_fidelity CONFIG``.

Hypothesis: where full prefill decides right, a policy that was compiled in isolation and repositioned (``shift``) leads to the
same decision (at least 0.95), with state and request behind it.

Falsifier: agreement given that full prefill is right below 0.95, or no higher than that of an unrelated policy (``unrelated``:
the policy of another instance of the same family is spliced in its place; its decisions are what agreement is worth).

Prompts are decisions with the policy before the field, cut by token: what stands in front, then the policy with what stands
between it and the record (spliced), then record and request (run). ``policy_tokens`` puts the policies of other families around
the one that decides, as distractors, in one skill; with ``padding: filler`` it is text without any rule instead, because a
model that is at chance among other rules says nothing about skills. ``offsets`` puts that many tokens of neutral text in front
of the policy: ``no_shift`` against ``shift`` there says where re-rotation matters. Nothing is trained here; families and words
are those held out from training.
"""

from typing import Any, Literal

from experiments.compose_cases import Chunk, Pool, SkillCase, chosen_cell, filled, neutral_ids, sections, task_of
from experiments.compose_harness import METRICS, ComposeConfig, Decisions
from experiments.edit_harness import Stage, main
from notelens.models.base import NoteModel

POOL = 48
"""Instances that distractors come from."""


class FidelityConfig(ComposeConfig):
    """Configuration of this experiment.

    Attributes:
        offsets: tokens of neutral text in front of the policy.
        policy_tokens: tokens of the skill, reached with ``padding``; ``null`` is the policy alone.
        padding: other families' policies, or the filler of other families' prompts.
    """

    offsets: tuple[int, ...] = (0,)
    policy_tokens: tuple[int | None, ...] = (None,)
    padding: Literal["policies", "filler"] = "policies"


class Fidelity(Decisions):
    """Composed against fully prefilled decisions, by offset and length of the policy."""

    name = "compose_fidelity"

    def stages(self, config: FidelityConfig) -> list[Stage]:
        """One per length of the policy and offset."""
        return [
            Stage(
                f"policy{n}_offset{offset}",
                {"offset": offset, **({} if n is None else {"policy_tokens": n})},
                {"offset": offset, "policy_tokens": n},
            )
            for n in config.policy_tokens
            for offset in config.offsets
        ]


def policy_cases(model: NoteModel, config: FidelityConfig, stage: Stage) -> list[SkillCase]:
    """Cases of a stage."""
    task: Any = task_of(config.task, **config.options(order="rule_first"))
    instances = task.instances(model.tokenizer, config.n, config.seed)
    pool = Pool(task.instances(model.tokenizer, POOL, config.seed + 1), "rule_first")
    found: list[SkillCase] = []
    for instance in instances:
        cell = chosen_cell(instance, config.seed)
        s = sections(instance.cells[cell], "rule_first")
        key = f"{config.seed}/{instance.id}"
        filler = config.padding == "filler"
        others = pool.lines(instance, key) if filler else [o.first for o in pool.others(instance, key)]
        policy, control = (
            filled(own, others, stage.source["policy_tokens"], key)
            for own in (s.first, pool.like(instance, s, key).first)
        )
        n = stage.source["offset"]
        neutral = neutral_ids(model.tokenizer, n) if config.task == "gated" else pool.filler(instance, n, key)
        before = [*s.head, *neutral]
        found.append(
            SkillCase(
                instance.id, instance.family, instance.form,
                (Chunk(tuple(before)), Chunk(policy, "policy"), Chunk((*s.second, *s.request))),
                instance.answer_ids, instance.conclusion[cell], {"policy": control},
                {"cell": list(cell), "offset": stage.source["offset"]},
            )
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main(Fidelity(), FidelityConfig, METRICS, source=policy_cases)
