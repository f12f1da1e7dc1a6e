"""May a changed field be put into the weights instead of the cache? ``python -m experiments.weight_editing CONFIG``.

Hypothesis (arXiv:2606.17107, section "editable", weight editing): a rank-one edit (ROME) and fine-tuning (LoRA) can make the
model give the new answer, but state that belongs to one request does not belong into weights that all requests share: other
requests that still hold the old value get the wrong answer too (contamination), and the edit costs many prefills.

Falsifier: a weight arm flips the target and leaves held-out requests with the old value and unrelated decisions as they were;
or a KV arm does not.

Two stages. ``validation``: before ROME is used it has to do what it was made for, an *associative* edit (``facts``: who belongs
to what; in the organisms' language: which value is looked up), judged by efficacy and by *locality* (neighbours keep their
answers). ``request``: the prompt still says the old value; a weight arm edits the weights until the model answers as for the
new one, a KV arm repairs the cached prompt. Then the same model is asked ``held_out`` requests (same field and old value, other
wording and filler) and ``unrelated`` decisions (other families); only those that it answered right before count. For KV arms
these requests are run again behind the edit, too: measured, not assumed. Time is a ratio to a full prefill of the same
prompt in the same run; the covariance, made once per model, is stated apart (``setup_ms``).
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.edit_arms import Arm, Bench, Row
from experiments.edit_cases import Case, draw_case
from experiments.edit_harness import EditConfig, Line, Stage, Sums, cases_of, main
from experiments.organism_cases import of_length, organism_cases, scene_case
from experiments.weight_edits import Keys, Target, covariance, lora, rome
from notelens.errors import ConfigError, EditError, UnsupportedModelError
from notelens.models.base import NoteModel
from notelens.spans import encode
from notelens.stats import cluster_bootstrap
from notelens.tasks.gated import GatedDecisions
from notelens.tasks.organism import OrganismLanguage

WEIGHT_ARMS = ("rome", "lora")
METRICS = (
    "efficacy", "locality", "competence", "p_correct", "flip_rate", "cost_ms", "contamination", "collateral",
    "largest_logit_change", "restored",
)  # fmt: skip
FACTS = (
    ("The capital of France is", " France", " Paris"), ("The capital of Italy is", " Italy", " Rome"),
    ("The capital of Germany is", " Germany", " Berlin"), ("The capital of Japan is", " Japan", " Tokyo"),
    ("The capital of Spain is", " Spain", " Madrid"), ("The capital of Russia is", " Russia", " Moscow"),
    ("The capital of China is", " China", " Beijing"), ("The capital of England is", " England", " London"),
    ("The capital of Egypt is", " Egypt", " Cairo"), ("The capital of Greece is", " Greece", " Athens"),
)  # fmt: skip
"""Prompt, subject, answer."""


class WeightConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        length: tokens of the prompts.
        arms: ``rome``, ``lora``, and methods of :mod:`experiments.edit_arms`.
        layer: whose ``down_proj`` ROME edits.
        steps: of optimisation, at most.
        asked: held-out and unrelated requests per case.
        covariance_texts: ordinary prompts of the task that the covariance comes from.
        facts: ``capitals`` or ``lookup``.
    """

    length: int | None = None
    arms: tuple[str, ...]
    layer: int
    steps: int = 25
    asked: int = 6
    covariance_texts: int = 64
    facts: str = "capitals"


@dataclass(frozen=True)
class Fact:
    """An association that can be edited, with neighbours that must stay.

    Attributes:
        id, family, form: for the record.
        target: the new answer.
        old: id of the answer before.
        neighbours: prompts and their right next tokens.
    """

    id: str
    family: str
    form: str
    target: Target
    old: int
    neighbours: tuple[tuple[tuple[int, ...], int], ...]


Asked = tuple[tuple[int, ...], int]
"""Prompt and right next token."""


# --- what is asked ------------------------------------------------------------------------------------------------------


def facts(model: NoteModel, config: WeightConfig) -> list[Fact]:
    """Associations of the validation stage.

    Raises:
        ConfigError: no such set.
    """
    if config.facts == "capitals":
        return capitals(model, config.n)
    if config.facts == "lookup":
        return lookups(model, config)
    raise ConfigError(f"facts {config.facts!r}: use capitals or lookup")


def capitals(model: NoteModel, n: int) -> list[Fact]:
    """Every capital replaced by that of another country."""
    tokenizer = model.tokenizer
    found: list[Fact] = []
    known = [
        (
            tuple(encode(tokenizer, text)),
            encode(tokenizer, text[: text.index(s) + len(s)]),
            encode(tokenizer, a, templated=True)[0],
        )
        for text, s, a in FACTS
    ]
    for i, (ids, upto, right) in enumerate(known):
        for step in range(1, len(known)):
            wrong = known[(i + step) % len(known)][2]
            rest = tuple((known[j][0], known[j][2]) for j in range(len(known)) if j != i and known[j][2] != wrong)
            target = Target(ids, len(upto) - 1, wrong)
            found.append(Fact(f"{FACTS[i][1].strip()}/{step}", FACTS[i][1].strip(), "capital", target, right, rest))
    order = sorted(found, key=lambda f: f.id.split("/")[::-1])
    return order[:n]


