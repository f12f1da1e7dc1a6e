"""Can it be told beforehand that a field needs more than a refresh in place? ``python -m experiments.diagnostic CONFIG``.

Hypothesis (arXiv:2606.17107, section "editable"): whether refreshing the field's own rows repairs the decision depends on
where the decision reads from, and that shows before the repair: in the reads recorded at prefill, in the attention of the last
row, in the note map of *another* value of the field (:mod:`notelens.edits.diagnostic`).

Falsifier: the rank correlation of predicted and true recovery of ``in_place`` on held-out prompts is below 0.7, or predictions
fitted on one model fail on another (``--across RUN_A RUN_B``: fitted on prompts of A, measured on held-out prompts of B).

Prompts of several kinds are mixed (``sources``), because among prompts that all keep their conclusion in notes there is nothing
to rank. Calibration prompts come from the training split of the task, held-out ones from its evaluation split. The value that
is set plays no part in any feature; where no other value changes the decision, the features of the note map are missing and the
prompt counts for the cheaper levels only. ``level``: ``recorded`` (no token), ``one_token``, ``mapped``.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from experiments.edit_arms import Arm, Bench, Row
from experiments.edit_cases import Case, gated_cases
from experiments.edit_harness import EditConfig, Line, Stage, Sums, main, show
from experiments.organism_cases import organism_cases
from notelens.edits.diagnostic import MAPPED, ONE_TOKEN, RECORDED, Diagnostic, Signs, signs
from notelens.errors import AnswerError, ConfigError, LengthChangeError, SeamError
from notelens.models.base import NoteModel
from notelens.runs.manifest import read_manifest
from notelens.runs.records import read_records
from notelens.runs.tables import write_atomic
from notelens.stats import cluster_bootstrap, cluster_rate, rank_correlation
from notelens.tasks.organism import organism_families
from notelens.tasks.scenarios import load_families

LEVELS = {"recorded": RECORDED, "one_token": ONE_TOKEN, "mapped": MAPPED}
BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
REFERENCES = 3
"""Other values that are tried before the features of the note map are given up; all of them are charged."""
METRICS = ("competence", "rank_correlation", "absolute_error", "needs_more_accuracy", "refresh_suffices", "tokens")
CALIBRATION, HELD_OUT = "calibration", "held_out"


class DiagnosticConfig(EditConfig):
    """Configuration of this experiment; ``n`` prompts of every source, for calibration and held out.

    Attributes:
        sources: name to what the cases are made with, beyond the configuration (``order``, ``kinds``, ``length``, ...).
        calibration_split: of the task; ``split`` is for held-out prompts.
    """

    sources: dict[str, dict[str, Any]]
    calibration_split: Literal["train", "eval"] = "train"


def mixed_cases(model: NoteModel, config: DiagnosticConfig, stage: Stage) -> list[Case]:
    """Calibration and held-out prompts of every source.

    Raises:
        ConfigError: both come from the same split, or the task is not known here.
    """
    if config.calibration_split == config.split:
        raise ConfigError(f"calibration and held-out prompts are both from split {config.split!r}; choose two")
    makers: dict[str, Any] = {"gated": gated_cases, "organism": organism_cases}
    if config.task not in makers:
        raise ConfigError(f"task {config.task!r} has no cases here; use {' or '.join(makers)}")
    found: list[Case] = []
    for part, split in ((CALIBRATION, config.calibration_split), (HELD_OUT, config.split)):
        for name, source in config.sources.items():
            options = {"forms": config.forms, "order": config.order, **source}
            if config.task == "organism":
                options = {"kinds": config.kinds, **options}
            for case in makers[config.task](model.tokenizer, config.n, config.seed, split=split, **options):
                meta = {**case.meta, "part": part, "source": name, "others": other_values(config.task, case)}
                found.append(replace(case, id=f"{part}/{name}/{case.id}", meta=meta))
    return found


def other_values(task: str, case: Case) -> tuple[str, ...]:
    """Values of the case's family that it does not use, in an order of its own."""
    families = organism_families() if task == "organism" else load_families()
    values = next(f for f in families if f.name == case.family).values
    rest = [v for v in values if v not in case.values]
    random.Random(case.seed).shuffle(rest)
    return tuple(rest)


