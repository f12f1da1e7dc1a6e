"""What a composer is, what it is given, and what it gives back.

**Chunks.** A composition is a row of chunks at positions 0, 1, 2, ... without gaps. A *text* chunk is run on top of everything
before it. A *spliced* chunk brings rows that were computed elsewhere; what happens to them is the composer's business.

**Memory.** The rows of a composition are written once: the first splice behind something takes memory for all rows
(:mod:`notelens.cache.room`), spliced keys are turned on their way into it, and text is run on it without a copy.

**Budget.** One formula for all composers: a row computed in one layer costs ``1 / n_layers`` tokens.
``tokens_text`` is what text chunks cost (the same for every composer), ``tokens_recomputed`` what the composer ran for
spliced chunks, ``recompute_share`` the latter over all spliced tokens. Rotating keys costs no tokens. What compiling a
skill cost is counted apart (``tokens_compiled``), because it is paid once and used many times.

**Mark.** A composed cache is exact only if each of its rows equals a fresh prefill of its ids. Composers say so by leaving
the history empty, and a contract test compares them with a fresh prefill.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.attention.move import move_rows, move_rows_into
from notelens.cache.kv import KVCache
from notelens.cache.ops import slice_rows
from notelens.cache.room import room_behind
from notelens.compose.skill import Skill
from notelens.context import Context
from notelens.errors import ComposeError
from notelens.intervene.run_rows import extend
from notelens.models.base import NoteModel
from notelens.prompt import Prompt, Span
from notelens.spans import token_texts


@dataclass(frozen=True)
class Chunk:
    """A part of a composition.

    Attributes:
        label: what messages, history and spans call it.
        token_ids: its tokens.
        stored: rows at the positions where they were computed, as they are stored; ``None`` for text.
        skill: the skill it comes from, if any.
        shared: rows at the beginning of the composition in front of anything spliced from elsewhere.
        total: rows of the whole composition, where it is known.
        model: whose rows they are; needed where the skill is stored unrotated.
    """

    label: str
    token_ids: tuple[int, ...]
    stored: KVCache | None = None
    skill: Skill | None = None
    shared: int = 0
    total: int = 0
    model: NoteModel | None = None

    @cached_property
    def rows(self) -> KVCache | None:
        """Rotated rows at the positions where they were computed; turned once, when asked for, where stored unrotated."""
        if self.skill is None or self.skill.scheme == "rotated" or self.model is None:
            return self.stored
        return self.skill.in_place(self.model)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Cost:
    """What a composition cost, in tokens (see the module).

    Attributes:
        n_tokens: rows of the composition.
        n_spliced: of them, rows that came with spliced chunks.
        tokens_text: run for text chunks.
        tokens_recomputed: run for spliced chunks.
        tokens_compiled: run, now or earlier, to compile what was spliced; paid once.
    """

    n_tokens: int = 0
    n_spliced: int = 0
    tokens_text: float = 0.0
    tokens_recomputed: float = 0.0
    tokens_compiled: float = 0.0

    @property
    def tokens_run(self) -> float:
        """Tokens run to compose: text and recomputed rows."""
        return self.tokens_text + self.tokens_recomputed

    @property
    def recompute_share(self) -> float:
        """Recomputed tokens over spliced ones; 0 where nothing was spliced."""
        return self.tokens_recomputed / self.n_spliced if self.n_spliced else 0.0

    @property
    def pays_after(self) -> float:
        """Uses after which compiling has paid for itself; infinite where splicing saves nothing."""
        saved = self.n_spliced - self.tokens_recomputed
        return self.tokens_compiled / saved if saved > 0 else float("inf")


@dataclass(frozen=True)
class Placed:
    """A chunk in place.

    Attributes:
        cache: everything up to and with the chunk.
        tokens: run for it.
        hidden: final-norm output of its last token ``[d_model]``, where that token was run through all layers.
        compiled: tokens that the composer compiled for it, in place of those of its skill.
    """

    cache: KVCache
    tokens: float
    hidden: Float[Tensor, " d_model"] | None = None
    compiled: float | None = None


@dataclass(frozen=True)
class Piece:
    """Where a chunk stands in a composition: rows ``[start, stop)``."""

    label: str
    start: int
    stop: int
    spliced: bool


@dataclass(frozen=True)
class Composed:
    """One context made of parts.

    Attributes:
        cache: all rows, at positions 0, 1, 2, ...; carries the mark and the history.
        pieces: where each chunk stands.
        method: the composer, with its parameter.
        cost: in tokens.
        hidden: final-norm output of the last token ``[d_model]``; ``None`` where that token was spliced and not run.
        merged: rows in front of which the tokenizer would join text across the border of two chunks; the ids are not
            those of the joint text there.
    """

    cache: KVCache
    pieces: tuple[Piece, ...]
    method: str
    cost: Cost
    hidden: Float[Tensor, " d_model"] | None = None
    merged: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.cache)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of all rows."""
        return self.cache.token_ids

    @property
    def exact(self) -> bool:
        """Whether every row equals a fresh prefill."""
        return self.cache.exact

    def read(self, model: NoteModel) -> Float[Tensor, " d_model"]:
        """Final-norm output of the last token; run again (one token) where it was spliced."""
        if self.hidden is not None:
            return self.hidden
        if len(self) == 1:
            return model.prefill(self.token_ids).hidden
        return model.prefill(self.token_ids[-1:], slice_rows(self.cache, 0, len(self) - 1)).hidden

    def context(self, model: NoteModel, *, id: str, answer: str = "") -> Context:
        """As a context for probes and edits: one span and region per piece (by label), the last token decides.

        Raises:
            SpanError: it has a single token.

        Cost: one token where the last one was spliced.
        """
        n = len(self)
        spans: dict[str, tuple[Span, ...]] = {}
        for piece in self.pieces:
            spans[piece.label] = (*spans.get(piece.label, ()), Span(piece.start, piece.stop))
        regions = tuple(piece.label for piece in self.pieces for _ in range(piece.stop - piece.start))
        prompt = Prompt(
            id=id,
            text=str(model.tokenizer.decode(list(self.token_ids))),
            token_ids=self.token_ids,
            tokens=token_texts(model.tokenizer, self.token_ids),
            spans=spans,
            regions=regions,
            anchors={"decision": n - 1, **({"before_decision": n - 2} if n > 1 else {})},
            answer=answer,
        )
        return Context(prompt, self.cache, self.read(model), {})


