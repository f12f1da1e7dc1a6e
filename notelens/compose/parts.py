"""From what a caller passes to checked chunks: text, ids, caches, contexts, skills, compositions, and lists of these."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from notelens.cache.kv import KVCache
from notelens.compose.base import Chunk, Composed, fits_here
from notelens.compose.skill import Skill, check_bos, text_ids
from notelens.context import Context
from notelens.errors import ComposeError
from notelens.models.base import NoteModel

logger = logging.getLogger(__name__)

Part = str | Context | KVCache | Skill | Composed | Sequence[Any]
"""Text; a list of token ids; a context, cache or composition with all its rows; a skill; or a list of parts."""

BORDER_TOKENS = 6
"""Tokens on either side of a border that are decoded and encoded again to see whether the tokenizer would join them."""


def resolve(model: NoteModel, parts: Sequence[Part]) -> list[Chunk]:
    """Checked chunks of the parts, in order, nested lists opened.

    Raises:
        ComposeError: there are no parts, one is empty, is of a kind that cannot be joined, belongs to another model or
            holds a beginning-of-sequence token behind the first; or all together exceed the model's positions.
        ArtefactError: a skill belongs to another model, tokenizer, type or RoPE table.
    """
    chunks: list[Chunk] = []
    for index, part in enumerate(_opened(parts)):
        chunks.append(_chunk(model, part, index, first=not chunks))
    if not chunks:
        raise ComposeError("there are no parts to compose")
    total = sum(len(c) for c in chunks)
    if total > model.geometry.max_positions:
        sizes = ", ".join(f"{c.label} {len(c)}" for c in chunks[:6])
        raise ComposeError(
            f"{total} tokens exceed the {model.geometry.max_positions} positions of {model.name} ({sizes}); drop or shorten "
            "a part"
        )
    _warn_windows(model, chunks)
    shared = _shared(chunks)
    return [replace(c, shared=shared, total=total) if c.stored is not None else c for c in _distinct(chunks)]


def merged_borders(model: NoteModel, chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Rows in front of which the tokenizer would join text across the border of two chunks (reported, not repaired)."""
    found: list[int] = []
    at = 0
    for left, right in itertools.pairwise(chunks):
        at += len(left)
        if _joins(model.tokenizer, left.token_ids[-BORDER_TOKENS:], right.token_ids[:BORDER_TOKENS]):
            found.append(at)
            logger.warning(
                "the tokenizer would join %s and %s: ids around row %d are not those of the joint text", left.label,
                right.label, at,
            )  # fmt: skip
    return tuple(found)


def _joins(tokenizer: Any, left: Sequence[int], right: Sequence[int]) -> bool:
    def again(ids: Sequence[int]) -> list[int]:
        text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    if again(left) != list(left) or again(right) != list(right):
        return False  # ids that their own text does not give back: nothing can be said about the border
    return again([*left, *right]) != [*left, *right]


def _opened(parts: Any) -> Iterator[Any]:
    """Parts with nested lists opened; a list of whole numbers is one part (token ids)."""
    if isinstance(parts, str) or not isinstance(parts, Sequence) or (parts and all(isinstance(p, int) for p in parts)):
        yield parts
    else:
        for part in parts:
            if isinstance(part, Sequence) and not isinstance(part, str) and not part:
                raise ComposeError("a part is an empty list; there is nothing to run")
            yield from _opened(part)


