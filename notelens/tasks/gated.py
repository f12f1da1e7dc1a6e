"""Gated decisions: a field, a rule that turns its value into one of two actions, and a request (paper, section 3)."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, cast, get_args

from notelens.errors import TaskError
from notelens.prompt import Prompt
from notelens.registry import nearest
from notelens.spans import answer_token, encode, make_prompt
from notelens.tasks.base import Cell, Instance
from notelens.tasks.render import (
    SYSTEM,
    TWO_RULES,
    Draw,
    Mode,
    Order,
    Phrasing,
    Rendering,
    chain_text,
    pieces,
    update_pieces,
)
from notelens.tasks.scenarios import FORMS, Family, load_families

LENGTH_RANGE = (100, 4000)
LENGTH_TOLERANCE = 20
"""How far a prompt may be from ``length``: a filler line has about 10 tokens and the rule forms differ by 8."""
_MAX_FILLER = 5


class GatedDecisions:
    """Gated decisions from scenario families.

    Args:
        split: families to draw from: ``train``, ``eval`` (never used for training) or ``all``.
        families: names of families within the split; all of them when not given.
        forms: rule forms, out of ``two_clause``, ``polarity``, ``swapped``, ``negated``.
        order: whether the field (``value_first``) or the rule (``rule_first``) comes first.
        rendering: ``chat`` (the tokenizer's template) or ``plain``.
        length: tokens of the whole prompt, 100 to 4,000, reached by filler; 2 to 5 lines when not given.
        fixed_words: every group of a family has the same two values and actions, in the same roles, as a linear read-out
            of the conclusion needs (its label is a direction of given words); groups then differ in filler, request and
            wording of the rule.
        between: share of the filler lines that stand between field and rule, 0 to 1; the others follow the second of the
            two. Any number when not given. With the rule first, 1 puts the field right before the request.
        phrasing: ``record`` or ``conversation``: how the field is stated; the shipped adapters saw records only.
        scenario_file: JSON file with families instead of the built-in ones (``data/README.md`` has the schema).

    Raises:
        TaskError: a parameter is out of range or unknown, or the scenario file cannot be used.
    """

    name = "gated"

    def __init__(
        self,
        *,
        split: str = "eval",
        families: Sequence[str] | None = None,
        forms: Sequence[str] = FORMS,
        order: str = "value_first",
        rendering: str = "chat",
        length: int | None = None,
        fixed_words: bool = False,
        between: float | None = None,
        phrasing: str = "record",
        scenario_file: str | Path | None = None,
    ) -> None:
        _one_of("split", split, ("train", "eval", "all"))
        _one_of("order", order, get_args(Order))
        _one_of("rendering", rendering, ("chat", "plain"))
        _one_of("phrasing", phrasing, get_args(Phrasing))
        if isinstance(forms, str) or not forms or len(set(forms)) != len(forms):
            raise TaskError(f"forms must be a list of distinct rule forms, out of {', '.join(FORMS)}; got {forms!r}")
        for form in forms:
            _one_of("form", form, FORMS)
        low, high = LENGTH_RANGE
        if length is not None and (isinstance(length, bool) or not low <= length <= high):
            raise TaskError(f"length {length!r} is not a whole number from {low} to {high} (tokens of the prompt)")
        found = [f for f in load_families(Path(scenario_file) if scenario_file else None) if split in ("all", f.split)]
        if families is not None:
            known = [f.name for f in found]
            for wanted in families:
                if wanted not in known:
                    raise TaskError(f"no family {wanted!r} in split {split!r}; {nearest(wanted, known)}")
            found = [f for f in found if f.name in families]
        if not found:
            raise TaskError(f"no families are left: split {split!r}, families {families!r}")
        self.families: tuple[Family, ...] = tuple(found)
        self.forms: tuple[str, ...] = tuple(forms)
        self.order: Order = cast(Order, order)
        self.rendering: Literal["chat", "plain"] = cast(Literal["chat", "plain"], rendering)
        self.length = length
        self.fixed_words = fixed_words
        if between is not None and (isinstance(between, bool) or not 0 <= between <= 1):
            raise TaskError(f"between {between!r} is not a share from 0 to 1 (of the filler lines)")
        self.between = between
        self.phrasing: Phrasing = cast(Phrasing, phrasing)

    def instances(self, tokenizer: Any, n: int, seed: int) -> list[Instance]:
        """The first ``n`` instances, spread evenly over families and forms; deterministic in ``seed``.

        Raises:
            TaskError: a family has no values or actions that this tokenizer can align, or the length is out of reach.
        """
        return [self.build(tokenizer, draw) for draw in self.draws(tokenizer, n, seed)]

    def draws(self, tokenizer: Any, n: int, seed: int) -> list[Draw]:
        """What :meth:`instances` is built from, in the same order."""
        usable = {f.name: _usable(tokenizer, f) for f in self.families}

        def every() -> Iterator[Draw]:
            for index in count():
                for shift in range(len(self.forms)):
                    for at, family in enumerate(self.families):
                        form = self.forms[(at + shift) % len(self.forms)]
                        yield self._draw(tokenizer, family, form, index, seed, *usable[family.name])

        return list(islice(every(), n))

    def build(self, tokenizer: Any, draw: Draw) -> Instance:
        """The instance of a draw; every pair along every axis is checked before it is returned.

        Raises:
            PairError, AnswerError, SpanError: the prompts do not align with this tokenizer.
        """
        cells = {cell: self._prompt(tokenizer, draw, cell, "direct", None, False) for cell in draw.cells}
        first = cells[0, 0]
        a, b = (answer_token(tokenizer, first, word, self.rendering) for word in draw.answers)
        instance = Instance(
            id=draw.id,
            family=draw.family.name,
            form=draw.form,
            group=draw.group,
            cells=cells,
            answers=draw.answers,
            answer_ids=(a, b),
            conclusion={cell: draw.conclusion(cell) for cell in draw.cells},
            meta={
                "v0": draw.values[0],
                "v1": draw.values[1],
                "p": draw.actions[0],
                "q": draw.actions[1],
                "template": draw.template,
                "filler_lines": len(draw.filler),
                "order": draw.order,
                "rendering": self.rendering,
                "n_tokens": len(first),
            },
        )
        for at in (0, 1) if draw.form in TWO_RULES else (0,):
            instance.pair("field", at)
            if draw.form in TWO_RULES:
                instance.pair("trigger", at)
        self._check_length(instance)
        return instance

    def render(
        self,
        tokenizer: Any,
        draw: Draw,
        cell: Cell,
        *,
        mode: Mode = "direct",
        update: str | None = None,
        distractor: bool = False,
    ) -> Rendering:
        """A cell with its supervised answer text, as an ordinary prompt.

        Args:
            tokenizer: a Hugging Face tokenizer.
            draw: from :meth:`draws`.
            cell: (field index, rule index).
            mode: ``direct`` asks for one word, ``chain`` for value, clause and answer.
            update: newer value of the field, stated in a line before the request; it is the one that counts.
            distractor: add an update about something else.

        Raises:
            TaskError: the form has no such cell, or its rule says nothing about the new value.
        """
        if cell not in draw.cells:
            raise TaskError(f"{draw.id}: form {draw.form} has no cell {cell}; it has {draw.cells}")
        value = draw.values[cell[0]] if update is None else update
        action = draw.action(value, cell[1])
        prompt = self._prompt(tokenizer, draw, cell, mode, update, distractor)
        target = action if mode == "direct" else chain_text(draw, value, cell[1])
        return Rendering(prompt, target, len(target) - len(action))

    def _prompt(
        self, tokenizer: Any, draw: Draw, cell: Cell, mode: Mode, update: str | None, distractor: bool
    ) -> Prompt:
        value = draw.values[cell[0]] if update is None else update
        suffix = "".join((f"/{mode}" if mode != "direct" else "", f"/{update}" if update else "", "/d" * distractor))
        return make_prompt(
            tokenizer,
            pieces(draw, cell, mode, update_pieces(draw, update, distractor)),
            id=f"{draw.id}/{cell[0]}{cell[1]}{suffix}",
            answer=draw.action(value, cell[1]),
            rendering=self.rendering,
            system=SYSTEM,
        )

    def _draw(
        self,
        tokenizer: Any,
        family: Family,
        form: str,
        index: int,
        seed: int,
        values: Sequence[tuple[str, str]],
        actions: Sequence[tuple[str, str]],
    ) -> Draw:
        if form not in family.rules:
            raise TaskError(f"family {family.name!r} has no rule template of form {form!r}")
        rng = random.Random(f"{seed}/{family.name}/{index}")  # text seeds do not depend on PYTHONHASHSEED
        pair, words = rng.choice(values), rng.choice(actions)
        if rng.random() < 0.5:
            pair = (pair[1], pair[0])
        restrictive = rng.randrange(2)
        if self.fixed_words:
            words_rng = random.Random(f"{seed}/{family.name}/words")  # the other draws stay as they are
            pair, words, restrictive = words_rng.choice(values), words_rng.choice(actions), words_rng.randrange(2)
        n_filler = rng.randint(2, _MAX_FILLER)
        draw = Draw(
            family=family,
            form=form,
            index=index,
            values=pair,
            actions=words if restrictive == 0 else (words[1], words[0]),
            restrictive=restrictive,
            template="",
            request=rng.choice(family.requests),
            filler=tuple(islice(family.lines(random.Random(f"{seed}/{family.name}/{index}/filler")), n_filler)),
            between=rng.randint(1, n_filler - 1),
            order=self.order,
            distractor=family.fill(rng.choice(family.distractors), rng),
            phrasing=self.phrasing,
        )
        wording = random.Random(f"{seed}/{family.name}/{index}/{form}").choice(family.rules[form])
        draw = replace(self._to_length(tokenizer, draw, seed), template=wording)
        return draw if self.between is None else replace(draw, between=round(self.between * len(draw.filler)))

    def _to_length(self, tokenizer: Any, draw: Draw, seed: int) -> Draw:
        """Fit the filler to ``length``, measured with one fixed rule so that all forms of a group share it."""
        if self.length is None:
            return draw
        canonical = replace(draw, form="polarity", template=draw.family.rules["polarity"][0], filler=())
        have = len(self._prompt(tokenizer, replace(canonical, between=0), (0, 0), "direct", None, False))
        source = draw.family.lines(random.Random(f"{seed}/{draw.family.name}/{draw.index}/filler"))
        lines: list[str] = []
        while len(lines) < 2 or have < self.length:
            line = next(source)
            cost = len(encode(tokenizer, f"\n- {line}", templated=True))
            if len(lines) >= 2 and have + cost - self.length > self.length - have:
                break
            lines.append(line)
            have += cost
        return replace(draw, filler=tuple(lines), between=len(lines) // 2)

    def _check_length(self, instance: Instance) -> None:
        n = len(instance.cells[0, 0])
        if self.length is not None and abs(n - self.length) > LENGTH_TOLERANCE:
            raise TaskError(
                f"instance {instance.id!r} has {n} tokens, not {self.length} +- {LENGTH_TOLERANCE}: record, rule, request "
                "and two filler lines are as short as this scenario gets; ask for a greater length"
            )


def _one_of(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise TaskError(f"unknown {what} {value!r}; {nearest(str(value), list(known))}")


def _usable(tokenizer: Any, family: Family) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Value pairs and (restrictive, permissive) pairs that this tokenizer can align and tell apart.

    Raises:
        TaskError: there are none; the message lists the token lengths.
    """

    def ids(word: str) -> tuple[int, ...]:
        return encode(tokenizer, f" {word}", templated=True)

    def lengths(words: Sequence[str]) -> str:
        return ", ".join(f"{w} {len(ids(w))}" for w in words)

    values = [
        (a, b)
        for i, a in enumerate(family.values)
        for b in family.values[i + 1 :]
        if len(ids(a)) == len(ids(b)) and ids(a) != ids(b)
    ]
    if not values:
        raise TaskError(
            f"family {family.name!r}: no two values have equal token length with this tokenizer ({lengths(family.values)})"
        )
    same_length = [(r, p) for r in family.restrictive for p in family.permissive if len(ids(r)) == len(ids(p))]
    if not same_length:
        words = (*family.restrictive, *family.permissive)
        raise TaskError(
            f"family {family.name!r}: no restrictive and permissive action have equal token length ({lengths(words)})"
        )
    actions = [
        (r, p)
        for r, p in same_length
        if ids(r)[0] != ids(p)[0] and encode(tokenizer, r, templated=True)[0] != encode(tokenizer, p, templated=True)[0]
    ]
    if not actions:
        raise TaskError(
            f"family {family.name!r}: every pair of actions of equal length shares its first token with this tokenizer "
            f"({', '.join('/'.join(pair) for pair in same_length)})"
        )
    return values, actions


__all__ = ["LENGTH_TOLERANCE", "GatedDecisions"]
