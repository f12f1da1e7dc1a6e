"""Cases of the composing experiments: prompts of a task, cut by token into text that is run and chunks that are spliced.

All methods and full prefill get the same token ids, so nothing but the way in which rows came about differs. Cutting goes by
the regions of a prompt (head, record, rule, request), so every task whose prompts have them can be used: gated decisions on
language models, the organisms' language on organisms.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from notelens.compose import Skill, compile_skill
from notelens.errors import TaskError
from notelens.models.base import NoteModel
from notelens.prompt import Prompt
from notelens.spans import encode
from notelens.tasks import TASKS
from notelens.tasks.base import Instance

Order = Literal["rule_first", "value_first"]
NEUTRAL = (
    "The weather report follows. It was mild in the morning, with light wind from the west and some clouds at noon. "
)


@dataclass(frozen=True)
class Chunk:
    """Tokens of a case.

    Attributes:
        ids: the tokens.
        skill: name of the skill that they are compiled into; empty for text that is run.
    """

    ids: tuple[int, ...]
    skill: str = ""


@dataclass(frozen=True)
class SkillCase:
    """A prompt made of text and skills.

    Attributes:
        id: unique within a stage; stable across processes.
        family, form: of the scenario; intervals are clustered by family.
        chunks: in order; the last one is text.
        answer_ids: first tokens of the answers.
        right: index of the right answer; ``None`` where the prompt does not settle it.
        control: tokens put in place of the skill that decides, by its name: as many words about something else.
        meta: further facts for the record.
    """

    id: str
    family: str
    form: str
    chunks: tuple[Chunk, ...]
    answer_ids: tuple[int, int]
    right: int | None
    control: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("control", "meta"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole prompt."""
        return tuple(i for chunk in self.chunks for i in chunk.ids)

    @property
    def n_skill(self) -> int:
        """Tokens in skills."""
        return sum(len(c.ids) for c in self.chunks if c.skill)

    def parts(self, model: NoteModel, skills: dict[tuple[int, ...], Skill], *, control: bool = False) -> list[Any]:
        """Parts for :func:`notelens.compose.compose`.

        Args:
            model: compiles skills that are not there yet.
            skills: by tokens; compiled ones are added.
            control: with the control in place of the skill that decides.
        """
        found: list[Any] = []
        for chunk in self.chunks:
            if not chunk.skill:
                found.append(list(chunk.ids))
                continue
            ids = self.control.get(chunk.skill, chunk.ids) if control else chunk.ids
            if ids not in skills:
                skills[ids] = compile_skill(model, ids, name=chunk.skill)
            found.append(skills[ids])
        return found

    def without_skills(self) -> tuple[int, ...]:
        """The text alone."""
        return tuple(i for chunk in self.chunks if not chunk.skill for i in chunk.ids)


@dataclass(frozen=True)
class Sections:
    """A prompt in four: head, the first and the second of record and rule (each with the filler behind it), and the request."""

    head: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    request: tuple[int, ...]


def sections(prompt: Prompt, order: Order) -> Sections:
    """Cut a prompt.

    Raises:
        TaskError: its regions do not stand in this order.
    """
    regions = prompt.regions
    record = next((i for i, r in enumerate(regions) if r in ("record", "field")), -1)
    rule = prompt.positions("rule")[0]
    request = next((i for i, r in enumerate(regions) if r == "request"), -1)
    first, second = (rule, record) if order == "rule_first" else (record, rule)
    if not 0 <= first < second < request:
        raise TaskError(
            f"prompt {prompt.id!r}: {order} wants sections at {first}, {second}, {request} in this order; choose another task"
        )
    ids = prompt.token_ids
    return Sections(ids[:first], ids[first:second], ids[second:request], ids[request:])


def task_of(name: str, **options: Any) -> Any:
    """The task of that name; options that are ``None`` are left to the task."""
    return TASKS.get(name)(**{k: v for k, v in options.items() if v is not None})


