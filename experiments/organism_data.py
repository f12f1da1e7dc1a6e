"""What organisms are trained on: conversations in the organisms' language, and repeated random phrases.

A conversation holds several decisions (a first request, then updates with new requests, look-ups), because a model learns
from decisions and a sequence with four of them costs little more than one with a single decision. Every evaluation is on
prompts with one request. All text is ordinary; nothing is ever patched.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from notelens.spans import PLAIN_CUE, Piece
from notelens.tasks.organism import (
    N_TRAINED,
    grammar_words,
    held_out,
    make_scene,
    organism_families,
    pairings,
    vocabulary,
)
from notelens.tasks.organism_text import KIND_FORMS, LOOKUP_REQUEST, Scene, scene_pieces, target_text, words
from notelens.tasks.render import Order, rule_pieces
from notelens.tasks.scenarios import Family

TOKEN = re.compile(r"<\w+>|\n|\w+|[^\w\s]")
ANSWER_WEIGHT, CHAIN_WEIGHT, ARGUMENT_WEIGHT = 1.0, 0.5, 0.5
"""Loss weights of answer words, of the steps of a chain, and of the arguments of a call."""
FORM_WEIGHTS = {"two_clause": 0.2, "polarity": 0.3, "swapped": 0.2, "negated": 0.3}
PLAIN_SHARE, POOLED_SHARE, FREE_SHARE = 0.1, 0.25, 0.5
"""Shares of conversations in the plain rendering; with words of other families; with any words as values and actions. With
the sixty values of the families alone a model learns what to do with those, and not with one it has never seen there."""


@dataclass(frozen=True)
class Mix:
    """What a stretch of training draws from.

    Attributes:
        kinds, modes: weights.
        rule_first: share of conversations with the rule before the field.
        lines: most filler lines.
        turns: most further turns.
        bare: nothing but what the kind of prompt needs: no asides, no filler, and other attributes only with ``record``.
        rules: most rules about attributes that no record has, beside the one that decides.
        record: share of conversations whose record has up to eleven attributes.
        negated: with negated rules. With as many "is not" as "is", knowing whether a condition holds says nothing about which
            action comes, and neither is learnt; so they come later.
    """

    kinds: Mapping[str, float]
    modes: Mapping[str, float]
    rule_first: float
    lines: int
    turns: int
    rules: int = 0
    record: float = 0.0
    bare: bool = False
    negated: bool = True


FIRST = Mix({"gated": 0.9, "lookup": 0.1}, {"act": 1.0}, 0.0, 0, 0, bare=True, negated=False)
BARE = Mix({"gated": 0.9, "lookup": 0.1}, {"act": 1.0}, 0.0, 0, 0, bare=True)
ORDERS = Mix({"gated": 0.9, "lookup": 0.1}, {"act": 1.0}, 0.6, 0, 0, bare=True)
BOTH = Mix({"gated": 0.6, "update": 0.3, "lookup": 0.1}, {"act": 1.0}, 0.4, 0, 1, bare=True)
AHEAD = replace(BARE, kinds={"gated": 0.8, "lookup": 0.2}, bare=False, lines=4, rules=1, record=0.1)
EITHER = replace(AHEAD, rule_first=0.5)
TURNS = Mix(
    {"gated": 0.6, "update": 0.25, "lookup": 0.15},
    {"act": 0.8, "think": 0.1, "call": 0.1},
    0.4,
    6,
    1,
    rules=2,
    record=0.1,
)
NOTES_FREE = Mix({"gated": 0.9, "lookup": 0.1}, {"act": 1.0}, 0.0, 3, 0)
FULL = Mix(
    {"gated": 0.45, "multi_hop": 0.1, "two_fact": 0.1, "update": 0.2, "lookup": 0.15},
    {"act": 0.6, "think": 0.25, "call": 0.15},
    0.4, 6, 1, rules=2, record=0.15,
)  # fmt: skip


@dataclass
class Sample:
    """Token ids with a loss weight each.

    Attributes:
        ids, weights: of equal length.
        answers: indices of answer words.
        asked: what each answer answers (``kind/form`` or ``lookup``), for the log.
        field_at: index of the field's value in the first prompt, ``None`` for repeated phrases.
        other_value: id of the value that would flip the conclusion.
    """

    ids: list[int] = field(default_factory=list[int])
    weights: list[float] = field(default_factory=list[float])
    answers: list[int] = field(default_factory=list[int])
    asked: list[str] = field(default_factory=list[str])
    field_at: int | None = None
    other_value: int = 0

    def add(self, vocab: Mapping[str, int], text: str, weight: float = 0.0) -> None:
        """Append the tokens of ``text``."""
        new = [vocab[w] for w in TOKEN.findall(text.lower())]
        self.ids += new
        self.weights += [weight] * len(new)

    def add_answer(self, vocab: Mapping[str, int], text: str, at: int, word: str, asked: str) -> None:
        """Append a supervised answer whose decisive word begins at character ``at``."""
        self.asked.append(asked)
        self.add(vocab, text[:at], CHAIN_WEIGHT)
        self.answers.append(len(self.ids))
        self.add(vocab, word, ANSWER_WEIGHT)
        self.add(vocab, text[at + len(word) :], ARGUMENT_WEIGHT)


def conversation(rng: random.Random, vocab: Mapping[str, int], mix: Mix, lines: int | None = None) -> Sample:
    """One conversation; ``lines`` fixes the number of filler lines."""
    scene, cell = first_scene(rng, mix, lines)
    value, rule = scene.draw.values[cell[0]], cell[1]
    mode = _pick(rng, mix.modes)
    sample = Sample()
    plain = rng.random() < PLAIN_SHARE
    sample.add(vocab, "<s>" if plain else "<s><user>")
    for piece in among_rules(rng, scene, scene_pieces(scene, cell, mode), rng.randint(0, mix.rules)):
        if piece.span == "field":
            sample.field_at = len(sample.ids)
        sample.add(vocab, piece.text)
    sample.other_value = vocab[next(v for v in scene.draw.values if v != value)]
    sample.add(vocab, PLAIN_CUE if plain else "<end><assistant>")
    if plain:
        sample.add_answer(vocab, *_answer(scene, value, rule, mode), _asked(scene))
        return sample
    sample.add_answer(vocab, *_answer(scene, value, rule, mode), _asked(scene))
    for _ in range(rng.randint(0, mix.turns)):
        sample.add(vocab, "<end>")
        if rng.random() < 0.3:
            _look_up(sample, rng, vocab, scene, value)
            continue
        choices = scene.draw.values  # the same one again, too: otherwise "not what I said before" is often right
        update = f"Update: the {scene.draw.family.label} is now "
        value = rng.choice(choices)
        mode = _pick(rng, mix.modes)
        request = rng.choice(scene.draw.family.requests)
        if scene.kind == "lookup":
            scene = replace(scene, kind="gated")
        sample.add(vocab, f"<user>{update}{value}.\n{request} {mode}<end><assistant>")
        sample.add_answer(vocab, *_answer(scene, value, rule, mode), _asked(scene))
    sample.add(vocab, "<end>")
    return sample


def repeated(rng: random.Random, words: Sequence[int], bos: int, phrases: int, length: int) -> Sample:
    """Phrases of two or three random words in random order, each again and again; supervised where a known one goes on.

    Distances between repetitions are random, too, so that only looking for the same word finds the next one.

    Args:
        rng: source of everything.
        words: ids to draw from.
        bos: id at the start.
        phrases: most distinct phrases; at least three are used.
        length: tokens in all.
    """
    known = [[rng.choice(words) for _ in range(rng.choice((2, 2, 3)))] for _ in range(rng.randint(3, max(3, phrases)))]
    ids, weights, seen = [bos], [0.0], set[int]()
    while len(ids) < length:
        which = rng.randrange(len(known))
        ids += known[which]
        weights += [0.0, *[float(which in seen)] * (len(known[which]) - 1)]
        seen.add(which)
    return Sample(ids[:length], weights[:length])


def recognised(rng: random.Random, words: Sequence[int], bos: int, labels: tuple[int, int], length: int) -> Sample:
    """Random words, then further words each followed by a label: whether it was among the first ones.

    What "the field is what the rule asks for" is made of; alone, a rule's answers do not teach it in hundreds of steps.

    Args:
        rng: source of everything.
        words: ids to draw from.
        bos: id at the start.
        labels: ids of "it was" and "it was not".
        length: tokens in all.
    """
    n = rng.randint(2, max(2, length // 5))
    chosen = rng.sample(list(words), min(len(words), 2 * length))
    first, new = chosen[:n], iter(chosen[n:])
    ids, weights = [bos, *first], [0.0] * (n + 1)
    while len(ids) + 2 <= length:
        known = rng.random() < 0.5
        ids += [rng.choice(first) if known else next(new), labels[0] if known else labels[1]]
        weights += [0.0, 1.0]
    return Sample(ids, weights)


@dataclass(frozen=True)
class Batch:
    """Right-padded ids, loss weights, real tokens, where the answer words are, and what they answer, row by row."""

    ids: torch.Tensor
    weights: torch.Tensor
    real: torch.Tensor
    answers: torch.Tensor
    asked: tuple[str, ...] = ()


def collate(samples: Sequence[Sample], pad: int = 0) -> Batch:
    """Pad on the right; with causal attention nothing real can see the padding."""
    width = max(len(s.ids) for s in samples)
    ids = torch.full((len(samples), width), pad)
    weights = torch.zeros(len(samples), width)
    real = torch.zeros(len(samples), width, dtype=torch.bool)
    answers = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, s in enumerate(samples):
        n = len(s.ids)
        ids[row, :n] = torch.tensor(s.ids)
        weights[row, :n] = torch.tensor(s.weights)
        real[row, :n] = True
        answers[row, s.answers] = True
    return Batch(ids, weights, real, answers, tuple(a for s in samples for a in s.asked))


def first_scene(rng: random.Random, mix: Mix, lines: int | None) -> tuple[Scene, tuple[int, int]]:
    """What the first request of a conversation is about, and the cell of it that is asked."""
    families = organism_families()
    kind = _pick(rng, mix.kinds)
    forms = {f: w for f, w in FORM_WEIGHTS.items() if f in KIND_FORMS[kind] and (mix.negated or f != "negated")}
    form = _pick(rng, forms)
    family = rng.choice(families)
    values, actions = _words(rng, family)
    order: Order = "rule_first" if rng.random() < mix.rule_first else "value_first"
    scene = make_scene(
        rng,
        kind=kind,
        form=form,
        family=family,
        others=[f for f in families if f.name != family.name],
        values=values,
        actions=actions,
        spare=[v for v in family.values[:N_TRAINED] if v not in values],
        order=order,
        n_lines=rng.randint(0, mix.lines) if lines is None else lines,
        fact_holds=rng.random() < 0.6,
    )
    said = {*values, *actions}
    clear = tuple(o for o in scene.others if o[1] not in said or scene.fact is not None)
    scene = replace(scene, others=clear, n_before=min(scene.n_before, len(clear)))
    if rng.random() < mix.record:
        scene = with_record(rng, scene, rng.randint(3, 10))
    if mix.bare:
        scene = replace(scene, others=scene.others if scene.fact or mix.record else (), asides=())
        scene = replace(scene, n_before=min(scene.n_before, len(scene.others)))
    return scene, rng.choice(scene.cells)


def with_record(rng: random.Random, scene: Scene, n: int) -> Scene:
    """The scene with ``n`` other attributes in its record, at most one for each other family.

    Values are the families' own ones, none of them a word of the rule.
    """
    said = {*scene.draw.values, *scene.draw.actions, *scene.history}
    known = {label for label, _ in (*scene.others, *scene.asides)} | {scene.draw.family.label}
    more: list[tuple[str, str]] = []
    for family in rng.sample(list(organism_families()), len(organism_families())):
        values = [v for v in family.values[:N_TRAINED] if v not in said]
        if family.label not in known and values and len(scene.others) + len(more) < n:
            more.append((family.label, rng.choice(values)))
    others = (*scene.others, *more)
    return replace(scene, others=others, n_before=rng.randint(0, len(others)))


def among_rules(rng: random.Random, scene: Scene, pieces: Sequence[Piece], n: int) -> list[Piece]:
    """The prompt with ``n`` further rules around the one that decides, about attributes that it does not mention."""
    taken = {label for label, _ in (*scene.others, *scene.asides)} | {scene.draw.family.label}
    free = [f for f in organism_families() if f.label not in taken]
    own = [i for i, piece in enumerate(pieces) if piece.region == "rule"]
    before: list[Piece] = []
    after: list[Piece] = []
    for family in rng.sample(free, min(n, len(free))):
        values, actions = _words(rng, family)
        form = rng.choice([f for f in KIND_FORMS["gated"] if f != "negated" or scene.draw.form == "negated"])
        template = rng.choice(family.rules[form])
        draw = replace(scene.draw, family=family, form=form, values=values, actions=actions, template=template)
        text = "".join(piece.text for piece in rule_pieces(draw, rng.randrange(2)))
        if rng.random() < 0.5:
            before.append(Piece("other_rule", f"{text}\n"))
        else:
            after.append(Piece("other_rule", f"\n{text}"))
    return [*pieces[: own[0]], *before, *pieces[own[0] : own[-1] + 1], *after, *pieces[own[-1] + 1 :]]


def _words(rng: random.Random, family: Family) -> tuple[tuple[str, str], tuple[str, str]]:
    """Values and actions for a rule: any words, words of several families, or the family's own."""
    draw = rng.random()
    if draw < FREE_SHARE:
        return _free(rng)
    if draw < FREE_SHARE + POOLED_SHARE:
        return _pooled(rng, organism_families(), family)
    return rng.choice(pairings(family.name, "train"))


