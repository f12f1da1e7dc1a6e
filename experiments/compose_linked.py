"""A chain split over two chunks: can a fitted link stand in for recomputing? ``python -m experiments.compose_linked CONFIG``.

The record (with the field) stands in front, the policy behind it is a skill that was compiled without it, the request follows.
A full prefill writes the conclusion into rows of the policy; a spliced policy has none.

Hypothesis: a link (``linked``) closes at least 0.7 of the gap between no record at all and full prefill, with ``k`` recomputed
rows, where ``shift`` closes at most 0.2 and seams with as many rows little more.

Falsifier: a share below 0.7, or one that ``seam@k`` reaches too.

A case is a policy; its calibration and evaluation contexts share no filler line set. Both field values occur in both, since a
link can only learn changes that it has seen. Families and words are those held out from training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from experiments.compose_cases import task_of
from experiments.compose_harness import NO_CONTEXT, ComposeConfig, agreement_lines
from experiments.edit_harness import Line, Row, Stage, Sums, main
from notelens.compose import Calibration, Composer, Linked, compile_skill, fit_link
from notelens.compose.fidelity import compare
from notelens.errors import TaskError
from notelens.models.base import NoteModel
from notelens.tasks.base import Instance

METRICS = (
    "full_correct",
    "p_correct",
    "pgr",
    "agreement",
    "agreement_given_full_correct",
    "logit_kl",
    "tokens_recomputed",
)

POOL = 3
"""Draws looked at per context that is needed: one whose text in front was there before is left out."""


class LinkedConfig(ComposeConfig):
    """Configuration of this experiment; ``n`` counts policies.

    Attributes:
        calibration, evaluation: contexts per policy.
        k, rank: of the link.
    """

    calibration: int = Field(ge=4)
    evaluation: int = Field(ge=1)
    k: int = Field(ge=1)
    rank: int = Field(ge=1)


@dataclass(frozen=True)
class Context:
    """One prompt of a policy, cut at its rule."""

    before: tuple[int, ...]
    policy: tuple[int, ...]
    after: tuple[int, ...]
    answers: tuple[int, int]
    right: int


@dataclass(frozen=True)
class Policy:
    """A case: contexts of one policy, the last ``n_held_out`` of which are evaluated."""

    id: str
    family: str
    form: str
    contexts: tuple[Context, ...]
    n_held_out: int


class LinkedChain:
    """A fitted link against composers with as many rows."""

    name = "compose_linked"

    def stages(self, config: LinkedConfig) -> list[Stage]:
        """One."""
        return [Stage("chain", {"k": config.k, "rank": config.rank}, {})]

    def measure(self, model: NoteModel, config: LinkedConfig, stage: Stage, case: Policy) -> list[Row]:
        """Fit the link of a policy, then one row per held-out context and method."""
        fit, held_out = case.contexts[: -case.n_held_out], case.contexts[-case.n_held_out :]
        policy = fit[0].policy
        skill = compile_skill(model, policy, name="policy")
        link = fit_link(model, skill, [Calibration([c.before], c.after) for c in fit], k=config.k, rank=config.rank)
        methods: list[str | Composer] = [*config.methods, Linked([link])]
        rows: list[Row] = []
        for index, context in enumerate(held_out):
            result = compare(model, [context.before, skill, context.after], context.answers, methods)
            hidden = model.prefill((*policy, *context.after)).hidden
            base: Row = {
                "item": f"{case.id}/{index}", "family": case.family, "form": case.form, "excluded": None,
                "right": context.right, "full": result.full.answer, "n_policy": len(policy), "reader_kl": link.reader_kl,
                "floor_cosine": result.floor.cosine, "floor_kl": result.floor.kl, "floor_top1": result.floor.top1,
            }  # fmt: skip
            without = int(model.answer_logits(hidden, context.answers).argmax())
            for method, decision in result.decisions.items():
                d, cost = decision.distance, decision.composed.cost
                rows.append({
                    **base, "method": method, "answer": decision.answer, "margin": decision.margins[context.right],
                    "kl": d.kl, "cosine": d.cosine, "top1": d.top1, "recompute_share": cost.recompute_share,
                    "tokens_recomputed": cost.tokens_recomputed,
                })  # fmt: skip
            rows.append({**base, "method": NO_CONTEXT, "answer": without})
        return rows

    def aggregate(self, config: LinkedConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Share of the gap closed and agreement, by method."""
        sums = Sums(self.name, config, stage, rows)
        agreement_lines(sums, margin=config.margin)
        for method in dict.fromkeys(r["method"] for r in rows if "tokens_recomputed" in r):
            sums.mean("tokens_recomputed", method, lambda r: float(r["tokens_recomputed"]), unit="tokens")
        return sums.lines


def policies(model: NoteModel, config: LinkedConfig, stage: Stage) -> list[Policy]:
    """Policies, each behind both field values in turn with the filler lines of other draws.

    Raises:
        TaskError: too few contexts keep the policy's tokens.
    """
    task: Any = task_of(config.task, **config.options(order="value_first"))
    gated, tokenizer = config.task == "gated", model.tokenizer
    each = config.calibration + config.evaluation

    def drawn(n: int, seed: int) -> list[Any]:
        return task.draws(tokenizer, n, seed) if gated else task.scenes(n, seed)

    def draw_of(item: Any) -> Any:
        return item if gated else item.draw

    pool = drawn(len(task.families) * len(config.forms) * each * POOL, config.seed + 1)
    found: list[Policy] = []
    for item in drawn(config.n, config.seed):
        draw = draw_of(item)
        contexts: list[Context] = []
        for other in (draw_of(p) for p in pool):
            if other.family.name != draw.family.name or len(contexts) == each:
                continue
            changed = replace(draw, filler=other.filler, between=other.between)
            instance = task.build(tokenizer, changed if gated else replace(item, draw=changed))
            context = cut(instance, len(contexts) % 2)
            fresh = context.before not in (
                c.before for c in contexts
            )  # what stands behind does not reach the skill's rows
            if fresh and (not contexts or context.policy == contexts[0].policy):
                contexts.append(context)
        if len(contexts) < each:
            raise TaskError(f"policy {item.id}: {len(contexts)} different contexts of {each} keep its tokens")
        found.append(Policy(item.id, draw.family.name, draw.form, tuple(contexts), config.evaluation))
    return found


def cut(instance: Instance, value: int) -> Context:
    """A context of an instance's first rule behind a field value."""
    prompt = instance.cells[value, 0]
    rule, ids = prompt.positions("rule"), prompt.token_ids
    start, stop = rule[0], rule[-1] + 1
    return Context(ids[:start], ids[start:stop], ids[stop:], instance.answer_ids, instance.conclusion[value, 0])


if __name__ == "__main__":
    main(LinkedChain(), LinkedConfig, METRICS, source=policies)
