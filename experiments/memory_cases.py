"""A user's memory in Markdown: dozens of facts, asked for one by one, or two of them that only together give an answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from notelens.errors import TaskError
from notelens.spans import encode, render
from notelens.tasks.organism import N_TRAINED, organism_families
from notelens.tasks.organism_text import LOOKUP_REQUEST

Place = Literal["early", "late"]
Kind = Literal["independent", "cross"]
NAMES = ("ada", "bruno", "carla", "elif", "farid", "greta", "hugo", "ines", "jonas", "kaia", "leo", "mira")
ATTRIBUTES = {
    "city": ("Lund", "Porto", "Graz", "Delft", "Turin", "Bergen", "Ghent", "Tartu"),
    "pet": ("cat", "dog", "rabbit", "parrot", "turtle", "hamster", "horse", "goat"),
    "drink": ("tea", "coffee", "water", "juice", "milk", "cider", "cocoa", "soda"),
    "colour": ("red", "blue", "green", "black", "white", "yellow", "pink", "grey"),
}
FILLER = (
    "The weekly report is due on Friday.", "The lift is being repaired.", "Lunch is served from noon.",
    "The car park closes at nine.", "A new printer stands on the second floor.", "Windows are cleaned in spring.",
)  # fmt: skip


@dataclass(frozen=True)
class Query:
    """What is asked.

    Attributes:
        fact: index of the fact that decides.
        text: the request.
        answers: for the fact's value and for its other one.
        choices: words to choose among.
        other: index of the second fact that is needed, or ``None``.
    """

    fact: int
    text: str
    answers: tuple[str, str]
    choices: tuple[str, ...]
    other: int | None = None


@dataclass(frozen=True)
class Memory:
    """A memory with what surrounds it.

    Attributes:
        id, family: of the case.
        facts: lines; each ends in a line break.
        changed: the same lines with the other value of each fact that is asked for.
        filler: lines in front of it (late) or behind it (early).
        queries: as they are asked, one a turn.
        values: per query, label and other value of its fact.
    """

    id: str
    family: str
    facts: tuple[str, ...]
    changed: tuple[str, ...]
    filler: tuple[str, ...]
    queries: tuple[Query, ...]
    values: tuple[tuple[str, str], ...]


def memories(
    language: str, n: int, seed: int, *, kind: Kind, n_facts: int, n_queries: int, n_filler: int
) -> list[Memory]:
    """``n`` memories.

    Args:
        language: ``organism`` (twelve attributes of one record; the other facts are notes that nobody asks for) or ``plain``
            (what people like; every fact can be asked for).
        n, seed: as everywhere.
        kind: ``independent``: each query needs one fact. ``cross``: a query needs a fact and a rule that stands in the last
            line of the memory, so that a border between blocks lies between them.
        n_facts: lines of the memory.
        n_queries: asked of each.
        n_filler: lines around it.

    Raises:
        TaskError: too few facts for the queries.
    """
    make = {"organism": _organism, "plain": _plain}.get(language)
    if make is None:
        raise TaskError(f"unknown language {language!r}; there are organism and plain")
    most = 11 if language == "organism" else n_facts - 1
    if not 1 <= n_queries <= min(most, n_facts - 1) or n_facts > len(NAMES) * len(ATTRIBUTES):
        raise TaskError(f"{n_queries} queries over {n_facts} facts cannot be had in language {language!r}")
    return [
        make(i, random.Random(f"memory/{seed}/{language}/{i}"), kind, n_facts, n_queries, n_filler) for i in range(n)
    ]


def _organism(index: int, rng: random.Random, kind: Kind, n_facts: int, n_queries: int, n_filler: int) -> Memory:
    families = list(organism_families())
    home = families[index % len(families)]
    labels = rng.sample(families, min(len(families), n_facts - 1))
    pairs = [_two(rng, f.values[:N_TRAINED]) for f in labels]
    lines = [f"- {f.label}: {a}\n" for f, (a, _) in zip(labels, pairs, strict=True)]
    others = [f"- {f.label}: {b}\n" for f, (_, b) in zip(labels, pairs, strict=True)]
    notes = home.lines(rng)
    while len(lines) < n_facts - 1:
        at = rng.randint(0, len(lines))
        note = f"- {next(notes)}\n"
        lines.insert(at, note)
        others.insert(at, note)
    asked = rng.sample(range(len(labels)), n_queries)
    where = [lines.index(f"- {labels[i].label}: {pairs[i][0]}\n") for i in asked]
    queries: list[Query] = []
    if kind == "independent":
        lines.append(last := f"- {next(notes)}\n")
        for i, at in zip(asked, where, strict=True):
            queries.append(Query(at, f"{LOOKUP_REQUEST.format(label=labels[i].label)} act", pairs[i], labels[i].values))
    else:  # one rule, about one fact: every query is the same
        i, at = asked[0], where[0]
        f, (a, _) = labels[i], pairs[i]
        deny, allow = rng.choice(f.restrictive), rng.choice(f.permissive)
        lines.append(last := f"Rule: if the {f.label} is {a} then {deny}, otherwise {allow}.\n")
        queries.append(Query(at, f"{rng.choice(f.requests)} act", (deny, allow), (deny, allow), len(lines) - 1))
        asked = asked[:1]
    others.append(last)
    values = tuple((labels[i].label, pairs[i][1]) for i in asked)
    filler = tuple(f"- {next(notes)}\n" for _ in range(n_filler))
    return Memory(
        f"organism/{kind}/{index:03d}", home.name, tuple(lines), tuple(others), filler, tuple(queries), values
    )


def _two(rng: random.Random, values: Sequence[str]) -> tuple[str, str]:
    a, b = rng.sample(list(values), 2)
    return a, b


def _plain(index: int, rng: random.Random, kind: Kind, n_facts: int, n_queries: int, n_filler: int) -> Memory:
    keys = rng.sample([(n, a) for n in NAMES for a in ATTRIBUTES], n_facts - 1)
    pairs = [_two(rng, ATTRIBUTES[a]) for _, a in keys]

    def line(i: int, value: str) -> str:
        return f"- {keys[i][0].capitalize()}'s {keys[i][1]}: {value}\n"

    lines, others = ([line(i, p[side]) for i, p in enumerate(pairs)] for side in (0, 1))
    asked = rng.sample(range(len(keys)), n_queries)
    queries: list[Query] = []
    last = "- The user prefers short answers.\n"
    if kind == "independent":
        for i in asked:
            name, attribute = keys[i]
            text = f"What is {name.capitalize()}'s {attribute}? Answer with one word."
            queries.append(Query(i, text, pairs[i], ATTRIBUTES[attribute]))
    else:
        asked = asked[:1]
        i = asked[0]
        name, attribute = keys[i]
        last = f"- If {name.capitalize()}'s {attribute} is {pairs[i][0]}, the meeting is approved; otherwise it is denied.\n"
        text = "Is the meeting approved or denied? Answer with one word."
        queries.append(Query(i, text, ("approved", "denied"), ("approved", "denied"), len(lines)))
    lines.append(last)
    others.append(last)
    values = tuple((f"{keys[i][0].capitalize()}'s {keys[i][1]}", pairs[i][1]) for i in asked)
    filler = tuple(rng.choice(FILLER) + "\n" for _ in range(n_filler))
    return Memory(f"plain/{kind}/{index:03d}", keys[0][1], tuple(lines), tuple(others), filler, tuple(queries), values)


@dataclass(frozen=True)
class Laid:
    """A memory laid out as a prompt: ids in front of it, its blocks, and what is behind up to the answer.

    ``text`` is all of it, ``request_at`` the character at which the request begins.
    """

    text: str
    request_at: int
    head: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """All of it."""
        return (*self.head, *(i for b in self.blocks for i in b), *self.tail)


def lay_out(
    tokenizer: Any,
    memory: Memory,
    query: Query,
    *,
    place: Place,
    blocks: int,
    turn: int = 0,
    lines: tuple[str, ...] | None = None,
) -> Laid:
    """The prompt of one turn, cut into blocks at line ends.

    Args:
        tokenizer: of the model.
        memory, query: what is asked of what.
        place: filler behind the memory (``early``) or in front of it (``late``).
        blocks: number of blocks, of as equal numbers of lines as can be.
        turn: so many further lines stand in front of the memory, so that it moves at every turn.
        lines: of the memory, when not its facts.

    Raises:
        TaskError: more blocks than lines, or tokens that cross a line end.
    """
    facts = memory.facts if lines is None else lines
    if not 1 <= blocks <= len(facts):
        raise TaskError(f"{len(facts)} facts cannot be split into {blocks} blocks")
    moved = "".join(memory.filler[i % max(1, len(memory.filler))] for i in range(turn)) if memory.filler else ""
    filler = "".join(memory.filler)
    before, after = (moved, filler) if place == "early" else (moved + filler, "")
    cuts = [round(i * len(facts) / blocks) for i in range(blocks + 1)]
    parts = ["".join(facts[a:b]) for a, b in pairwise(cuts)]
    body = before + "".join(parts) + after + query.text
    shown, at = render(tokenizer, body, "chat", None)
    texts = [shown[:at] + before, *parts, after + shown[at + len(body) - len(query.text) :]]
    pieces = [encode(tokenizer, t, templated=True) if t else () for t in texts]
    whole = encode(tokenizer, shown, templated=True)
    if tuple(i for p in pieces for i in p) != whole:
        raise TaskError(f"memory {memory.id!r}: tokens cross a border between blocks with this tokenizer")
    answer_ids = tuple(_answer(tokenizer, shown, whole, w) for w in query.choices)
    return Laid(shown, at + len(body) - len(query.text), pieces[0], tuple(pieces[1:-1]), pieces[-1], answer_ids)


def _answer(tokenizer: Any, text: str, ids: tuple[int, ...], word: str) -> int:
    longer = encode(tokenizer, text + word, templated=True)
    if longer[: len(ids)] == ids and len(longer) > len(ids):
        return longer[len(ids)]
    return encode(tokenizer, word, templated=True)[0]


__all__ = ["Laid", "Memory", "Query", "lay_out", "memories"]
