"""The scheduler's half of the plug-in: which requests take rows, what the worker is to write, what the client is told."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notelens.errors import EngineError, NotelensError
from notelens.serving.skill_loads import (
    PARAMS,
    Load,
    Mark,
    Piece,
    RefusedLoadError,
    check_salt,
    choose,
    marks_of,
)
from notelens.serving.skill_store import SkillStore

logger = logging.getLogger(__name__)

LOADED, TOKENS, CACHED, REFUSED, FAILED = "loads", "tokens_loaded", "cached", "refused", "loads_failed"
COUNTERS = {
    LOADED: "Requests that were given rows of skills.",
    TOKENS: "Tokens whose rows came from skills and were not computed.",
    CACHED: "Requests with skills whose rows were all in the engine's cache already.",
    REFUSED: "Requests with skills that took no rows; the engine computed them.",
    FAILED: "Loads of skills that failed in the worker; the engine computed the tokens.",
}
"""Names and meaning of what is counted."""


@dataclass(frozen=True)
class Failure:
    """A load that failed in the worker.

    Attributes:
        request_id: of the engine.
        signatures: of the skills that were to be loaded.
        reason: one sentence.
        lasting: the same skills will fail again.
    """

    request_id: str
    signatures: tuple[str, ...]
    reason: str
    lasting: bool


@dataclass
class _Report:
    """What becomes of a marked request; told to its client."""

    kind: str = "cached"
    tokens: int = 0
    reason: str | None = None
    pieces: tuple[Piece, ...] = ()
    counted: set[str] = field(default_factory=set)


class SchedulerSide:
    """Decides for every request that the engine schedules.

    Args:
        store: skills that the engine's model may use.
    """

    def __init__(self, store: SkillStore) -> None:
        self.store = store
        self._reports: dict[str, _Report] = {}
        self._pending: list[Load] = []
        self._failing: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def matched(self, request: Any, n_computed: int) -> int:
        """How many tokens behind the ``n_computed`` cached ones come from skills; may be asked again for one request.

        Args:
            request: the engine's; its id, prompt, salt, parameters, adapter and media are read.
            n_computed: block-aligned.
        """
        report = self._reports.setdefault(request.request_id, _Report())
        report.pieces = ()
        try:
            marks = marks_of(request.kv_transfer_params)
            if not marks:
                del self._reports[request.request_id]
                return 0
            report.pieces = self._pieces(request, marks, n_computed)
        except RefusedLoadError as e:
            self._refuse(request.request_id, report, e.kind, str(e))
        except (NotelensError, OSError) as e:
            self._refuse(request.request_id, report, "skill", str(e))
        else:
            report.kind, report.reason = ("chosen" if report.pieces else "cached"), None
        return sum(p.n for p in report.pieces)

    def allocated(self, request_id: str, block_ids: Sequence[int], n_external: int) -> None:
        """The engine has blocks for a request; nothing is loaded unless it counts on external tokens.

        Args:
            request_id: of the engine.
            block_ids: all blocks of the request, in order.
            n_external: tokens that the engine will not compute.
        """
        report = self._reports.get(request_id)
        if report is None or n_external == 0:
            return
        load = Load(request_id, report.pieces, tuple(block_ids))
        if load.n_tokens != n_external:
            raise EngineError(
                f"request {request_id}: the engine counts on {n_external} tokens of {load.n_tokens} chosen ones"
            )
        self._pending.append(load)
        report.kind, report.tokens = "loading", n_external

    def take_loads(self) -> tuple[Load, ...]:
        """What the worker is to load in this step; asking empties it."""
        loads, self._pending = tuple(self._pending), []
        return loads

    def ended(self, request_ids: Iterable[str], failures: Sequence[Failure]) -> None:
        """Loads have ended in the worker. Where one failed, the engine computes these tokens.

        Args:
            request_ids: whose loads have ended, well or not.
            failures: those that failed.
        """
        for failure in failures:
            if failure.lasting:
                self._failing |= dict.fromkeys(failure.signatures, failure.reason)
            self._count(FAILED)
            report = self._reports.get(failure.request_id)
            if report is not None:
                report.kind, report.tokens, report.reason = "failed", 0, failure.reason
        for request_id in request_ids:
            report = self._reports.get(request_id)
            if report is not None and report.kind == "loading":
                report.kind = "loaded"
                self._count(LOADED)
                self._count(TOKENS, report.tokens)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """What the client of a marked request is told; ``None`` for other requests."""
        report = self._reports.pop(request_id, None)
        if report is None:
            return None
        if report.kind == "cached":
            self._count(CACHED)
        if report.kind == "chosen":  # the engine asked and then took nothing
            reason = "the engine took no rows for this request; one for prompt log-probabilities, for instance, reads no cache"
            self._refuse(request_id, report, "unused", reason)
        return {PARAMS: {"kind": report.kind, "loaded_tokens": report.tokens, "reason": report.reason}}

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        counts, self._counts = self._counts, {}
        return counts

    def _pieces(self, request: Any, marks: Sequence[Mark], n_computed: int) -> tuple[Piece, ...]:
        check_salt(request.cache_salt)
        if request.prompt_token_ids is None or request.lora_request is not None or request.mm_features:
            raise RefusedLoadError(
                "request",
                "rows of a skill hold for tokens run by the model itself: no adapter, images or embeddings beside them",
            )
        pieces = choose(marks, request.prompt_token_ids, n_computed, self.store.find)
        for piece in pieces:
            if piece.signature in self._failing:
                raise RefusedLoadError("model", self._failing[piece.signature])
        return pieces

    def _refuse(self, request_id: str, report: _Report, kind: str, reason: str) -> None:
        if kind not in report.counted:
            report.counted.add(kind)
            self._count(REFUSED)
            logger.warning("request %s takes no rows of skills: %s", request_id, reason)
        report.kind, report.reason = kind, reason

    def _count(self, name: str, n: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + n


def added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    """Counts together."""
    return {name: a.get(name, 0) + b.get(name, 0) for name in {*a, *b}}


__all__ = ["COUNTERS", "Failure", "SchedulerSide", "added"]
