"""How many rows must be repaired? ``python -m experiments.k_sweep CONFIG``.

Hypothesis (arXiv:2606.17107, section "editable", K sweep): the decision follows once a handful of rows, ranked by their causal
effect, are right. arXiv:2609.17983: that holds for rows *copied* from a fresh prefill; the same rows *run again* in the stale
cache read stale rows in front of them, and many more are needed.

Falsifier: copied and recomputed rows reach 0.95 at the same K, or rows ranked by effect need as many as random ones.

``k_star`` is the smallest K from which on the rate stays at 0.95 or above, for recomputed (``k_star``) and for copied rows
(``k_star_transplant``); undefined where no K reaches it. Ranking costs are those of the frontier; here only rows are counted.
"""

from collections.abc import Sequence

from experiments.edit_arms import Arm, Row
from experiments.edit_cases import Case
from experiments.edit_harness import EditConfig, Line, Stage, Sums, main, measure_arms
from notelens.models.base import NoteModel
from notelens.stats import Estimate

TARGET = 0.95
METRICS = (
    "competence",
    "p_correct",
    "p_correct_transplant",
    "recovery",
    "recovery_transplant",
    "k_star",
    "k_star_transplant",
)


class SweepConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        lengths: tokens of the prompts.
        ks: rows repaired.
        rankings: of :mod:`notelens.edits.ranking`; ``local`` takes the rows right behind the edit.
    """

    lengths: tuple[int | None, ...]
    ks: tuple[int, ...]
    rankings: tuple[str, ...]


def arm_text(ranking: str, k: int) -> str:
    """How an arm is written."""
    return f"edit_local@{k}" if ranking == "local" else f"selective@{k} ranking={ranking}"


class KSweep:
    """Every ranking at every K."""

    name = "k_sweep"

    def stages(self, config: SweepConfig) -> list[Stage]:
        """One per length."""
        return [Stage(f"length{n}", {"length": n}, {"length": n}) for n in config.lengths]

    def measure(self, model: NoteModel, config: SweepConfig, stage: Stage, case: Case) -> list[Row]:
        """All rankings and K on one case."""
        arms = [Arm.parse(arm_text(ranking, k)) for ranking in config.rankings for k in config.ks]
        return measure_arms(model, case, arms)

    def aggregate(self, config: SweepConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Rates by ranking and K, and where they reach the target for good."""
        sums = Sums(self.name, config, stage, rows)
        sums.competence()
        for ranking in config.rankings:
            reached: dict[str, list[float | None]] = {"p_correct": [], "p_correct_transplant": []}
            n = 0
            for k in config.ks:
                text, params = arm_text(ranking, k), {"k": k}
                for metric, key in (("p_correct", "right"), ("p_correct_transplant", "transplant_right")):
                    sums.rate(metric, text, key, params=params, ranking=ranking)
                    reached[metric].append(sums.lines[-1]["value"])
                    n = max(n, sums.lines[-1]["n"])
                if sums.of(text)[0]:
                    sums.mean("recovery", text, lambda r: r["recovery"], unit="recovery", params=params)
                    sums.mean(
                        "recovery_transplant", text, lambda r: r["transplant_recovery"], unit="recovery", params=params
                    )
            for metric, name in (("p_correct", "k_star"), ("p_correct_transplant", "k_star_transplant")):
                k = k_star(config.ks, reached[metric])
                sums.add(name, ranking, Estimate(k, None, None, n, 0, "none"), unit="rows")
        return sums.lines


def k_star(ks: Sequence[int], rates: Sequence[float | None]) -> float | None:
    """Smallest K from which on every rate reaches the target."""
    found: float | None = None
    for k, rate in sorted(zip(ks, rates, strict=True), reverse=True):
        if rate is None or rate < TARGET:
            break
        found = float(k)
    return found


if __name__ == "__main__":
    main(KSweep(), SweepConfig, METRICS)
