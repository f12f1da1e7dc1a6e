"""ALiBi: positions live in the bias of the scores, so stored rows carry none."""

from typing import ClassVar

from torch import Tensor

from notelens.attention.base import AttentionAdapter, Support


class Alibi(AttentionAdapter):
    """ALiBi (BLOOM, MPT): keys carry no position, the bias does."""

    support: ClassVar[Support] = "partial"
    moves: ClassVar[str] = "nothing; the bias follows the row's distance"
    limits: ClassVar[str] = (
        "no family runs on it: transformers takes the bias from row numbers, so gaps cannot be expressed"
    )
    proof: ClassVar[str] = "tests/test_attention.py::test_alibi_rows_carry_no_position"

    def move(self, keys: Tensor, values: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The same tensors."""
        return keys, values
