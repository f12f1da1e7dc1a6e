"""A piece of text prefilled once: its rows, what they attended to, and the model they belong to.

A skill is compiled *isolated* (its first row stands at position 0 and sees nothing before it), behind a *neutral* prefix
(a few rows that take the attention that models put on the first token, dropped afterwards), or behind a real *prefix*
whose text it will follow again. Its keys are stored rotated to the positions at which they were computed, or unrotated:
then they are rotated once, when they are placed, and do not depend on how often the skill has moved.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from notelens.attention.move import adapters, move_rows, move_rows_into
from notelens.cache.artefact import CONDITIONS, SCHEMES, ModelTag, SkillFile, SkillHeader, check_model, check_name
from notelens.cache.kv import KVCache
from notelens.cache.ops import slice_rows
from notelens.cache.room import Room
from notelens.compose.tag import model_tag
from notelens.errors import ArtefactError, CacheError, ComposeError, UnsupportedModelError
from notelens.models.base import NoteModel
from notelens.spans import bos_text, encode

if TYPE_CHECKING:
    from pathlib import Path

NEUTRAL = "\n"
"""Text of the neutral prefix when none is given; repeated to :data:`NEUTRAL_TOKENS` tokens."""
NEUTRAL_TOKENS = 4
UNROTATED_TOLERANCE = 1e-4
"""Unrotated and rotated storage of one skill must place the same rows, relative to the largest key: they differ by one
rounding to float32 (1e-7); half-precision rows differ by their own step, which is allowed for."""


@dataclass(frozen=True)
class Skill:
    """Rows of a compiled text.

    Attributes:
        name: letters, digits, dot, dash and underscore; also the name of its file.
        cache: its rows at the positions at which they were computed. Keys of an ``unrotated`` skill carry no rotation.
        scheme: ``rotated`` or ``unrotated``.
        condition: ``isolated``, ``neutral`` or ``prefix``.
        prefix_ids: ids that its rows attended to.
        text_sha256: of its text.
        tag: of the model.
        gate: the model's gate report as plain data, or ``None``.
        ungated: whether the model was used without passing.
    """

    name: str
    cache: KVCache
    scheme: str
    condition: str
    prefix_ids: tuple[int, ...]
    text_sha256: str
    tag: ModelTag
    gate: dict[str, Any] | None
    ungated: bool

    def __len__(self) -> int:
        return len(self.cache)

    def __repr__(self) -> str:
        mark = "exact" if self.cache.exact else "approximate"
        return f"Skill({self.name!r}, {len(self)} tokens, {self.condition}, {self.scheme}, {self.tag.name}, {mark})"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of its tokens."""
        return self.cache.token_ids

    @property
    def compile_tokens(self) -> int:
        """Tokens that compiling ran: its own and those of the prefix."""
        return len(self) + len(self.prefix_ids)

    @property
    def key(self) -> str:
        """SHA-256 over everything that decides its rows but the rows themselves; equal for a skill and its file."""
        facts = (self.token_ids, self.condition, self.prefix_ids, self.tag.weights_sha256, self.tag.dtype)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def at(self, model: NoteModel, start: int) -> KVCache:
        """Its rows at positions ``start, start + 1, ...``.

        Raises:
            ArtefactError: the skill belongs to another model, tokenizer, type or RoPE table.
            CacheError: a position is beyond the model's.

        Cost: one rotation of its keys; no forward pass.
        """
        rows = self.onto(model).cache
        if self.scheme == "rotated":
            return move_rows(model, rows, start - int(rows.positions[0]))
        return _turn(model, self._standing(model, rows, start), forward=True)

    def at_into(self, model: NoteModel, start: int, room: Room) -> None:
        """As :meth:`at`, written into memory behind the rows that are there.

        Raises:
            ArtefactError, CacheError: as :meth:`at`.
        """
        rows = self.onto(model).cache
        standing = self._standing(model, rows, start)
        if self.scheme == "rotated":
            move_rows_into(model, rows, standing.positions, room)
            return
        for layer, adapter in enumerate(adapters(model)):
            steps = standing.positions.to(rows.device)
            adapter.move_into(rows.keys[layer], rows.values[layer], steps, room.free(layer, len(rows)))

    def onto(self, model: NoteModel) -> "Skill":
        """The skill with its rows on the model's device; the same object where they already are.

        Raises:
            ArtefactError: the skill belongs to another model, tokenizer, type or RoPE table.
        """
        self.check(model)
        return self if self.cache.device == model.device else replace(self, cache=_onto(self.cache, model))

    def _standing(self, model: NoteModel, rows: KVCache, start: int) -> KVCache:
        """The rows, as they are stored, under the positions from ``start`` on."""
        if start < 0 or start + len(rows) > model.geometry.max_positions:
            raise CacheError(
                f"rows at {start}..{start + len(rows) - 1} are not within the {model.geometry.max_positions} positions of "
                f"{model.name}"
            )
        positions = torch.arange(start, start + len(rows), dtype=torch.int64)
        return KVCache(rows.keys, rows.values, positions, rows.token_ids, rows.history)

    def in_place(self, model: NoteModel) -> KVCache:
        """Its rows where they were computed, keys rotated."""
        return self.at(model, int(self.cache.positions[0]))

    def check(self, model: NoteModel) -> None:
        """Check that ``model`` may use it.

        Raises:
            ArtefactError: it belongs to another model, tokenizer, type or RoPE table.
        """
        difference = self.tag.difference(model_tag(model))
        if difference is not None:
            raise ArtefactError(f"skill {self.name!r} cannot be used here: {difference}")

    def to_file(self) -> SkillFile:
        """As the content of a skill file (``notelens.cache.artefact``)."""
        header = SkillHeader(
            name=self.name, token_ids=self.token_ids, text_sha256=self.text_sha256,
            start=int(self.cache.positions[0]), scheme=self.scheme, condition=self.condition,
            prefix_ids=self.prefix_ids, exact=self.cache.exact, history=self.cache.history, gate=self.gate,
            ungated=self.ungated, model=self.tag,
        )  # fmt: skip
        return SkillFile(header, self.cache.keys, self.cache.values)

    @classmethod
    def from_file(cls, file: SkillFile, model: NoteModel | None = None) -> "Skill":
        """The skill in a file.

        Args:
            file: as :func:`notelens.cache.artefact.read_skill` gives it.
            model: the model that will use it; its rows are put on the model's device.

        Raises:
            ArtefactError: it belongs to another model.
        """
        h = file.header
        if model is not None:
            check_model(h, model_tag(model))
        positions = torch.arange(h.start, h.start + len(h.token_ids), dtype=torch.int64)
        cache = KVCache(file.keys, file.values, positions, h.token_ids, h.history)
        gate = None if h.gate is None else dict(h.gate)
        cache = cache if model is None else _onto(cache, model)
        return cls(h.name, cache, h.scheme, h.condition, h.prefix_ids, h.text_sha256, h.model, gate, h.ungated)

    def save(self, path: "str | Path") -> int:
        """Write its file, whole or not at all; returns the size in bytes.

        Raises:
            RecordError: it could not be written.
        """
        from pathlib import Path

        from notelens.cache.artefact import write_skill

        return write_skill(self.to_file(), Path(path))

    @classmethod
    def load(cls, path: "str | Path", model: NoteModel | None = None) -> "Skill":
        """Read its file.

        Raises:
            ArtefactError: the file is damaged, or belongs to another model.
        """
        from pathlib import Path

        from notelens.cache.artefact import read_skill

        return cls.from_file(read_skill(Path(path)), model)


