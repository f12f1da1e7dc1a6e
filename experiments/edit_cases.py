"""Cases of the editing experiments: one prompt with its field at the old and at the new value, and the two answers."""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

from notelens.edits.context import EditableContext
from notelens.errors import TaskError
from notelens.models.base import NoteModel
from notelens.prompt import Prompt
from notelens.spans import Rendering, answer_token, encode
from notelens.tasks.base import Instance
from notelens.tasks.gated import GatedDecisions
from notelens.tasks.render import TWO_RULES, Draw, Mode

Change = Literal["same", "longer", "shorter"]
LINES_BEHIND = 2
"""Filler lines behind field and rule where the distance between them is given."""


@dataclass(frozen=True)
class Case:
    """A field that changes inside a prompt.

    Attributes:
        id: unique within a stage; stable across processes.
        family, form: scenario family (intervals are clustered by it) and rule form.
        old, new: the prompt with either value; whatever else they say is equal.
        name: what the edit calls the field (the family's label with underscores).
        values, answers, answer_ids: for the old and the new value.
        meta: further facts for the record.
    """

    id: str
    family: str
    form: str
    old: Prompt
    new: Prompt
    name: str
    values: tuple[str, str]
    answers: tuple[str, str]
    answer_ids: tuple[int, int]
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "meta", MappingProxyType(dict(self.meta)))

    @property
    def seed(self) -> int:
        """A seed of its own, the same in every process."""
        return zlib.crc32(self.id.encode())

    @property
    def distance(self) -> int:
        """Tokens between the field and the rule behind it; negative where the rule stands first."""
        return self.old.positions("rule")[0] - self.old.positions("field")[-1] - 1

    def context(self, model: NoteModel, *, record: bool) -> EditableContext:
        """The prompt with the old value, prefilled. Cost: one prefill."""
        return EditableContext.from_prompt(model, self.old, {"field": self.name}, record=record)


def instance_case(instance: Instance, at: int = 0, *, backwards: bool = False) -> Case:
    """The case of an instance's field pair with the rule of index ``at``.

    Args:
        backwards: from the second value to the first.
    """
    pair = instance.pair("field", at)
    pair = pair.reversed() if backwards else pair
    values = tuple(str(instance.meta[v]) for v in (("v1", "v0") if backwards else ("v0", "v1")))
    return Case(
        pair.id, instance.family, instance.form, pair.old, pair.new, "field", (values[0], values[1]),
        (pair.old.answer, pair.new.answer), pair.answer_ids, instance.meta,
    )  # fmt: skip


def instance_cases(instances: Sequence[Instance], seed: int) -> list[Case]:
    """One case of every instance; rule and direction are drawn, so that neither answer is always the new one."""
    found: list[Case] = []
    for instance in instances:
        rng = random.Random(f"{seed}/{instance.id}/case")
        at = rng.randrange(2) if (0, 1) in instance.cells else 0
        found.append(instance_case(instance, at, backwards=rng.random() < 0.5))
    return found


def gated_cases(
    tokenizer: Any,
    n: int,
    seed: int,
    *,
    split: str = "eval",
    forms: Sequence[str],
    order: str = "value_first",
    rendering: str = "chat",
    length: int | None = None,
    between: float | None = None,
    distance: int | None = None,
    change: Change = "same",
    mode: Mode = "direct",
) -> list[Case]:
    """Cases of gated decisions, spread evenly over families and forms; rule and direction are drawn.

    Args:
        tokenizer: of the model.
        n, seed, split, forms, order, rendering, length, between: as for :class:`~notelens.tasks.gated.GatedDecisions`.
        distance: tokens of filler between field and rule (to the nearest line); two lines follow.
        change: ``longer`` and ``shorter`` replace one of the values by a phrase of more tokens.
        mode: ``direct`` or ``chain``.

    Raises:
        TaskError: length and distance are both given, or ``change`` cannot be had with a form.
    """
    if length is not None and distance is not None:
        raise TaskError("give the length of the prompt or the distance between field and rule, not both")
    task = GatedDecisions(split=split, forms=forms, order=order, rendering=rendering, length=length, between=between)
    found: list[Case] = []
    for draw in task.draws(tokenizer, n, seed):
        rng = random.Random(f"{seed}/{draw.id}/case")
        rule = rng.randrange(2) if draw.form in TWO_RULES else 0
        first = rng.randrange(2)
        if distance is not None:
            draw = _at_distance(tokenizer, draw, distance, seed)
        if change != "same":
            draw = _longer(draw, rule)
            first = rule if change == "longer" else 1 - rule
        found.append(draw_case(tokenizer, task, draw, first, rule, mode))
    return found


