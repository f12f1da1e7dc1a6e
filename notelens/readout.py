"""What a model decides, and how far a patch moved the decision."""

import math
from dataclasses import dataclass

from notelens.errors import NonFiniteError

MIN_GAP = 1.0
"""Smallest distance, in logits, between donor and recipient margin over which a recovery is defined."""


@dataclass(frozen=True)
class Recovery:
    """One patched decision against its two ends.

    A margin is logit(donor's answer) - logit(recipient's answer) at the decision position.

    Attributes:
        recipient, donor, patched: margins of the unpatched recipient, of the donor and of the patched recipient.
        value: ``(patched - recipient) / (donor - recipient)``.
        flipped: the sign of the margin changed from the recipient's to the donor's.
        probability: two-way probability of the donor's answer after the patch, ``sigmoid(patched)``.
    """

    recipient: float
    donor: float
    patched: float

    @property
    def value(self) -> float:
        """Share of the margin that the patch moved."""
        return (self.patched - self.recipient) / (self.donor - self.recipient)

    @property
    def flipped(self) -> bool:
        """Whether the decision changed from the recipient's to the donor's."""
        return self.recipient < 0 < self.patched

    @property
    def probability(self) -> float:
        """Two-way probability of the donor's answer behind the patch."""
        return 0.5 * (1.0 + math.tanh(0.5 * self.patched))


def exclusion(recipient: float, donor: float, min_gap: float = MIN_GAP) -> str | None:
    """Why a recovery between these margins is not defined, or ``None`` where it is.

    Args:
        recipient, donor: margins towards the donor's answer.
        min_gap: smallest usable distance in logits.

    Returns:
        ``"recipient wrong"``, ``"donor wrong"``, ``"both wrong"`` or ``"gap too small"``.

    Raises:
        NonFiniteError: a margin is NaN or infinite.
    """
    for name, value in (("recipient", recipient), ("donor", donor)):
        if not abs(value) < float("inf"):
            raise NonFiniteError(f"the {name} margin is {value}; check the model's logits for overflow")
    wrong_recipient, wrong_donor = recipient >= 0, donor <= 0
    if wrong_recipient and wrong_donor:
        return "both wrong"
    if wrong_recipient:
        return "recipient wrong"
    if wrong_donor:
        return "donor wrong"
    if donor - recipient < min_gap:
        return "gap too small"
    return None
