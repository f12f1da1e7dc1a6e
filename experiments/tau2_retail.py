"""The retail policy of tau2-bench, where a user has a checkout: ``python -m experiments.tau2_retail CONFIG``.

Every write of the tasks' reference solutions (cancel, modify, return, exchange) is a decision that the policy ties to the
status of an order of the database. The session holds the whole policy; the status changes at every turn. Competence (oracle
accuracy of full prefill) is printed first. Where a model is not competent, ``agreement`` with full prefill is per step and says
only that the cache decides as the prefill does, right or wrong: those lines have ``given: all`` in their parameters.

Falsifier: on models that pass the gate, correctness not equivalent to full prefill within the margin.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from experiments.agent_cases import FULL, AgentConfig, Baselines, SessionCase
from experiments.agent_harness import Starts, arm_rows, facts, lines_of
from experiments.edit_arms import Row
from experiments.edit_harness import Line, Stage, Sums, main
from notelens.agents import tau2
from notelens.models.base import NoteModel
from notelens.spans import answer_token

METRICS = (
    "oracle_accuracy", "agreement_all", "agreement", "correctness", "difference_to_full", "logit_cosine_all", "ttft_ratio",
    "tokens_share",
)  # fmt: skip


class Tau2Config(AgentConfig):
    """Configuration of this experiment.

    Attributes:
        checkout: folder of tau2-bench, or of its retail domain; relative to where the command runs.
    """

    checkout: Path


def tau2_cases(model: NoteModel, config: Tau2Config, stage: Stage) -> list[SessionCase]:
    """Sessions over the decisions of a checkout.

    Raises:
        CheckoutError: there is no checkout, or it holds too few decisions.
    """
    retail = tau2.read(config.checkout)
    found: list[SessionCase] = []
    for step, statuses in tau2.pairs(retail, config.n, config.seed):
        prompts = tuple(tau2.decision(retail, step, s, model.tokenizer) for s in statuses)
        answers = tuple(p.answer for p in prompts)
        ids = tuple(answer_token(model.tokenizer, prompts[0], word, "chat") for word in answers)
        rng = random.Random(f"{config.seed}/{step}/order")
        order = [0]
        while len(order) < config.turns:
            order.append(1 - order[-1] if config.pattern == "toggle" else rng.randrange(2))
        id = f"{step.task}/{step.tool}/{step.order.lstrip('#')}"
        found.append(SessionCase(id, step.word, prompts, "status", statuses, answers, ids, tuple(order)))
    return found


class Tau2Retail:
    """All arms over the decisions of a checkout."""

    name = "tau2_retail"

    def stages(self, config: Tau2Config) -> list[Stage]:
        """One."""
        return [Stage("policy", {"turns": config.turns}, {})]

    def measure(self, model: NoteModel, config: Tau2Config, stage: Stage, case: SessionCase) -> list[Row]:
        """Baselines and arms on every decision, also where full prefill is wrong."""
        base = Baselines.of(model, case)
        oracle = base.right(case)
        reason = None if all(oracle) else "full prefill wrong"
        rows: list[Row] = [{**facts(case), "method": FULL, "oracle": sum(oracle) / len(oracle), "excluded": reason}]
        starts = Starts.of(model, case)
        for arm in config.arms:
            rows += [{**r, "excluded": r["excluded"] or reason} for r in arm_rows(case, arm, base, starts)]
        return rows

    def aggregate(self, config: Tau2Config, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Agreement over all decisions, and everything else over those that full prefill gets right."""
        lines = lines_of(self.name, config, stage, rows)
        whole = Sums(
            self.name,
            config,
            stage,
            [{**r, "excluded": None if "same" in r or r["method"] == FULL else r["excluded"]} for r in rows],
        )
        for method in dict.fromkeys(r["method"] for r in rows if "same" in r):
            whole.mean("agreement_all", method, lambda r: float(r["same"]), unit="rate", params={"given": "all"})
            whole.mean("logit_cosine_all", method, lambda r: r["cosine"], unit="cosine", params={"given": "all"})
        return [*lines, *whole.lines]


if __name__ == "__main__":
    main(Tau2Retail(), Tau2Config, METRICS, source=tau2_cases)
