"""What a probe is.

A probe looks at instances of a task through a :class:`~notelens.context.ContextStore` and yields plain rows; aggregates
are functions of rows only, so they can be recomputed from records without a model. All probes here are *isolated* swaps
(DESIGN section 2): rows of the cache are replaced and only the decision token runs.

Rows and aggregates are in :mod:`~notelens.probes.rows`, swaps in :mod:`~notelens.probes.swaps`, table lines in
:mod:`~notelens.probes.lines`; whoever writes a probe imports all of them from here.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from notelens.context import ContextStore
from notelens.errors import CompetenceError
from notelens.probes.lines import at_index, by_direction, ends_lines, excluded_reasons, mean_lines, rate_lines, rounded
from notelens.probes.rows import DIRECTIONS, Aggregate, Direction, Item, Json, ProbeResult, Row
from notelens.probes.swaps import (
    Swapped,
    check_fired,
    check_pairs,
    end_values,
    ends,
    field_and_downstream,
    margins,
    opposite,
    pair_meta,
    pairs_along,
    single_effects,
    site_values,
    swap_pair,
)
from notelens.tasks.base import Instance

__all__ = [
    "DIRECTIONS",
    "Aggregate",
    "Direction",
    "Item",
    "Json",
    "Probe",
    "ProbeResult",
    "Row",
    "Swapped",
    "at_index",
    "by_direction",
    "check_fired",
    "check_pairs",
    "end_values",
    "ends",
    "ends_lines",
    "excluded_reasons",
    "field_and_downstream",
    "margins",
    "mean_lines",
    "nothing_measured",
    "opposite",
    "pair_meta",
    "pairs_along",
    "rate_lines",
    "rounded",
    "single_effects",
    "site_values",
    "swap_pair",
]


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
        if (why := nothing_measured(self.name, rows)) is not None:
            raise CompetenceError(why)
        return ProbeResult(self.name, tuple(rows), tuple(self.aggregate(rows, seed=seed)))


def nothing_measured(name: str, rows: Sequence[Row]) -> str | None:
    """The sentence of a :class:`CompetenceError` where every row was excluded, else ``None``."""
    reasons = Counter(str(row.excluded) for row in rows if row.excluded is not None)
    if not rows or sum(reasons.values()) < len(rows):
        return None
    return (
        f"{name}: none of {len(rows)} rows could be measured "
        f"({', '.join(f'{reason}: {n}' for reason, n in sorted(reasons.items()))}); the model does not decide this "
        "task, so the probe says nothing about it"
    )