def _chunk(model: NoteModel, part: Any, index: int, *, first: bool) -> Chunk:
    what = f"part {index}"
    if isinstance(part, str) or (isinstance(part, Sequence) and not isinstance(part, str)):
        return Chunk(f"text{index}", text_ids(model, part, what, first=first))
    if isinstance(part, Skill):
        if not len(part):
            raise ComposeError(f"{what}: skill {part.name!r} has no rows")
        check_bos(model, part.token_ids, f"skill {part.name!r}")
        return Chunk(part.name, part.token_ids, part.onto(model).cache, part.onto(model), model=model)
    if isinstance(part, Context | Composed | KVCache):
        cache = part if isinstance(part, KVCache) else part.cache
        label = part.prompt.id if isinstance(part, Context) else f"cache{index}"
        _check_cache(model, cache, f"{what} ({label})")
        check_bos(model, cache.token_ids[1:] if first else cache.token_ids, f"{what} ({label})")
        return Chunk(label, cache.token_ids, cache)
    raise ComposeError(
        f"{what} is a {type(part).__name__}; parts are text, token ids, caches, contexts, skills, compositions, or "
        "lists of them"
    )


def _check_cache(model: NoteModel, cache: KVCache, what: str) -> None:
    """Raise ComposeError unless the cache could be the model's."""
    if not len(cache):
        raise ComposeError(f"{what} has no rows")
    if cache.n_layers != model.geometry.n_layers:
        raise ComposeError(f"{what} has {cache.n_layers} layers, {model.name} has {model.geometry.n_layers}")
    if cache.dtype != model.dtype or cache.device != model.device:
        raise ComposeError(f"{what} is {cache.dtype} on {cache.device}, {model.name} {model.dtype} on {model.device}")
    for layer, geometry in enumerate(model.geometry.layers):
        found = (cache.keys[layer].shape[0], cache.keys[layer].shape[2], cache.values[layer].shape[2])
        wanted = (geometry.n_kv_heads, geometry.d_key, geometry.d_value)
        if found != wanted:
            raise ComposeError(
                f"{what}: layer {layer} stores {found} (heads, key width, value width), the model {wanted}"
            )


def _warn_windows(model: NoteModel, chunks: Sequence[Chunk]) -> None:
    """Say where a chunk is longer than a sliding window: its early rows are kept, and later tokens do not see them there."""
    windows = [g.window for g in model.geometry.layers if g.window is not None]
    for chunk in chunks:
        if windows and chunk.stored is not None and len(chunk) > min(windows):
            n_layers = sum(len(chunk) > w for w in windows)
            logger.warning(
                "%s has %d rows, more than the window of %d in %d of %d layers; all rows are kept and the mask enforces the "
                "window", chunk.label, len(chunk), min(windows), n_layers, model.geometry.n_layers,
            )  # fmt: skip


def _shared(chunks: Sequence[Chunk]) -> int:
    """Rows of leading text, or of a leading cache that stands at its own place and is exact."""
    shared = 0
    for index, chunk in enumerate(chunks):
        own = chunk.stored is not None and index == 0 and chunk.skill is None and fits_here(None, chunk)
        if chunk.stored is not None and not own:
            break
        shared += len(chunk)
    return shared if shared < sum(map(len, chunks)) else 0


def _distinct(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks, with repeated labels numbered, so that each piece of a composition can be named."""
    seen: dict[str, int] = {}
    out: list[Chunk] = []
    for chunk in chunks:
        n = seen[chunk.label] = seen.get(chunk.label, 0) + 1
        out.append(chunk if n == 1 else replace(chunk, label=f"{chunk.label}#{n}"))
    return out


def check_composed(composed: Composed, chunks: Sequence[Chunk]) -> Composed:
    """Return a composition that holds the ids of its chunks at positions 0, 1, 2, ...

    Raises:
        ComposeError: it does not; the composer is at fault.
    """
    wanted = tuple(i for chunk in chunks for i in chunk.token_ids)
    if composed.token_ids != wanted or not torch.equal(composed.cache.positions, torch.arange(len(wanted))):
        raise ComposeError(
            f"composer {composed.method!r} gave {len(composed)} rows up to position {composed.cache.next_position - 1} for "
            f"{len(wanted)} tokens, or other ids; rows must stand at 0..{len(wanted) - 1} in the order of the parts"
        )
    return composed


__all__ = ["Part", "check_composed", "merged_borders", "resolve"]
