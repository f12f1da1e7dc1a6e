"""Cases of the editing experiments in the organisms' language, and what else these experiments need to know about it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from experiments.edit_cases import LINES_BEHIND, Case, Change, lines_for, rendered_case
from notelens.edits.context import EditableContext
from notelens.errors import TaskError
from notelens.models.base import NoteModel
from notelens.spans import Piece
from notelens.tasks.organism import OrganismLanguage, organism_families
from notelens.tasks.organism_text import LOOKUP_REQUEST, Scene, scene_pieces

MODES = {"direct": "act", "chain": "think"}
"""Last word of a prompt that asks for the answer at once, and for a chain."""


def organism_cases(
    tokenizer: Any,
    n: int,
    seed: int,
    *,
    split: str = "eval",
    kinds: Sequence[str] = ("gated",),
    forms: Sequence[str],
    order: str = "value_first",
    rendering: str = "chat",
    length: int | None = None,
    between: float | None = None,
    distance: int | None = None,
    change: Change = "same",
    mode: str = "direct",
) -> list[Case]:
    """Cases in the organisms' language, spread evenly over families, kinds and forms; rule and direction are drawn.

    Args:
        tokenizer: of an organism.
        n, seed: as everywhere.
        split, kinds, forms, order, rendering: as for :class:`~notelens.tasks.organism.OrganismLanguage`.
        length: tokens of the prompt, to the nearest line of filler; the task's own 2 to 5 lines when not given. Organisms
            were trained with up to 600 tokens of filler, so longer prompts ask for more than they were shown.
        between: share of the filler that stands between record and rule; half of it when not given.
        distance: tokens of filler between record and rule (to the nearest line); two lines follow.
        change: only ``same``.
        mode: ``direct`` or ``chain``.

    Raises:
        TaskError: length and distance are both given, a value of another length is wanted (every word is one token), or a
            parameter is unknown.
    """
    if length is not None and distance is not None:
        raise TaskError("give the length of the prompt or the distance between field and rule, not both")
    if change != "same":
        raise TaskError(f"values of the organisms' language are one token each; change {change!r} cannot be had")
    if mode not in MODES:
        raise TaskError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    task = OrganismLanguage(split=split, kinds=kinds, forms=forms, order=order, rendering=rendering)
    found: list[Case] = []
    for scene in task.scenes(n, seed):
        if distance is not None:
            scene = at_distance(tokenizer, scene, distance, seed)
        elif length is not None:
            scene = of_length(tokenizer, task, scene, length, 0.5 if between is None else between, seed)
        rng = random.Random(f"{seed}/{scene.id}/case")
        rule = rng.randrange(2) if (0, 1) in scene.cells else 0
        found.append(scene_case(tokenizer, task, scene, rng.randrange(2), rule, MODES[mode]))
    return found


def scene_case(tokenizer: Any, task: OrganismLanguage, scene: Scene, first: int, rule: int, mode: Any = "act") -> Case:
    """The case of a scene whose field changes from value ``first`` to the other one."""
    old, new = (task.render(tokenizer, scene, (i, rule), mode=mode).prompt for i in (first, 1 - first))
    return rendered_case(tokenizer, scene.draw, scene.id, (old, new), first, rule, task.rendering, kind=scene.kind)


def of_length(tokenizer: Any, task: OrganismLanguage, scene: Scene, length: int, between: float, seed: int) -> Scene:
    """The scene with as much filler as brings its prompt nearest to ``length`` tokens.

    Raises:
        TaskError: the prompt is longer without any filler, or ``between`` is no share.
    """
    if not 0.0 <= between <= 1.0:
        raise TaskError(f"between {between} is not a share from 0 to 1")
    bare = replace(scene, draw=replace(scene.draw, filler=(), between=0))
    have = len(task.render(tokenizer, bare, scene.cells[0]).prompt)
    lines = _up_to(tokenizer, scene, length - have, f"{seed}/{scene.draw.group}/length")
    if not lines:
        raise TaskError(f"{scene.id} has {have} tokens without filler; a prompt of {length} tokens cannot be had")
    return replace(scene, draw=replace(scene.draw, filler=lines, between=round(between * len(lines))))


def at_distance(tokenizer: Any, scene: Scene, distance: int, seed: int) -> Scene:
    """The scene with about ``distance`` tokens of filler between record and rule, and two lines behind the rule."""
    text = f"{seed}/{scene.draw.group}/distance"
    between = _up_to(tokenizer, scene, distance, text)
    others = (x for x in scene.draw.family.lines(random.Random(f"{text}/behind")) if x not in between)
    behind = tuple(islice(others, LINES_BEHIND))
    return replace(scene, draw=replace(scene.draw, filler=(*between, *behind), between=len(between)))


def _up_to(tokenizer: Any, scene: Scene, tokens: int, seed: str) -> tuple[str, ...]:
    """Filler lines that come nearest to so many tokens."""
    return lines_for(tokenizer, scene.draw.family.lines(random.Random(seed)), tokens)


# --- several questions to one prompt ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Consequences:
    """One record with two fields, one rule, and everything that can be asked about them.

    Attributes:
        id, family, form: of the case.
        scene: what the prompt says; its first further attribute is the second field.
        rule, first: rule version, and which value each field has at first.
        others: both values of the second field.
        poisoned: a line recalls the first value of the first field.
    """

    id: str
    family: str
    form: str
    scene: Scene
    rule: int
    first: tuple[int, int]
    others: tuple[str, str]
    poisoned: bool

    questions = ("field", "rephrased", "lookup", "other")

    @property
    def names(self) -> tuple[str, str]:
        """What edits call the fields."""
        return self.scene.draw.family.label, self.scene.others[0][0]

    def value(self, which: int, changed: bool) -> str:
        """Value of a field before and after it changed."""
        return (self.scene.draw.values, self.others)[which][self.first[which] ^ changed]

    def expected(self, question: str, changed: Sequence[bool]) -> str:
        """The right answer when these fields have changed."""
        if question in ("lookup", "other"):
            which = ("lookup", "other").index(question)
            return self.value(which, changed[which])
        return self.scene.answer(self.value(0, changed[0]), self.rule)

    def context(self, model: NoteModel, question: str, *, record: bool) -> EditableContext:
        """The prompt with both fields at their first value and one question. Cost: one prefill."""
        label, other = self.names
        draw = self.scene.draw
        marked = replace(self.scene, others=((other, f"{{{{{other}}}}}"), *self.scene.others[1:]))
        parts: list[Piece] = scene_pieces(marked, (self.first[0], self.rule), "act")[:-1]
        text = "".join(f"{{{{{label}}}}}" if p.span == "field" else p.text for p in parts)
        if self.poisoned:
            text += f"- note: the {label} is {self.value(0, False)}\n"
        requests = [draw.request, *(r for r in draw.family.requests if r != draw.request)]
        asked = {
            "field": requests[0], "rephrased": requests[-1],
            "lookup": LOOKUP_REQUEST.format(label=label), "other": LOOKUP_REQUEST.format(label=other),
        }  # fmt: skip
        fields = {label: self.value(0, False), other: self.value(1, False)}
        return EditableContext.from_text(model, text, fields, request=f"{asked[question]} act", record=record)


def consequences(
    tokenizer: Any, n: int, seed: int, *, split: str, forms: Sequence[str], order: str, poisoned: bool
) -> list[Any]:
    """Cases with a second field in the record; deterministic in the seed."""
    task = OrganismLanguage(split=split, forms=forms, order=order)
    families = {f.label: f for f in organism_families()}
    found: list[Consequences] = []
    for scene in task.scenes(8 * n, seed):
        if not scene.others:
            continue
        rng = random.Random(f"{seed}/{scene.id}/consequences")
        label, value = scene.others[0]
        if any(label == aside for aside, _ in scene.asides):
            continue
        other = rng.choice([v for v in families[label].values if v not in (value, *scene.draw.values)])
        rule = rng.randrange(2) if (0, 1) in scene.cells else 0
        first = (rng.randrange(2), rng.randrange(2))
        draw = scene.draw
        found.append(Consequences(scene.id, draw.family.name, draw.form, scene, rule, first, (value, other), poisoned))
        if len(found) == n:
            return found
    raise TaskError(f"only {len(found)} of {n} cases have a second field in their record; ask for fewer")
