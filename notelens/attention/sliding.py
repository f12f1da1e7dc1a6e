"""Sliding-window attention: every row is kept, the mask enforces the window."""

from typing import ClassVar

from notelens.attention.base import Support
from notelens.attention.gqa import Rotated


class Sliding(Rotated):
    """Sliding-window layers, with attention sinks (gpt-oss) and soft caps (Gemma-2): all rows kept, the mask hides them."""

    support: ClassVar[Support] = "adapter"
    limits: ClassVar[str] = "a row outside the window is reported as not readable there"
    proof: ClassVar[str] = "tests/test_attention_sliding.py::test_rows_outside_the_window_are_not_readable"
