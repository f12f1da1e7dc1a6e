"""What the competence adapter is trained on: gated decisions as ordinary prompts, in legs and phases, as minimal pairs."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from rich.progress import track

from notelens.spans import encode
from notelens.tasks.base import Cell
from notelens.tasks.gated import GatedDecisions
from notelens.tasks.render import Draw, Mode, Order
from notelens.tasks.scenarios import FORMS, load_families

BATCH = 8
KINDS: dict[str, float] = {"direct": 0.50, "chain": 0.20, "update": 0.18, "update_chain": 0.12}
DISTRACTOR_SHARE, LONG_TOKENS = 0.25, 220
ACTION_WEIGHT, CHAIN_WEIGHT, END_WEIGHT = 1.0, 0.15, 0.1
"""Loss weights: a chain has twenty tokens that are easy; its conclusion and direct answers should count."""


@dataclass(frozen=True)
class Phase:
    """What a part of the training draws from.

    The first phase holds direct prompts under the two easier forms. With all four forms in both orders from the first step
    (no minimal pairs, learning rate 5e-4) a run was still at chance when it was stopped at step 170; a run with pairs, the
    easier forms first and 5e-4 was at chance on held-out prompts at step 80 and was stopped after 90.

    Attributes:
        share: part of all steps.
        kinds, forms: weights of what is drawn.
        value_first: share of prompts with the field before the rule.
        short: share of prompts with only two filler lines.
        plain: share of direct prompts without the chat template.
        long: share of batches with prompts of about LONG_TOKENS tokens.
        families: how many of the training families are drawn from.
        wordings: how many wordings of a rule are drawn from.
        pairs: whether a batch is four minimal pairs; otherwise eight prompts drawn apart from each other.
    """

    share: float
    kinds: dict[str, float]
    forms: dict[str, float]
    value_first: float
    short: float
    plain: float
    long: float
    pairs: bool
    families: int = 15
    wordings: int = 3


EASY = {"two_clause": 0.4, "swapped": 0.1, "polarity": 0.5}
EVERYTHING = {"two_clause": 0.15, "swapped": 0.2, "polarity": 0.35, "negated": 0.3}
MOSTLY_DIRECT = {"direct": 0.6, "chain": 0.15, "update": 0.15, "update_chain": 0.1}


@dataclass(frozen=True)
class Leg:
    """A stretch of training with an optimiser and a learning-rate schedule of its own.

    Attributes:
        steps: how many steps are run.
        schedule: number of steps over which the learning rate falls to zero; longer than ``steps`` breaks the leg off.
        phases: what is drawn, in order; shares are of ``schedule``.
    """

    steps: int
    schedule: int
    phases: tuple[Phase, ...]


LEGS = (
    Leg(65, 120, (Phase(1.0, {"direct": 1.0}, EASY, 1.0, 0.5, 0.0, 0.0, False, 6, 1),)),
    Leg(
        240,
        240,
        (
            Phase(0.25, MOSTLY_DIRECT, EVERYTHING, 0.75, 0.7, 0.0, 0.0, False),
            Phase(0.75, KINDS, EVERYTHING, 0.55, 0.6, 0.05, 0.03, False),
        ),
    ),
)


@dataclass(frozen=True)
class Example:
    """Token ids with a loss weight per token (0 where not supervised)."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    n_prompt: int
    action_at: int
    kind: str
    form: str
    order: str
    family: str


def make_example(
    tokenizer: Any, task: GatedDecisions, draw: Draw, kind: str, cell: Cell, rng: random.Random
) -> Example:
    """A cell of a draw with its supervised continuation.

    With an update line the cell says which value counts in the end: the update states it and the field holds another one
    (now and then the same, so that an update line alone says nothing).
    """
    mode: Mode = "chain" if kind.endswith("chain") else "direct"
    update = None
    if kind.startswith("update"):
        update = draw.values[cell[0]]
        stays = rng.random() < 0.1
        cell = cell if stays else (1 - cell[0], cell[1])
        third = [v for v in draw.family.values if v not in draw.values]
        if draw.form in ("polarity", "negated") and update != draw.values[cell[1]] and rng.random() < 0.3:
            update = rng.choice(third)  # a value that neither field nor rule mentions
    distractor = rng.random() < DISTRACTOR_SHARE
    rendered = task.render(tokenizer, draw, cell, mode=mode, update=update, distractor=distractor)
    prompt, lead = rendered.prompt, "" if task.rendering == "chat" else " "
    full = encode(tokenizer, prompt.text + lead + rendered.target, templated=True)
    before_action = encode(
        tokenizer, (prompt.text + lead + rendered.target[: rendered.action_at]).rstrip(" "), templated=True
    )
    n, action_at = len(prompt), len(before_action) if mode == "chain" else len(prompt)
    if full[:n] != prompt.token_ids or (mode == "chain" and full[:action_at] != before_action):
        raise ValueError(f"prompt {prompt.id!r} and its answer do not tokenise apart")
    weights = [0.0] * n + [CHAIN_WEIGHT] * (action_at - n) + [ACTION_WEIGHT] * (len(full) - action_at) + [END_WEIGHT]
    return Example(
        (*full, int(tokenizer.eos_token_id)),
        tuple(weights),
        n,
        action_at,
        kind,
        draw.form,
        task.order,
        draw.family.name,
    )


