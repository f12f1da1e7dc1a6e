"""What the editing experiments share: configuration, records that can be continued, aggregates, a table, a command line.

An experiment measures *items* (one case in one stage) and writes them one by one to ``records.jsonl``
(:mod:`notelens.runs.records`); a run that was stopped continues behind the last whole item. Aggregates are a function of the
records and are written when all items are there; ``notelens table FOLDER`` reads them as of any other run.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from experiments.edit_arms import Arm, Bench, Row
from experiments.edit_cases import Case, gated_cases, instance_cases
from experiments.organism_cases import organism_cases
from notelens.errors import ConfigError, NotelensError
from notelens.models.base import NoteModel
from notelens.models.load import load
from notelens.runs.files import held
from notelens.runs.manifest import MANIFEST_VERSION, check_same_model, read_manifest, session, write_manifest
from notelens.runs.records import FILE, RecordWriter, plain
from notelens.runs.tables import FORMATS, gate_word, load_table, render, write_atomic
from notelens.runs.yamlfile import read_document
from notelens.stats import Estimate, cluster_bootstrap, cluster_rate
from notelens.tasks import TASKS

Line = dict[str, Any]


class EditConfig(BaseModel):
    """What every editing experiment is told; closed to unknown keys.

    Attributes:
        name: of the run.
        model: as ``notelens.load`` takes it.
        task: ``gated``, ``organism``, or another registered task (whose instances are used as they are).
        n: cases per stage.
        seed: of cases and intervals.
        split, forms, order: of gated decisions and of the organisms' language.
        kinds: of the organisms' language.
        role: ``evaluation``, or ``tuning`` where constants of a method were chosen on these cases.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    model: str
    task: str = "gated"
    n: int = Field(ge=1)
    seed: int = 0
    split: Literal["train", "eval", "values", "combos"] = "eval"
    kinds: tuple[str, ...] | None = ("gated",)
    forms: tuple[str, ...] = ("two_clause", "polarity", "swapped", "negated")
    order: Literal["value_first", "rule_first"] = "value_first"
    role: Literal["evaluation", "tuning"] = "evaluation"

    @classmethod
    def read(cls, path: Path, **changes: Any) -> Self:
        """From a YAML file.

        Raises:
            ConfigError: a key is missing, unknown or of the wrong type.
        """
        data = read_document(path).data
        try:
            return cls.model_validate({**data, **{k: v for k, v in changes.items() if v is not None}})
        except ValidationError as e:
            first = e.errors()[0]
            raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from e

    @property
    def hash(self) -> str:
        """sha256 of everything but the name (and the kinds, where there are none)."""
        data = self.model_dump(mode="json", exclude={"name"} if self.task == "organism" else {"name", "kinds"})
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Stage:
    """A cell of the design.

    Attributes:
        name: unique within the experiment.
        params: as they stand in tables (``{"length": 600}``).
        source: what :func:`cases_of` is told beyond the configuration.
    """

    name: str
    params: dict[str, Any]
    source: dict[str, Any]


