"""What does a repair of a cached prompt cost, and when is it right? ``python -m experiments.editing_frontier CONFIG``.

Hypothesis (arXiv:2606.17107, section "editable", table "frontier"): refreshing the changed field alone leaves the decision
where it was, because the conclusion stands in notes behind it; an erratum or a repair of the right rows is right at a
fraction of a prefill. arXiv:2609.17983 adds that *copying* the right rows from a fresh prefill is not *running* them again in
the stale cache.

Falsifier: ``stale`` or ``in_place`` right in more than 0.05; ``full_suffix`` below full prefill; the planner ``auto`` no better
than as many random contiguous rows, or than its own choice for another edit (``wrong_edit``).

Only cases whose prompt full prefill answers right with the old and with the new value count
(:func:`notelens.readout.exclusion`); competence stands first in the table. ``p_correct``: the next token is the new answer.
``flip_rate``: the margin has changed sign. Tokens are those really run; planning is charged to every arm in full, and left out
in ``*_reused`` and ``tokens_run``, as when a plan serves further values. Time is a ratio to a full prefill of the same case in
the same run. ``erratum`` is exact for its own tokens, so its ``p_correct`` is also the model's competence at ordinary prompts
with an update line. Constants of the planner were chosen on families of the training split (``role: tuning``), never on those
evaluated here.
"""

from collections.abc import Sequence
from typing import Any

from experiments.edit_arms import Arm, Row
from experiments.edit_cases import Case, Change
from experiments.edit_harness import EditConfig, Line, Stage, Sums, arm_lines, main, measure_arms
from notelens.models.base import NoteModel
from notelens.stats import holm, mcnemar_exact

PAPER = {
    "full_prefill": 1.0, "stale": 0.0, "in_place": 0.0, "selective@15% ranking=deviation": 0.125, "hoist": 1.0, "erratum": 1.0,
    "field_erratum": 1.0,
}  # fmt: skip
"""Table "frontier" of the paper: Qwen3-8B, n = 8."""
METRICS = (
    "competence", "p_correct", "p_correct_transplant", "flip_rate", "tokens_run", "recompute_share", "suffix_share", "cost_ms",
    "cost_ms_reused",
)  # fmt: skip
PLANNER = "auto"


class FrontierConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        lengths: tokens of the prompts.
        between: share of the filler that stands between field and rule; half of it when not given.
        change: token length of the new value against the old one.
        arms: see :mod:`experiments.edit_arms`.
    """

    lengths: tuple[int | None, ...]
    between: float | None = None
    change: Change = "same"
    arms: tuple[str, ...]


class Frontier:
    """All arms at every length."""

    name = "editing_frontier"

    def stages(self, config: FrontierConfig) -> list[Stage]:
        """One per length."""
        more = {"change": config.change, "between": config.between} if config.task in ("gated", "organism") else {}
        params: dict[str, Any] = {"change": config.change} if config.change != "same" else {}
        params |= {"between": config.between} if config.between is not None else {}
        return [Stage(f"length{n}", {"length": n, **params}, {"length": n, **more}) for n in config.lengths]

    def measure(self, model: NoteModel, config: FrontierConfig, stage: Stage, case: Case) -> list[Row]:
        """All arms on one case."""
        return measure_arms(model, case, [Arm.parse(text) for text in config.arms])

    def aggregate(self, config: FrontierConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Rates and costs by method, and the planner against every other arm on the same cases."""
        sums = Sums(self.name, config, stage, rows)
        sums.competence()
        methods = list(dict.fromkeys(["full_prefill", *(r["method"] for r in rows)]))
        arm_lines(sums, methods, PAPER)
        compare(sums, [m for m in methods if m not in (PLANNER, "full_prefill")])
        return sums.lines


def compare(sums: Sums, methods: Sequence[str]) -> None:
    """Exact McNemar tests of the planner against each method on the cases that both answered, Holm over methods."""
    own = {r["item"]: r["right"] for r in sums.of(PLANNER)[0]}
    found: list[tuple[str, int, int, int, float]] = []
    for method in methods:
        other = {r["item"]: r["right"] for r in sums.of(method)[0]}
        both = sorted(own.keys() & other.keys())
        if not both:
            continue
        b, c = (sum(x[i] and not y[i] for i in both) for x, y in ((own, other), (other, own)))
        found.append((method, len(both), b, c, mcnemar_exact(b, c)))
    adjusted = holm([p for *_, p in found]) if found else []
    for (method, n, b, c, p), p_holm in zip(found, adjusted, strict=True):
        sums.lines.append({
            **{k: v for k, v in sums.lines[0].items() if k not in ("reasons",)}, "metric": "planner_minus_method",
            "method": method, "value": (b - c) / n, "lo": None, "hi": None, "n": n, "n_excluded": 0, "flags": [],
            "interval": "mcnemar", "p": p, "p_holm": p_holm, "only_planner": b, "only_method": c, "paper_value": None,
        })  # fmt: skip


if __name__ == "__main__":
    main(Frontier(), FrontierConfig, METRICS)