def compile_skill(
    model: NoteModel,
    text: str | Sequence[int],
    *,
    name: str,
    condition: str = "isolated",
    prefix: str | Sequence[int] | KVCache | None = None,
    scheme: str = "rotated",
) -> Skill:
    """Prefill a piece of text once, to be used anywhere (paper, section on composing).

    Args:
        model: runs it.
        text: the text, or its token ids. No beginning-of-sequence token is added, none may be inside.
        name: of the skill.
        condition: ``isolated``; ``neutral``: behind a few newlines, or behind ``prefix``, which say nothing;
            ``prefix``: behind ``prefix``, which the skill will follow again.
        prefix: text, ids, or a cache of the prefix (rows from position 0).
        scheme: ``rotated`` or ``unrotated``.

    Returns:
        The skill; exact where isolated, otherwise its history says what its rows attended to.

    Raises:
        ComposeError: an empty text, a beginning-of-sequence token inside, more tokens than the model has positions, an
            unknown condition or scheme, a prefix that is missing or does not fit the condition.
        UnsupportedModelError: keys of this model cannot be stored unrotated.

    Cost: one forward over text and prefix (over the text only where the prefix is a cache).
    """
    check_name(name)
    if condition not in CONDITIONS or scheme not in SCHEMES:
        raise ComposeError(
            f"skill {name!r}: condition {condition!r} and scheme {scheme!r}; known are {', '.join(CONDITIONS)} and "
            f"{', '.join(SCHEMES)}"
        )
    ids = text_ids(model, text, f"skill {name!r}")
    past, before = _prefix(model, condition, prefix, name)
    if len(before) + len(ids) > model.geometry.max_positions:
        raise ComposeError(
            f"skill {name!r}: {len(before)} + {len(ids)} tokens exceed the {model.geometry.max_positions} positions of "
            f"{model.name}"
        )
    out = model.prefill((*before, *ids)) if past is None and before else model.prefill(ids, past)
    rows = slice_rows(out.cache, len(before), len(out.cache)) if before else out.cache
    if before:
        what = "neutral tokens" if condition == "neutral" else "tokens of a prefix"
        past_history = past.history if past is not None else ()
        rows = rows.replace_tensors(
            rows.keys, rows.values, history=(*past_history, f"attended to {len(before)} {what}")
        )
    rows = rows.replace_tensors(
        tuple(k.contiguous().clone() for k in rows.keys),
        tuple(v.contiguous().clone() for v in rows.values),
        history=rows.history,
    )
    if scheme == "unrotated":
        rows = _unrotated(model, rows, name)
    shown = text if isinstance(text, str) else str(model.tokenizer.decode(list(ids)))
    gate = model.gate.as_json() if model.gate is not None else None
    return Skill(
        name, rows, scheme, condition, before, hashlib.sha256(shown.encode()).hexdigest(), model_tag(model),
        _finite(gate), bool(getattr(model, "ungated", False)),
    )  # fmt: skip


