"""One probe of a run: items not on record are measured, the others are read back, and rows become aggregates."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from notelens.context import ContextStore
from notelens.errors import CompetenceError, RecordError, TaskError
from notelens.probes.base import Aggregate, Item, Probe, Row, nothing_measured
from notelens.runs.plan import Planned
from notelens.runs.progress import Progress
from notelens.runs.records import Line, RecordWriter, plain
from notelens.runs.tables import paper
from notelens.tasks.base import Instance

NOT_FINITE = "not finite"
"""Exclusion of a row in which a probe left NaN or infinity; the other values of the row stay on record."""


@dataclass(frozen=True)
class Stamp:
    """What every record of a run carries.

    Attributes:
        config: hash of the configuration.
        seed: of the run.
        gate: ``passed`` or ``ungated``.
        facts: of the model.
    """

    config: str
    seed: int
    gate: str
    facts: Mapping[str, Any]

    @property
    def short(self) -> Line:
        """What instance records carry; the header of the file has the rest."""
        return {"model": self.facts["name"], "gate": self.gate, "config": self.config}

    @property
    def full(self) -> Line:
        """What aggregate records carry."""
        facts = self.facts
        return {
            "model": facts["name"],
            "revision": facts.get("revision"),
            "weights_hash": facts.get("weights_hash"),
            "dtype": facts.get("dtype"),
            "attention": facts.get("attention_kernel"),
            "device": facts.get("device"),
            "seed": self.seed,
            "gate": self.gate,
            "config": self.config,
        }


@dataclass(frozen=True)
class Measured:
    """What became of one probe.

    Attributes:
        n_measured, n_read: items measured now and items read from the records.
        n_rows, n_excluded: rows, and those of them without values.
        n_aggregates: lines of the table.
        incompetent: why nothing could be measured, or ``None``.
    """

    n_measured: int
    n_read: int
    n_rows: int
    n_excluded: int
    n_aggregates: int
    incompetent: str | None


def measure(
    planned: Planned, instances: Sequence[Instance], store: ContextStore, writer: RecordWriter, stamp: Stamp,
    progress: Progress,
) -> Measured:  # fmt: skip
    """Measure and aggregate one probe, continuing behind what is on record.

    Rows are always those read back from their records, so that a resumed run computes from the same numbers.

    Raises:
        RecordError: a record could not be written; everything before it is kept.
        TaskError: the probe gives two items one id.
    """
    probe = planned.probe
    rows: list[Row] = []
    n_measured = n_read = 0
    aggregates: list[Aggregate] = []
    incompetent: str | None = None
    try:
        for stage in probe.stages:
            items = probe.items(instances, stage, tuple(rows))
            _check_ids(probe, stage, items)
            held = [writer.records.items.get((probe.name, stage, item.id)) for item in items]
            n_held = sum(lines is not None for lines in held)
            progress.stage(probe.name, stage, len(items), n_held)
            for item, known in zip(items, held, strict=True):
                lines = known
                if lines is None:
                    group = item_group(probe, stage, item, probe.measure(store, item), stamp)
                    lines = writer.write(group)[:-1]
                    progress.item()
                rows += [Row.from_json(line) for line in lines]
            n_read += n_held
            n_measured += len(items) - n_held
        incompetent = nothing_measured(probe.name, rows)
        aggregates = probe.aggregate(rows, seed=stamp.seed)
    except CompetenceError as e:
        incompetent = str(e)
    body = [aggregate_line(a, stamp) for a in aggregates]
    end = {
        "kind": "probe",
        "experiment": probe.name,
        "n_lines": len(body),
        "n_rows": len(rows),
        "incompetent": incompetent,
    }
    writer.write([*body, end])
    n_excluded = sum(row.excluded is not None for row in rows)
    return Measured(n_measured, n_read, len(rows), n_excluded, len(body), incompetent)


def item_group(probe: Probe, stage: str, item: Item, rows: Sequence[Row], stamp: Stamp) -> list[Line]:
    """Instance lines of one item and its end marker."""
    where = {"experiment": probe.name, "stage": stage, "item": item.id}
    body = [
        {"kind": "instance", "experiment": probe.name, **_finite(row), "swap": probe.swap, **stamp.short}
        for row in rows
    ]
    for line in body:
        if (line["item"], line["stage"]) != (item.id, stage):
            raise RecordError(f"{probe.name}: item {item.id!r} of stage {stage!r} gave a row of {line['item']!r}")
    return [*body, {"kind": "item", **where, "n_lines": len(body)}]


def _finite(row: Row) -> Line:
    """The fields of a row; one that holds NaN or infinity is excluded, and says so."""
    line: Line = {name: getattr(row, name) for name in Row.__dataclass_fields__}
    nulls = plain(row.values)[1]
    if nulls and row.excluded is None:
        line["excluded"] = NOT_FINITE
    return line


def aggregate_line(aggregate: Aggregate, stamp: Stamp) -> Line:
    """The record of one line of a table, with the paper's value beside it."""
    e = aggregate.estimate
    line: Line = {
        "kind": "aggregate",
        "experiment": aggregate.experiment,
        "metric": aggregate.metric,
        "method": aggregate.method,
        "params": dict(aggregate.params),
        "value": e.value,
        "lo": e.lo,
        "hi": e.hi,
        "n": e.n,
        "n_clusters": e.n_clusters,
        "n_excluded": aggregate.n_excluded,
        "reasons": dict(aggregate.reasons),
        "swap": aggregate.swap,
        "unit": aggregate.unit,
        "control": aggregate.control,
        "interval": e.method,
        "level": e.level,
        "flags": list(e.flags),
        **stamp.full,
    }
    return {**line, **paper(line)}


def _check_ids(probe: Probe, stage: str, items: Sequence[Item]) -> None:
    twice = [name for name, n in Counter(item.id for item in items).items() if n > 1]
    if twice:
        raise TaskError(f"{probe.name}: stage {stage!r} has two items with the id {twice[0]!r}; records are kept by id")
