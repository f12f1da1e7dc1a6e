"""Which heads read the notes: the output of single heads at the decision position is replaced by the donor's.

Implements the read side of the paper's circuit section. All heads of all layers are one batch. The joint effect of the top
heads is compared with the joint effect of as many random ones; patching random heads one at a time, as the published
control does, says nothing about their joint effect.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.errors import CompetenceError, NonFiniteError, PatchError
from notelens.intervene.attended import attended_cache
from notelens.intervene.engine import Reader, check_ends
from notelens.intervene.kernel import Batch, HeadPatches, engine_attention, run_readers
from notelens.models.base import NoteModel
from notelens.readout import exclusion

Head = tuple[int, int]
"""(layer, query head)."""

MAX_CHUNK = 256


@dataclass(frozen=True)
class HeadState:
    """What every head did at a reader's last token.

    Attributes:
        outputs: head outputs before the output projection, ``[layer, head, d_value]``.
        attention: weights on the cached rows, ``[layer, head, pos]``.
        logits: answer logits ``[answer]``.
    """

    outputs: Float[Tensor, "layer head d_value"]
    attention: Float[Tensor, "layer head pos"]
    logits: Float[Tensor, " answer"]


def _positions(cache: KVCache, reader: Reader) -> Tensor:
    begin = int(cache.positions[reader.start - 1]) + 1
    return torch.arange(begin, begin + len(reader.token_ids), device=cache.device)[None]


def read_heads(model: NoteModel, cache: KVCache, reader: Reader) -> HeadState:
    """Head outputs and attention at the reader's last token. Cost: one reader.

    Raises:
        PatchError: another model's cache, or a reader that does not fit.
    """
    check_ends(model, cache, (), [reader])
    cache = attended_cache(model, cache, (reader.start,))
    batch = Batch(cache, reader.start, _positions(cache, reader), record=True)
    ids = torch.tensor([reader.token_ids], device=cache.device)
    with torch.no_grad(), engine_attention(model):
        hidden = run_readers(model, batch, ids, n_readers=1)
        logits = model.answer_logits(hidden, reader.answer_ids)[0].float().cpu()
    layers = range(model.geometry.n_layers)
    return HeadState(
        torch.stack([batch.recorded_heads[i] for i in layers]),
        torch.stack([batch.recorded_attention[i] for i in layers]),
        logits,
    )


def head_effects(
    model: NoteModel,
    recipient: KVCache,
    donor: KVCache,
    sets: Sequence[Sequence[Head]],
    reader: Reader,
    *,
    prefix: int = 1,
) -> Float[Tensor, "set answer"]:
    """Answer logits with each set of heads replaced, jointly, by the donor's outputs at the reader's last token.

    Args:
        model: runs the reader.
        recipient, donor: aligned caches.
        sets: heads per patch; ``[[(l, h)] for ...]`` for single heads.
        reader: tokens and answers.
        prefix: how many leading tokens the two must share, as for ``swap_effects``.

    Returns:
        ``[set, answer]`` float32.

    Raises:
        PatchError: caches are not aligned or begin differently, a set is empty, or a head does not exist.
        NonFiniteError: a logit is NaN or infinite.

    Cost: one reader per set and one on the donor; layers below a chunk's first patched one run once.
    """
    check_ends(model, recipient, [donor], [reader], prefix=prefix)
    n_layers, n_heads = model.geometry.n_layers, model.geometry.layers[0].n_heads
    for heads in sets:
        for layer, head in heads:
            if not (0 <= layer < n_layers and 0 <= head < n_heads):
                raise PatchError(f"head {layer}.{head} does not exist: {n_layers} layers of {n_heads} query heads")
        if not heads:
            raise PatchError("a set of heads is empty")
    source = read_heads(model, donor, reader).outputs
    recipient = attended_cache(model, recipient, (reader.start,))
    order = sorted(range(len(sets)), key=lambda i: min(layer for layer, _ in sets[i]))
    out = torch.empty(len(sets), len(reader.answer_ids))
    ids = torch.tensor([reader.token_ids], device=recipient.device)
    with torch.no_grad(), engine_attention(model):
        for start in range(0, len(order), MAX_CHUNK):
            chunk = order[start : start + MAX_CHUNK]
            pairs = [(i, layer, head) for i, index in enumerate(chunk) for layer, head in sets[index]]
            columns = [torch.tensor(c, device=recipient.device) for c in zip(*pairs, strict=True)]
            batch = Batch(
                recipient, reader.start, _positions(recipient, reader), heads=HeadPatches(*columns, donor=source)
            )
            first = min(layer for _, layer, _ in pairs)
            hidden = run_readers(model, batch, ids, n_readers=len(chunk), first_layer=first)
            out[chunk] = model.answer_logits(hidden, reader.answer_ids).float().cpu()
    if not bool(torch.isfinite(out).all()):
        raise NonFiniteError("answer logits are not finite; check the model's dtype and the caches for overflow")
    return out


@dataclass(frozen=True)
class HeadMap:
    """Read effects of all heads for one pair and direction.

    Attributes:
        recovery: ``[layer, head]`` of single heads.
        note_mass: attention of the recipient's decision to the given rows, ``[layer, head]``.
        ks: sizes of the joint sets.
        joint_top: recovery of the k strongest single heads, patched together, per k.
        joint_random: recovery of k random heads, patched together, per k and draw.
        mode: heads are replaced at the reader only, so ``isolated``.
    """

    recovery: Float[Tensor, "layer head"]
    note_mass: Float[Tensor, "layer head"]
    ks: tuple[int, ...]
    joint_top: tuple[float, ...]
    joint_random: tuple[tuple[float, ...], ...]
    mode: str = "isolated"


def head_map(
    model: NoteModel,
    recipient: KVCache,
    donor: KVCache,
    reader: Reader,
    notes: Sequence[int],
    *,
    ks: Sequence[int] = (1, 2, 4, 8, 12, 16),
    n_random: int = 20,
    seed: int = 0,
    prefix: int = 1,
) -> HeadMap:
    """Single-head recoveries, attention mass on the notes, and joint top-k against joint random-k.

    Args:
        notes: rows that count as notes for the attention mass.
        ks: sizes of the joint sets; those above the number of heads are left out.
        n_random: draws per size.
        seed: of the draws.
        prefix: how many leading tokens the two must share, as for ``swap_effects``.

    Raises:
        PatchError: caches or reader do not fit, the reader does not read two answers, or a note row does not exist.
        CompetenceError: a recovery is not defined between the two margins; the message says why.

    Cost: ``n_layers * n_heads + len(ks) * (1 + n_random)`` readers.
    """
    n_layers, n_heads = model.geometry.n_layers, model.geometry.layers[0].n_heads
    singles = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    if len(reader.answer_ids) != 2:
        raise PatchError(f"a recovery needs a margin between two answers, the reader reads {len(reader.answer_ids)}")
    bad = [row for row in notes if not 0 <= row < reader.start]
    if bad:
        raise PatchError(f"note row {bad[0]} is outside the rows that the reader sees (0..{reader.start - 1})")
    base, other = read_heads(model, recipient, reader), read_heads(model, donor, reader)
    low, high = (float(state.logits[1] - state.logits[0]) for state in (base, other))
    reason = exclusion(low, high)
    if reason is not None:
        raise CompetenceError(
            f"head recoveries are not defined: {reason} (margins {low:.2f} and {high:.2f}); head_effects gives plain logits"
        )

    def recoveries(sets: Sequence[Sequence[Head]]) -> Tensor:
        logits = head_effects(model, recipient, donor, sets, reader, prefix=prefix)
        return (logits[:, 1] - logits[:, 0] - low) / (high - low)

    alone = recoveries([[s] for s in singles])
    ranking = torch.argsort(alone, descending=True, stable=True).tolist()
    sizes = tuple(k for k in ks if k <= len(singles))
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(f"{seed}".encode()).digest()[:8], "big"))
    draws = [[[singles[i] for i in rng.permutation(len(singles))[:k]] for _ in range(n_random)] for k in sizes]
    top = recoveries([[singles[i] for i in ranking[:k]] for k in sizes])
    random = recoveries([d for per_k in draws for d in per_k]).view(len(sizes), n_random)
    return HeadMap(
        alone.view(n_layers, n_heads),
        base.attention[:, :, list(notes)].sum(-1).cpu(),
        sizes,
        tuple(top.tolist()),
        tuple(tuple(row) for row in random.tolist()),
    )
