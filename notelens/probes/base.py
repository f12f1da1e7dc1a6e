"""What a probe is, the rows it measures and the aggregates it reports.

A probe looks at instances of a task through a :class:`~notelens.context.ContextStore` and yields plain rows; aggregates
are functions of rows only, so they can be recomputed from records without a model. All probes here are *isolated* swaps
(DESIGN section 2): rows of the cache are replaced and only the decision token runs.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

from notelens.cache.kv import KVCache
from notelens.context import Context, ContextStore
from notelens.errors import CompetenceError, InputError, PatchError, TaskError
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.prompt import Axis, Pair
from notelens.readout import Recovery, exclusion
from notelens.stats import Estimate, cluster_bootstrap, cluster_rate
from notelens.tasks.base import Instance

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


class Probe(ABC):
    """Base class. A subclass declares what it needs, measures one item at a time, and aggregates rows.

    Class attributes:
        name: registry name and the ``experiment`` of its records.
        paper_ref: section of arXiv:2606.17107 it implements.
        claim: the statement under test, one sentence.
        falsifier: what result would contradict it.
        swap: ``isolated`` or ``none``.
        stages: names of stages in order; items of a later stage may depend on rows of earlier ones.
    """

    name: ClassVar[str]
    paper_ref: ClassVar[str]
    claim: ClassVar[str]
    falsifier: ClassVar[str]
    swap: ClassVar[str] = "isolated"
    stages: ClassVar[tuple[str, ...]] = ("measure",)

    @abstractmethod
    def items(self, instances: Sequence[Instance], stage: str, earlier: Sequence[Row]) -> list[Item]:
        """Work of one stage, in a fixed order. ``earlier`` are all rows of earlier stages."""

    @abstractmethod
    def measure(self, store: ContextStore, item: Item) -> list[Row]:
        """Rows of one item; a pure function of model and item."""

    @abstractmethod
    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        """Table lines from rows of all stages."""

    def run(
        self,
        store: ContextStore,
        instances: Sequence[Instance],
        *,
        seed: int = 0,
        on_item: Callable[[Item, int, int], None] | None = None,
    ) -> ProbeResult:
        """Measure everything in this process; what notebooks and scripts call.

        Args:
            store: contexts of the model.
            instances: of a task.
            seed: of the bootstrap.
            on_item: called as ``(item, done, total)`` after each item of a stage.

        Raises:
            CompetenceError: no row could be measured because the model never decides right.
        """
        rows: list[Row] = []
        for stage in self.stages:
            items = self.items(instances, stage, rows)
            for done, item in enumerate(items, start=1):
                rows.extend(self.measure(store, item))
                if on_item is not None:
                    on_item(item, done, len(items))
        if rows and all(row.excluded is not None for row in rows):
            reasons = Counter(row.excluded for row in rows)
            raise CompetenceError(
                f"{self.name}: none of {len(rows)} rows could be measured "
                f"({', '.join(f'{k}: {v}' for k, v in sorted(reasons.items(), key=str))}); "
                "where the model does not decide the task, a probe says nothing about it"
            )
        return ProbeResult(self.name, tuple(rows), tuple(self.aggregate(rows, seed=seed)))


@dataclass(frozen=True)
class Swapped:
    """What :func:`swap_pair` measured in one direction.

    Attributes:
        direction: which end was patched.
        recipient, donor: unpatched margins towards the donor's answer.
        excluded: why recoveries are undefined, or ``None``.
        recoveries: one per site, in order; present also when excluded (their margins then still mean something).
    """

    direction: Direction
    recipient: float
    donor: float
    excluded: str | None
    recoveries: tuple[Recovery, ...]

    @property
    def competent(self) -> bool:
        """Both unpatched ends give their own right answer."""
        return self.recipient < 0 < self.donor


def ends(pair: Pair, direction: Direction) -> Pair:
    """``pair`` oriented so that ``old`` is the recipient of this direction."""
    return pair if direction == "denoising" else pair.reversed()


def pairs_along(
    instances: Sequence[Instance], axis: Axis, *, per_instance: int = 2, forms: Sequence[str] | None = None
) -> list[tuple[Instance, Pair]]:
    """Pairs of prompts along one axis of every instance that has them, in the order of the instances.

    Args:
        instances: of a task.
        axis: which span differs.
        per_instance: at most so many pairs per instance (1 or 2).
        forms: rule forms to use; all when ``None``.

    Raises:
        InputError: ``per_instance`` is not 1 or 2.
        TaskError: no instance has such a pair; the message names the forms there are.
    """
    check_pairs(per_instance)
    found: list[tuple[Instance, Pair]] = []
    for instance in instances:
        if forms is not None and instance.form not in forms:
            continue
        cells = instance.conclusion
        steps = [(((0, at), (1, at)) if axis == "field" else ((at, 0), (at, 1)), at) for at in (0, 1)]
        usable = [at for (a, b), at in steps if a in cells and b in cells and cells[a] != cells[b]]
        found += [(instance, instance.pair(axis, at)) for at in usable[:per_instance]]
    if not found:
        have = ", ".join(sorted({i.form for i in instances})) or "none"
        wanted = "" if forms is None else f" of form {' or '.join(forms)}"
        raise TaskError(
            f"no instance{wanted} has a pair along the {axis} axis ({len(instances)} instances, forms: {have})"
        )
    return found


def check_pairs(per_instance: int) -> int:
    """The argument, if it is 1 or 2; otherwise an :class:`InputError`."""
    if per_instance not in (1, 2):
        raise InputError(
            f"pairs_per_instance is {per_instance!r}; an instance has at most 2 pairs along an axis, so 1 or 2"
        )
    return per_instance


def margins(
    store: ContextStore,
    recipient: Context,
    donors: Sequence[KVCache],
    sites: Sequence[Site],
    answer_ids: tuple[int, int],
) -> tuple[float, list[float]]:
    """Margins logit(second answer) - logit(first) of the unpatched recipient and behind each patched site.

    Cost: one batch of ``len(sites) + 1`` one-token readers.
    """
    reader = Reader.last(recipient.cache, answer_ids)
    out = swap_effects(store.model, recipient.cache, donors, sites, reader)
    return float(out.baseline[1] - out.baseline[0]), (out.logits[:, 1] - out.logits[:, 0]).tolist()


def swap_pair(store: ContextStore, pair: Pair, sites: Sequence[Site], direction: Direction) -> Swapped:
    """Run isolated swaps between the two prompts of a pair.

    ``denoising`` puts rows of ``new`` into the cache of ``old``; ``noising`` the reverse. Margins are
    logit(donor's answer) - logit(recipient's answer) at the decision position. Both unpatched ends are run through the
    engine like the patched readers.

    Cost: two prefills (shared through the store) and one batch of ``len(sites) + 2`` one-token readers.
    """
    oriented = ends(pair, direction)
    recipient, donor = store.get(oriented.old), store.get(oriented.new)
    base, patched = margins(store, recipient, [donor.cache], sites, oriented.answer_ids)
    other, _ = margins(store, donor, [], [], oriented.answer_ids)
    return Swapped(direction, base, other, exclusion(base, other), tuple(Recovery(base, other, m) for m in patched))


def check_fired(swapped: Swapped, what: str) -> None:
    """Refuse a set of swaps of which none moved the decision by a single bit.

    Raises:
        PatchError: every patched margin equals the unpatched one although the two ends decide differently.
    """
    if swapped.competent and swapped.recoveries and all(r.patched == r.recipient for r in swapped.recoveries):
        raise PatchError(
            f"{what}: {len(swapped.recoveries)} swaps, among them one of all rows, leave the margin at exactly "
            f"{swapped.recipient}; the patches did not reach the attention of this model"
        )


def end_values(swapped: Swapped) -> dict[str, Json]:
    """The facts about the two unpatched ends that every row of a swap carries."""
    return {
        "recipient_margin": swapped.recipient,
        "donor_margin": swapped.donor,
        "margin_gap": swapped.donor - swapped.recipient,
        "competent": swapped.competent,
    }


def site_values(swapped: Swapped, names: Sequence[str]) -> dict[str, Json]:
    """Recovery, flip, margin and two-way probability of every site, by name; nothing where recoveries are undefined."""
    if swapped.excluded is not None:
        return {}
    values: dict[str, Json] = {}
    for name, recovery in zip(names, swapped.recoveries, strict=True):
        values |= {
            f"{name}_recovery": recovery.value,
            f"{name}_flipped": recovery.flipped,
            f"{name}_margin": recovery.patched,
            f"{name}_probability": recovery.probability,
        }
    return values


def pair_meta(instance: Instance, pair: Pair) -> dict[str, Json]:
    """What a record says about a pair."""
    return {**pair.meta, "instance": instance.id, "form": pair.form, "axis": pair.axis, "group": instance.group}


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