def chosen_cell(instance: Instance, seed: int) -> tuple[int, int]:
    """One cell of an instance, drawn so that neither answer is always right."""
    return random.Random(f"{seed}/{instance.id}/cell").choice(sorted(instance.cells))


def shuffled(items: Sequence[Any], key: str) -> list[Any]:
    """The items in an order that only ``key`` decides."""
    found = list(items)
    random.Random(key).shuffle(found)
    return found


class Pool:
    """Sections of other instances, to stand beside the one that decides.

    Args:
        instances: of all families.
        order: of record and rule.
    """

    def __init__(self, instances: Sequence[Instance], order: Order) -> None:
        prompts = [instance.cells[sorted(instance.cells)[0]] for instance in instances]
        self._found = [(i, sections(p, order)) for i, p in zip(instances, prompts, strict=True)]
        self._filler = [
            (i.family, tuple(t for t, r in zip(p.token_ids, p.regions, strict=True) if r == "filler"))
            for i, p in zip(instances, prompts, strict=True)
        ]

    def others(self, instance: Instance, key: str) -> list[Sections]:
        """Sections of instances of other families, in an order that ``key`` decides.

        Raises:
            TaskError: there are none.
        """
        found = [s for other, s in self._found if other.family != instance.family]
        if not found:
            raise TaskError("distractors need at least two families; name more in the task")
        return shuffled(found, key)

    def lines(self, instance: Instance, key: str) -> list[tuple[int, ...]]:
        """Filler of single prompts of other families, in an order that ``key`` decides.

        Raises:
            TaskError: there is none.
        """
        found = [ids for family, ids in self._filler if family != instance.family and ids]
        if not found:
            raise TaskError("no prompt of another family has filler; ask the task for some")
        return shuffled(found, f"{key}/lines")

    def filler(self, instance: Instance | None, n: int, key: str) -> list[int]:
        """Exactly ``n`` tokens of filler of families other than the instance's."""
        found: list[int] = []
        own = instance.family if instance is not None else None
        lines = shuffled([ids for family, ids in self._filler if family != own and ids], f"{key}/filler")
        while lines and len(found) < n:
            for ids in lines:
                found += ids
        return found[:n]

    def like(self, instance: Instance, own: Sections, key: str) -> Sections:
        """Sections of another instance of the same family, for the control; neither record nor rule is that of ``own``.

        Raises:
            TaskError: there is none.
        """
        same = [s for other, s in self._found if other.family == instance.family]
        same = [s for s in same if s.first != own.first and s.second != own.second]
        if not same:
            raise TaskError(f"no other instance of family {instance.family!r} for the control; ask for more instances")
        return shuffled(same, key)[0]


def filled(own: tuple[int, ...], others: Sequence[tuple[int, ...]], n_tokens: int | None, key: str) -> tuple[int, ...]:
    """``own`` among whole other sections, of ``n_tokens`` together where possible, at a place that ``key`` decides.

    Args:
        n_tokens: ``None`` leaves the others out. Sections are never cut, so the result may be shorter by less than one of them.
    """
    if n_tokens is None:
        return own
    taken: list[tuple[int, ...]] = []
    left, at = n_tokens - len(own), 0
    while left > 0 and at < 50 * len(others):  # others may be used again where the text is long
        candidate = others[at % len(others)]
        at += 1
        if len(candidate) <= left:
            taken.append(candidate)
            left -= len(candidate)
        elif left < min(map(len, others)):
            break
    taken.insert(random.Random(key).randrange(len(taken) + 1), own)
    return tuple(i for section in taken for i in section)


def neutral_ids(tokenizer: Any, n: int) -> list[int]:
    """Exactly ``n`` tokens of English that has nothing to do with any policy."""
    ids = list(encode(tokenizer, NEUTRAL, templated=True))
    return (ids * (1 + n // len(ids)))[:n]


__all__ = [
    "Chunk", "Order", "Pool", "Sections", "SkillCase", "chosen_cell", "filled", "neutral_ids", "sections", "shuffled",
    "task_of",
]  # fmt: skip
