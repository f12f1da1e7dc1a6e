"""Does a repair still reach a carrier far behind the edit? ``python -m experiments.distance CONFIG``.

Hypothesis (arXiv:2609.17983): rows right behind an edit repair a decision only while the rule that reads the field stands
there. The rule stands 0, 50, 250 or 1,000 tokens behind the field here, with filler between; the planner, which follows reads
recorded at prefill, does not depend on the distance.

Falsifier: ``edit_local@32`` above 0.2, or ``auto`` below 0.9, with the rule 250 or 1,000 tokens behind the edit; or random
contiguous rows as good as ``auto``.
"""

from collections.abc import Sequence

from experiments.edit_arms import Arm, Row
from experiments.edit_cases import Case
from experiments.edit_harness import EditConfig, Line, Stage, Sums, arm_lines, main, measure_arms
from notelens.models.base import NoteModel

METRICS = ("competence", "distance", "p_correct", "p_correct_transplant", "tokens_run", "suffix_share", "cost_ms")


class DistanceConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        distances: tokens between field and rule, to the nearest line.
        arms: see :mod:`experiments.edit_arms`.
    """

    distances: tuple[int, ...]
    arms: tuple[str, ...]


class Distance:
    """All arms at every distance."""

    name = "distance"

    def stages(self, config: DistanceConfig) -> list[Stage]:
        """One per distance."""
        return [Stage(f"distance{d}", {"distance": d}, {"distance": d}) for d in config.distances]

    def measure(self, model: NoteModel, config: DistanceConfig, stage: Stage, case: Case) -> list[Row]:
        """All arms on one case."""
        return measure_arms(model, case, [Arm.parse(text) for text in config.arms])

    def aggregate(self, config: DistanceConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Rates and costs by arm, and the distance there really was."""
        sums = Sums(self.name, config, stage, rows)
        sums.competence()
        if sums.of("full_prefill")[0]:
            sums.mean("distance", "full_prefill", lambda r: float(r["distance"]), unit="tokens")
        arm_lines(sums, list(dict.fromkeys(["full_prefill", *(r["method"] for r in rows)])))
        return sums.lines


if __name__ == "__main__":
    main(Distance(), DistanceConfig, METRICS)
