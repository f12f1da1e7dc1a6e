"""Training prompts that share a beginning: gated decisions, several of them behind one record, run together.

A prompt of 600 tokens has one answer to learn from, and nearly all of its tokens are filler. So the prompts of a group begin
alike, up to the rule, up to the field or up to the request, and go on differently; the model runs over the beginning once and
over every ending behind it. A token sees its own prompt only, at its own position: loss and gradients are those of the whole
prompts, one by one, for a fifth of the tokens.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch

from experiments.competence_data import DISTRACTOR_SHARE, Example, draw_stream, make_example, supervised, word_pool
from notelens.tasks.gated import GatedDecisions
from notelens.tasks.render import TWO_RULES, Draw
from notelens.tasks.scenarios import FORMS

MOST_BEHIND = 4


@dataclass(frozen=True)
class Phase:
    """A stretch of training.

    Attributes:
        steps: how many.
        lines: ranges of filler lines (of about 11 tokens) of a prompt, and the share of steps with each.
        part: how often the prompts of a group part at the rule, at the request, and (with the rule first) at the field.
        forms: rule forms to draw from; one that is there twice comes twice as often.
        free_words: share of groups whose values and actions are any words of the vocabulary.
        chains: share of chains of thought where prompts part at the rule or the field.
        asks: kinds of the prompts that part at the request.
        size: prompts of a group; a step has two groups, which differ in the field.
    """

    steps: int
    lines: tuple[tuple[tuple[int, int], float], ...]
    part: tuple[tuple[Literal["rule", "request", "field"], float], ...] = (
        ("rule", 0.45),
        ("request", 0.3),
        ("field", 0.25),
    )
    forms: tuple[str, ...] = FORMS
    free_words: float = 0.25
    chains: float = 0.15
    asks: tuple[str, ...] = ("direct", "direct", "update", "update", "chain", "update_chain")
    size: int = 6


@dataclass(frozen=True)
class Packed:
    """Prompts that begin alike, as one sequence.

    Attributes:
        ids: ``[1, pos]``: the shared beginning, then every ending.
        positions: ``[1, pos]``: of each token in its own prompt.
        mask: ``[1, 1, pos, pos]``, added to attention scores: a token sees the beginning and its own ending up to itself.
        weights: ``[1, pos]``: loss weights. No ending begins with a weighted token, so the row before one is of its own prompt.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor


def pack(examples: Sequence[Example]) -> Packed:
    """Prompts as one sequence with what they begin with in common once; nothing supervised is shared."""
    shared = 0
    shortest = min(e.n_prompt for e in examples) - 1
    while shared < shortest and len({e.ids[shared] for e in examples}) == 1:
        shared += 1
    ids, weights = list(examples[0].ids[:shared]), [0.0] * shared
    positions, owner = list(range(shared)), [-1] * shared
    for number, e in enumerate(examples):
        ids += e.ids[shared:]
        weights += e.weights[shared:]
        positions += range(shared, len(e.ids))
        owner += [number] * (len(e.ids) - shared)
    whose = torch.tensor(owner)
    sees = (whose[None, :] == -1) | (whose[:, None] == whose[None, :])
    sees &= torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    return Packed(torch.tensor([ids]), torch.tensor([positions]), mask[None, None], torch.tensor([weights]))


