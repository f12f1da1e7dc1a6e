"""Time to the first token: full prefill against composing from a skill, timed in turns (paper, section on composing)."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from notelens.compose.join import compose
from notelens.compose.skill import Skill, compile_skill
from notelens.models.base import NoteModel

Clock = Callable[[], float]


@dataclass(frozen=True)
class FirstToken:
    """Times of one prompt, in seconds; one entry per round.

    Attributes:
        n_tokens, n_skill: of the prompt, and of them in the skill.
        full: from the ids to the first token's logits.
        composed: the same, from a compiled skill and the ids of everything else.
        compiling: prefilling the skill, once.
        same_token: both arms choose the same first token.
    """

    n_tokens: int
    n_skill: int
    full: tuple[float, ...]
    composed: tuple[float, ...]
    compiling: float
    same_token: bool

    @property
    def ratios(self) -> tuple[float, ...]:
        """Full over composed, round by round."""
        return tuple(a / b for a, b in zip(self.full, self.composed, strict=True))

    @property
    def pays_after(self) -> float:
        """Uses after which compiling has paid for itself; infinite where composing saves nothing."""
        saved = statistics.median(a - b for a, b in zip(self.full, self.composed, strict=True))
        return self.compiling / saved if saved > 0 else float("inf")


def first_token(
    model: NoteModel,
    head: Sequence[int],
    body: Sequence[int],
    request: Sequence[int],
    *,
    rounds: int,
    clock: Clock = time.perf_counter,
    scheme: str = "rotated",
) -> FirstToken:
    """Time both ways to the first token behind ``head + body + request``, where ``body`` is the skill.

    Args:
        model: runs everything.
        head: text in front of the skill, so that every row of it has to be placed anew.
        body: compiled alone, once.
        request: text behind it.
        rounds: how often both are timed, in turns; one composition is not timed, so that memory and kernels are warm.
        clock: seconds; processor time is honest on a busy machine with one thread.
        scheme: how the skill is stored.

    Raises:
        ComposeError: a part is empty, or all together exceed the model's positions.

    Cost: ``rounds + 1`` full prefills.
    """
    device = model.device

    def seconds(call: Callable[[], object]) -> float:
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - start

    made: list[Skill] = []
    compiling = seconds(lambda: made.append(compile_skill(model, body, name="body", scheme=scheme)))
    tokens: dict[str, int] = {}

    def full() -> None:
        tokens["full"] = int(model.next_logits(model.prefill((*head, *body, *request)).hidden).argmax())

    def composed() -> None:
        found = compose(model, [list(head), made[0], list(request)])
        tokens["composed"] = int(model.next_logits(found.read(model)).argmax())

    composed()
    times = [(seconds(full), seconds(composed)) for _ in range(rounds)]
    return FirstToken(
        len(head) + len(body) + len(request), len(body), tuple(a for a, _ in times), tuple(b for _, b in times),
        compiling, tokens["full"] == tokens["composed"],
    )  # fmt: skip


__all__ = ["FirstToken", "first_token"]