class Experiment(Protocol):
    """One claim: what is measured and how it is summed up."""

    name: str

    def stages(self, config: Any) -> list[Stage]:
        """Cells of the design, in order."""
        ...

    def measure(self, model: NoteModel, config: Any, stage: Stage, case: Any) -> list[Row]:
        """Rows of one case."""
        ...

    def aggregate(self, config: Any, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Lines of the table for one stage."""
        ...


def cases_of(model: NoteModel, config: EditConfig, stage: Stage) -> list[Case]:
    """Cases of a stage."""
    if config.task == "gated":
        return gated_cases(
            model.tokenizer, config.n, config.seed, split=config.split, forms=config.forms, order=config.order,
            **stage.source,
        )  # fmt: skip
    if config.task == "organism":
        return organism_cases(
            model.tokenizer, config.n, config.seed, split=config.split, kinds=config.kinds or ("gated",), forms=config.forms,
            order=config.order, **stage.source,
        )  # fmt: skip
    task: Any = TASKS.get(config.task)(**stage.source)
    return instance_cases(task.instances(model.tokenizer, config.n, config.seed), config.seed)


def measure_arms(model: NoteModel, case: Case, arms: Sequence[Arm]) -> list[Row]:
    """Rows of all arms on one case, competence first: where full prefill is wrong, no arm is run."""
    bench = Bench(model, case)
    first: Row = {**bench.facts(), "method": "full_prefill"}
    if first["excluded"] is not None:
        return [first]
    first |= {
        **bench.read(bench.after), "tokens_run": bench.full.tokens_run, "planning_tokens": 0,
        "prompt_tokens": bench.full.prompt_tokens, "suffix_tokens": bench.full.suffix_tokens, "ms": bench.full.ms,
        "planning_ms": 0.0, "surgery": "", "exact": True,
    }  # fmt: skip
    return [first, *(bench.row(arm) for arm in arms if arm.text != "full_prefill")]


# --- aggregates -----------------------------------------------------------------------------------------------------------


class Sums:
    """Aggregates of one stage of one experiment."""

    def __init__(self, experiment: str, config: EditConfig, stage: Stage, rows: Sequence[Row]) -> None:
        self.experiment, self.config, self.stage, self.rows = experiment, config, stage, rows
        self.lines: list[Line] = []

    def add(
        self, metric: str, method: str, e: Estimate, *, excluded: Sequence[str] = (), unit: str = "rate", **more: Any
    ) -> None:
        """One line; ``params`` in ``more`` is added to those of the stage."""
        params = {**self.stage.params, **more.pop("params", {})}
        self.lines.append({
            "kind": "aggregate", "experiment": self.experiment, "metric": metric, "model": self.config.model,
            "method": method, "params": params, "value": e.value, "lo": e.lo, "hi": e.hi, "n": e.n,
            "n_clusters": e.n_clusters, "n_excluded": len(excluded), "reasons": dict(Counter(excluded)), "swap": "none",
            "unit": unit, "control": False, "interval": e.method, "level": e.level, "flags": list(e.flags),
            "paper_value": None, "seed": self.config.seed, "config": self.config.hash, "role": self.config.role, **more,
        })  # fmt: skip

    def competence(self, method: str = "full_prefill") -> None:
        """Share of cases that full prefill answers right with either value."""
        rows = [r for r in self.rows if r["method"] == method]
        reasons = [r["excluded"] for r in rows if r["excluded"] is not None]
        rate = cluster_rate([r["excluded"] is None for r in rows], [r["family"] for r in rows])
        self.add("competence", method, rate, reasons=dict(Counter(reasons)))

    def of(self, method: str) -> tuple[list[Row], list[str]]:
        """Measured rows of a method, and the reasons of the others (incompetent cases included)."""
        rows = [r for r in self.rows if r["method"] == method]
        lost = [r["excluded"] for r in rows if r["excluded"] is not None]
        if method != "full_prefill":
            first = [r for r in self.rows if r["method"] == "full_prefill"]
            lost += [r["excluded"] for r in first if r["excluded"] is not None]
        return [r for r in rows if r["excluded"] is None], lost

    def rate(self, metric: str, method: str, key: str, **more: Any) -> None:
        """Rate of a yes/no value."""
        rows, lost = self.of(method)
        rows = [r for r in rows if key in r]
        self.add(
            metric,
            method,
            cluster_rate([bool(r[key]) for r in rows], [r["family"] for r in rows]),
            excluded=lost,
            **more,
        )

    def mean(
        self, metric: str, method: str, of: Callable[[Row], float], *, unit: str, median: bool = False, **more: Any
    ) -> None:
        """Mean or median of a number."""
        rows, lost = self.of(method)
        e = cluster_bootstrap(
            [of(r) for r in rows], [r["family"] for r in rows], "median" if median else "mean", seed=self.config.seed
        )
        self.add(metric, method, e, excluded=lost, unit=unit, **more)


def arm_lines(sums: Sums, methods: Sequence[str], paper: dict[str, float] | None = None) -> None:
    """The lines of every method: decisions, cost, and the transplant of the same rows."""
    for method in methods:
        rows, _ = sums.of(method)
        if not rows:
            sums.rate("p_correct", method, "right", paper_value=(paper or {}).get(method))
            continue
        surgery = sum(bool(r["surgery"]) for r in rows) / len(rows)
        sums.rate("p_correct", method, "right", paper_value=(paper or {}).get(method), surgery=surgery)
        sums.rate("flip_rate", method, "flipped")
        sums.mean("recovery", method, lambda r: r["recovery"], unit="recovery")
        sums.mean("recompute_share", method, total_share, unit="share of the prompt, planning included")
        sums.mean(
            "suffix_share",
            method,
            lambda r: r["tokens_run"] / r["suffix_tokens"],
            unit="share of the suffix, plan reused",
        )
        sums.mean("tokens_run", method, lambda r: float(r["tokens_run"]), unit="tokens, plan reused")
        sums.mean("cost_ms", method, cost_ratio, unit="ratio to full prefill, planning included", median=True)
        sums.mean("cost_ms_reused", method, lambda r: r["ms"] / r["full_ms"], unit="ratio to full prefill", median=True)
        if all("transplant_right" in r for r in rows):
            sums.rate("p_correct_transplant", method, "transplant_right")
            sums.mean("recovery_transplant", method, lambda r: r["transplant_recovery"], unit="recovery")


def total_share(row: Row) -> float:
    """Tokens run, planning included, as a share of the prompt."""
    return (row["tokens_run"] + row["planning_tokens"]) / row["prompt_tokens"]


def cost_ratio(row: Row) -> float:
    """Time, planning included, as a share of a full prefill of the same case."""
    return (row["ms"] + row["planning_ms"]) / row["full_ms"]


# --- running --------------------------------------------------------------------------------------------------------------


def run(
    experiment: Experiment,
    config: EditConfig,
    out: Path,
    model: NoteModel,
    *,
    seconds: float | None = None,
    source: Callable[[NoteModel, Any, Stage], list[Any]] = cases_of,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Line]:
    """Measure, or continue where ``out`` holds the beginning of this run.

    Args:
        experiment: what is measured.
        config: how.
        out: folder of the run.
        model: on what.
        seconds: stop behind the item that is being measured when this time is over; the same command continues.
        source: where cases come from.
        tell: told about progress.

    Returns:
        Aggregates; of what is on record where the time was over.

    Raises:
        ConfigError: ``out`` was begun with another configuration or model.
    """
    facts = plain(model.facts())[0]
    began = time.monotonic()
    stages = experiment.stages(config)
    with held(out):
        manifest = _manifest(experiment, config, out, facts)
        write_manifest(out, manifest)
        with RecordWriter(out / FILE) as writer:
            writer.write(
                [
                    {
                        "kind": "run",
                        **manifest["sessions"][-1],
                        "config": config.hash,
                        "seed": config.seed,
                        "facts": facts,
                    }
                ]
            )
            complete = True
            for stage in stages:
                for i, case in enumerate(source(model, config, stage)):
                    key = (experiment.name, stage.name, case.id)
                    if key in writer.records.items:
                        continue
                    if seconds is not None and time.monotonic() - began > seconds:
                        complete = False
                        break
                    rows = experiment.measure(model, config, stage, case)
                    where = {"experiment": experiment.name, "stage": stage.name}
                    body = [{"kind": "instance", **where, **row} for row in rows]
                    writer.write([*body, {"kind": "item", **where, "item": case.id, "n_lines": len(body)}])
                    tell(f"{stage.name} {i + 1}/{config.n} {case.id} {time.monotonic() - began:.0f} s")
            lines = _aggregates(experiment, config, stages, writer, gate_word(facts))
            if complete and experiment.name not in writer.records.probes:
                end = {"kind": "probe", "experiment": experiment.name, "n_lines": len(lines), "incompetent": None}
                writer.write([*lines, end])
        if complete:
            write_manifest(out, {**manifest, "state": "finished"})
            table = load_table(out)
            for format in FORMATS:
                write_atomic(out / f"table.{format}", render(table, format))
    return lines


def _aggregates(
    experiment: Experiment, config: EditConfig, stages: Sequence[Stage], writer: RecordWriter, gate: str
) -> list[Line]:
    lines: list[Line] = []
    for stage in stages:
        rows = [
            r
            for (name, at, _), found in writer.records.items.items()
            for r in found
            if (name, at) == (experiment.name, stage.name)
        ]
        if rows:
            lines += experiment.aggregate(config, stage, rows)
    return [{**line, "gate": gate} for line in lines]


def _manifest(experiment: Experiment, config: EditConfig, out: Path, facts: dict[str, Any]) -> dict[str, Any]:
    before = read_manifest(out)
    if before is None:
        return {
            "manifest_version": MANIFEST_VERSION, "name": config.name,
            "config": {**config.model_dump(mode="json"), "probes": [{"name": experiment.name}]},
            "config_hash": config.hash, "seed": config.seed, "model": facts, "sessions": [session()], "state": "running",
        }  # fmt: skip
    if before["config_hash"] != config.hash:
        raise ConfigError(f"{out}: was begun with another configuration; choose another folder with --out")
    check_same_model(out, before, facts)
    return {**before, "sessions": [*before["sessions"], session()]}


def show(lines: Sequence[Line], metrics: Sequence[str]) -> str:
    """A table of one row per stage and method, one column per metric."""
    keys = list(
        dict.fromkeys((json.dumps(line["params"]), line["method"]) for line in lines if line["metric"] in metrics)
    )
    out = [" | ".join(("params", "method", "n", *metrics))]
    for params, method in keys:
        own = {r["metric"]: r for r in lines if json.dumps(r["params"]) == params and r["method"] == method}
        n = next((r["n"] for m in metrics if (r := own.get(m)) is not None), 0)
        out.append(" | ".join((params, method, str(n), *(_cell(own.get(m)) for m in metrics))))
    return "\n".join(out) + "\n"


def _cell(line: Line | None) -> str:
    if line is None or line["value"] is None:
        return "-"
    interval = "" if line["lo"] is None else f" [{line['lo']:.2f}, {line['hi']:.2f}]"
    return f"{line['value']:.3f}{interval}"


def main(
    experiment: Experiment,
    kind: type[EditConfig],
    metrics: Sequence[str],
    arguments: list[str] | None = None,
    *,
    source: Callable[[NoteModel, Any, Stage], list[Any]] = cases_of,
) -> None:
    """Command line of an experiment."""
    parser = argparse.ArgumentParser(description=sys.modules[type(experiment).__module__].__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, help="folder; runs/<name> when not given")
    parser.add_argument("--model", help="instead of the configuration's; the run is then called <name>-<model>")
    parser.add_argument("--n", type=int, help="cases per stage, instead of the configuration's")
    parser.add_argument("--seconds", type=float, help="stop after this time; the same command continues")
    given = parser.parse_args(arguments)

    def tell(text: str) -> None:
        sys.stderr.write(text + "\n")

    try:
        config = kind.read(given.config, n=given.n, model=given.model)
        if given.model is not None:
            config = config.model_copy(update={"name": f"{config.name}-{given.model}"})
        out = given.out or Path("runs") / config.name
        lines = run(experiment, config, out, load(config.model), seconds=given.seconds, source=source, tell=tell)
    except NotelensError as e:  # what was measured is on record; the same command continues
        tell(f"error: {e}")
        raise SystemExit(2) from None
    sys.stdout.write(show(lines, metrics))
