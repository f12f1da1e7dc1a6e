"""Do the tables show an effect where there is none? ``python -m experiments.false_effects CONFIG``.

Hypothesis: what the probes report as notes is not made by the probes. Three arms that cannot have the effect go through the
same probes and the same tables as a model that takes notes: a model with *shuffled donors* (in every 2 x 2 instance the donors
of the two pairs change places: each recipient gets rows of a prompt with the other field value and its *own* conclusion), a
model that was trained *without notes*, and a model with *random weights*.

Falsifier: one of these arms is judged "effect", or the model that takes notes is not.

The check is blind: arms are measured and printed under code names, the verdict on each is a fixed rule of the configuration
applied to the bounds of its intervals, and it is on disk before the key is opened. A real model that is passed off as a control
is therefore found (``flagged``), and the command ends with code 1.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from notelens.cache.kv import KVCache
from notelens.context import ContextStore
from notelens.errors import CompetenceError, ConfigError, TaskError
from notelens.models.base import NoteModel
from notelens.models.load import load
from notelens.probes import PROBES
from notelens.probes.locality import Locality
from notelens.prompt import Prompt
from notelens.registry import nearest
from notelens.report.select import as_lines
from notelens.runs.manifest import session
from notelens.runs.tables import write_atomic
from notelens.runs.yamlfile import read_document
from notelens.tasks import TASKS
from notelens.tasks.base import Instance

Line = dict[str, Any]
Verdict = Literal["effect", "no effect", "undecided"]
Maker = Callable[["Arm"], NoteModel]
RANDOM = "random:"
N_FIRING = 4
"""Instances on which swaps are shown to reach the attention before donors are shuffled."""


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Metric(_Closed):
    """A line of the tables that the verdict rests on (both directions pooled)."""

    experiment: str
    metric: str
    params: dict[str, Any] = Field(default_factory=dict)


class Rule(_Closed):
    """When a table shows an effect.

    Attributes:
        bound: an interval that lies beyond it on either side is an effect, one inside it is none.
        metrics: on which lines; one effect among them is an effect of the arm, and it has none where none of them has one.
    """

    bound: float = Field(gt=0, lt=1)
    metrics: tuple[Metric, ...] = Field(min_length=1)


class Arm(_Closed):
    """One model with one kind of donor.

    Attributes:
        name: what it is.
        model: as ``notelens.load`` takes it, or ``random:NAME`` for random weights (of an organism: with its tokenizer).
        donors: ``real`` or ``shuffled``.
        expect: what the verdict has to be.
    """

    name: str
    model: str
    donors: Literal["real", "shuffled"] = "real"
    expect: Literal["effect", "no effect"]


class FalseEffects(_Closed):
    """Configuration.

    Attributes:
        name: of the run.
        n: instances.
        seed: of instances, code names and intervals.
        task, params: where instances come from; they need two versions of the rule, so that donors can change places.
        arms: two or more.
        rule: fixed before anything is measured.
    """

    name: str
    n: int = Field(ge=2)
    seed: int = 0
    task: str
    params: dict[str, Any] = Field(default_factory=dict)
    arms: tuple[Arm, ...] = Field(min_length=2)
    rule: Rule

    @classmethod
    def read(cls, path: Path) -> "FalseEffects":
        """From a YAML file.

        Raises:
            ConfigError: a key is missing, unknown or of the wrong type; two arms have one name; no such probe or task.
        """
        try:
            found = cls.model_validate(read_document(path).data)
        except ValidationError as e:
            first = e.errors()[0]
            raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from e
        names = [a.name for a in found.arms]
        if len(set(names)) < len(names):
            raise ConfigError(f"{path}: two arms have one name ({', '.join(names)})")
        if unknown := sorted({m.experiment for m in found.rule.metrics} - set(PROBES.names())):
            raise ConfigError(f"{path}: no probe {unknown[0]!r}; {nearest(unknown[0], list(PROBES.names()))}")
        return found


class ShuffledDonors(ContextStore):
    """A store in which every recipient is given the donor of the other pair of its instance.

    Within a 2 x 2 instance the donors of (0, r) -> (1, r) and (0, 1 - r) -> (1, 1 - r) change places, and likewise along the
    rule. The donors are the same prompts as before, each used as often; only who gets which is different, and with it each
    donor says what its recipient says anyway.

    Args:
        model: as for :class:`~notelens.context.ContextStore`.
        instances: all with four cells.

    Raises:
        TaskError: an instance has no second version of the rule, or the opposite cell has another conclusion.
    """

    control = True

    def __init__(self, model: NoteModel, instances: Sequence[Instance]) -> None:
        super().__init__(model)
        self._given: dict[tuple[int, ...], Prompt] = {}
        for instance in instances:
            for (f, r), prompt in instance.cells.items():
                opposite = (1 - f, 1 - r)
                if instance.conclusion.get(opposite) != instance.conclusion[f, r]:
                    raise TaskError(
                        f"instance {instance.id!r} (form {instance.form}) has no opposite cell with the same conclusion; "
                        "donors can be shuffled in the forms polarity, swapped and negated"
                    )
                self._given[prompt.token_ids] = instance.cells[opposite]

    def donor(self, recipient: Prompt, prompt: Prompt) -> KVCache:
        """Rows of the donor that belongs to the other pair."""
        del prompt
        return self.get(self._given[recipient.token_ids]).cache


def make_model(arm: Arm) -> NoteModel:
    """The model of an arm."""
    if arm.model.startswith(RANDOM):
        return load(arm.model.removeprefix(RANDOM), dry_run=True)
    return load(arm.model)


@dataclass(frozen=True)
class Coded:
    """What is known of an arm while the check is blind: a code name and its table."""

    code: str
    lines: tuple[Line, ...]


def codes(config: FalseEffects) -> dict[str, str]:
    """Code name of each arm; the order says nothing."""
    letters = [f"arm-{chr(ord('A') + i)}" for i in range(len(config.arms))]
    random.Random(f"{config.seed}/{config.name}/codes").shuffle(letters)
    return {arm.name: letter for arm, letter in zip(config.arms, letters, strict=True)}


def measure(model: NoteModel, config: FalseEffects, donors: str, instances: Sequence[Instance]) -> list[Line]:
    """Lines of the tables that the rule asks for; a line that could not be measured has n = 0 and says why."""
    store = ContextStore(model)
    if donors == "shuffled":
        Locality().run(
            store, instances[:N_FIRING]
        )  # raises where swaps with the real donors move nothing in this model
        store = ShuffledDonors(model, instances)
    lines: list[Line] = []
    for name in dict.fromkeys(m.experiment for m in config.rule.metrics):
        probe: Any = PROBES.get(name)()
        wanted = [m for m in config.rule.metrics if m.experiment == name]
        try:
            found = as_lines(probe.run(store, instances, seed=config.seed).aggregates)
        except CompetenceError as e:
            lines += [_empty(m, str(e)) for m in wanted]
            continue
        for m in wanted:
            lines.append(_pooled(found, m))
    return lines


def _empty(m: Metric, why: str) -> Line:
    return {"experiment": m.experiment, "metric": m.metric, "params": m.params, "value": None, "lo": None, "hi": None,
            "n": 0, "n_excluded": None, "reason": why}  # fmt: skip


def _pooled(lines: Sequence[Mapping[str, Any]], m: Metric) -> Line:
    """The line of a metric with both directions pooled.

    Raises:
        ConfigError: the probe has no such line.
    """
    mine = [x for x in lines if x["metric"] == m.metric and m.params.items() <= x["params"].items()]
    pooled = [x for x in mine if x["method"] not in ("denoising", "noising")]
    if not pooled:
        known = sorted({str(x["metric"]) for x in lines})
        raise ConfigError(f"{m.experiment} has no line {m.metric} {m.params}; {nearest(m.metric, known)}")
    line = pooled[0]
    kept = ("experiment", "metric", "params", "value", "lo", "hi", "n", "n_excluded")
    return {**{k: dict(line[k]) if k == "params" else line[k] for k in kept}, "reason": None}


def judge(lines: Sequence[Line], rule: Rule) -> Verdict:
    """The verdict on a table, from the bounds of its intervals only."""
    each = [_judge_line(line, rule.bound) for line in lines]
    if "effect" in each:
        return "effect"
    return "no effect" if all(v == "no effect" for v in each) else "undecided"


def _judge_line(line: Line, bound: float) -> Verdict:
    if line["n"] == 0:
        return "no effect"  # nothing could be measured: the table shows nothing
    low, high = float(line["lo"]), float(line["hi"])
    if low > bound or high < -bound:
        return "effect"
    return "no effect" if -bound < low and high < bound else "undecided"


def run(config: FalseEffects, out: Path, *, maker: Maker = make_model, instances: Sequence[Instance] | None = None,
        tell: Callable[[str], None] = lambda _: None) -> list[Line]:  # fmt: skip
    """Measure all arms, judge them blind, open the key.

    Args:
        config: the arms and the rule.
        out: folder for ``blind.json`` (tables and verdicts under code names) and ``unblinded.json``.
        maker: gives the model of an arm.
        instances: instead of the configuration's task.
        tell: progress, in code names.

    Returns:
        One line per arm: ``arm, code, model, donors, verdict, expect, flagged`` and its table.

    Raises:
        ConfigError: the rule names a line that a probe does not have.
    """
    key = codes(config)
    coded: list[Coded] = []
    for arm in sorted(config.arms, key=lambda a: key[a.name]):
        model = maker(arm)
        mine = instances
        if mine is None:
            task: Any = TASKS.get(config.task)(**config.params)
            mine = task.instances(model.tokenizer, config.n, config.seed)
        coded.append(Coded(key[arm.name], tuple(measure(model, config, arm.donors, mine))))
        tell(f"{key[arm.name]} measured")
    blind = {
        "name": config.name, "rule": config.rule.model_dump(mode="json"), "session": session(),
        "arms": [{"code": c.code, "verdict": judge(c.lines, config.rule), "table": list(c.lines)} for c in coded],
    }  # fmt: skip
    text = json.dumps(blind, indent=1, sort_keys=True) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "blind.json", text)
    return _unblind(config, key, out, hashlib.sha256(text.encode()).hexdigest())


def _unblind(config: FalseEffects, key: Mapping[str, str], out: Path, sha256: str) -> list[Line]:
    """Read the verdicts back and say whose they are."""
    text = (out / "blind.json").read_text(encoding="utf-8")
    if hashlib.sha256(text.encode()).hexdigest() != sha256:
        raise ConfigError(f"{out / 'blind.json'} was changed between verdict and unblinding; run the check again")
    found = {arm["code"]: arm for arm in json.loads(text)["arms"]}
    rows: list[Line] = []
    for arm in config.arms:
        one = found[key[arm.name]]
        rows.append({
            "arm": arm.name, "code": one["code"], "model": arm.model, "donors": arm.donors, "verdict": one["verdict"],
            "expect": arm.expect, "flagged": one["verdict"] != arm.expect, "table": one["table"],
        })  # fmt: skip
    record = {"blind_sha256": sha256, "config": config.model_dump(mode="json"), "arms": rows}
    write_atomic(out / "unblinded.json", json.dumps(record, indent=1, sort_keys=True) + "\n")
    return rows


def show(rows: Sequence[Line]) -> str:
    """Markdown: one row per arm, one column per line of its table."""
    heads = [_title(line) for line in rows[0]["table"]]
    out = ["| code | arm | model | donors | " + " | ".join(heads) + " | verdict | expected | |"]
    out.append("|" + " --- |" * (len(heads) + 7))
    for row in sorted(rows, key=lambda r: r["code"]):
        cells = [_text(line) for line in row["table"]]
        mark = "FLAGGED" if row["flagged"] else "as expected"
        first = [row["code"], row["arm"], row["model"], row["donors"]]
        out.append("| " + " | ".join([*first, *cells, row["verdict"], row["expect"], mark]) + " |")
    return "\n".join(out) + "\n"


def _title(line: Line) -> str:
    params = "".join(f", {k} {v}" for k, v in line["params"].items())
    return f"{line['experiment']}: {line['metric']}{params}"


def _text(line: Line) -> str:
    if line["n"] == 0:
        return "not measurable"
    return f"{line['value']:.3f} [{line['lo']:.3f}, {line['hi']:.3f}] (n = {line['n']})"


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 where every verdict is the expected one, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, help="folder; runs/<name> when not given")
    given = parser.parse_args(arguments)
    config = FalseEffects.read(given.config)
    rows = run(
        config, given.out or Path("runs") / config.name, tell=lambda text: print(text, file=sys.stderr, flush=True)
    )
    print(show(rows), end="")
    return 1 if any(row["flagged"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
