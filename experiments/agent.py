"""An agent that edits its cache against agents that prefill at every turn: ``python -m experiments.agent CONFIG``.

Hypothesis (arXiv:2606.17107, section on the unified agent): a live loop that composes a long policy once, applies changes of
the world as edits and prefills only what is new decides as an agent that prefills the corrected prompt at every turn, at a
fraction of the time to first token.

Falsifier: agreement with the corrected prompt below 0.97, correctness not equivalent to it within 0.02, or cumulative time to
first token less than 5 times better on a policy of 2,000 tokens over 12 turns.

Both baselines are there: the corrected prompt (``full_prefill``), and a prefill of the prompt with the same appended errata
(``full_prefill_errata``), so that what an erratum costs in quality is told apart from what the cache costs.
"""

from collections.abc import Sequence

from experiments.agent_cases import AgentConfig, SessionCase, length_stages, session_cases
from experiments.agent_harness import lines_of, measure_session
from experiments.edit_arms import Row
from experiments.edit_harness import Line, Stage, main
from notelens.models.base import NoteModel

METRICS = (
    "oracle_accuracy", "agreement", "agreement_errata", "correctness", "difference_to_full", "logit_cosine", "ttft_ratio",
    "ttft_ratio_errata", "tokens_share", "break_even_ms", "mib",
)  # fmt: skip


class Agent:
    """All arms over sessions, at every length."""

    name = "agent"

    def stages(self, config: AgentConfig) -> list[Stage]:
        """One per length."""
        return length_stages(config)

    def measure(self, model: NoteModel, config: AgentConfig, stage: Stage, case: SessionCase) -> list[Row]:
        """Baselines and arms on one session."""
        return measure_session(model, case, config.arms)

    def aggregate(self, config: AgentConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Agreement, correctness, cost."""
        return lines_of(self.name, config, stage, rows)


if __name__ == "__main__":
    main(Agent(), AgentConfig, METRICS, source=session_cases)
