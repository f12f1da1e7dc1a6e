"""What a task is: a source of instances, each a small grid of prompts that share everything but field and rule."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from notelens.errors import TaskError
from notelens.prompt import Axis, Pair, Prompt

Cell = tuple[int, int]
"""(field index, rule index), each 0 or 1."""


@dataclass(frozen=True)
class Instance:
    """Up to four prompts in a 2 x 2 grid: two field values x two versions of the rule.

    Attributes:
        id: unique and stable across processes, e.g. ``parcel_return/polarity/003``.
        family: scenario family; intervals are clustered by it.
        form: rule form.
        group: id of the filler set, shared by all cells (and by the same index in other forms); cross-validation never
            splits a group.
        cells: prompts by (field, rule) index. Forms with one rule version hold only rule index 0.
        answers: the two answer words; index 0 is the restrictive action, index 1 the permissive one.
        answer_ids: first token of each answer word in the answer position.
        conclusion: index into ``answers`` of the right answer, per cell.
    """

    id: str
    family: str
    form: str
    group: str
    cells: Mapping[Cell, Prompt]
    answers: tuple[str, str]
    answer_ids: tuple[int, int]
    conclusion: Mapping[Cell, int]
    meta: Mapping[str, str | int | float]

    def __post_init__(self) -> None:
        if set(self.cells) != set(self.conclusion):
            raise TaskError(
                f"instance {self.id!r}: cells {sorted(self.cells)} but conclusions {sorted(self.conclusion)}"
            )
        for name in ("cells", "conclusion", "meta"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def pair(self, axis: Axis, at: int = 0) -> Pair:
        """The pair along ``axis``: the two field values at rule index ``at``, or the two rules at field index ``at``.

        Raises:
            TaskError: the instance has no such cells, or the conclusion does not flip along this axis.
        """
        ends: tuple[Cell, Cell] = ((0, at), (1, at)) if axis == "field" else ((at, 0), (at, 1))
        if any(c not in self.cells for c in ends):
            raise TaskError(f"instance {self.id!r} (form {self.form}) has no {axis} pair at index {at}")
        old, new = (self.cells[c] for c in ends)
        a, b = (self.conclusion[c] for c in ends)
        if a == b:
            raise TaskError(f"instance {self.id!r}: the conclusion does not flip along the {axis}")
        return Pair(
            id=f"{self.id}/{axis}{at}",
            cluster=self.family,
            form=self.form,
            old=old,
            new=new,
            axis=axis,
            answer_ids=(self.answer_ids[a], self.answer_ids[b]),
            meta={**self.meta, "group": self.group},
        )


@runtime_checkable
class Task(Protocol):
    """A named source of instances; construction validates parameters, ``instances`` needs a tokenizer."""

    name: str

    def instances(self, tokenizer: Any, n: int, seed: int) -> list[Instance]:
        """The first ``n`` instances, spread evenly over families and forms; deterministic in ``seed``."""
        ...
