"""Stored rows as attention sees them, so that one engine serves every representation.

A latent cache (MLA) stores one latent and one rotary slice per token; attention sees keys and values of every query head. The
engine works on what attention sees. Sites speak of what is stored, so a site that takes only the latent or only the slice of
a donor becomes a site on a donor whose stored rows were mixed before they were expanded. A hybrid's readers continue from the
recurrent state in front of them, which is scanned here where the cache has none.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from notelens.cache.kv import KVCache
from notelens.intervene.rescan import rescan
from notelens.models.base import NoteModel

if TYPE_CHECKING:
    from notelens.intervene.engine import Mode, Reader, Site


def attended_cache(model: NoteModel, cache: KVCache, starts: Sequence[int] = ()) -> KVCache:
    """``cache`` with keys and values as attention sees them, and with the recurrent states behind ``starts`` rows.

    The same object where nothing has to be done. Cost: the up-projection of a latent cache once; for a hybrid one forward over
    the tokens in front of the last start that is not known yet.
    """
    if model.family.latent:
        pairs = [
            model.family.attended(model.hf, i, k, v)
            for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True))
        ]
        cache = cache.replace_tensors([k for k, _ in pairs], [v for _, v in pairs], history=cache.history)
    missing = {s for s in starts if s > 0 and s not in cache.states}
    if model.family.recurrent and missing:
        found = rescan(model, cache, sorted(missing)).cache.states
        cache = replace(cache, states={**cache.states, **found})
    return cache


def attended(
    model: NoteModel,
    recipient: KVCache,
    donors: Sequence[KVCache],
    sites: "Sequence[Site]",
    readers: "Sequence[Reader]",
    mode: "Mode",
) -> "tuple[KVCache, list[KVCache], list[Site]]":
    """Recipient, donors and sites of a call in the form the engine works on; see :func:`attended_cache`."""
    starts = {r.start for r in readers}
    if mode == "in_forward":  # a run begins at the first row of its site that changes anything
        starts |= {p for s in sites for p in s.positions}
    if not model.family.latent:
        return attended_cache(model, recipient, sorted(starts)), list(donors), list(sites)
    wanted = sorted({(s.donor, s.parts) for s in sites if s.positions})
    mixed: list[KVCache] = []
    for donor, parts in wanted:
        keys = donors[donor].keys if "k" in parts else recipient.keys
        values = donors[donor].values if "v" in parts else recipient.values
        mixed.append(attended_cache(model, donors[donor].replace_tensors(keys, values, history=donors[donor].history)))
    place = {key: i for i, key in enumerate(wanted)}
    moved = [
        replace(s, donor=place.get((s.donor, s.parts), 0), parts="kv", kv_heads=None) if s.positions else s
        for s in sites
    ]
    return attended_cache(model, recipient), mixed, moved


__all__ = ["attended", "attended_cache"]
