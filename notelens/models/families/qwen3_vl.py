"""Qwen3-VL, text side: Qwen3 attention with three position axes interleaved over the channels."""

from typing import Any

from notelens.attention.mrope import Layout
from notelens.models.families.qwen2_5_vl import Qwen25VL


class Qwen3VL(Qwen25VL):
    """Qwen3-VL checkpoints; prompts are text, images enter as positions."""

    model_types = ("qwen3_vl",)
    layout: Layout = "interleaved"

    def window(self, config: Any, layer: int) -> int | None:
        """Every layer sees everything."""
        return None
