"""What a session has cost, turn by turn and in all, and from which turn on it is the cheaper way."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One call of a session.

    Attributes:
        kind: ``build``, ``update``, ``ask``, ``add``, ``call`` or ``reanchor``.
        tokens_run: tokens run, a fresh prefill of the re-anchoring policy included.
        planning_tokens: of an edit method that runs tokens to choose rows.
        check_tokens: run to measure drift.
        decoded_tokens: generated one by one.
        ms: wall time of the call; of an ``ask``, up to the logits of the first token.
        prompt_tokens: rows behind the call.
        reused_tokens: of them, rows that were not run in it.
        nbytes: bytes of all tensors that the rows refer to.
        exact: every row equals a fresh prefill of what the prompt says.
        history: what makes it approximate.
        drift: largest relative difference of a row that was checked; ``None`` where none was.
        reanchored: the policy paid for a fresh prefill.
        detail: fields with their new values, the request, or the tool.
    """

    kind: str
    tokens_run: int
    ms: float
    prompt_tokens: int
    reused_tokens: int
    nbytes: int
    exact: bool
    planning_tokens: int = 0
    check_tokens: int = 0
    decoded_tokens: int = 0
    history: tuple[str, ...] = ()
    drift: float | None = None
    reanchored: bool = False
    detail: str = ""

    @property
    def total_tokens(self) -> int:
        """Everything that was run, for whatever reason."""
        return self.tokens_run + self.planning_tokens + self.check_tokens + self.decoded_tokens


@dataclass(frozen=True)
class SessionReport:
    """All turns of a session.

    Attributes:
        turns: in order; the first is the build.
        exact: mark of the session as it is now.
        history: why it is approximate; empty when exact.
    """

    turns: tuple[Turn, ...]
    exact: bool
    history: tuple[str, ...]

    @property
    def tokens_run(self) -> tuple[int, ...]:
        """Tokens run up to and with every turn, of all kinds."""
        return tuple(accumulate(t.total_tokens for t in self.turns))

    @property
    def first_token_ms(self) -> tuple[float, ...]:
        """Per ``ask``: time to its first token, the calls since the ask before (or since the build) included."""
        found: list[float] = []
        waiting = 0.0
        for turn in self.turns[1:]:
            waiting += turn.ms
            if turn.kind == "ask":
                found.append(waiting)
                waiting = 0.0
        return tuple(found)

    @property
    def cumulative_first_token_ms(self) -> tuple[float, ...]:
        """Time to first token, the build included, summed up to and with every ``ask``."""
        build = self.turns[0].ms if self.turns else 0.0
        return tuple(build + x for x in accumulate(self.first_token_ms))

    @property
    def peak_bytes(self) -> int:
        """Largest size of the rows behind any turn."""
        return max((t.nbytes for t in self.turns), default=0)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per turn, with the cumulative number of tokens."""
        return [
            {**asdict(t), "total_tokens": t.total_tokens, "cumulative_tokens": total}
            for t, total in zip(self.turns, self.tokens_run, strict=True)
        ]

    def __str__(self) -> str:
        lines = ["turn  kind      tokens  cumulative  reused  prompt        ms     MiB  exact  detail"]
        for i, (t, total) in enumerate(zip(self.turns, self.tokens_run, strict=True)):
            lines.append(
                f"{i:4d}  {t.kind:8s}  {t.total_tokens:6d}  {total:10d}  {t.reused_tokens:6d}  {t.prompt_tokens:6d}  "
                f"{t.ms:8.1f}  {t.nbytes / 2**20:6.1f}  {'yes' if t.exact else 'no':5s}  {t.detail}"
            )
        mark = "exact" if self.exact else f"approximate: {'; '.join(dict.fromkeys(self.history))}"
        return "\n".join([*lines, mark])


def break_even(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """The first turn (counted from 1) from which on ``ours`` has never cost more in all than ``theirs``.

    Args:
        ours: cost of every turn, one-off costs in the first.
        theirs: as many.

    Returns:
        ``None`` where there is no such turn.

    Raises:
        ValueError: they have different lengths.
    """
    gaps = [a - b for a, b in zip(accumulate(ours), accumulate(theirs), strict=True)]
    last = max((i for i, gap in enumerate(gaps) if gap > 0), default=-1)
    return last + 2 if last + 1 < len(gaps) else None


__all__ = ["SessionReport", "Turn", "break_even"]
