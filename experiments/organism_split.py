"""Training without notes: the field stands twice at one position, once for the decision and once for everything else.

The token behind the first copy sees what it would see in a prompt with *that* value, the decision sees the second copy only.
The first copy is the flipping value, the right one or a random one, so what positions between field and decision know about the
field is worthless, and the only way to answer is to read the field's own row at the decision.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from experiments.organism_data import Batch, Sample, collate
from notelens.tasks.organism import N_TRAINED, organism_families

FLIPPED, SAME = 0.5, 0.3
"""Shares of first copies that are the flipping value and the right one; the rest is any value of the language."""


def split_batch(
    samples: Sequence[Sample], rng: random.Random, vocab: Mapping[str, int]
) -> tuple[Batch, dict[str, Any]]:
    """A batch with the field of every conversation split, and the positions and mask that the model needs for it.

    Args:
        samples: conversations with one request, or repeated phrases (left as they are).
        rng: draws the first copies.
        vocab: of the tokenizer.

    Returns:
        The batch, and ``position_ids`` ``[batch, pos]`` and ``attention_mask`` ``[batch, 1, pos, pos]`` (added to scores).
    """
    values = [vocab[v] for f in organism_families() for v in f.values[:N_TRAINED]]
    split = [s if s.field_at is None else _twice(s, _first_copy(s, rng, values)) for s in samples]
    batch = collate(split)
    rows, width = batch.ids.shape
    positions = torch.arange(width).repeat(rows, 1)
    sees = torch.ones(width, width, dtype=torch.bool).tril().repeat(rows, 1, 1)
    for row, sample in enumerate(split):
        if sample.field_at is None:
            continue
        first, second, decision = sample.field_at, sample.field_at + 1, sample.answers[0] - 1
        positions[row, second:] -= 1
        sees[row, second, first] = False
        sees[row, second + 1 : decision, second] = False
        sees[row, decision:, first] = False
    mask = torch.zeros(rows, 1, width, width).masked_fill(~sees[:, None], torch.finfo(torch.float32).min)
    return batch, {"position_ids": positions, "attention_mask": mask}


def _first_copy(sample: Sample, rng: random.Random, values: Sequence[int]) -> int:
    draw = rng.random()
    if draw < FLIPPED:
        return sample.other_value
    return sample.ids[sample.field_at or 0] if draw < FLIPPED + SAME else rng.choice(values)


def _twice(sample: Sample, first: int) -> Sample:
    """The sample with ``first`` inserted in front of the field; loss weights of the inserted token are zero."""
    at = sample.field_at or 0
    return replace(
        sample,
        ids=[*sample.ids[:at], first, *sample.ids[at:]],
        weights=[*sample.weights[:at], 0.0, *sample.weights[at:]],
        answers=[a + 1 for a in sample.answers],
    )
