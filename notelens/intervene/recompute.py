"""Rows re-run in the stale cache: the counterpart of a transplant.

A transplant copies rows that a full prefill of the new prompt would have written. A repair has no such donor: it can only run
tokens again in the cache it has, where everything it does not run is stale. The same positions can be enough one way and
useless the other (arXiv:2609.17983), so maps report both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.errors import NonFiniteError, PatchError, UnsupportedModelError
from notelens.intervene.attended import attended_cache
from notelens.intervene.engine import DEFAULT_BUDGET_BYTES, MAX_CHUNK
from notelens.intervene.kernel import Batch, engine_attention, run_readers
from notelens.models.base import NoteModel


def recompute_effects(
    model: NoteModel,
    stale: KVCache,
    token_ids: Sequence[int],
    sites: Sequence[Sequence[int]],
    answer_ids: Sequence[int],
    *,
    edited: Sequence[int],
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    max_chunk: int = MAX_CHUNK,
) -> Tensor:
    """Answer logits after the edited rows and each site's rows are run again in the stale cache.

    All rows of a site run together in one pass, in order: each sees the stale rows before it, the edited rows, and the
    site's own recomputed rows. The last token (the decision) is always run and never cached.

    Args:
        model: runs the rows.
        stale: cache of the old prompt, all its rows.
        token_ids: ids of the *new* prompt, equal in length.
        sites: rows to run again, one sequence per site; an empty one is the in-place edit alone.
        answer_ids: ids whose logits are returned.
        edited: rows of the field, always run with the new ids.

    Returns:
        ``[site, answer]`` float32.

    Raises:
        PatchError: another model's cache, lengths differ, a row does not exist, ids differ outside the edited rows, or there
            is no answer to read.
        UnsupportedModelError: a hybrid, whose recurrent layers cannot run scattered rows.
        NonFiniteError: a logit is NaN or infinite.

    Cost: ``len(edited) + len(site) + 1`` tokens per site.
    """
    n = len(stale)
    if stale.n_layers != model.geometry.n_layers:
        raise PatchError(
            f"the cache has {stale.n_layers} layers, the model {model.geometry.n_layers}; use a cache of this model"
        )
    if model.family.recurrent:
        raise UnsupportedModelError(
            f"{model.name} has recurrent layers, which read every token in order; scattered rows cannot be run again in them. "
            "Prefill the changed prompt in full"
        )
    if not answer_ids:
        raise PatchError("at least one answer id is needed")
    if len(token_ids) != n:
        raise PatchError(
            f"the stale cache has {n} rows, the new prompt {len(token_ids)} tokens; recompute aligns them row by row"
        )
    outside = [
        i for i, (a, b) in enumerate(zip(stale.token_ids, token_ids, strict=True)) if a != b and i not in set(edited)
    ]
    if outside:
        raise PatchError(
            f"the new prompt differs from the cached one at {outside[0]}, which is not among the edited rows"
        )
    rows: list[tuple[int, ...]] = []
    for site in sites:
        bad = [p for p in (*site, *edited) if not 0 <= p < n - 1]
        if bad:
            raise PatchError(f"row {bad[0]} is outside the rows that the decision reads (0..{n - 2})")
        rows.append((*sorted({*site, *edited}), n - 1))
    stale = attended_cache(model, stale)
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), rows[i]))
    out = torch.empty(len(rows), len(answer_ids))
    ids = torch.tensor(list(token_ids), device=stale.device)
    layer, d_model = model.geometry.layers[0], model.geometry.d_model
    with torch.no_grad(), engine_attention(model):
        start = 0
        while start < len(order):
            width = len(rows[order[start]])
            cost = width * (2 * 4 * layer.n_heads * (n + width) + 4 * 4 * d_model)
            limit = max(1, min(max_chunk, budget_bytes // cost))
            chunk = [i for i in order[start : start + limit] if len(rows[i]) == width]
            own = torch.tensor([rows[i] for i in chunk], device=stale.device)
            positions = stale.positions.to(stale.device)[own]
            batch = Batch(stale, n - 1, positions, own_rows=own)
            hidden = run_readers(model, batch, ids[own], n_readers=len(chunk))
            out[chunk] = model.answer_logits(hidden, answer_ids).float().cpu()
            start += len(chunk)
    if not bool(torch.isfinite(out).all()):
        raise NonFiniteError("answer logits are not finite; check the model's dtype and the cache for overflow")
    return out
