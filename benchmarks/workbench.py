"""What is measured: prompts that differ in one early token, their caches, and the plan of a run.

The recipient and the donor of a case differ in the value of a field near the start, so every later row differs and no patch
is free. The reader is the last token. A plan lists timed steps; methods alternate within a round, so that a ratio compares
two measurements of the same minute.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notelens.cache.kv import KVCache
from notelens.intervene.engine import Reader, Site

HEAD, VALUES, TAIL = "Record\nStatus of the gate:", (" open", " closed"), "\nIs the gate open now? Answer:"
ANSWERS = (" yes", " no")
SUBJECTS = (
    "The night guard",
    "A driver from the north depot",
    "Our clerk",
    "The second crew",
    "An old farmer",
    "The cook",
)
VERBS = ("counted", "moved", "painted", "checked", "sold", "repaired", "weighed", "forgot")
OBJECTS = (
    "three crates of apples",
    "the long ladder",
    "two bicycles",
    "a letter",
    "the spare keys",
    "seven maps",
    "some rope",
)
PLACES = ("behind the mill", "in the yard", "at the station", "near the bridge", "on the second floor", "by the river")
TIMES = ("on Monday", "before noon", "after the rain", "at dawn", "last week", "in the evening", "during lunch")


@dataclass(frozen=True)
class Case:
    """Two prompts of equal length that differ in one token.

    Attributes:
        recipient_ids, donor_ids: whole prompts; the last token is the reader.
        field: where they differ.
        answer_ids: two ids; the margin is the second logit minus the first.
    """

    recipient_ids: tuple[int, ...]
    donor_ids: tuple[int, ...]
    field: int
    answer_ids: tuple[int, int]

    @property
    def n(self) -> int:
        """Tokens of the prompt, the reader included."""
        return len(self.recipient_ids)

    @property
    def positions(self) -> range:
        """All positions between the field and the reader."""
        return range(self.field + 1, self.n - 1)


def text_case(tokenizer: Any, n: int, seed: int = 0) -> Case:
    """A prompt of exactly ``n`` tokens: a field, sentences drawn with ``seed``, a question.

    Raises:
        ValueError: ``n`` leaves no room, or a value or an answer is not one token.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    single = [ids(word) for word in (*VALUES, *ANSWERS)]
    if any(len(word) != 1 for word in single):
        raise ValueError(f"values and answers must be single tokens, got {single}")
    old, new, no, yes = (word[0] for word in single)
    head, tail = ids(HEAD), ids(TAIL)
    room = n - len(head) - 1 - len(tail)
    if room < 1:
        raise ValueError(f"{n} tokens leave no room between field and question")
    rng = random.Random(f"filler/{seed}")
    filler: list[int] = ids(".\n")
    while len(filler) < room:
        words = (rng.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, PLACES, TIMES))
        filler += ids(" ".join(words) + rng.choice((". ", ".\n", "; ")))
    rest = (*filler[:room], *tail)
    return Case((*head, old, *rest), (*head, new, *rest), len(head), (no, yes))


@dataclass
class Prepared:
    """A case with everything that a method may have before its clock starts.

    Attributes:
        recipient, donor: whole caches.
        extras: what one method prepared for itself (a transformers cache, hooked donor rows).
    """

    model: Any
    case: Case
    recipient: KVCache
    donor: KVCache
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def reader(self) -> Reader:
        """The last token, which reads the two answers."""
        return Reader.last(self.recipient, self.case.answer_ids)


def prepare(model: Any, case: Case) -> Prepared:
    """Prefill both prompts of a case."""
    return Prepared(model, case, model.prefill(case.recipient_ids).cache, model.prefill(case.donor_ids).cache)


@dataclass(frozen=True)
class Step:
    """One timed call.

    Attributes:
        benchmark: ``position_map`` or ``layer_position_map``.
        n: tokens of the prompt.
        method: key of :data:`benchmarks.methods.METHODS`.
        round: methods of one round are compared with each other.
        sites: how many sites to draw; ``None`` takes all.
        spread: take evenly spaced sites instead of random ones.
    """

    benchmark: str
    n: int
    method: str
    round: int
    sites: int | None
    spread: bool = False

    def __str__(self) -> str:
        return f"{self.benchmark}-{self.n}-round{self.round}-{self.method}"

    def choose(self, case: Case, n_layers: int) -> list[Site]:
        """The sites of this step; the same every time."""
        if self.benchmark == "position_map":
            every = [Site((p,)) for p in case.positions]
        else:
            every = [Site((p,), layers=(low, low + 1)) for low in range(n_layers) for p in case.positions]
        if self.sites is None or self.sites >= len(every):
            return every
        if self.spread:
            return [every[i * len(every) // self.sites] for i in range(self.sites)]
        return random.Random(str(self)).sample(every, self.sites)


BATCHES = (8, 32, 64)
"""Batch sizes of native batching."""
COPY_LIMIT_BYTES = 3 * 2**30
"""Most bytes of copied caches in one native batch; larger batches are left out."""


def steps(
    benchmark: str,
    n: int,
    rounds: int,
    samples: Mapping[str, int | None],
    *,
    prefills: int | None = None,
    spread: Sequence[str] = (),
) -> list[Step]:
    """Steps of one prompt length, methods alternating within a round.

    Args:
        benchmark: ``position_map`` or ``layer_position_map``.
        n: tokens of the prompt.
        rounds: how often each method is timed.
        samples: per method, how many sites are drawn; ``None`` takes all.
        prefills: how often the ordinary prefill is timed where that is not in every round; at least two. The first two
            come first, because their caches are what the other methods start from.
        spread: methods whose sample is evenly spaced instead of random.
    """
    last = rounds if prefills is None else prefills
    found = [Step(benchmark, n, "prefill", r, None) for r in range(2)]
    for r in range(rounds):
        found += [Step(benchmark, n, name, r, sites, name in spread) for name, sites in samples.items()]
        if 2 <= r < last:
            found.append(Step(benchmark, n, "prefill", r, None))
    return found


__all__ = ["BATCHES", "COPY_LIMIT_BYTES", "Case", "Prepared", "Step", "prepare", "steps", "text_case"]