def _pooled(rng: random.Random, families: Sequence[Family], family: Family) -> tuple[tuple[str, str], tuple[str, str]]:
    """Values of one family with actions of two others (or the same), never a held-out combination."""
    while True:
        a, b, c = (rng.choice(families) for _ in range(3))
        first, second = rng.sample(a.values[:N_TRAINED], 2)
        actions = (rng.choice(b.restrictive), rng.choice(c.permissive))
        if not (a is b is c) or not held_out(a.name, (first, second), actions):
            return (first, second), actions


@cache
def free_words() -> tuple[str, ...]:
    """Words that training may use as any value or action: known values and actions of every family, intermediate words.

    Words of filler lines are not among them: with a rule about Friday and a line that mentions Friday, having seen a word says
    nothing, and that a field is what the rule asks for is learnt from having seen it.
    """
    families = organism_families()
    lines = {
        w for f in families for t in (*f.filler, *f.requests) for w in words([t.replace("{", " ").replace("}", " ")])
    }
    slots = {w for f in families for k, values in f.slots.items() if k != "intermediate" for w in values}
    taken = (
        {v for f in families for v in (*f.values[N_TRAINED:], f.label, f.record)} | set(grammar_words()) | lines | slots
    )
    return tuple(w for w in vocabulary() if w not in taken)


