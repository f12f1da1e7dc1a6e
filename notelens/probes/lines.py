"""From rows to table lines: means and rates with intervals, for both directions together and each on its own."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from notelens.probes.rows import DIRECTIONS, Aggregate, Json, Row
from notelens.stats import cluster_bootstrap, cluster_rate


def rounded(values: Iterable[float]) -> list[float]:
    """Six digits: what lists of numbers are stored with."""
    return [round(float(v), 6) for v in values]


def at_index(rows: Sequence[Row], key: str, index: int, reason: str) -> list[Row]:
    """Rows that carry entry ``index`` of the list ``key`` as ``value``; where it is ``None`` they are excluded.

    Args:
        rows: of one stage.
        key: name of a list in ``Row.values``.
        index: entry of the list.
        reason: why the entry may be missing.
    """
    found: list[Row] = []
    for row in rows:
        if row.excluded is not None:
            found.append(row)
            continue
        entry = cast(Sequence[Any], row.values[key])[index] if key in row.values else None
        found.append(replace(row, excluded=reason) if entry is None else replace(row, values={"value": entry}))
    return found


def excluded_reasons(rows: Iterable[Row]) -> dict[str, int]:
    """How many rows were excluded for which reason."""
    return dict(sorted(Counter(r.excluded for r in rows if r.excluded is not None).items()))


def by_direction(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """``("both", all)``, then each direction on its own where rows have one."""
    yield "both", list(rows)
    if any(r.direction for r in rows):
        for direction in DIRECTIONS:
            yield direction, [r for r in rows if r.direction == direction]


def mean_lines(
    experiment: str,
    rows: Sequence[Row],
    metrics: Mapping[str, str],
    *,
    unit: str = "recovery",
    swap: str = "isolated",
    params: Mapping[str, Json] | None = None,
    control: str | None = None,
    seed: int = 0,
) -> list[Aggregate]:
    """Cluster-bootstrapped means, both directions pooled and each on its own.

    Args:
        metrics: name in ``Row.values`` -> metric name in the table.
    """
    lines: list[Aggregate] = []
    for method, chosen in by_direction(rows):
        kept = [r for r in chosen if r.excluded is None]
        for key, metric in metrics.items():
            values = [float(r.values[key]) for r in kept]  # type: ignore[arg-type]  # JSON number by contract
            estimate = cluster_bootstrap(values, [r.cluster for r in kept], seed=seed)
            lines.append(
                Aggregate(
                    experiment, metric, method, dict(params or {}), estimate, len(chosen) - len(kept),
                    excluded_reasons(chosen), swap, unit, control,
                )
            )  # fmt: skip
    return lines


def rate_lines(
    experiment: str,
    rows: Sequence[Row],
    metrics: Mapping[str, str],
    *,
    include_excluded: bool = False,
    swap: str = "isolated",
    params: Mapping[str, Json] | None = None,
    control: str | None = None,
) -> list[Aggregate]:
    """Shares of true values with Wilson intervals at the effective n of clustered rows; both directions, then each.

    Args:
        metrics: name of a boolean in ``Row.values`` -> metric name in the table.
        include_excluded: count excluded rows too (for ``competence``, which must not depend on exclusions).
    """
    lines: list[Aggregate] = []
    for method, chosen in by_direction(rows):
        kept = [r for r in chosen if include_excluded or r.excluded is None]
        for key, metric in metrics.items():
            estimate = cluster_rate([bool(r.values[key]) for r in kept], [r.cluster for r in kept])
            lines.append(
                Aggregate(
                    experiment, metric, method, dict(params or {}), estimate, len(chosen) - len(kept),
                    {} if include_excluded else excluded_reasons(chosen), swap, "fraction", control,
                )
            )  # fmt: skip
    return lines


def ends_lines(experiment: str, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
    """``competence`` over all rows, and the mean ``margin_gap`` in logits over those that are used."""
    return [
        *rate_lines(experiment, rows, {"competent": "competence"}, include_excluded=True),
        *mean_lines(experiment, rows, {"margin_gap": "margin_gap"}, unit="logit", seed=seed),
    ]
