"""Which rows of which skills a request takes: its marks, what the engine has cached, and the decision. Needs no engine.

A request that contains skills says so in its ``kv_transfer_params``::

    {"notelens": {"skills": [{"name": "policy", "start": 208}]}}

``start`` is the index of the skill's first token in the prompt. The engine asks once, when it first schedules the request, what
can follow the tokens it has cached. The answer is the rows from there to the end of the skill that stands there (and of
skills that follow it without a gap). Three consequences:

* the tokens in front of a skill have to be cached, so they go ahead as a short request of their own;
* what is cached ends at a block edge. Where a skill does not begin at one, that short request also holds the first rows of
  the skill up to the next edge (the *ragged head*, computed in place like a seam), or the text is padded;
* a prompt's last token is always run, as it decides.

Rows that come this way make the blocks behind them approximate, and the engine would keep all of them under the hash of their
tokens. So a request takes rows only under a cache salt that begins with :data:`SALT`: it is part of the hash, and no request
without that very salt can reach these blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from notelens.errors import EngineError

PARAMS = "notelens"
"""Entry of ``kv_transfer_params``, in requests and in answers."""
SALT = "notelens-approximate-"
"""How the cache salt of a request begins whose blocks may be approximate."""


@dataclass(frozen=True)
class Mark:
    """A skill in a prompt: its first token is token ``start``."""

    name: str
    start: int


@dataclass(frozen=True)
class Known:
    """A skill that the engine may use.

    Attributes:
        token_ids: its tokens.
        signature: changes with the content of its file.
    """

    token_ids: tuple[int, ...]
    signature: str


@dataclass(frozen=True)
class Piece:
    """Rows ``[first, first + n)`` of a skill, to stand at positions ``position, position + 1, ...``."""

    name: str
    signature: str
    first: int
    n: int
    position: int


@dataclass(frozen=True)
class Load:
    """What the scheduler tells the worker to put into a request's blocks.

    Attributes:
        request_id: of the engine.
        pieces: adjacent, in order.
        block_ids: of the request, from its first token on.
    """

    request_id: str
    pieces: tuple[Piece, ...]
    block_ids: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Rows of all pieces."""
        return sum(p.n for p in self.pieces)

    def touched(self, block_size: int) -> set[int]:
        """Blocks that the rows go into."""
        first = self.pieces[0].position
        return set(self.block_ids[first // block_size : (first + self.n_tokens - 1) // block_size + 1])


class RefusedLoadError(EngineError):
    """Rows are not taken; the engine computes these tokens itself.

    Args:
        kind: one word, for counters and clients.
        reason: one sentence.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def marks_of(params: Any) -> tuple[Mark, ...]:
    """The marks in a request's ``kv_transfer_params``, by position; none where it has no entry of ours.

    Raises:
        RefusedLoadError: the entry is there and malformed, or marks overlap in their first token.
    """
    entry = params.get(PARAMS) if isinstance(params, dict) else None
    if entry is None:
        return ()
    try:
        if set(entry) != {"skills"} or not entry["skills"]:
            raise ValueError(f"its entries are {sorted(entry)}")
        marks = [Mark(**skill) for skill in entry["skills"]]
        if not all(isinstance(m.name, str) and type(m.start) is int and m.start >= 0 for m in marks):
            raise ValueError("a name is no text, or a start is no position")
    except (TypeError, ValueError, AttributeError, KeyError) as e:
        raise RefusedLoadError(
            "marks", f"kv_transfer_params[{PARAMS!r}] must be {{'skills': [{{'name': ..., 'start': ...}}]}} ({e})"
        ) from e
    return tuple(sorted(marks, key=lambda m: m.start))


def check_salt(salt: str | None) -> None:
    """Check that a request may take rows.

    Raises:
        RefusedLoadError: its blocks could be reached by an exact request.
    """
    if salt is None or not salt.startswith(SALT) or len(salt) == len(SALT):
        raise RefusedLoadError(
            "salt",
            f"a request with skills needs a cache_salt that begins with {SALT!r} and goes on with a name of its session; "
            f"without one, exact requests would reach its approximate blocks (cache_salt is {salt!r})",
        )


def choose(
    marks: Sequence[Mark], token_ids: Sequence[int], n_computed: int, find: Callable[[str], Known]
) -> tuple[Piece, ...]:
    """The rows that follow the ``n_computed`` tokens that the engine has; none where it has all marked ones already.

    Args:
        marks: by position.
        token_ids: the whole prompt; its last token is never taken.
        n_computed: tokens that the engine has cached.
        find: gives a skill by name; raises what the library raises.

    Raises:
        RefusedLoadError: the prompt has other tokens than the skill, skills overlap, or tokens in front of one are missing.
    """
    at, pieces, behind = n_computed, list[Piece](), 0
    for mark in marks:
        if pieces and mark.start > at:
            break  # there is text in between, which the engine has to run first
        skill = find(mark.name)
        stop = mark.start + len(skill.token_ids)
        if mark.start < behind:
            raise RefusedLoadError("marks", f"skill {mark.name!r} at {mark.start} overlaps the one in front of it")
        found = tuple(token_ids[mark.start : stop])
        if found != skill.token_ids:
            wrong = next(
                (i for i, (a, b) in enumerate(zip(found, skill.token_ids, strict=False)) if a != b), len(found)
            )
            raise RefusedLoadError(
                "tokens",
                f"the prompt at {mark.start} is not skill {mark.name!r}: token {wrong} of {len(skill.token_ids)} differs or is "
                "missing; send the skill's own token ids",
            )
        behind, stop = stop, min(stop, len(token_ids) - 1)
        if stop <= at:
            continue
        if mark.start > at:
            raise RefusedLoadError(
                "prefix",
                f"tokens {at}..{mark.start - 1} in front of skill {mark.name!r} are not in the engine's cache; send them "
                "first, as a request of their own under the same cache_salt",
            )
        pieces.append(Piece(mark.name, skill.signature, at - mark.start, stop - at, at))
        at = stop
    return tuple(pieces)


__all__ = [
    "PARAMS", "SALT", "Known", "Load", "Mark", "Piece", "RefusedLoadError", "check_salt", "choose", "marks_of",
]  # fmt: skip