def lookups(model: NoteModel, config: WeightConfig) -> list[Fact]:
    """Look-ups in the organisms' language: the value under a label is to be read as another one; other values stay."""
    made = organism_cases(
        model.tokenizer, 4 * config.n, config.seed, split=config.split, kinds=("lookup",), forms=("two_clause",)
    )
    found: list[Fact] = []
    for case in made:
        rest = [c for c in made if c.family == case.family and case.values[0] not in c.old.text]
        others = [c for c in made if c.family != case.family][: config.asked]
        if not rest:
            continue
        asked = [(c.old.token_ids, c.answer_ids[0]) for c in (*rest[: config.asked], *others)]
        target = Target(case.old.token_ids, case.old.positions("field")[-1], case.answer_ids[1])
        found.append(Fact(case.id, case.family, "lookup", target, case.answer_ids[0], tuple(asked)))
    return found[: config.n]


def held_out(model: NoteModel, config: WeightConfig, case: Case) -> list[Case]:
    """Other requests of the same family that hold the same old value, with other filler, wording and actions."""
    n, seed = config.asked, config.seed + 1
    found: list[Case] = []
    if config.task == "organism":
        task = OrganismLanguage(
            split=config.split, kinds=("gated",), forms=config.forms, families=(case.family,), order=config.order
        )
        for scene in task.scenes(4 * n, seed):
            draw = replace(scene.draw, values=case.values)
            made = replace(scene, draw=draw)
            if config.length is not None:
                made = of_length(model.tokenizer, task, made, config.length, 0.5, seed)
            found.append(scene_case(model.tokenizer, task, made, 0, 0))
    elif config.task == "gated":
        task = GatedDecisions(split=config.split, forms=config.forms, order=config.order, length=config.length)
        draws = [d for d in task.draws(model.tokenizer, 12 * n, seed) if d.family.name == case.family]
        found = [draw_case(model.tokenizer, task, replace(d, values=case.values), 0, 0) for d in draws[: 4 * n]]
    return [c for c in found if c.old.token_ids != case.old.token_ids][:n]


def unrelated(model: NoteModel, config: WeightConfig, stage: Stage, case: Case) -> list[Case]:
    """Decisions of other families."""
    every = [c for c in cases_of(model, config, stage) if c.family != case.family]
    return random.Random(case.seed).sample(every, min(config.asked, len(every)))


def answers(model: NoteModel, asked: Sequence[Asked]) -> tuple[list[bool], list[Any]]:
    """Whether each prompt gets its right next token, and the logits. Cost: one prefill each."""
    logits = [model.next_logits(model.prefill(ids).hidden) for ids, _ in asked]
    return [int(x.argmax()) == right for x, (_, right) in zip(logits, asked, strict=True)], logits


def compare(model: NoteModel, asked: Sequence[Asked], before: tuple[list[bool], list[Any]]) -> Row:
    """How many of the requests that were right before are wrong now, and how far any logit moved."""
    now, logits = answers(model, asked)
    were = [i for i, ok in enumerate(before[0]) if ok]
    moved = [float((a - b).abs().max()) for a, b in zip(before[1], logits, strict=True)]
    return {"n": len(were), "broken": sum(not now[i] for i in were), "moved": max(moved, default=0.0)}


# --- the experiment -----------------------------------------------------------------------------------------------------