def draw_case(tokenizer: Any, task: GatedDecisions, draw: Draw, first: int, rule: int, mode: Mode = "direct") -> Case:
    """The case of a draw in which the field changes from value ``first`` to the other one."""
    old, new = (task.render(tokenizer, draw, (i, rule), mode=mode).prompt for i in (first, 1 - first))
    return rendered_case(tokenizer, draw, draw.id, (old, new), first, rule, task.rendering)


def rendered_case(
    tokenizer: Any,
    draw: Draw,
    id: str,
    prompts: tuple[Prompt, Prompt],
    first: int,
    rule: int,
    rendering: Rendering,
    **meta: Any,
) -> Case:
    """The case of two prompts that were rendered from a draw with the field at value ``first`` and at the other one.

    Args:
        tokenizer: of the model.
        draw: what both prompts say.
        id: of the draw.
        prompts: with the old and with the new value.
        first, rule: the old value and the rule version, which become part of the case's id.
        rendering: of the prompts.
        meta: further facts for the record.
    """
    old, new = prompts
    a, b = (answer_token(tokenizer, p, p.answer, rendering) for p in prompts)
    return Case(
        f"{id}/{first}{rule}", draw.family.name, draw.form, old, new, draw.family.label.replace(" ", "_"),
        (draw.values[first], draw.values[1 - first]), (old.answer, new.answer), (a, b),
        {"rule": rule, "order": draw.order, "filler_lines": len(draw.filler), **meta},
    )  # fmt: skip


def lines_for(tokenizer: Any, lines: Iterator[str], tokens: int) -> tuple[str, ...]:
    """As many of the next filler lines as come nearest to so many tokens; the line that is one too many is taken too."""
    found: list[str] = []
    have = 0
    while have < tokens:
        line = next(lines)
        cost = len(encode(tokenizer, f"\n- {line}", templated=True))
        if have + cost - tokens > tokens - have:
            break
        found.append(line)
        have += cost
    return tuple(found)


def _at_distance(tokenizer: Any, draw: Draw, distance: int, seed: int) -> Draw:
    lines = draw.family.lines(random.Random(f"{seed}/{draw.group}/distance"))
    behind = tuple(islice(lines, LINES_BEHIND))
    between = lines_for(tokenizer, lines, distance)
    return replace(draw, filler=(*between, *behind), between=len(between))


def _longer(draw: Draw, rule: int) -> Draw:
    """The draw with the value that the rule does not name replaced by a phrase.

    Raises:
        TaskError: the rule names both values.
    """
    if draw.form not in ("polarity", "negated"):
        raise TaskError(f"form {draw.form!r} names both values in its rule; a longer value needs polarity or negated")
    phrase = f"not yet {draw.values[rule]}" if len(draw.family.values) < 3 else f"probably {_third(draw)}"
    values = (draw.values[0], phrase) if rule == 0 else (phrase, draw.values[1])
    return replace(draw, values=values)


def _third(draw: Draw) -> str:
    return next(v for v in draw.family.values if v not in draw.values)


Source = Callable[..., list[Case]]
"""``source(tokenizer, n, seed, **params)``; params are those of a stage."""