def text_ids(model: NoteModel, text: str | Sequence[int], what: str, *, first: bool = False) -> tuple[int, ...]:
    """Token ids of a part, checked.

    Args:
        model: its tokenizer and vocabulary.
        text: text or ids.
        what: what messages call it.
        first: it stands at the beginning of a context: a beginning-of-sequence token is added to text, and allowed.

    Raises:
        ComposeError: no tokens, an id outside the vocabulary, or a beginning-of-sequence token inside.
    """
    if isinstance(text, str):
        if not text:
            raise ComposeError(f"{what} is empty; there is nothing to run")
        ids = encode(model.tokenizer, text, templated=not first)
    else:
        ids = tuple(int(i) for i in text)
    if not ids:
        raise ComposeError(f"{what} is empty; there is nothing to run")
    bad = [i for i in ids if not 0 <= i < model.geometry.vocab_size]
    if bad:
        raise ComposeError(f"{what}: id {bad[0]} is outside the vocabulary of {model.geometry.vocab_size}")
    check_bos(model, ids[1:] if first else ids, what)
    return ids


def check_bos(model: NoteModel, ids: Sequence[int], what: str) -> None:
    """Refuse a beginning-of-sequence token inside a context.

    Raises:
        ComposeError: there is one; the message gives its place.
    """
    if bos_text(model.tokenizer) is not None and int(model.tokenizer.bos_token_id) in ids:
        at = list(ids).index(int(model.tokenizer.bos_token_id))
        raise ComposeError(
            f"{what} holds the beginning-of-sequence token (token {at}); only the first token of a context may be one: "
            "compile the text without it"
        )


