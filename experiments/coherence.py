"""Is a repaired cache coherent: over histories, several fields, every question? ``python -m experiments.coherence CONFIG``.

Hypothesis: a repair that follows the chain from a field to its conclusions leaves a cache that answers *all* questions as a
fresh prefill would: those about the field in either phrasing, those about another field, after one edit, after a change and
its revocation, after edits of two fields, and with a line that recalls the old value.

Falsifier: complete-case success (all questions of a case right) of ``auto`` below 0.9 of full prefill's own; or ``erratum`` and
``in_place`` no worse than ``auto`` on it (then asking everything shows nothing that one question does not).

Two gated decisions stand one behind the other in one prompt: two records, two rules. In the organisms' language, which knows
one rule a prompt, the record holds two fields, and their values are asked for too (``lookup``, ``other``). The cache is
repaired once, with the first question at its end; the other questions are then asked of the *same* repaired rows, by running
their few tokens in place of the first question's (arXiv:2606.17107 asks one question). Histories: ``once`` (first field),
``there_and_back`` (changed, then revoked), ``both`` (two fields), ``poisoned`` (once, and a line of the prompt says what the
value was before). No case is left out: full prefill's own rate stands beside, and rates over the cases that it answers
completely.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from experiments.edit_arms import Arm, Row
from experiments.edit_harness import EditConfig, Line, Stage, Sums, main
from experiments.organism_cases import consequences
from notelens.cache.rows import Rows
from notelens.edits.context import EditableContext
from notelens.edits.lines import SEAM
from notelens.edits.resolve import resolve
from notelens.edits.text import common_prefix
from notelens.errors import EditError, SeamError
from notelens.intervene.run_rows import run_rows
from notelens.models.base import NoteModel
from notelens.stats import cluster_rate
from notelens.tasks.gated import GatedDecisions
from notelens.tasks.render import DIRECT_CUE, SYSTEM, TWO_RULES, Draw, pieces

HISTORIES = ("once", "there_and_back", "both", "poisoned")
METRICS = ("complete_case_rate", "complete_given_full", "p_field", "p_rephrased", "p_lookup", "p_other", "tokens_run")
QUESTIONS = {"field": (0, 0), "rephrased": (0, 1), "other": (1, 0)}
"""Name to (which decision, which phrasing of its request)."""


class Asked(Protocol):
    """A prompt with two fields and several questions."""

    id: str
    family: str
    form: str

    @property
    def questions(self) -> tuple[str, ...]:
        """Names; the repair is made with the first one at the end of the prompt."""
        ...

    @property
    def names(self) -> tuple[str, str]:
        """What edits call the fields."""
        ...

    def value(self, which: int, changed: bool) -> str:
        """Value of a field before and after it changed."""
        ...

    def expected(self, question: str, changed: Sequence[bool]) -> str:
        """The right answer when these fields have changed."""
        ...

    def context(self, model: NoteModel, question: str, *, record: bool) -> EditableContext:
        """The prompt with both fields at their first value and one question."""
        ...


class CoherenceConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        histories: out of :data:`HISTORIES`.
        arms: see :mod:`experiments.edit_arms`; without ``@auto``.
    """

    histories: tuple[str, ...] = HISTORIES
    arms: tuple[str, ...]


@dataclass(frozen=True)
class Double:
    """Two decisions in one prompt.

    Attributes:
        id, family: of the case; clusters are first families.
        draws: the two decisions.
        rules, first: rule version and first value of each.
        poisoned: a line recalls the first value of the first field.
    """

    id: str
    family: str
    draws: tuple[Draw, Draw]
    rules: tuple[int, int]
    first: tuple[int, int]
    poisoned: bool

    questions = tuple(QUESTIONS)

    @property
    def form(self) -> str:
        """Rule form of the first decision."""
        return self.draws[0].form

    def expected(self, question: str, changed: Sequence[bool]) -> str:
        """The right answer when these fields have changed."""
        which = QUESTIONS[question][0]
        return self.answer(which, changed[which])

    @property
    def names(self) -> tuple[str, str]:
        """What edits call the fields."""
        a, b = (d.family.label.replace(" ", "_") for d in self.draws)
        return a, b

    def value(self, which: int, changed: bool) -> str:
        """Value of a field before and after it changed."""
        return self.draws[which].values[self.first[which] ^ changed]

    def answer(self, which: int, changed: bool) -> str:
        """What the rule says then."""
        return self.draws[which].action(self.value(which, changed), self.rules[which])

    def context(self, model: NoteModel, question: str, *, record: bool) -> EditableContext:
        """The prompt with both fields at their first value and one question. Cost: one prefill."""
        text = ""
        for which in (0, 1):
            draw, name = self.draws[which], self.names[which]
            parts = pieces(draw, (self.first[which], self.rules[which]), "direct", ())[:-1]
            text += "".join("{{" + name + "}}" if p.span == "field" else p.text for p in parts)
            if which == 0 and self.poisoned:
                text += f"Earlier note: the {draw.family.label} was {self.value(0, False)}.\n"
        about, phrasing = QUESTIONS[question]
        requests = self.draws[about].family.requests
        fields = {self.names[i]: self.value(i, False) for i in (0, 1)}
        request = f"{requests[phrasing % len(requests)]} {DIRECT_CUE}"
        return EditableContext.from_text(model, text, fields, request=request, system=SYSTEM, record=record)