class WeightEditing:
    """Weight arms and KV arms on the same cases."""

    name = "weight_editing"

    def __init__(self) -> None:
        self._keys: dict[tuple[str, int], Keys] = {}

    def stages(self, config: WeightConfig) -> list[Stage]:
        """Validation of ROME, then requests."""
        source = {"length": config.length} if config.task in ("gated", "organism") else {}
        found = [Stage("request", {}, source)]
        return [Stage("validation", {"facts": config.facts}, {}), *found] if "rome" in config.arms else found

    def keys(self, model: NoteModel, config: WeightConfig) -> Keys:
        """Covariance of the edited layer on ordinary prompts of the task, made once per model."""
        at = (model.name, config.layer)
        if at not in self._keys:
            source = {"length": config.length} if config.task in ("gated", "organism") else {}
            other = config.model_copy(update={"n": config.covariance_texts, "seed": config.seed + 2, "split": "train"})
            texts = [c.old.token_ids for c in cases_of(model, other, Stage("covariance", {}, source))]
            self._keys[at] = covariance(model, config.layer, texts)
        return self._keys[at]

    def measure(self, model: NoteModel, config: WeightConfig, stage: Stage, case: Any) -> list[Row]:
        """A fact, or all arms on a request."""
        if isinstance(case, Fact):
            return [self._fact(model, config, case)]
        bench = Bench(model, case)
        first: Row = {**bench.facts(), "method": "full_prefill"}
        if first["excluded"] is not None:
            return [first]
        sets = {
            "contamination": [(c.old.token_ids, c.answer_ids[0]) for c in self.held_out(model, config, case)],
            "collateral": [(c.old.token_ids, c.answer_ids[0]) for c in self.unrelated(model, config, stage, case)],
        }
        before = {name: answers(model, asked) for name, asked in sets.items()}
        rows: list[Row] = [first]
        for text in config.arms:
            row: Row = {**bench.facts(), "method": text}
            start = {n: p.detach().clone() for n, p in model.hf.named_parameters()}
            try:
                with self._arm(model, config, bench, text) as made:
                    row |= made
                    for name, asked in sets.items():
                        row[name] = compare(model, asked, before[name])
            except (EditError, UnsupportedModelError) as e:
                row |= {"excluded": f"refused ({type(e).__name__})", "message": str(e)}
            row["restored"] = dict(model.hf.named_parameters()).keys() == start.keys() and all(
                bool((p == start[n]).all()) for n, p in model.hf.named_parameters()
            )
            rows.append(row)
        return rows

    held_out = staticmethod(held_out)
    unrelated = staticmethod(unrelated)

    @contextlib.contextmanager
    def _arm(self, model: NoteModel, config: WeightConfig, bench: Bench, text: str) -> Iterator[Row]:
        """The arm in force: what it made of the request, and what that cost."""
        case = bench.case
        if text not in WEIGHT_ARMS:
            made, report = bench.run(Arm.parse(text))
            cost = {"ms": report.ms + report.planning_ms, "tokens_run": report.total_tokens, "setup_ms": 0.0}
            yield {**bench.read(bench.decide(made)), **cost}
            return
        target = Target(case.old.token_ids, case.old.positions("field")[-1], case.answer_ids[1])
        keys = self.keys(model, config) if text == "rome" else None
        editor = (
            rome(model, target, keys, steps=config.steps)
            if keys is not None
            else lora(model, target, steps=config.steps)
        )
        with editor as done:
            context = case.context(model, record=False)
            row = {
                **bench.read(bench.decide(context)),
                "ms": done.ms,
                "steps": done.steps,
                "probability": done.probability,
            }
            yield {**row, "setup_ms": keys.ms if keys is not None else 0.0}

    def _fact(self, model: NoteModel, config: WeightConfig, fact: Fact) -> Row:
        row: Row = {"item": fact.id, "family": fact.family, "form": fact.form, "method": "rome", "excluded": None}
        asked = [(fact.target.token_ids, fact.old), *fact.neighbours]
        before = answers(model, asked)
        if not before[0][0]:
            return {**row, "excluded": "the model does not know the fact"}
        with rome(model, fact.target, self.keys(model, config), steps=config.steps) as done:
            said, _ = answers(model, [(fact.target.token_ids, fact.target.answer)])
            near = compare(model, fact.neighbours, (before[0][1:], before[1][1:]))
        return {**row, "efficacy": said[0], "neighbours": near, "steps": done.steps, "probability": done.probability}

    def aggregate(self, config: WeightConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Efficacy and locality; or decisions, costs, contamination and collateral by arm."""
        sums = Sums(self.name, config, stage, rows)
        if stage.name == "validation":
            sums.rate("efficacy", "rome", "efficacy")
            self._share(sums, "locality", "rome", "neighbours", kept=True)
            return sums.lines
        sums.competence()
        for method in dict.fromkeys(r["method"] for r in rows if r["method"] != "full_prefill"):
            sums.rate("p_correct", method, "right")
            kept, _ = sums.of(method)
            if not kept:
                continue
            sums.rate("flip_rate", method, "flipped")
            sums.mean("cost_ms", method, lambda r: r["ms"] / r["full_ms"], unit="ratio to full prefill", median=True)
            sums.mean("edit_ms", method, lambda r: r["ms"], unit="ms", median=True)
            sums.mean("setup_ms", method, lambda r: r["setup_ms"], unit="ms, once per model", median=True)
            for metric in ("contamination", "collateral"):
                self._share(sums, metric, method, metric)
            moved = [max(r["contamination"]["moved"], r["collateral"]["moved"]) for r in kept]
            families = [r["family"] for r in kept]
            e = cluster_bootstrap(moved, families, "mean", seed=config.seed)
            sums.add("largest_logit_change", method, e, unit="logits")
            sums.rate("restored", method, "restored")
        return sums.lines

    def _share(self, sums: Sums, metric: str, method: str, key: str, *, kept: bool = False) -> None:
        """Mean over cases of the share of requests that broke (or stayed); cases of which no request was right do not count."""
        rows, lost = sums.of(method)
        some = [r for r in rows if r[key]["n"]]
        values = [r[key]["broken"] / r[key]["n"] for r in some]
        values = [1.0 - v for v in values] if kept else values
        e = cluster_bootstrap(values, [r["family"] for r in some], "mean", seed=sums.config.seed)
        lost = [*lost, *["no request was right before"] * (len(rows) - len(some))]
        sums.add(metric, method, e, excluded=lost, n_requests=sum(r[key]["n"] for r in some))


def source(model: NoteModel, config: WeightConfig, stage: Stage) -> list[Any]:
    """Facts, or requests."""
    return facts(model, config) if stage.name == "validation" else cases_of(model, config, stage)


if __name__ == "__main__":
    main(WeightEditing(), WeightConfig, METRICS, source=source)
