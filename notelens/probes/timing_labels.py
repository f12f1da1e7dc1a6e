"""What the timing probe reads out of residuals, as labels of prompts.

* ``conclusion``: restrictive or permissive answer.
* ``field``: which of the instance's two values the field has.
* ``repetition``: whether a trigger of the rule repeats the field's value. With one trigger whose action is the same in
  every prompt (the published design) this *is* the conclusion, and it is decodable from layer 2 on without inference.
  :func:`agreement` says how far the two coincide.
* ``shuffled``: the conclusion, flipped or not at random for each group. Within a group nothing changes, so the label is
  as structured as the real one, and held-out accuracy is 1/2 on average unless groups leak between folds.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence

from notelens.probes.linear import Label
from notelens.prompt import Prompt
from notelens.tasks.base import Cell, Instance

Sample = tuple[Instance, Cell, Prompt]


def make_labels(samples: Sequence[Sample], key: str, *, n_shuffles: int, with_field: bool) -> dict[str, Label]:
    """All labels of the samples; ``repetition`` only where both of its classes occur.

    Args:
        samples: every cell of some instances.
        key: seeds the shuffles; the same in every process.
        n_shuffles: how many shuffled conclusions.
        with_field: leave the field out where its values cannot be shared (between families).
    """
    conclusion = [i.conclusion[cell] for i, cell, _ in samples]
    labels = {"conclusion": Label.binary(conclusion)}
    if with_field:
        truth, other = (
            tuple(_field_ids(i.cells[(cell[0] ^ flip, cell[1])]) for i, cell, _ in samples) for flip in (0, 1)
        )
        labels["field"] = Label(truth, other)
    again = [repeats_field(p) for _, _, p in samples]
    if len(set(again)) == 2:
        labels["repetition"] = Label.binary([int(a) for a in again])
    groups = sorted({i.group for i, _, _ in samples})
    for shuffle in range(n_shuffles):
        digest = hashlib.sha256(f"{key}/{shuffle}".encode()).digest()
        rng = random.Random(int.from_bytes(digest[:8], "big"))
        flip = {g: rng.randrange(2) for g in groups}
        bits = [c ^ flip[i.group] for c, (i, _, _) in zip(conclusion, samples, strict=True)]
        labels[f"shuffled{shuffle}"] = Label.binary(bits)
    return labels


def agreement(labels: Mapping[str, Label]) -> int | None:
    """Prompts in which conclusion and repetition coincide, up to naming; ``None`` where nothing is repeated."""
    if "repetition" not in labels:
        return None
    pairs = list(zip(labels["conclusion"].truth, labels["repetition"].truth, strict=True))
    same = sum(a == b for a, b in pairs)
    return max(same, len(pairs) - same)


def repeats_field(prompt: Prompt) -> bool:
    """Whether one part of the trigger spells the field's value again."""
    value = _bare(prompt, prompt.positions("field"))
    return any(_bare(prompt, part.positions) == value for part in prompt.spans.get("trigger", ()))


def settled(margins: Sequence[float]) -> int:
    """First index from which all margins have the sign of the last one."""
    positive = [m > 0 for m in margins]
    return max((i + 1 for i, p in enumerate(positive) if p != positive[-1]), default=0)


def _bare(prompt: Prompt, positions: Sequence[int]) -> str:
    return "".join("".join(prompt.tokens[p].split()) for p in positions).casefold()


def _field_ids(prompt: Prompt) -> tuple[int, ...]:
    return tuple(prompt.token_ids[p] for p in prompt.positions("field"))
