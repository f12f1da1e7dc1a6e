"""Hybrids of attention and a recurrent layer (Falcon-H1): attention rows move, the recurrent state never does."""

from typing import ClassVar

from notelens.attention.base import Support
from notelens.attention.gqa import Rotated


class Hybrid(Rotated):
    """Attention beside a state-space layer (Falcon-H1): attention rows move, the recurrent state is scanned again."""

    support: ClassVar[Support] = "partial"
    limits: ClassVar[str] = (
        "the state of a changed prefix must be scanned again over all its tokens, which saves none of them; hooks run on "
        "whole prompts only"
    )
    proof: ClassVar[str] = "tests/test_attention_hybrid.py::test_moved_rows_are_scanned_again"
    recurrent: ClassVar[bool] = True