class Composer(ABC):
    """Base class. A subclass puts one spliced chunk in place; text is run here.

    Class attributes:
        name: registry name.
        paper_ref: where it comes from.
        parameter: meaning of the number in ``name@number``; empty where there is none.
        repositions: keys of spliced rows are turned to where they stand.
        exact_when: ``one_part``: only where one cache stands at its own position, with text behind it; ``always``;
            ``same_prefix``: also where the rows attended to exactly what precedes them. No composer may claim more.
    """

    name: ClassVar[str]
    paper_ref: ClassVar[str]
    parameter: ClassVar[str] = ""
    repositions: ClassVar[bool] = True
    exact_when: ClassVar[str] = "same_prefix"

    @property
    def method(self) -> str:
        """Name with parameter, as records have it."""
        return self.name

    @classmethod
    def parse(cls, value: str | None) -> "Composer":
        """The composer written as ``name`` or ``name@value``.

        Raises:
            ComposeError: it takes no parameter, or the value is not one.
        """
        if value is not None:
            raise ComposeError(f"composer {cls.name!r} takes no parameter, got {value!r}")
        return cls()

    @abstractmethod
    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Put a spliced chunk behind ``before``."""

    def join(self, model: NoteModel, chunks: Sequence[Chunk]) -> Composed:
        """Put all chunks in place, in order. Callers use :func:`notelens.compose.compose`, which checks the parts."""
        cache: KVCache | None = None
        hidden: Tensor | None = None
        cost, pieces = Cost(), list[Piece]()
        for chunk in chunks:
            start = len(cache) if cache is not None else 0
            if chunk.stored is None:
                cache, hidden = run_text(model, cache, chunk.token_ids)
                cost = replace(cost, tokens_text=cost.tokens_text + len(chunk))
            else:
                placed = self.splice(model, cache, chunk)
                cache, hidden = placed.cache, placed.hidden
                compiled = placed.compiled
                if compiled is None:
                    compiled = chunk.skill.compile_tokens if chunk.skill is not None else len(chunk)
                cost = replace(
                    cost,
                    n_spliced=cost.n_spliced + len(chunk),
                    tokens_recomputed=cost.tokens_recomputed + placed.tokens,
                    tokens_compiled=cost.tokens_compiled + compiled,
                )
            pieces.append(Piece(chunk.label, start, start + len(chunk), chunk.stored is not None))
        assert cache is not None
        return Composed(cache, tuple(pieces), self.method, replace(cost, n_tokens=len(cache)), hidden)


def run_text(
    model: NoteModel, before: KVCache | None, token_ids: Sequence[int]
) -> tuple[KVCache, Float[Tensor, " d_model"]]:
    """``before`` with text run behind it, and the final-norm output of its last token.

    Rows go straight into the memory of the composition where it has one; a hybrid's recurrent layers take the plain way.
    """
    if before is None or before.room is None or model.family.recurrent:
        out = model.prefill(token_ids, before)
        return out.cache, out.hidden
    return extend(model, before, token_ids)


def fits_here(before: KVCache | None, chunk: Chunk) -> bool:
    """Whether the chunk's rows are, unmoved, what a fresh prefill behind ``before`` would compute."""
    assert chunk.stored is not None
    n_before = len(before) if before is not None else 0
    positions = torch.arange(n_before, n_before + len(chunk), dtype=torch.int64)
    if not torch.equal(chunk.stored.positions, positions):
        return False
    if before is None:
        return chunk.stored.exact
    attended = chunk.skill.prefix_ids if chunk.skill is not None and chunk.skill.condition != "isolated" else None
    # only that it attended to a prefix: neither the prefix nor the rows were approximate
    whole = len(chunk.stored.history) <= 1
    return before.exact and whole and attended == before.token_ids


