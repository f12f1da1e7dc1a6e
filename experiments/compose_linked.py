"""A chain split over two chunks: can a fitted link stand in for recomputing? ``python -m experiments.compose_linked CONFIG``.

The record (with the field) stands in front, the policy behind it is a skill that was compiled without it, the request follows.
A full prefill writes the conclusion into rows of the policy; a spliced policy has none.

Hypothesis: a link (``linked``) closes at least 0.7 of the gap between no record at all and full prefill, with ``k`` recomputed
rows, where ``shift`` closes at most 0.2 and seams with as many rows little more.

Falsifier: a share below 0.7, or one that ``seam@k`` reaches too.

Calibration and evaluation contexts of a skill share no filler line set; both field values occur in both, since a link can only
learn changes that it has seen. Families are those held out from the adapter's training.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import notelens
from notelens._files import write_atomic
from notelens.compose import Calibration, Composer, Linked, compile_skill, composer, fit_link
from notelens.compose.fidelity import compare
from notelens.errors import ConfigError
from notelens.models.load import load
from notelens.prompt import Prompt
from notelens.runs.yamlfile import read_document
from notelens.stats import agreement, gap_recovered
from notelens.tasks.gated import GatedDecisions
from notelens.tasks.render import Draw

Row = dict[str, Any]
FLOOR = "no_context"


@dataclass(frozen=True)
class Config:
    """What is measured; every key must be given.

    Attributes:
        name: of the run.
        model: as ``notelens.load`` takes it.
        skills: policies.
        calibration, evaluation: contexts per policy.
        seed: of policies and contexts.
        split, forms: of the gated task.
        k, rank: of the link.
        methods: composers beside ``linked``.
    """

    name: str
    model: str
    skills: int
    calibration: int
    evaluation: int
    seed: int
    split: str
    forms: list[str]
    k: int
    rank: int
    methods: list[str]

    @classmethod
    def read(cls, path: Path) -> "Config":
        """From a YAML file.

        Raises:
            ConfigError: a key is missing or unknown, or a composer does not exist.
        """
        data = read_document(path).data
        wanted = {f.name for f in fields(cls)}
        if set(data) != wanted:
            raise ConfigError(
                f"{path}: keys {sorted(set(data) ^ wanted)} are missing or unknown; needed: {sorted(wanted)}"
            )
        config = cls(**data)  # type: ignore[arg-type]  # checked by use: a wrong type fails before anything is measured
        for method in config.methods:
            composer(method)
        return config


@dataclass(frozen=True)
class Context:
    """One prompt of a policy, cut at its rule."""

    before: tuple[int, ...]
    policy: tuple[int, ...]
    after: tuple[int, ...]
    answers: tuple[int, int]
    right: int


def cut(prompt: Prompt, answers: tuple[int, int], right: int) -> Context:
    """The three pieces of a prompt."""
    rule, ids = prompt.positions("rule"), prompt.token_ids
    return Context(ids[: rule[0]], ids[rule[0] : rule[-1] + 1], ids[rule[-1] + 1 :], answers, right)


def contexts(task: GatedDecisions, tokenizer: Any, draw: Draw, fillers: Sequence[Draw]) -> Iterator[Context]:
    """The policy of ``draw`` behind both field values in turn, with the filler lines of other draws."""
    for index, other in enumerate(fillers):
        instance = task.build(tokenizer, replace(draw, filler=other.filler, between=other.between))
        cell = (index % 2, 0)
        yield cut(instance.cells[cell], instance.answer_ids, instance.conclusion[cell])


def measure(model: Any, config: Config) -> Iterator[Row]:
    """One row per evaluated context and method."""
    task = GatedDecisions(split=config.split, forms=config.forms)
    each = config.calibration + config.evaluation
    n_families = len(task.families)
    policies = task.draws(model.tokenizer, config.skills, config.seed)
    pool = task.draws(model.tokenizer, n_families * len(config.forms) * each, config.seed + 1)
    for draw in policies:
        fillers = [d for d in pool if d.family.name == draw.family.name][:each]
        found = list(contexts(task, model.tokenizer, draw, fillers))
        policy = found[0].policy
        found = [c for c in found if c.policy == policy]
        fit, held_out = found[: -config.evaluation], found[-config.evaluation :]
        skill = compile_skill(model, policy, name="policy")
        link = fit_link(model, skill, [Calibration([c.before], c.after) for c in fit], k=config.k, rank=config.rank)
        methods: list[str | Composer] = [*config.methods, Linked([link])]
        for index, context in enumerate(held_out):
            result = compare(model, [context.before, skill, context.after], context.answers, methods)
            hidden = model.prefill((*policy, *context.after)).hidden
            without = int(model.answer_logits(hidden, context.answers).argmax())
            base = {
                "kind": "instance", "item": f"{draw.id}/{index}", "family": draw.family.name, "form": draw.form,
                "right": context.right, "full": result.full.answer, "n_policy": len(policy), "link": link.reader_kl,
            }  # fmt: skip
            yield {**base, "method": FLOOR, "answer": without}
            for method, decision in result.decisions.items():
                yield {
                    **base, "method": method, "answer": decision.answer, "margin": decision.margins[context.right],
                    "kl": decision.distance.kl, "cosine": decision.distance.cosine, "top1": decision.distance.top1,
                    "tokens_recomputed": decision.composed.cost.tokens_recomputed,
                }  # fmt: skip


def aggregate(rows: Sequence[Row], config: Config) -> list[Row]:
    """Share of the gap closed and agreement, by method."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    floor = [r["answer"] == r["right"] for r in by_method[FLOOR]]
    ceiling = [r["full"] == r["right"] for r in by_method[FLOOR]]
    lines: list[Row] = []
    for method, cell in by_method.items():
        clusters = [r["family"] for r in cell]
        hits = [r["answer"] == r["right"] for r in cell]
        agreed = agreement([r["full"] for r in cell], [r["answer"] for r in cell], [r["right"] for r in cell], clusters)
        estimates = {
            "pgr": gap_recovered(floor, hits, ceiling, clusters, seed=config.seed),
            "p_correct": agreed.method_right,
            "full_correct": agreed.reference_right,
            "agreement": agreed.overall,
            "agreement_given_full_correct": agreed.given_right,
        }
        budget = [r["tokens_recomputed"] for r in cell if "tokens_recomputed" in r]
        for metric, e in estimates.items():
            lines.append({
                "kind": "aggregate", "experiment": "compose_linked", "metric": metric, "model": config.model,
                "method": method, "params": {"tokens_recomputed": sum(budget) / len(budget) if budget else 0.0},
                "value": e.value, "lo": e.lo, "hi": e.hi, "n": e.n, "n_clusters": e.n_clusters, "n_excluded": 0,
                "swap": "none", "unit": "rate", "paper_value": None, "interval": e.method, "flags": list(e.flags),
            })  # fmt: skip
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, help="folder; runs/<name> when not given")
    parser.add_argument("--skills", type=int, help="fewer policies than the config says")
    given = parser.parse_args(arguments)
    config = Config.read(given.config)
    if given.skills is not None:
        config = replace(config, skills=given.skills)
    model = load(config.model)
    header = {"kind": "header", "notelens": notelens.__version__, "config": config.__dict__, "model": model.facts()}
    rows = list(measure(model, config))
    lines = aggregate(rows, config)
    folder = given.out or Path("runs") / config.name
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, default=str) + "\n" for line in (header, *rows, *lines))
    write_atomic(folder / "records.jsonl", text)
    for line in lines:
        value = "-" if line["value"] is None else f"{line['value']:.3f}"
        sys.stdout.write(f"{line['method']:<20} {line['metric']:<30} {value} n={line['n']}\n")


if __name__ == "__main__":
    main()
