"""Attribution patching of cached rows: a first-order *estimate* of every isolated swap (Nanda 2023; AtP, arXiv:2403.00745)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.cache.hf import leaf_cache
from notelens.cache.kv import KVCache
from notelens.cache.ops import slice_rows
from notelens.errors import NonFiniteError, PatchError
from notelens.intervene.engine import Reader, check_ends
from notelens.models.base import NoteModel


@dataclass(frozen=True)
class Attribution:
    """Estimated margin changes.

    Attributes:
        effects: ``[layer, pos]`` estimated change of logit(answer 1) - logit(answer 0) when the row of one layer is taken
            from the donor; a position's estimate is the sum over layers.
        mode: always ``attribution``: an estimate, never a measurement.
    """

    effects: Float[Tensor, "layer pos"]
    mode: str = "attribution"

    @property
    def positions(self) -> Float[Tensor, " pos"]:
        """Estimate for whole rows."""
        return self.effects.sum(0)


def attribution_effects(
    model: NoteModel, recipient: KVCache, donor: KVCache, reader: Reader, *, prefix: int = 1
) -> Attribution:
    """Gradient of the recipient's margin with respect to its rows, times donor minus recipient.

    Args:
        model: a model whose plain attention can be differentiated.
        recipient, donor: aligned caches.
        reader: with two answers; the margin is the second minus the first.
        prefix: how many leading tokens the two must share, as for ``swap_effects``.

    Raises:
        PatchError: caches are not aligned or begin differently, or the reader does not read exactly two answers.
        NonFiniteError: a gradient is NaN or infinite.

    Cost: one forward and one backward of the reader (plus the two prefills that made the caches).
    """
    check_ends(model, recipient, [donor], [reader], prefix=prefix)
    if len(reader.answer_ids) != 2:
        raise PatchError(f"attribution needs a margin between two answers, the reader reads {len(reader.answer_ids)}")
    base, other = slice_rows(recipient, 0, reader.start), slice_rows(donor, 0, reader.start)
    begin = base.next_position
    ids = torch.tensor([reader.token_ids], device=recipient.device)
    positions = torch.arange(begin, begin + len(reader.token_ids), device=recipient.device)[None]
    with torch.enable_grad():
        store, keys, values = leaf_cache(base)
        hidden = model.family.decoder(model.hf)(
            input_ids=ids, position_ids=positions, past_key_values=store, use_cache=True
        ).last_hidden_state[0, -1]
        logits = model.answer_logits(hidden, reader.answer_ids)
        gradients = torch.autograd.grad(logits[1] - logits[0], [*keys, *values])
    n = base.n_layers
    effects = [
        sum(
            ((b - a).float() * g[0].float()).sum((0, 2))
            for a, b, g in (
                (base.keys[i], other.keys[i], gradients[i]),
                (base.values[i], other.values[i], gradients[n + i]),
            )
        )
        for i in range(n)
    ]
    found = torch.stack([torch.as_tensor(e) for e in effects]).cpu()
    if not bool(torch.isfinite(found).all()):
        raise NonFiniteError("gradients are not finite; check the model's dtype and the caches for overflow")
    return Attribution(found)
