"""The causal probes written down once more, slowly: a loop of single isolated swaps each.

Everywhere ``answer_ids`` are the first tokens of the answers that are right for the old and for the new prompt, margins
are logit(donor's answer) - logit(recipient's answer), and a recovery is (patched - recipient) / (donor - recipient).
"""

from collections.abc import Sequence
from typing import Any

from tests.oracle.swap import Direction, full_logits, loop_isolated_swap, margin, oriented


def swap_recovery(
    hf: Any,
    old_ids: Sequence[int],
    new_ids: Sequence[int],
    positions: Sequence[int],
    answer_ids: tuple[int, int],
    direction: Direction = "denoising",
    **where: Any,
) -> dict[str, float]:
    """``recipient``, ``donor``, ``patched`` margins, ``recovery`` and ``flipped`` (0 or 1) of one swap.

    Args:
        where: ``layers``, ``heads``, ``parts`` of :func:`loop_isolated_swap`.
    """
    recipient, donor, answers = oriented(old_ids, new_ids, answer_ids, direction)
    low = margin(full_logits(hf, recipient, answers))
    high = margin(full_logits(hf, donor, answers))
    patched = margin(loop_isolated_swap(hf, recipient, donor, positions, answers, **where))
    return {
        "recipient": low,
        "donor": high,
        "patched": patched,
        "recovery": (patched - low) / (high - low),
        "flipped": float(low < 0 < patched),
    }


def downstream(last_position: int, n_tokens: int) -> list[int]:
    """Positions behind ``last_position`` and in front of the decision position."""
    return list(range(last_position + 1, n_tokens - 1))


def locality(
    hf: Any,
    old_ids: Sequence[int],
    new_ids: Sequence[int],
    field_positions: Sequence[int],
    answer_ids: tuple[int, int],
    direction: Direction = "denoising",
) -> dict[str, float]:
    """``field_only_recovery`` (rows of the field) and ``full_downstream_recovery`` (every row behind it)."""
    behind = downstream(max(field_positions), len(old_ids))
    return {
        "field_only_recovery": swap_recovery(hf, old_ids, new_ids, field_positions, answer_ids, direction)["recovery"],
        "full_downstream_recovery": swap_recovery(hf, old_ids, new_ids, behind, answer_ids, direction)["recovery"],
    }


def dissociation(
    hf: Any,
    old_ids: Sequence[int],
    new_ids: Sequence[int],
    trigger_positions: Sequence[int],
    answer_ids: tuple[int, int],
    direction: Direction = "denoising",
) -> dict[str, float]:
    """``trigger_only_recovery`` (rows of the trigger) and ``notes_recovery`` (rows behind it); same field."""
    behind = downstream(max(trigger_positions), len(old_ids))
    return {
        "trigger_only_recovery": swap_recovery(hf, old_ids, new_ids, trigger_positions, answer_ids, direction)[
            "recovery"
        ],
        "notes_recovery": swap_recovery(hf, old_ids, new_ids, behind, answer_ids, direction)["recovery"],
    }


def position_effects(
    hf: Any,
    old_ids: Sequence[int],
    new_ids: Sequence[int],
    field_positions: Sequence[int],
    answer_ids: tuple[int, int],
    direction: Direction = "denoising",
) -> dict[int, float]:
    """Recovery of every single position behind the field."""
    return {
        pos: swap_recovery(hf, old_ids, new_ids, [pos], answer_ids, direction)["recovery"]
        for pos in downstream(max(field_positions), len(old_ids))
    }


def ranked(effects: dict[int, float]) -> list[int]:
    """Positions by falling effect; equal effects in order of position."""
    return sorted(effects, key=lambda pos: (-effects[pos], pos))


def specificity(
    hf: Any,
    old_ids: Sequence[int],
    new_ids: Sequence[int],
    field_positions: Sequence[int],
    answer_ids: tuple[int, int],
    k: int,
    draws: Sequence[Sequence[int]],
    ranking: Sequence[int] | None = None,
    direction: Direction = "denoising",
) -> dict[str, float]:
    """``topk_recovery`` of the first ``k`` positions of a ranking, ``randk_recovery`` as the mean over the draws.

    Args:
        draws: sets of positions to swap together, as they were drawn.
        ranking: positions, most important first; by this instance's own single effects when ``None``.
    """
    order = ranking
    if order is None:
        order = ranked(position_effects(hf, old_ids, new_ids, field_positions, answer_ids, direction))
    rand = [swap_recovery(hf, old_ids, new_ids, draw, answer_ids, direction)["recovery"] for draw in draws]
    top = swap_recovery(hf, old_ids, new_ids, order[:k], answer_ids, direction)["recovery"]
    return {"topk_recovery": top, "randk_recovery": sum(rand) / len(rand)}


def injection(
    hf: Any,
    true_ids: Sequence[int],
    false_ids: Sequence[int],
    field_positions: Sequence[int],
    answer_ids: tuple[int, int],
    positions: Sequence[int] | None = None,
) -> dict[str, float]:
    """False notes in a true prompt: the rows behind the field come from a prompt with another value, the field stays.

    Args:
        true_ids, false_ids: prompt with the true and with the false field value; ``answer_ids`` are right for them.
        positions: rows to inject (a dose); every row behind the field when ``None``.

    Returns:
        ``recovery``, ``follow`` (1 where the decision is the false prompt's) and ``flip`` (1 where it also was the true
        prompt's before).
    """
    dose = downstream(max(field_positions), len(true_ids)) if positions is None else positions
    found = swap_recovery(hf, true_ids, false_ids, dose, answer_ids)
    return {
        "recovery": found["recovery"],
        "follow": float((found["patched"] > 0) == (found["donor"] > 0)),
        "flip": found["flipped"],
    }


def placebo(
    hf: Any,
    recipient_ids: Sequence[int],
    donor_ids: Sequence[int],
    positions: Sequence[int],
    answer_ids: tuple[int, int],
    gap: float,
) -> float:
    """Shift of the margin by rows of a donor with the same conclusion, as a share of ``gap``.

    Args:
        answer_ids: (recipient's answer, the other answer).
        gap: donor margin - recipient margin of the real pair, over which a recovery would be defined.
    """
    low = margin(full_logits(hf, recipient_ids, answer_ids))
    return (margin(loop_isolated_swap(hf, recipient_ids, donor_ids, positions, answer_ids)) - low) / gap