def shifted(model: NoteModel, before: KVCache | None, chunk: Chunk) -> KVCache:
    """``before`` with the chunk's rows behind it, keys turned to where they stand; with mark and history.

    Raises:
        CacheError: a position is beyond the model's.

    Cost: each row is read once and written once.
    """
    assert chunk.stored is not None
    start = len(before) if before is not None else 0
    positions = torch.arange(start, start + len(chunk), dtype=torch.int64)
    history: tuple[str, ...] = ()
    if not fits_here(before, chunk):
        offset = start - int(chunk.stored.positions[0])
        history = (f"{chunk.label}: {len(chunk)} rows from elsewhere, moved by {offset}", *chunk.stored.history)
    bare = chunk.skill if chunk.skill is not None and chunk.skill.scheme == "unrotated" else None
    if before is None:
        rows = move_rows(model, chunk.stored, positions) if bare is None else bare.at(model, start)
        return joined(None, rows, history)
    room, before = room_behind(before, len(chunk), chunk.total)
    if bare is None:
        move_rows_into(model, chunk.stored, positions, room)
    else:
        bare.at_into(model, start, room)  # rotated once, from the unrotated rows
    return room.grown(before, positions, chunk.token_ids, (*before.history, *history))


def joined(before: KVCache | None, rows: KVCache, history: tuple[str, ...], total: int = 0) -> KVCache:
    """``before`` with ``rows``, which stand at their positions, behind it; ``history`` is added to that of ``before``.

    Args:
        total: rows of the whole composition, where it is known.
    """
    if before is None:
        return rows.replace_tensors(rows.keys, rows.values, history=history)
    room, before = room_behind(before, len(rows), total)
    room.write(rows)
    return room.grown(before, rows.positions, rows.token_ids, (*before.history, *history))


def whole_number(name: str, value: str | None, default: int) -> int:
    """The ``k`` of ``name@k``.

    Raises:
        ComposeError: not a whole number of at least 1.
    """
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ComposeError(f"{name}@{value}: k must be a whole number of rows, at least 1")
    return int(value)


__all__ = [
    "Chunk",
    "Composed",
    "Composer",
    "Cost",
    "Piece",
    "Placed",
    "fits_here",
    "joined",
    "run_text",
    "shifted",
    "whole_number",
]
