"""What the composing experiments share: configuration, the rows of a case, the lines of a table.

Running, records that can be continued and the command line are those of :mod:`experiments.edit_harness`. Rigour is here, so
that no experiment can leave it out: agreement is counted overall and where full prefill is right; a cell in which a column is
constant is flagged; logit cosines are centred and stand beside KL divergence and top-1 agreement; equivalence is a TOST with
the margin of the configuration; full prefill in two passes gives the noise floor; and the same prompt with an unrelated skill
in place of the one that decides says what agreement is worth.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

from pydantic import Field, field_validator

from experiments.compose_cases import SkillCase
from experiments.edit_harness import EditConfig, Line, Row, Stage, Sums
from notelens.compose import Skill, compose, composer
from notelens.compose.fidelity import compare
from notelens.errors import ComposeError
from notelens.models.base import NoteModel
from notelens.stats import Estimate, agreement, cluster_bootstrap, gap_recovered, tost_paired

UNRELATED, NO_CONTEXT, FULL = "unrelated", "no_context", "full_prefill"
CONTROLS = (UNRELATED, NO_CONTEXT)
METRICS = (
    "full_correct", "agreement", "agreement_given_full_correct", "p_correct", "pgr", "logit_cosine", "logit_kl", "top1",
    "recompute_share",
)  # fmt: skip


class ComposeConfig(EditConfig):
    """What every composing experiment is told.

    Attributes:
        methods: composers.
        margin: largest share of disagreements that counts as equivalent to full prefill.
        kinds: of the organisms' language.
    """

    methods: tuple[str, ...] = Field(min_length=1)
    margin: float = Field(gt=0.0, lt=1.0)
    kinds: tuple[str, ...] | None = None
    order: Literal["value_first", "rule_first"] = "rule_first"

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        for method in methods:
            try:
                composer(method)
            except (ComposeError, KeyError) as e:
                raise ValueError(str(e)) from e
        return methods

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of the task that this configuration decides."""
        own = {"split": self.split, "forms": self.forms, "order": self.order, "kinds": self.kinds, **more}
        return {k: v for k, v in own.items() if v is not None}


