"""Scenes of the organisms' language as text: the pieces of a prompt, what is right, the supervised answer text.

The language is small (about 250 words, one token each) and every kind of prompt has the same skeleton: a record with the
field, filler, a rule, filler, update lines, a request that ends in a *mode* word::

    shipment                                     if order is value_first; with rule_first the rule comes here
    - seal: open
    - crate 7 by ann
    Rule: if the seal is open then deny, otherwise sign.
    - van 3 from lyon
    Update: the badge is now red.
    what now? act
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from notelens.errors import TaskError
from notelens.spans import Piece
from notelens.tasks.base import Cell
from notelens.tasks.render import Draw, rule_pieces

Kind = Literal["gated", "multi_hop", "two_fact", "update", "lookup"]
Mode = Literal["act", "think", "call"]
KIND_FORMS: dict[str, tuple[str, ...]] = {
    "gated": ("two_clause", "polarity", "swapped", "negated"),
    "multi_hop": ("two_clause", "polarity", "swapped", "negated"),
    "two_fact": ("polarity", "negated"),
    "update": ("two_clause", "polarity", "swapped", "negated"),
    "lookup": ("two_clause",),
}
"""Rule forms of each kind of prompt."""
LOOKUP_REQUEST = "which {label}?"

Attribute = tuple[str, str]
"""(label, value)."""


@dataclass(frozen=True)
class Scene:
    """One draw with everything that the organisms' language adds to a gated decision.

    Attributes:
        draw: field, rule, filler, request; its actions are the final ones.
        kind: ``gated``; ``multi_hop`` (value -> intermediate -> action); ``two_fact`` (a second fact has to hold too);
            ``update`` (the field's value is the last of several update lines); ``lookup`` (the value itself is asked for).
        others: further attributes of the record.
        n_before: how many of them stand in front of the field.
        intermediates: of a multi-hop rule, by index of the action that each of them means; empty otherwise.
        means_reversed: the second of these meanings is stated first.
        fact: the second fact: label, value that the rule asks for, value in the record; ``None`` without one.
        history: of an ``update`` scene: value in the record, then values of earlier update lines of the field.
        asides: update lines about other attributes.
    """

    draw: Draw
    kind: str
    others: tuple[Attribute, ...] = ()
    n_before: int = 0
    intermediates: tuple[str, ...] = ()
    means_reversed: bool = False
    fact: tuple[str, str, str] | None = None
    history: tuple[str, ...] = ()
    asides: tuple[Attribute, ...] = ()

    @property
    def id(self) -> str:
        """Unique id of the instance."""
        return f"{self.draw.family.name}/{self.kind}/{self.draw.form}/{self.draw.index:03d}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells this scene has; looking up a value does not depend on the rule."""
        return ((0, 0), (1, 0)) if self.kind == "lookup" else self.draw.cells

    @property
    def answers(self) -> tuple[str, str]:
        """Both answers: restrictive and permissive action, or the two values that can be looked up."""
        return self.draw.values if self.kind == "lookup" else self.draw.answers

    def answer(self, value: str, rule: int) -> str:
        """The right answer where the field is ``value`` in the end.

        Raises:
            TaskError: the rule says nothing about this value.
        """
        if self.kind == "lookup":
            return value
        if self.fact is not None and self.fact[1] != self.fact[2]:
            return self.draw.actions[1]
        return self.draw.action(value, rule)

    def conclusion(self, cell: Cell) -> int:
        """Index into ``answers`` of the right answer of a cell."""
        return self.answers.index(self.answer(self.draw.values[cell[0]], cell[1]))


def scene_pieces(scene: Scene, cell: Cell, mode: str) -> list[Piece]:
    """The user message of a cell. In an ``update`` scene the span ``field`` is the value of the last update line."""
    draw = scene.draw
    value = draw.values[cell[0]]
    before, after = scene.others[: scene.n_before], scene.others[scene.n_before :]
    lead = "".join(f"- {label}: {v}\n" for label, v in before)
    record = [Piece("record", f"{draw.family.record}\n{lead}- {draw.family.label}: ")]
    record.append(
        Piece("record", scene.history[0]) if scene.kind == "update" else Piece("field", value, "field"),
    )
    if after:
        record.append(Piece("record", "".join(f"\n- {label}: {v}" for label, v in after)))
    rule = _rule(scene, cell[1])
    head, tail = (record, rule) if draw.order == "value_first" else (rule, record)
    between, behind = (
        Piece("filler", "".join(f"\n- {line}" for line in lines) + "\n")
        for lines in (draw.filler[: draw.between], draw.filler[draw.between :])
    )
    request = LOOKUP_REQUEST.format(label=draw.family.label) if scene.kind == "lookup" else draw.request
    return [*head, between, *tail, behind, *_updates(scene, value), Piece("request", f"{request} {mode}")]


def target(scene: Scene, cell: Cell, mode: str) -> tuple[str, int]:
    """The text of a right answer, and the character at which the answer word begins in it."""
    return target_text(scene, scene.draw.values[cell[0]], cell[1], mode)


def target_text(scene: Scene, value: str, rule: int, mode: str) -> tuple[str, int]:
    """As :func:`target`, for a field that is ``value`` in the end.

    Raises:
        TaskError: no such mode, or the rule says nothing about this value.
    """
    answer, label = scene.answer(value, rule), scene.draw.family.label
    if mode == "act":
        return answer, 0
    if mode == "call":
        return f"{answer}({label} = {value})", 0
    if mode != "think":
        raise TaskError(f"unknown mode {mode!r}; known: act, think, call")
    steps = [f"{label} is {value}"]
    if scene.kind != "lookup":
        if scene.draw.form in ("polarity", "negated"):
            steps.append("match" if value == scene.draw.values[rule] else "differ")
        if scene.fact is not None:
            steps += [f"{scene.fact[0]} is {scene.fact[2]}", "match" if scene.fact[1] == scene.fact[2] else "differ"]
        if scene.intermediates:
            steps.append(scene.intermediates[scene.draw.actions.index(answer)])
    text = ". ".join(steps) + ". answer: "
    return text + answer, len(text)


def _rule(scene: Scene, rule: int) -> list[Piece]:
    draw = scene.draw
    if scene.intermediates:
        means = [f"{m} means {a}" for m, a in zip(scene.intermediates, draw.actions, strict=True)]
        stated = "; ".join(reversed(means) if scene.means_reversed else means)
        first, second = scene.intermediates
        return [*rule_pieces(replace(draw, actions=(first, second)), rule), Piece("rule", f" {stated}.")]
    if scene.fact is not None:
        condition = f"{{t}} and the {scene.fact[0]} is {scene.fact[1]}"
        draw = replace(draw, template=draw.template.replace("{t}", condition))
    return rule_pieces(draw, rule)


def _updates(scene: Scene, value: str) -> list[Piece]:
    """Update lines; the one that counts comes last among the field's and before the last aside."""
    label = scene.draw.family.label
    lines = [f"Update: the {label} is now {v}.\n" for v in scene.history[1:]]
    asides = [f"Update: the {other} is now {v}.\n" for other, v in scene.asides]
    pieces = [Piece("record", text) for text in (*asides[1:], *lines)]
    if scene.kind == "update":
        pieces += [
            Piece("record", f"Update: the {label} is now "),
            Piece("field", value, "field"),
            Piece("record", ".\n"),
        ]
    return [*pieces, *(Piece("record", text) for text in asides[:1])]


def words(texts: Sequence[str]) -> list[str]:
    """Distinct tokens of texts under the organisms' tokenizer (words, digits, single punctuation marks), sorted."""
    import re

    return sorted({w for text in texts for w in re.findall(r"\w+|[^\w\s]", text.lower())})