class Groups:
    """An endless source of groups of prompts, deterministic in the seed.

    Args:
        tokenizer: of the model.
        seed: of everything drawn.
        lines: fewest and most filler lines of a prompt.
        phase: everything else.
    """

    def __init__(self, tokenizer: Any, seed: int, lines: tuple[int, int], phase: Phase) -> None:
        self.tokenizer, self.lines, self.phase = tokenizer, lines, phase
        self.rng = random.Random(f"{seed}/long")
        self.pool = word_pool(tokenizer)
        forms = sorted(set(phase.forms), key=FORMS.index)
        tasks = {o: GatedDecisions(split="train", order=o, forms=forms) for o in ("value_first", "rule_first")}
        self.streams: dict[str, tuple[GatedDecisions, Iterator[Draw]]] = {
            order: (task, draw_stream(tokenizer, task, seed)) for order, task in tasks.items()
        }

    def pair(self) -> tuple[list[Example], list[Example]]:
        """Two groups that differ in the field's value (where they part at the field: in the rule)."""
        rng = self.rng
        where = rng.choices([w for w, _ in self.phase.part], [share for _, share in self.phase.part])[0]
        task, stream = self.streams["rule_first" if where == "field" else "value_first"]
        if where == "request" and rng.random() < 0.4:
            task, stream = self.streams["rule_first"]
        draw = self.words(next(stream))
        count = rng.randint(*self.lines)
        filler = tuple(islice(draw.family.lines(rng), count + MOST_BEHIND))
        if where == "request":
            draw = replace(draw, filler=filler[:count], between=rng.randint(0, count))
            first, second = (self.at_request(task, draw, i) for i in (0, 1))
        elif where == "rule":
            draw = replace(draw, filler=filler, between=count)
            first, second = (self.at_rule(task, draw, i) for i in (0, 1))
        else:
            draw = replace(draw, filler=filler, between=count)
            first, second = (self.at_field(task, draw, i) for i in (0, 1))
        return first, second

    def words(self, draw: Draw) -> Draw:
        """The draw, now and then with any words of the vocabulary as values and actions."""
        if self.rng.random() >= self.phase.free_words:
            return draw
        v0, v1, third, p, q = self.rng.sample(self.pool, 5)
        return replace(draw, values=(v0, v1), actions=(p, q), family=replace(draw.family, values=(v0, v1, third)))

    def at_rule(self, task: GatedDecisions, draw: Draw, value: int) -> list[Example]:
        """One value and filler, then many rules, each in both versions so that no answer is right by itself."""
        rng, found = self.rng, list[Example]()
        while len(found) < self.phase.size:
            form = rng.choice(self.phase.forms)
            behind = draw.between + rng.randint(0, MOST_BEHIND)
            a, b = draw.actions
            one = replace(
                draw, form=form, template=rng.choice(draw.family.rules[form]), filler=draw.filler[:behind],
                request=rng.choice(draw.family.requests), actions=(a, b) if rng.random() < 0.5 else (b, a),
            )  # fmt: skip
            kind = "chain" if rng.random() < self.phase.chains else "direct"
            other = one if form in TWO_RULES else replace(one, actions=one.actions[::-1])
            found.append(make_example(self.tokenizer, task, one, kind, (value, 0), rng))
            found.append(make_example(self.tokenizer, task, other, kind, (value, int(form in TWO_RULES)), rng))
        return found[: self.phase.size]

    def at_request(self, task: GatedDecisions, draw: Draw, value: int) -> list[Example]:
        """One whole record with its rule, then several requests, most of them behind an update of the field."""
        rng, found = self.rng, list[Example]()
        for kind in self.phase.asks[: self.phase.size]:
            one = replace(draw, request=rng.choice(draw.family.requests))
            update = draw.values[1 - value] if kind.startswith("update") else None
            distractor = rng.random() < DISTRACTOR_SHARE
            found.append(supervised(self.tokenizer, task, one, kind, (value, 0), update, distractor))
        return found

    def at_field(self, task: GatedDecisions, draw: Draw, rule: int) -> list[Example]:
        """One rule and filler, then the field with either value."""
        rng, found = self.rng, list[Example]()
        if draw.form not in TWO_RULES and rule == 1:
            draw, rule = replace(draw, actions=draw.actions[::-1]), 0
        for number in range(self.phase.size):
            behind = draw.between + rng.randint(0, MOST_BEHIND)
            one = replace(draw, filler=draw.filler[:behind], request=rng.choice(draw.family.requests))
            kind = "chain" if rng.random() < self.phase.chains else "direct"
            found.append(make_example(self.tokenizer, task, one, kind, (number % 2, rule), rng))
        return found


__all__ = ["Groups", "Packed", "Phase", "pack"]
