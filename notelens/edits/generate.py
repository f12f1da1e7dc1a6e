"""Decoding behind an editable context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from notelens.cache.hf import from_transformers, to_transformers
from notelens.cache.kv import KVCache
from notelens.errors import EditError, NonFiniteError

if TYPE_CHECKING:
    from notelens.edits.context import EditableContext


@dataclass(frozen=True)
class Generated:
    """What was decoded.

    Attributes:
        ids: generated tokens, without the one that stopped it.
        text: decoded, special tokens left out.
        stopped: a stop token came up before ``max_tokens``.
        context: prompt and generated tokens; exact exactly when the prompt's was.
    """

    ids: tuple[int, ...]
    text: str
    stopped: bool
    context: "EditableContext"


def stop_ids(context: "EditableContext") -> tuple[int, ...]:
    """End-of-sequence tokens of the model's generation settings and of its tokenizer."""
    wanted = getattr(getattr(context.model.hf, "generation_config", None), "eos_token_id", None)
    found = list(wanted) if isinstance(wanted, list) else [wanted]
    found.append(getattr(context.model.tokenizer, "eos_token_id", None))
    return tuple(sorted({int(i) for i in found if i is not None}))


@torch.no_grad()
def generate(
    context: "EditableContext",
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    stop: Sequence[int] | None = None,
) -> Generated:
    """Decode up to ``max_tokens`` tokens.

    Args:
        context: stays unchanged.
        max_tokens: at most so many.
        temperature: 0 takes the largest logit; otherwise tokens are sampled.
        seed: of the sampler, needed when ``temperature`` is positive.
        stop: tokens that end it; those of the model when ``None``.

    Raises:
        EditError: nothing to generate, a negative temperature, or sampling without a seed.
        NonFiniteError: logits are NaN or infinite.

    Cost: one token each; one copy of the rows while it runs.
    """
    if max_tokens < 1:
        raise EditError(f"max_tokens is {max_tokens}; at least 1 is needed")
    if temperature < 0:
        raise EditError(f"temperature is {temperature}; it cannot be negative")
    if temperature > 0 and seed is None:
        raise EditError("sampling needs a seed, so that it can be repeated; pass seed=0")
    model = context.model
    ends = set(stop_ids(context) if stop is None else stop)
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    store = to_transformers(context.rows.join(), share=True)
    n, hidden, ids, stopped = len(context), context.hidden, list[int](), False
    decoder = model.family.decoder(model.hf)
    while len(ids) < max_tokens:
        token = _pick(model.next_logits(hidden), temperature, generator)
        if token in ends:
            stopped = True
            break
        at = n + len(ids)
        if at >= model.geometry.max_positions:
            break
        out = decoder(
            input_ids=torch.tensor([[token]], device=model.device),
            position_ids=torch.tensor([[at]], device=model.device),
            past_key_values=store,
            use_cache=True,
        )
        hidden = out.last_hidden_state[0, -1]
        ids.append(token)
    text = str(model.tokenizer.decode(ids, skip_special_tokens=True))
    if not ids:
        return Generated((), "", stopped, context)
    whole = from_transformers(store, (*context.tokens.ids, *ids))
    fresh = KVCache(
        tuple(k[:, n:].clone() for k in whole.keys),
        tuple(v[:, n:].clone() for v in whole.values),
        whole.positions[n:],
        tuple(ids),
    )
    return Generated(tuple(ids), text, stopped, context.extended(fresh, hidden))


def _pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError("logits are not finite; check the model's dtype and the cache for overflow")
    if temperature == 0:
        return int(logits.argmax())
    shares = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return int(torch.multinomial(shares, 1, generator=generator))