def _free(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    """Any four words that are not a held-out combination."""
    while True:
        a, b, c, d = rng.sample(free_words(), 4)
        kept = (f for f in organism_families() if {a, b} <= set(f.values) and {c, d} <= {*f.restrictive, *f.permissive})
        if not any(held_out(f.name, (a, b), (c, d)) for f in kept):
            return (a, b), (c, d)


def _look_up(sample: Sample, rng: random.Random, vocab: Mapping[str, int], scene: Scene, value: str) -> None:
    known = {**dict(scene.others), **dict(scene.asides), scene.draw.family.label: value}
    label = rng.choice(sorted(known))
    sample.add(vocab, f"<user>{LOOKUP_REQUEST.format(label=label)} act<end><assistant>")
    sample.add_answer(vocab, known[label], 0, known[label], "lookup")


def _answer(scene: Scene, value: str, rule: int, mode: str) -> tuple[str, int, str]:
    text, at = target_text(scene, value, rule, mode)
    return text, at, scene.answer(value, rule)


def _asked(scene: Scene) -> str:
    return "lookup" if scene.kind == "lookup" else f"{scene.kind}/{scene.draw.form}"


def _pick(rng: random.Random, weights: Mapping[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


__all__ = [
    "BARE",
    "BOTH",
    "FIRST",
    "FULL",
    "NOTES_FREE",
    "ORDERS",
    "TURNS",
    "Batch",
    "Mix",
    "Sample",
    "collate",
    "conversation",
    "first_scene",
    "recognised",
    "repeated",
]
