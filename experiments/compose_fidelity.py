"""Does a policy that was compiled alone decide as a prefilled one? ``python -m experiments.compose_fidelity CONFIG``.

Hypothesis: where full prefill decides right, a policy that was compiled in isolation and repositioned (``shift``) leads to the
same decision (at least 0.95), with state and request behind it.

Falsifier: agreement given that full prefill is right below 0.95, or no higher than that of an unrelated policy (``unrelated``:
the policy of another instance of the same family and form is spliced in its place; its decisions are what agreement is worth).

Prompts are gated decisions with the policy before the field, cut by token: system text, then the policy with what stands
between it and the record (spliced), then record and request (run). Offsets put that many tokens of neutral text between the
system text and the policy. Nothing is trained here, and families are those held out from the adapter's training.

Records: one line per instance, offset and method, then aggregates with the fields of DESIGN section 8. Agreement is counted
overall and where full prefill is right, cells with a constant column are flagged, logit cosines are centred and stand beside
KL divergence and top-1 agreement, and the noise floor is full prefill in two passes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import notelens
from notelens._files import write_atomic
from notelens.compose import Skill, compile_skill, composer
from notelens.compose.fidelity import compare
from notelens.errors import ConfigError
from notelens.models.load import load
from notelens.prompt import Prompt
from notelens.runs.yamlfile import read_document
from notelens.spans import encode
from notelens.stats import Estimate, agreement, cluster_bootstrap, tost_paired
from notelens.tasks.gated import GatedDecisions

NEUTRAL = (
    "The weather report follows. It was mild in the morning, with light wind from the west and some clouds at noon. "
)
UNRELATED = "unrelated"
Row = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """What is measured; every key must be given.

    Attributes:
        name: of the run.
        model: as ``notelens.load`` takes it.
        n: instances.
        seed: of instances and bootstraps.
        split, forms, length: of the gated task.
        offsets: tokens of neutral text in front of the policy.
        methods: composers.
        margin: largest difference in agreement with the noise floor that counts as equivalent.
    """

    name: str
    model: str
    n: int
    seed: int
    split: str
    forms: list[str]
    length: int | None
    offsets: list[int]
    methods: list[str]
    margin: float

    @classmethod
    def read(cls, path: Path) -> "Config":
        """From a YAML file.

        Raises:
            ConfigError: a key is missing or unknown, or a composer does not exist.
        """
        data = read_document(path).data
        wanted = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or set(data) != wanted:
            found = set(data) if isinstance(data, dict) else set[str]()
            raise ConfigError(f"{path}: keys {sorted(found ^ wanted)} are missing or unknown; needed: {sorted(wanted)}")
        config = cls(**cast(dict[str, Any], data))
        for method in config.methods:
            composer(method)
        if config.n < 1 or not config.methods or not config.offsets or not config.margin > 0:
            raise ConfigError(f"{path}: n, methods, offsets and margin must not be empty or zero")
        return config


def cut(prompt: Prompt) -> tuple[int, int]:
    """Where the policy starts and where the record begins behind it."""
    rule = prompt.positions("rule")
    record = [i for i, region in enumerate(prompt.regions) if region == "record" and i > rule[-1]]
    return rule[0], record[0]


def neutral_ids(tokenizer: Any, n: int) -> list[int]:
    """Exactly ``n`` tokens of text that has nothing to do with any policy."""
    if n == 0:
        return []
    ids = list(encode(tokenizer, NEUTRAL * (1 + n // 10), templated=True))
    return ids[:n]


def measure(model: Any, config: Config) -> Iterator[Row]:
    """One row per instance, offset and method."""
    task = GatedDecisions(split=config.split, forms=config.forms, order="rule_first", length=config.length)
    instances = task.instances(model.tokenizer, config.n, config.seed)
    skills: dict[tuple[int, ...], Skill] = {}

    def skill(ids: Sequence[int]) -> Skill:
        if tuple(ids) not in skills:
            skills.clear()  # one instance at a time; a library would keep them
            skills[tuple(ids)] = compile_skill(model, ids, name="policy")
        return skills[tuple(ids)]

    for index, instance in enumerate(instances):
        cell = sorted(instance.cells)[index % len(instance.cells)]
        prompt = instance.cells[cell]
        start, stop = cut(prompt)
        other = next(
            (
                o
                for o in (*instances[index + 1 :], *instances[:index])
                if (o.family, o.form) == (instance.family, instance.form)
            ),
            None,
        )
        for offset in config.offsets:
            head = [list(prompt.token_ids[:start]), neutral_ids(model.tokenizer, offset)]
            before = [part for part in head if part]
            policy = prompt.token_ids[start:stop]
            found = compare(
                model, [*before, skill(policy), prompt.token_ids[stop:]], instance.answer_ids, config.methods
            )
            row: Row = {
                "kind": "instance", "item": instance.id, "family": instance.family, "form": instance.form, "offset": offset,
                "cell": list(cell), "n_tokens": len(found.full.composed), "n_policy": stop - start,
                "right": instance.conclusion[cell], "full": found.full.answer,
                "full_margin": found.full.margins[instance.conclusion[cell]],
                "floor_cosine": found.floor.cosine, "floor_kl": found.floor.kl, "floor_top1": found.floor.top1,
            }  # fmt: skip
            for method, decision in found.decisions.items():
                d = decision.distance
                yield {
                    **row, "method": method, "answer": decision.answer,
                    "margin": decision.margins[instance.conclusion[cell]], "cosine": d.cosine, "kl": d.kl, "top1": d.top1,
                    "recompute_share": decision.composed.cost.recompute_share,
                }  # fmt: skip
            if other is not None:
                a, b = cut(other.cells[sorted(other.cells)[0]])
                wrong = compile_skill(model, other.cells[sorted(other.cells)[0]].token_ids[a:b], name="other")
                answer = compare(model, [*before, wrong, prompt.token_ids[stop:]], instance.answer_ids, ["shift"])
                yield {**row, "method": UNRELATED, "answer": answer.decisions["shift"].answer}


def aggregate(rows: Sequence[Row], config: Config) -> list[Row]:
    """Aggregates by method and offset; a function of the rows."""
    lines: list[Row] = []
    for offset in config.offsets:
        for method in dict.fromkeys(r["method"] for r in rows):
            cell = [r for r in rows if r["method"] == method and r["offset"] == offset]
            clusters = [r["family"] for r in cell]
            right = [r["right"] for r in cell]
            found = agreement([r["full"] for r in cell], [r["answer"] for r in cell], right, clusters)

            def line(metric: str, e: Estimate, method: str = method, offset: int = offset, **more: Any) -> Row:
                return {
                    "kind": "aggregate", "experiment": "compose_fidelity", "metric": metric, "model": config.model,
                    "method": method, "params": {"offset": offset}, "value": e.value, "lo": e.lo, "hi": e.hi, "n": e.n,
                    "n_clusters": e.n_clusters, "n_excluded": 0, "swap": "none", "unit": "rate", "paper_value": None,
                    "interval": e.method, "flags": list(e.flags), **more,
                }  # fmt: skip

            wrong = found.overall.n - found.given_right.n
            excluded = {"n_excluded": wrong, "reasons": {"full prefill wrong": wrong}}
            lines += [
                line("agreement", found.overall, by_chance=found.by_chance, empty=found.empty),
                line("agreement_given_full_correct", found.given_right, empty=found.empty, **excluded),
                line("full_correct", found.reference_right),
                line("p_correct", found.method_right),
            ]  # fmt: skip
            if method == UNRELATED:
                continue
            for name in ("cosine", "kl", "top1", "recompute_share"):
                values = [float(r[name]) for r in cell]
                metric = f"logit_{name}" if name in ("cosine", "kl") else name
                lines.append(line(metric, cluster_bootstrap(values, clusters, seed=config.seed), unit=name))
            agree = [float(r["answer"] == r["full"]) - 1.0 for r in cell]
            test = tost_paired(agree, config.margin, clusters)
            lines.append({
                "kind": "aggregate", "experiment": "compose_fidelity", "metric": "equivalence", "model": config.model,
                "method": method, "params": {"offset": offset, "margin": config.margin}, "value": test.value, "lo": test.lo,
                "hi": test.hi, "n": test.n, "n_clusters": test.n_clusters, "n_excluded": 0, "swap": "none", "unit": "rate",
                "paper_value": None, "p": test.p, "equivalent": test.equivalent, "flags": list(test.flags),
            })  # fmt: skip
        first = [r for r in rows if r["method"] == config.methods[0] and r["offset"] == offset]
        for name in ("floor_cosine", "floor_kl"):
            e = cluster_bootstrap([r[name] for r in first], [r["family"] for r in first], seed=config.seed)
            lines.append({
                "kind": "aggregate", "experiment": "compose_fidelity", "metric": f"noise_{name}", "model": config.model,
                "method": "full_prefill", "params": {"offset": offset}, "value": e.value, "lo": e.lo, "hi": e.hi, "n": e.n,
                "n_clusters": e.n_clusters, "n_excluded": 0, "swap": "none", "unit": name, "paper_value": None,
                "flags": list(e.flags),
            })  # fmt: skip
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, help="folder; runs/<name> when not given")
    parser.add_argument("--n", type=int, help="fewer instances than the config says")
    given = parser.parse_args(arguments)
    config = Config.read(given.config)
    if given.n is not None:
        config = Config(**{**config.__dict__, "n": given.n})
    model = load(config.model)
    header = {"kind": "header", "notelens": notelens.__version__, "config": config.__dict__, "model": model.facts()}
    rows = list(measure(model, config))
    lines = aggregate(rows, config)
    folder = given.out or Path("runs") / config.name
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, default=str) + "\n" for line in (header, *rows, *lines))
    write_atomic(folder / "records.jsonl", text)
    for line in lines:
        if line["metric"] in (
            "agreement",
            "agreement_given_full_correct",
            "full_correct",
            "logit_cosine",
            "logit_kl",
            "top1",
        ):
            value = "-" if line["value"] is None else f"{line['value']:.3f}"
            sys.stdout.write(
                f"{line['params']['offset']:>6} {line['method']:<20} {line['metric']:<30} {value} n={line['n']}\n"
            )


if __name__ == "__main__":
    main()
