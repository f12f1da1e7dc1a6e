"""Representations that cannot be moved, each with its reason and the way out."""

from typing import ClassVar, NoReturn

from torch import Tensor

from notelens.attention.base import AttentionAdapter, Support
from notelens.errors import UnsupportedModelError


class Refused(AttentionAdapter):
    """Base of everything that is refused: says why and what to do instead."""

    support: ClassVar[Support] = "refused"
    moves: ClassVar[str] = "refused"
    proof: ClassVar[str] = "tests/test_families.py::test_representations_without_movable_rows_are_refused"

    def move(self, keys: Tensor, values: Tensor, delta: Tensor) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedModelError: always, with the reason.
        """
        raise UnsupportedModelError(f"rows cannot be moved: {self.limits}")


class Recurrent(Refused):
    """Pure state-space, RWKV and linear-attention models."""

    limits: ClassVar[str] = (
        "the state sums up all tokens and holds no row per token, so nothing can be patched, moved or spliced; "
        "prefill the changed prompt in full"
    )


class EncoderDecoder(Refused):
    """Encoder-decoder models (T5, BART, Whisper)."""

    limits: ClassVar[str] = (
        "the encoder reads in both directions, so its rows depend on later tokens and are no notes taken at prefill; "
        "use a decoder-only model"
    )


class LearnedPositions(Refused):
    """Learned absolute positions (GPT-2, OPT)."""

    limits: ClassVar[str] = (
        "the position is added to the embedding and goes through every layer, so keys and values at another position can only "
        "be computed anew; prefill the span where it shall stand"
    )