def draw_stream(tokenizer: Any, task: GatedDecisions, seed: int) -> Iterator[Draw]:
    """Endless shuffled draws of a task: blocks of four per family, each block with a seed of its own."""
    for block in count():
        draws = task.draws(tokenizer, 4 * len(task.families), seed * 1000 + block)
        random.Random(f"{seed}/{block}/{task.forms}/{task.order}/{task.rendering}").shuffle(draws)
        yield from draws


def training_batches(tokenizer: Any, seed: int, leg: Leg) -> list[list[Example]]:
    """Batches of four minimal pairs: two cells of one draw with different right answers, all of the same kind of length.

    Within a pair everything but field (or trigger) is equal, so what any word does for an answer as such cancels in the
    gradient, and no answer has a prior.
    """
    rng = random.Random(f"{seed}/mix")
    streams: dict[tuple[str, str, str, int | None, int], tuple[GatedDecisions, Iterator[Draw]]] = {}
    batches: list[list[Example]] = []
    for number, phase in enumerate(leg.phases):
        last = number == len(leg.phases) - 1
        n_batches = leg.schedule - len(batches) if last else round(phase.share * leg.schedule)
        for _ in track(range(n_batches), description=f"prompts of phase {number + 1}"):
            batch: list[Example] = []
            length = LONG_TOKENS if rng.random() < phase.long else None
            chains = "chain" in phase.kinds and rng.random() < phase.kinds["chain"] + phase.kinds["update_chain"]
            kinds = {k: w for k, w in phase.kinds.items() if k.endswith("chain") == chains}  # alike in length
            while len(batch) < BATCH:
                kind = rng.choices(list(kinds), list(kinds.values()))[0]
                form = rng.choices(list(phase.forms), list(phase.forms.values()))[0]
                order = "value_first" if rng.random() < phase.value_first else "rule_first"
                rendering = "plain" if kind == "direct" and rng.random() < phase.plain else "chat"
                key = (form, order, rendering, length, phase.families)
                if key not in streams:
                    names = [f.name for f in load_families() if f.split == "train"][: phase.families]
                    task = GatedDecisions(
                        split="train", families=names, forms=[form], order=order, rendering=rendering, length=length
                    )
                    streams[key] = (task, draw_stream(tokenizer, task, seed))
                task, stream = streams[key]
                draw = next(stream)
                if draw.template not in draw.family.rules[form][: phase.wordings]:
                    draw = replace(draw, template=rng.choice(draw.family.rules[form][: phase.wordings]))
                if length is None and rng.random() < phase.short:
                    draw = replace(draw, filler=draw.filler[:2], between=1)
                along_trigger = form != "two_clause" and kind in ("direct", "chain") and rng.random() < 0.35
                fixed = rng.randrange(2) if form != "two_clause" else 0
                for i in (0, 1) if phase.pairs else (rng.randrange(2),):
                    cell = (fixed, i) if along_trigger else (i, fixed)
                    batch.append(make_example(tokenizer, task, draw, kind, cell, rng))
            batches.append(batch)
    return batches[: leg.steps]


def heldout_examples(tokenizer: Any, seed: int, n: int, orders: Sequence[Order]) -> list[Example]:
    """``n`` prompts per (order, form, kind) from families that training never sees."""
    rng = random.Random(f"{seed}/heldout")
    found: list[Example] = []
    for order in orders:
        for form in FORMS:
            task = GatedDecisions(split="eval", order=order, forms=[form])
            for kind in KINDS:
                for draw in task.draws(tokenizer, n, seed + 1000):
                    found.append(make_example(tokenizer, task, draw, kind, rng.choice(draw.cells), rng))
    return found