class Decisions:
    """An experiment whose cases are decided by every method and held against full prefill; it adds a name and its stages."""

    name: str

    def methods(self, config: Any) -> Sequence[str]:
        """Composers of a case."""
        return config.methods

    def measure(self, model: NoteModel, config: Any, stage: Stage, case: SkillCase) -> list[Row]:
        """All methods on one case."""
        return measure_case(model, case, self.methods(config))

    def aggregate(self, config: Any, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Agreement and distances by method."""
        sums = Sums(self.name, config, stage, rows)
        agreement_lines(sums, margin=config.margin)
        return sums.lines


def measure_case(model: NoteModel, case: SkillCase, methods: Sequence[Any], **more: Any) -> list[Row]:
    """Rows of one case: one for each method and control.

    Args:
        methods: composers.
        more: further entries of every row.

    Cost: two full prefills, what the methods run, and the controls.
    """
    skills: dict[tuple[int, ...], Skill] = {}
    parts = case.parts(model, skills)
    found = compare(model, parts, case.answer_ids, methods)
    base: Row = {
        "item": case.id, "family": case.family, "form": case.form, "excluded": None, "n_tokens": len(found.full.composed),
        "n_skill": case.n_skill, "right": case.right, "full": found.full.answer,
        "full_margin": None if case.right is None else found.full.margins[case.right],
        "floor_cosine": found.floor.cosine, "floor_kl": found.floor.kl, "floor_top1": found.floor.top1, **case.meta, **more,
    }  # fmt: skip
    rows: list[Row] = []
    for method, decision in found.decisions.items():
        d, cost = decision.distance, decision.composed.cost
        rows.append({
            **base, "method": method, "answer": decision.answer,
            "margin": None if case.right is None else decision.margins[case.right],
            "cosine": d.cosine, "kl": d.kl, "top1": d.top1, "recompute_share": cost.recompute_share,
            "tokens_recomputed": cost.tokens_recomputed, "tokens_compiled": cost.tokens_compiled,
        })  # fmt: skip
    if case.control:
        rows.append(
            {**base, "method": UNRELATED, "answer": _answer(model, case.parts(model, skills, control=True), case)}
        )
    rows.append({**base, "method": NO_CONTEXT, "answer": _answer(model, [list(case.without_skills())], case)})
    return rows


def _answer(model: NoteModel, parts: list[Any], case: SkillCase) -> int:
    hidden = compose(model, parts, method="shift").read(model)
    return int(model.answer_logits(hidden, case.answer_ids).argmax())


def agreement_lines(sums: Sums, *, margin: float, paper: dict[str, float] | None = None) -> None:
    """Lines of every method and control of a stage."""
    methods = list(dict.fromkeys(r["method"] for r in sums.rows))
    for method in methods:
        _method_lines(sums, method, margin, (paper or {}).get(method))
    if methods:
        _noise_lines(sums, methods[0])


def _method_lines(sums: Sums, method: str, margin: float, paper_value: float | None) -> None:
    rows, lost = sums.of(method)
    if not rows:
        sums.rate("agreement", method, "agrees")
        return
    clusters = [r["family"] for r in rows]
    known = all(r["right"] is not None for r in rows)
    right = [r["right"] for r in rows] if known else None
    found = agreement([r["full"] for r in rows], [r["answer"] for r in rows], right, clusters)
    sums.add(
        "agreement", method, found.overall, excluded=lost, paper_value=paper_value, by_chance=found.by_chance,
        empty=found.empty,
    )  # fmt: skip
    if known:
        wrong = ["full prefill wrong"] * (found.overall.n - found.given_right.n)
        sums.add("agreement_given_full_correct", method, found.given_right, excluded=[*lost, *wrong], empty=found.empty)
        sums.add("full_correct", method, found.reference_right, excluded=lost)
        sums.add("p_correct", method, found.method_right, excluded=lost)
    if method in CONTROLS:
        return
    for name, metric in (("cosine", "logit_cosine"), ("kl", "logit_kl"), ("top1", "top1")):
        sums.mean(metric, method, lambda r, name=name: float(r[name]), unit=name)
    sums.mean("recompute_share", method, lambda r: float(r["recompute_share"]), unit="share of spliced tokens")
    test = tost_paired([float(r["answer"] == r["full"]) - 1.0 for r in rows], margin, clusters)
    interval = Estimate(test.value, test.lo, test.hi, test.n, test.n_clusters, "tost", 1 - 2 * test.alpha, test.flags)
    sums.add(
        "equivalence", method, interval, excluded=lost, params={"margin": margin}, p=test.p, equivalent=test.equivalent
    )
    if known:
        floor = {r["item"]: r["answer"] == r["right"] for r in sums.rows if r["method"] == NO_CONTEXT}
        share = gap_recovered(
            [floor[r["item"]] for r in rows], [r["answer"] == r["right"] for r in rows],
            [r["full"] == r["right"] for r in rows], clusters, seed=sums.config.seed,
        )  # fmt: skip
        sums.add("pgr", method, share, excluded=lost, unit="share of the gap between no skill and full prefill")


def _noise_lines(sums: Sums, method: str) -> None:
    """The noise floor: full prefill in two passes against one."""
    rows = [r for r in sums.of(method)[0] if "floor_kl" in r]
    for name in ("floor_cosine", "floor_kl", "floor_top1"):
        e = cluster_bootstrap(
            [float(r[name]) for r in rows], [r["family"] for r in rows], seed=cast(int, sums.config.seed)
        )
        sums.add(f"noise_{name}", FULL, e, unit=name)


__all__ = [
    "CONTROLS", "FULL", "METRICS", "NO_CONTEXT", "UNRELATED", "ComposeConfig", "Decisions", "agreement_lines", "measure_case",
]  # fmt: skip
