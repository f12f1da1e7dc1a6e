"""RoPE whose frequencies depend on the length (dynamic NTK, longrope): exact below the first change of tables."""

from typing import ClassVar

from notelens.attention.base import Support
from notelens.attention.gqa import Rotated


class OneTable(Rotated):
    """RoPE with a length-dependent table (dynamic NTK, longrope): within the first table only."""

    support: ClassVar[Support] = "partial"
    limits: ClassVar[str] = "prompts and moves stop where the model would change its frequency table"
    proof: ClassVar[str] = "tests/test_attention.py::test_length_dependent_tables_are_refused_beyond_their_end"
