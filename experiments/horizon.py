"""Does a cache that is edited turn after turn get worse? ``python -m experiments.horizon CONFIG``.

Hypothesis (arXiv:2606.17107, section on the horizon): one gated field changes at every turn for 28 turns or more, and agreement
with a fresh prefill does not decline; over 100 turns with re-anchoring it does not either.

Falsifier: a slope of agreement outside +-0.002 per turn over 28 turns; over 100 turns with re-anchoring, an interval of the
slope that does not contain 0, or that contains -0.001 per turn.

The arm ``full_suffix`` is exact and is the noise floor: what it disagrees in is rounding. Re-anchoring arms show what a policy
buys and costs (``reanchored``, ``tokens_share``); ``drift`` is what the spot check of the policy saw.
"""

from collections.abc import Sequence

from experiments.agent_cases import AgentConfig, SessionCase, length_stages, session_cases
from experiments.agent_harness import lines_of, measure_session
from experiments.edit_arms import Row
from experiments.edit_harness import Line, Stage, main
from notelens.models.base import NoteModel

METRICS = (
    "oracle_accuracy", "agreement", "correctness", "difference_to_full", "logit_cosine", "slope_agreement",
    "slope_correctness", "slope_cosine", "reanchored", "drift", "tokens_share", "ttft_ratio",
)  # fmt: skip


class Horizon:
    """All arms over long sessions."""

    name = "horizon"

    def stages(self, config: AgentConfig) -> list[Stage]:
        """One per length."""
        return length_stages(config)

    def measure(self, model: NoteModel, config: AgentConfig, stage: Stage, case: SessionCase) -> list[Row]:
        """Baselines and arms on one session."""
        return measure_session(model, case, config.arms)

    def aggregate(self, config: AgentConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """As for the agent, with slopes."""
        return lines_of(self.name, config, stage, rows, slopes=True)


if __name__ == "__main__":
    main(Horizon(), AgentConfig, METRICS, source=session_cases)
