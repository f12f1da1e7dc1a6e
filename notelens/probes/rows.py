"""The rows that a probe measures and the aggregates it reports; both can be written to records and read back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from notelens.stats import Estimate

Direction = Literal["denoising", "noising"]
DIRECTIONS: tuple[Direction, Direction] = ("denoising", "noising")
Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True)
class Item:
    """One unit of work: finished or not, never half.

    Attributes:
        id: stable across processes; a run is resumed by it.
        stage: stage of the probe it belongs to.
        payload: what ``measure`` needs; not stored.
    """

    id: str
    stage: str
    payload: Any


@dataclass(frozen=True)
class Row:
    """One measured outcome of one item; exactly what is written as an instance record.

    Attributes:
        item: id of the item it belongs to.
        stage: stage of the probe.
        cluster: scenario family, by which intervals resample.
        direction: ``denoising`` (new rows into a stale cache), ``noising``, or ``""`` where no swap is involved.
        excluded: why the row carries no values, or ``None``.
        values: numbers, lists of numbers or short strings, JSON only. Recoveries, flips and margins by name.
        meta: facts about the instance (form, axis, group).
    """

    item: str
    stage: str
    cluster: str
    direction: str
    excluded: str | None
    values: Mapping[str, Json]
    meta: Mapping[str, Json] = field(default_factory=dict)

    def as_json(self) -> dict[str, Json]:
        """Plain dictionary for a record."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Row":
        """Inverse of :meth:`as_json`; keys of a newer schema are ignored."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


@dataclass(frozen=True)
class Aggregate:
    """One line of a table.

    Attributes:
        experiment: name of the probe.
        metric: name as in DESIGN section 8.
        method: ``both`` directions pooled, ``denoising``, ``noising``, or a control's name.
        params: what distinguishes lines of one metric (``k``, ``anchor``, ``form``).
        estimate: value, interval, n, clusters, flags.
        n_excluded: rows without values.
        reasons: how many were excluded for which reason.
        swap: ``isolated``, or ``none`` for readings that patch nothing.
        unit: ``recovery``, ``fraction``, ``depth``, ``accuracy``, ``share``, ``logit``.
        control: name of the metric that this one must be read against, if any.
    """

    experiment: str
    metric: str
    method: str
    params: Mapping[str, Json]
    estimate: Estimate
    n_excluded: int
    reasons: Mapping[str, int]
    swap: str
    unit: str
    control: str | None = None


@dataclass(frozen=True)
class ProbeResult:
    """Rows and aggregates of one probe on one model."""

    probe: str
    rows: tuple[Row, ...]
    aggregates: tuple[Aggregate, ...]

    def get(self, metric: str, method: str = "both", **params: Json) -> Aggregate:
        """The aggregate with this metric and method and exactly ``params``, or the only one whose params include them.

        Raises:
            KeyError: none or several match; the message lists what there is.
        """
        named = [a for a in self.aggregates if a.metric == metric and a.method == method]
        found = [a for a in named if dict(a.params) == params]
        if len(found) != 1:
            found = [a for a in named if all(a.params.get(k) == v for k, v in params.items())]
        if len(found) != 1:
            have = sorted({(a.metric, a.method, str(dict(a.params))) for a in self.aggregates})
            raise KeyError(f"{len(found)} aggregates match {metric!r}, {method!r}, {params}; there are {have}")
        return found[0]
