"""The paper's numbers, for printing beside ours.

``reference.yaml`` holds facts from arXiv:2606.17107 and its released records under this library's names. A reference
row is never an input to a measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from notelens.errors import InputError

Interval = tuple[float, float]
Number = float | int | str
Method = Literal["bootstrap", "stride_index"]


@dataclass(frozen=True)
class ReferenceRow:
    """One number of the paper.

    Attributes:
        experiment, metric: names as in our tables.
        params: conditions that select the row (``{"k": 8}``); empty where there is one number per model.
        model: short name used in the file.
        model_ids: hub ids of these weights, the one the release used first.
        value: as in the released record.
        printed: as in the paper's text, ``None`` where it is not printed.
        released: 95 % interval as released.
        released_method: ``"bootstrap"``, or ``"stride_index"`` (a fixed index pattern, not resampling).
        resampled: percentile bootstrap over the released instances, 10,000 draws.
        n: instances.
        detail: further facts (anchor, layer, number of layers).
        record: file of the release; ``source``: id in the reference collection; ``ref``: label in the paper.
        discrepancies: ids for :func:`discrepancy`.
        unusable: why the row is left out of ranges, ``None`` for a good row.
        note: what the number means where that differs from ours.
    """

    experiment: str
    metric: str
    params: Mapping[str, Number]
    model: str
    model_ids: tuple[str, ...]
    value: float
    printed: float | None
    released: Interval | None
    released_method: Method | None
    resampled: Interval | None
    n: int | None
    detail: Mapping[str, Number]
    record: str
    source: str
    ref: str
    discrepancies: tuple[str, ...]
    unusable: str | None
    note: str | None

    def is_of(self, model: str) -> bool:
        """Whether ``model`` (hub id or short name, any case) names this row's model."""
        return model.lower() in {name.lower() for name in (self.model, *self.model_ids)}


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Curve(_Closed):
    k: tuple[int, ...]
    value: tuple[float, ...]
    released: tuple[Interval, ...] | None = None
    printed: tuple[float | None, ...] | None = None
    resampled: dict[int, Interval] = Field(default_factory=dict[int, Interval])


class _Entry(_Closed):
    experiment: str
    metric: str
    model: str
    source: str
    record: str
    ref: str
    n: int | None
    value: float | None = None
    curve: _Curve | None = None
    params: dict[str, Number] = Field(default_factory=dict[str, Number])
    released: Interval | None = None
    printed: float | None = None
    resampled: Interval | None = None
    detail: dict[str, Number] = Field(default_factory=dict[str, Number])
    discrepancies: tuple[str, ...] = ()
    unusable: str | None = None
    note: str | None = None


class _File(_Closed):
    paper: dict[str, str]
    intervals: dict[Method, tuple[str, ...]]
    models: dict[str, tuple[str, ...]]
    discrepancies: dict[str, str]
    entries: tuple[_Entry, ...]


@cache
def _file() -> _File:
    import yaml

    text = resources.files("notelens.report").joinpath("reference.yaml").read_text(encoding="utf-8")
    return _File.model_validate(yaml.safe_load(text))


def _expand(entry: _Entry, file: _File) -> list[ReferenceRow]:
    """The entry's rows: one, or one per point of its curve."""
    method: Method | None = None
    for name, beginnings in file.intervals.items():
        if entry.record.startswith(beginnings):
            method = name

    def row(
        value: float,
        params: dict[str, Number],
        printed: float | None,
        released: Interval | None,
        resampled: Interval | None,
    ) -> ReferenceRow:
        return ReferenceRow(
            experiment=entry.experiment,
            metric=entry.metric,
            params=MappingProxyType(params),
            model=entry.model,
            model_ids=file.models[entry.model],
            value=value,
            printed=printed,
            released=released,
            released_method=method if released else None,
            resampled=resampled,
            n=entry.n,
            detail=MappingProxyType(entry.detail),
            record=entry.record,
            source=entry.source,
            ref=entry.ref,
            discrepancies=entry.discrepancies,
            unusable=entry.unusable,
            note=entry.note,
        )

    curve = entry.curve
    if curve is None:
        if entry.value is None:
            raise InputError(f"reference entry {entry.source!r} has neither a value nor a curve")
        return [row(entry.value, entry.params, entry.printed, entry.released, entry.resampled)]
    return [
        row(
            value,
            {"k": k},
            curve.printed[i] if curve.printed else None,
            curve.released[i] if curve.released else None,
            curve.resampled.get(k),
        )
        for i, (k, value) in enumerate(zip(curve.k, curve.value, strict=True))
    ]


@cache
def _rows() -> tuple[ReferenceRow, ...]:
    file = _file()
    return tuple(row for entry in file.entries for row in _expand(entry, file))


def reference_rows(
    experiment: str, metric: str, params: Mapping[str, object] | None = None, model: str | None = None
) -> list[ReferenceRow]:
    """The paper's rows for one metric; an empty list where it reports none.

    Args:
        experiment: name of the experiment, as in our tables.
        metric: name of the metric, as in our tables.
        params: conditions, for instance ``{"k": 8}``. Only the conditions that the paper varies for this metric are
            compared, and they must agree exactly: without ``k``, or with ``k`` ``None``, rows that have a ``k`` do not
            match. ``None`` gives the rows of all conditions.
        model: hub id or short name; ``None`` gives all models.
    """
    rows = [row for row in _rows() if (row.experiment, row.metric) == (experiment, metric)]
    if params is not None:
        varied = {key for row in rows for key in row.params}
        wanted = {key: params[key] for key in varied if params.get(key) is not None}
        rows = [row for row in rows if row.params == wanted]
    return [row for row in rows if model is None or row.is_of(model)]


def reference_range(
    experiment: str, metric: str, params: Mapping[str, object] | None = None, model: str | None = None
) -> str:
    """What to print beside our number.

    Args:
        experiment, metric, params: as :func:`reference_rows`, except that ``None`` means "no condition".
        model: hub id or short name of the model we measured.

    Returns:
        The paper's value where it measured ``model`` (several records of one quantity are joined: ``"0.004 / 0.137"``),
        else the range over its models (``"0.744..0.955 (5 models)"``), else ``""``. Rows marked unusable are left out,
        and a range says how many.
    """
    rows = reference_rows(experiment, metric, params or {})
    usable = [row for row in rows if row.unusable is None]
    own = [row for row in usable if model is not None and row.is_of(model)]
    if own:
        return " / ".join(str(value) for value in dict.fromkeys(row.value for row in own))
    if not usable:
        return ""
    values = [row.value for row in usable]
    low, high = min(values), max(values)
    n_models = len({row.model for row in usable})
    left_out = f", {len(rows) - len(usable)} unusable left out" if len(rows) > len(usable) else ""
    span = str(low) if low == high else f"{low}..{high}"
    return f"{span} ({n_models} model{'s' if n_models > 1 else ''}{left_out})"


def discrepancy(name: str) -> str:
    """One sentence on a difference between the paper's text and its released records.

    Raises:
        InputError: unknown id; the message lists those of the file.
    """
    known = _file().discrepancies
    if name not in known:
        raise InputError(f"unknown discrepancy {name!r}; the file has {', '.join(sorted(known))}")
    return known[name]