def double_cases(model: NoteModel, config: EditConfig, stage: Stage) -> list[Any]:
    """Prompts with two fields; of gated decisions, pairs of different families. Deterministic in the seed."""
    if config.task == "organism":
        return consequences(
            model.tokenizer, config.n, config.seed, split=config.split, forms=config.forms, order=config.order,
            poisoned=stage.name == "poisoned",
        )  # fmt: skip
    task = GatedDecisions(split=config.split, forms=config.forms, order=config.order)
    draws = task.draws(model.tokenizer, 2 * config.n, config.seed)
    found: list[Double] = []
    for i in range(config.n):
        one = draws[i]
        others = [
            d for d in draws[config.n :] if d.family.label != one.family.label and not set(d.actions) & set(one.actions)
        ]
        rng = random.Random(f"{config.seed}/{one.id}/double")
        two = rng.choice(others)
        rules = tuple(rng.randrange(2) if d.form in TWO_RULES else 0 for d in (one, two))
        first = (rng.randrange(2), rng.randrange(2))
        pair = (one, replace(two, filler=two.filler[:2], between=1))
        found.append(
            Double(f"{one.id}+{two.id}", one.family.name, pair, (rules[0], rules[1]), first, stage.name == "poisoned")
        )
    return found


def steps(history: str, case: Double) -> list[tuple[int, bool]]:
    """Edits of a history: (which field, changed or back)."""
    return {"there_and_back": [(0, True), (0, False)], "both": [(0, True), (1, True)]}.get(history, [(0, True)])


def ask(context: EditableContext, other: EditableContext) -> tuple[int, int]:
    """The next token where the repaired rows are asked the question at the end of ``other``. Cost: the question's tokens.

    Returns:
        Next token and tokens run.

    Raises:
        SeamError: the question changes tokens well in front of it.
    """
    text = replace(
        context.text,
        nodes=(*context.text.nodes[: context.text.tail], *other.text.nodes[other.text.tail :]),
    )
    tokens = text.tokenise(context.model.tokenizer)
    cut = min(common_prefix(tokens.ids, context.tokens.ids), len(tokens) - 1)
    if cut < context.tokens.tail - SEAM:
        raise SeamError(f"another question changes the prompt from row {cut} on; end the text with a new line")
    kept = Rows(tuple(context.rows.between(0, cut)), context.rows.history)
    done = run_rows(context.model, kept, tokens.ids[cut:], range(cut, len(tokens)))
    return int(context.model.next_logits(done.hidden).argmax()), done.n_tokens


class Coherence:
    """Every arm over every history, asked everything."""

    name = "coherence"

    def stages(self, config: CoherenceConfig) -> list[Stage]:
        """One per history."""
        return [Stage(h, {"history": h}, {}) for h in config.histories]

    def measure(self, model: NoteModel, config: CoherenceConfig, stage: Stage, case: Any) -> list[Row]:
        """All arms on one case (an :class:`Asked`)."""
        rows: list[Row] = []
        begun = {record: case.context(model, case.questions[0], record=record) for record in (False, True)}
        asked = {name: case.context(model, name, record=False) for name in case.questions}
        changed = [False, False]
        for which, state in steps(stage.name, case):
            changed[which] = state
        for text in dict.fromkeys(("full_prefill", *config.arms)):
            arm = Arm.parse(text)
            row: Row = {
                "item": case.id, "family": case.family, "form": case.form, "method": text, "excluded": None,
                "n_tokens": len(begun[False]),
            }  # fmt: skip
            context = begun[arm.method == "auto" or arm.options.get("ranking") == "chain"]
            spec = f"{arm.method}@{arm.k}" if arm.k else arm.method
            run = 0
            try:
                for which, state in steps(stage.name, case):
                    made = context.edit(case.names[which], case.value(which, state), resolve(spec, **arm.options))
                    context, run = made.context, run + made.report.total_tokens
                right: dict[str, bool] = {}
                for name in case.questions:
                    top, _ = ask(context, asked[name])
                    right[name] = top == context.answer_id(case.expected(name, changed))
            except EditError as e:
                rows.append({**row, "excluded": f"refused ({type(e).__name__})", "message": str(e)})
                continue
            rows.append(
                {**row, "right": right, "complete": all(right.values()), "tokens_run": run, "exact": context.exact}
            )
        return rows

    def aggregate(self, config: CoherenceConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Complete-case and per-question success by arm."""
        sums = Sums(self.name, config, stage, rows)
        whole = {r["item"] for r in rows if r["method"] == "full_prefill" and r.get("complete")}
        for method in dict.fromkeys(r["method"] for r in rows):
            own = [r for r in rows if r["method"] == method]
            kept = [r for r in own if r["excluded"] is None]
            lost = [r["excluded"] for r in own if r["excluded"] is not None]
            families = [r["family"] for r in kept]
            sums.add("complete_case_rate", method, cluster_rate([r["complete"] for r in kept], families), excluded=lost)
            given = [r for r in kept if r["item"] in whole]
            rate = cluster_rate([r["complete"] for r in given], [r["family"] for r in given])
            sums.add(
                "complete_given_full", method, rate, excluded=["full prefill incomplete"] * (len(kept) - len(given))
            )
            for name in kept[0]["right"] if kept else ():
                sums.add(f"p_{name}", method, cluster_rate([r["right"][name] for r in kept], families), excluded=lost)
            if kept:
                sums.mean("tokens_run", method, lambda r: float(r["tokens_run"]), unit="tokens")
        return sums.lines


if __name__ == "__main__":
    main(Coherence(), CoherenceConfig, METRICS, source=double_cases)