def look(bench: Bench, others: Sequence[str]) -> tuple[Signs, int]:
    """Signs of a case with the first usable reference, and all tokens run on the way."""
    context, field = bench.recorded, bench.case.name
    spent = 0
    for value in others[:REFERENCES]:
        try:
            found = signs(context, field, value)
        except (LengthChangeError, SeamError):
            continue
        except AnswerError:
            # attention, prefill, and at most every row behind the field
            spent += 1 + len(context) + len(context.tokens.ids[context.tokens.positions(field)[0] :])
            continue
        return found, spent + found.tokens
    found = signs(context, field)
    return found, spent + found.tokens


class DiagnosticExperiment:
    """Signs and truth of every prompt; fitted and judged when all are there."""

    name = "diagnostic"

    def stages(self, config: DiagnosticConfig) -> list[Stage]:
        """One: what is fitted needs all sources."""
        return [Stage("all", {}, {})]

    def measure(self, model: NoteModel, config: DiagnosticConfig, stage: Stage, case: Case) -> list[Row]:
        """Truth and signs of one case."""
        bench = Bench(model, case)
        where = {"part": case.meta["part"], "source": case.meta["source"]}
        first: Row = {**bench.facts(), **where, "method": "full_prefill"}
        if first["excluded"] is not None:
            return [first]
        truth = bench.row(Arm.parse("in_place"))
        if truth["excluded"] is not None:
            return [first, {**truth, **where}]
        found, tokens = look(bench, case.meta["others"])
        return [first, {**truth, **where, "signs": asdict(found), "sign_tokens": tokens}]

    def aggregate(self, config: DiagnosticConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Fit on calibration prompts, judge on held-out ones."""
        sums = Sums(self.name, config, stage, rows)
        sums.competence()
        judge(sums, rows, rows, {})
        return sums.lines


def judge(sums: Sums, fitted_on: Sequence[Row], rows: Sequence[Row], params: dict[str, Any]) -> None:
    """Lines of every level: fitted on the calibration rows of one run, measured on the held-out rows of another or the same."""
    for level, names in LEVELS.items():
        parts = {CALIBRATION: usable(fitted_on, CALIBRATION, names), HELD_OUT: usable(rows, HELD_OUT, names)}
        of = {**params, "n_calibration": len(parts[CALIBRATION])}
        held = parts[HELD_OUT]
        whole = [r for r in rows if r["part"] == HELD_OUT and r["method"] == "in_place"]
        lost = [str(r["excluded"] or "no other value changes the decision") for r in whole if r not in held]
        if len(parts[CALIBRATION]) < 3 or len(held) < 3:
            sums.add("rank_correlation", level, rank_correlation([], []), excluded=lost, unit="Spearman", params=of)
            continue
        model = Diagnostic.fit(
            [signs_of(r) for r in parts[CALIBRATION]], [r["recovery"] for r in parts[CALIBRATION]], names
        )
        predicted = [model.predict(signs_of(r)) for r in held]
        truth, families = [float(r["recovery"]) for r in held], [r["family"] for r in held]
        seed = sums.config.seed
        correlation = rank_correlation(predicted, truth, families, seed=seed)
        sums.add(
            "rank_correlation", level, correlation, excluded=lost, unit="Spearman", params=of, fitted=model.to_dict(),
        )  # fmt: skip
        for name in names if level == "mapped" else ():
            alone = rank_correlation([r["signs"][name] for r in held], truth, families, seed=seed)
            sums.add("rank_correlation_of_feature", name, alone, excluded=lost, unit="Spearman", params=of)
        for label, guess in (
            ("", predicted),
            ("_of_mean", [sum(p["recovery"] for p in parts[CALIBRATION]) / len(parts[CALIBRATION])] * len(held)),
        ):
            gaps = [abs(min(1.0, max(0.0, t)) - g) for t, g in zip(truth, guess, strict=True)]
            error = cluster_bootstrap(gaps, families, "mean", seed=seed)
            sums.add(f"absolute_error{label}", level, error, excluded=lost, unit="recovery", params=of)
        hit = [(p < 0.5) != bool(r["right"]) for p, r in zip(predicted, held, strict=True)]
        sums.add("needs_more_accuracy", level, cluster_rate(hit, families), excluded=lost, params=of)
        enough = cluster_rate([bool(r["right"]) for r in held], families)
        sums.add("refresh_suffices", level, enough, excluded=lost, params=of)
        if level == "mapped":
            cost = cluster_bootstrap([float(r["sign_tokens"]) for r in held], families, "mean", seed=seed)
            sums.add("tokens", level, cost, excluded=lost, unit="tokens", params=of)
        calibration(sums, level, of, held, predicted)


def calibration(
    sums: Sums, level: str, params: dict[str, Any], held: Sequence[Row], predicted: Sequence[float]
) -> None:
    """Mean true recovery of the prompts in every bin of predictions; bins without prompts have no line."""
    for low, high in pairwise(BINS):
        inside = [i for i, p in enumerate(predicted) if low <= p < high or (high == 1.0 and p == 1.0)]
        if not inside:
            continue
        truth = cluster_bootstrap(
            [float(held[i]["recovery"]) for i in inside],
            [held[i]["family"] for i in inside],
            "mean",
            seed=sums.config.seed,
        )
        mean = sum(predicted[i] for i in inside) / len(inside)
        sums.add(
            "calibration",
            level,
            truth,
            unit="recovery",
            params={**params, "bin": f"{low:.1f}-{high:.1f}"},
            predicted=mean,
        )


def signs_of(row: Row) -> Signs:
    """Signs of a row of the record."""
    return Signs(**row["signs"])


def usable(rows: Sequence[Row], part: str, names: Sequence[str]) -> list[Row]:
    """Measured rows of a part that have all the features."""
    found = [r for r in rows if r["part"] == part and "signs" in r]
    return [r for r in found if all(r["signs"][name] is not None for name in names)]


def across(fitted: Path, measured: Path) -> list[Line]:
    """Fit on the calibration prompts of one run, judge on the held-out prompts of another (of another model).

    Raises:
        ConfigError: a folder is no finished run of this experiment.
    """
    data: list[tuple[DiagnosticConfig, list[Row]]] = []
    for folder in (fitted, measured):
        manifest, records = read_manifest(folder), read_records(folder)
        if manifest is None or DiagnosticExperiment.name not in records.probes:
            raise ConfigError(f"{folder} is no finished run of {DiagnosticExperiment.name}; run it first")
        config = DiagnosticConfig.model_validate({k: v for k, v in manifest["config"].items() if k != "probes"})
        data.append((config, [r for rows in records.items.values() for r in rows]))
    (first, fitted_rows), (second, rows) = data
    sums = Sums(DiagnosticExperiment.name, second, Stage("across", {}, {}), rows)
    judge(sums, fitted_rows, rows, {"fitted_on": first.model})
    return sums.lines


def command(arguments: list[str] | None = None) -> None:
    """Command line: an ordinary run, or ``--across``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--across", nargs=2, type=Path)
    given, rest = parser.parse_known_args(arguments)
    if given.across is None:
        main(DiagnosticExperiment(), DiagnosticConfig, METRICS, rest, source=mixed_cases)
        return
    lines = across(*given.across)
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    write_atomic(given.across[1] / f"across-{lines[0]['params']['fitted_on']}.jsonl", text)
    sys.stdout.write(show(lines, METRICS))


if __name__ == "__main__":
    command()