def _prefix(
    model: NoteModel, condition: str, prefix: str | Sequence[int] | KVCache | None, name: str
) -> tuple[KVCache | None, tuple[int, ...]]:
    """The cache of the prefix where there is one, and its ids."""
    if condition == "isolated":
        if prefix is not None:
            raise ComposeError(f"skill {name!r}: an isolated skill attends to no prefix; use condition='prefix'")
        return None, ()
    if prefix is None:
        if condition == "prefix":
            raise ComposeError(f"skill {name!r}: condition 'prefix' needs the prefix")
        ids = encode(model.tokenizer, NEUTRAL, templated=True)
        return None, (ids * NEUTRAL_TOKENS)[:NEUTRAL_TOKENS]
    if isinstance(prefix, KVCache):
        if not len(prefix) or prefix.next_position != len(prefix):
            raise ComposeError(
                f"skill {name!r}: the prefix must have rows from position 0 without gaps, it has {len(prefix)} up to "
                f"{prefix.next_position - 1}"
            )
        return prefix, prefix.token_ids
    return None, text_ids(model, prefix, f"the prefix of skill {name!r}", first=True)


def _turn(model: NoteModel, cache: KVCache, *, forward: bool) -> KVCache:
    """Put the rotation of every row's position on its key, or take it off."""
    steps = (cache.positions if forward else -cache.positions).to(cache.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for adapter, key, value in zip(adapters(model), cache.keys, cache.values, strict=True):
        moved_key, moved_value = adapter.move(key, value, steps)
        keys.append(moved_key)
        values.append(moved_value)
    return cache.replace_tensors(keys, values, history=cache.history)


def _unrotated(model: NoteModel, rows: KVCache, name: str) -> KVCache:
    """Rows without rotation, after a check that they can be placed as rotated ones are.

    Raises:
        UnsupportedModelError: they cannot; this model's rotation is not a plain one of its keys.
    """
    bare = _turn(model, rows, forward=False)
    shift = min(17, model.geometry.max_positions - rows.next_position)
    wanted = move_rows(model, rows, shift)
    moved = KVCache(bare.keys, bare.values, bare.positions + shift, bare.token_ids, bare.history)
    found = _turn(model, moved, forward=True)
    for layer in range(rows.n_layers):
        for a, b in ((found.keys[layer], wanted.keys[layer]), (found.values[layer], wanted.values[layer])):
            scale = float(b.float().abs().max())
            allowed = max(UNROTATED_TOLERANCE, 4 * torch.finfo(b.dtype).eps) * scale
            if not float((a.float() - b.float()).abs().max()) <= allowed:
                raise UnsupportedModelError(
                    f"skill {name!r}: layer {layer} of {model.name} cannot be stored unrotated (its rotation is not a plain "
                    "one of its keys); store it rotated"
                )
    return bare


def _onto(cache: KVCache, model: NoteModel) -> KVCache:
    """The rows on the model's device; the same object where they already are."""
    if cache.device == model.device:
        return cache
    return cache.replace_tensors(
        [k.to(model.device) for k in cache.keys], [v.to(model.device) for v in cache.values], history=cache.history
    )


def _finite(data: Any) -> Any:
    """Plain data with numbers that JSON can hold (a failed check may carry an infinite difference)."""
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


__all__ = ["Skill", "check_bos", "compile_skill", "text_ids"]
