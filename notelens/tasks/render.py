"""One draw of a gated decision as text: the pieces of the prompt, the right conclusion, the supervised answer text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from notelens.errors import TaskError
from notelens.prompt import Prompt
from notelens.spans import Piece
from notelens.tasks.base import Cell
from notelens.tasks.scenarios import Family

Order = Literal["value_first", "rule_first"]
Mode = Literal["direct", "chain"]
Phrasing = Literal["record", "conversation"]
SYSTEM = "You are a careful assistant. Follow the rule exactly."
DIRECT_CUE = "Answer with one word."
CHAIN_CUE = "State the value and the rule, then end with Answer: and one word."
TWO_RULES = ("polarity", "swapped", "negated")
_TRIGGERS = {"two_clause": (), "polarity": ("t",), "negated": ("t",), "swapped": ("p", "q")}
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Draw:
    """Everything that is drawn for one instance.

    Attributes:
        family: the scenario family.
        form: rule form.
        index: number of the group within the family.
        values: the two field values, by field index.
        actions: first and second action word of the rule (``p``, ``q``).
        restrictive: index into ``actions`` of the restrictive one.
        template: the rule's wording.
        request: the sentence that asks for the decision.
        filler: lines, without bullets.
        between: how many of them stand between field and rule; the others follow.
        order: whether the field or the rule comes first.
        distractor: an update about something other than the field.
        phrasing: ``record`` (a list of attributes) or ``conversation`` (somebody says it).
    """

    family: Family
    form: str
    index: int
    values: tuple[str, str]
    actions: tuple[str, str]
    restrictive: int
    template: str
    request: str
    filler: tuple[str, ...]
    between: int
    order: Order
    distractor: str
    phrasing: Phrasing = "record"

    @property
    def id(self) -> str:
        """Unique id of the instance."""
        return f"{self.family.name}/{self.form}/{self.index:03d}"

    @property
    def group(self) -> str:
        """Id of the filler set."""
        return f"{self.family.name}/{self.index:03d}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells this form has."""
        return ((0, 0), (1, 0)) if self.form not in TWO_RULES else ((0, 0), (0, 1), (1, 0), (1, 1))

    @property
    def answers(self) -> tuple[str, str]:
        """The restrictive and the permissive action."""
        return self.actions[self.restrictive], self.actions[1 - self.restrictive]

    def action(self, value: str, rule: int) -> str:
        """What the rule says for a value.

        Raises:
            TaskError: the rule names neither this value nor an "otherwise".
        """
        if self.form in ("two_clause", "swapped"):
            if value not in self.values:
                raise TaskError(
                    f"{self.id}: the rule says nothing about {value!r}; it names {' and '.join(self.values)}"
                )
            return self.actions[self.values.index(value) ^ (rule if self.form == "swapped" else 0)]
        matches = (value == self.values[rule]) != (self.form == "negated")
        return self.actions[0 if matches else 1]

    def conclusion(self, cell: Cell) -> int:
        """Index into ``answers`` of the right answer of a cell."""
        return self.answers.index(self.action(self.values[cell[0]], cell[1]))


@dataclass(frozen=True)
class Rendering:
    """A prompt with the text a right answer consists of.

    Attributes:
        prompt: the tokenised prompt; its ``answer`` is the action word.
        target: supervised text that follows the prompt: the word, or the chain that ends in it.
        action_at: character of ``target`` at which the action word of the conclusion begins.
    """

    prompt: Prompt
    target: str
    action_at: int


def rule_pieces(draw: Draw, rule: int) -> list[Piece]:
    """The rule as pieces; its triggers (the named value, or the two action words) are spans of their own."""
    first, second = draw.actions[::-1] if draw.form == "swapped" and rule == 1 else draw.actions
    words = {
        "label": draw.family.label,
        "v0": draw.values[0],
        "v1": draw.values[1],
        "t": draw.values[rule],
        "p": first,
        "q": second,
    }
    pieces: list[Piece] = []
    plain, at = "Rule: ", 0
    for match in _SLOT.finditer(draw.template):
        plain += draw.template[at : match.start()]
        at = match.end()
        word = words[match.group(1)]
        if match.group(1) in _TRIGGERS[draw.form]:
            pieces += [Piece("rule", plain), Piece("rule", word, "trigger")]
            plain = ""
        else:
            plain += word
    return [*pieces, Piece("rule", plain + draw.template[at:])]


def pieces(draw: Draw, cell: Cell, mode: Mode, updates: Sequence[Piece]) -> list[Piece]:
    """The whole user message of a cell."""
    label = draw.family.label
    if draw.phrasing == "record":
        field = [
            Piece("record", f"{draw.family.record}\n- {label[0].upper()}{label[1:]}: "),
            Piece("field", draw.values[cell[0]], "field"),
        ]
    else:
        field = [
            Piece("record", f'"Hello, I have a question. As far as I can see, the {label} is '),
            Piece("field", draw.values[cell[0]], "field"),
            Piece("record", '. Thank you for looking into it."'),
        ]
    rule = rule_pieces(draw, cell[1])
    head, tail = (field, rule) if draw.order == "value_first" else (rule, field)
    between = Piece("filler", "".join(f"\n- {line}" for line in draw.filler[: draw.between]) + "\n")
    after = Piece("filler", "".join(f"\n- {line}" for line in draw.filler[draw.between :]) + "\n")
    cue = DIRECT_CUE if mode == "direct" else CHAIN_CUE
    return [*head, between, *tail, after, *updates, Piece("request", f"{draw.request} {cue}")]


def update_pieces(draw: Draw, update: str | None, distractor: bool) -> list[Piece]:
    """Update lines that stand before the request; the one about the field carries the span ``update``."""
    lines: list[Piece] = []
    if distractor:
        lines.append(Piece("filler", f"Update: {draw.distractor}.\n"))
    if update is not None:
        lines += [
            Piece("record", f"Update: the {draw.family.label} is now "),
            Piece("record", update, "update"),
            Piece("record", ".\n"),
        ]
    return lines


def chain_text(draw: Draw, value: str, rule: int) -> str:
    """A short chain of thought: the value that counts, what the rule says about it, the answer."""
    action = draw.action(value, rule)
    return f"The {draw.family.label} is {value}. By the rule that means {action}. Answer: {action}"
