"""Composed against fully prefilled: the decision, the logits, and what re-running the same thing changes by itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from notelens.compose.base import Composed, Composer
from notelens.compose.join import compose
from notelens.compose.parts import Part
from notelens.errors import ComposeError
from notelens.models.base import NoteModel
from notelens.stats.agreement import LogitDistance, logit_distance


@dataclass(frozen=True)
class Decision:
    """What a composed context decides.

    Attributes:
        method: the composer.
        answer: index into the answers of the largest of their logits.
        margins: the answers' logits less the largest other answer's.
        distance: of its logits from full prefill's, over the whole vocabulary.
        composed: the context.
    """

    method: str
    answer: int
    margins: tuple[float, ...]
    distance: LogitDistance
    composed: Composed


@dataclass(frozen=True)
class Comparison:
    """One composition by several methods.

    Attributes:
        full: full prefill, whose distance is that of an identical run.
        floor: distance of full prefill in another order of work (two passes instead of one) from full prefill: the noise
            floor that no method can be better than.
        decisions: by method.
    """

    full: Decision
    floor: LogitDistance
    decisions: dict[str, Decision]


def compare(
    model: NoteModel,
    parts: Sequence[Part],
    answer_ids: Sequence[int],
    methods: Sequence[str | Composer] = ("shift", "no_shift"),
) -> Comparison:
    """Compose by several methods and compare what is decided with full prefill (paper, section on composing).

    Args:
        model: runs everything.
        parts: as for :func:`~notelens.compose.join.compose`; the last one must be text, whose last token decides.
        answer_ids: first tokens of the possible answers.
        methods: composers besides full prefill.

    Raises:
        ComposeError: fewer than two answers, or the last part is not run by every method.

    Cost: two full prefills, and what each method runs.
    """
    if len(set(answer_ids)) < 2:
        raise ComposeError(f"answers {list(answer_ids)} leave nothing to decide; give at least two different ids")
    full = compose(model, parts, method="full_prefill")
    reference = _logits(model, full)
    n = len(full)
    again = reference
    if n > 1:
        first = model.prefill(full.token_ids[: n // 2])
        hidden = model.prefill(full.token_ids[n // 2 :], first.cache).hidden
        again = model.next_logits(hidden).double().cpu().numpy()
    decisions: dict[str, Decision] = {}
    for method in methods:
        composed = compose(model, parts, method=method)
        if composed.hidden is None:
            raise ComposeError("the last part must be text: its last token decides, and has to be run")
        decisions[composed.method] = _decision(model, composed, reference, answer_ids)
    return Comparison(_decision(model, full, reference, answer_ids), logit_distance(reference, again), decisions)


def _logits(model: NoteModel, composed: Composed) -> np.ndarray:
    return model.next_logits(composed.read(model)).double().cpu().numpy()


def _decision(model: NoteModel, composed: Composed, reference: np.ndarray, answer_ids: Sequence[int]) -> Decision:
    logits = _logits(model, composed)
    chosen = torch.tensor([float(logits[i]) for i in answer_ids])
    margins: list[float] = []
    for i in range(len(chosen)):
        others = torch.cat([chosen[:i], chosen[i + 1 :]])
        margins.append(float(chosen[i] - others.max()))
    return Decision(composed.method, int(chosen.argmax()), tuple(margins), logit_distance(reference, logits), composed)


__all__ = ["Comparison", "Decision", "compare"]
