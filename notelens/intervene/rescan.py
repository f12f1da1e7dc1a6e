"""The recurrent state of a hybrid, scanned again over rows that were patched or moved.

In a hybrid layer the recurrent half reads the same residual stream as attention, and that stream depends on the attention of
all lower layers. So the state behind changed rows has to be computed by running every token through every layer; only the
key and value projections could be left out. Re-scanning therefore saves nothing in tokens: what reuse of rows buys on a plain
transformer it does not buy here, and the report says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from notelens.cache.hf import HeldRows, recurrent_state
from notelens.cache.kv import KVCache, RecurrentState
from notelens.errors import CacheError, UnsupportedModelError
from notelens.models.base import NoteModel


@dataclass(frozen=True)
class Rescan:
    """A cache with its recurrent state, and what that cost.

    Attributes:
        cache: the rows as they were, with the states.
        n_tokens_run: tokens that went through the model.
        n_tokens_saved: tokens that a full prefill would have run on top of that.
        reason: why not more were saved.
    """

    cache: KVCache
    n_tokens_run: int
    n_tokens_saved: int
    reason: str


def rescan(model: NoteModel, cache: KVCache, boundaries: Sequence[int] | None = None) -> Rescan:
    """Compute the recurrent state behind rows of ``cache``; attention reads the cached rows as they are.

    Args:
        model: a hybrid.
        cache: its rows; unchanged.
        boundaries: numbers of rows behind which the state is wanted; behind the last row when ``None``.

    Returns:
        The cache with the states at ``boundaries`` in place of those it had. Of an exact cache they are those of a prefill.

    Raises:
        UnsupportedModelError: the model has no recurrent layers.
        CacheError: another model's cache, or a boundary that it does not have.

    Cost: one forward over all tokens up to the last boundary. What is saved by the reused rows is none of them.
    """
    if not model.family.recurrent:
        raise UnsupportedModelError(f"{model.name} has no recurrent layers; nothing needs to be scanned again")
    model.geometry.check(cache, model.name)
    wanted = sorted({len(cache)} if boundaries is None else set(boundaries))
    if not wanted or not 0 < wanted[0] <= wanted[-1] <= len(cache):
        raise CacheError(f"states behind {wanted[:4]} rows of a cache that has {len(cache)}")
    ids = torch.tensor([cache.token_ids], device=cache.device)
    positions = cache.positions.to(cache.device)[None]
    held, states, start = HeldRows(cache), dict[int, RecurrentState](), 0
    with torch.no_grad():
        for stop in wanted:
            held.scan_to(stop)
            model.family.decoder(model.hf)(
                input_ids=ids[:, start:stop],
                position_ids=positions[:, start:stop],
                past_key_values=held,
                use_cache=True,
            )
            state = recurrent_state(held)
            if state is None:
                raise UnsupportedModelError(f"{model.name} left no recurrent state behind {stop} tokens")
            states[stop], start = state, stop
    reason = (
        "recurrent layers read the residual stream of every token, so a changed prefix is run in full; the rows that were "
        "reused spare their key and value projections only"
    )
    return Rescan(replace(cache, states=states), wanted[-1], 0, reason)


__all__ = ["Rescan", "rescan"]
