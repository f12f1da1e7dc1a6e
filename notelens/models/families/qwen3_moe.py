"""Qwen3-MoE: Qwen3's attention, a mixture of experts in place of the MLP."""

from typing import Any

from notelens.models.base import FamilySpec


class Qwen3Moe(FamilySpec):
    """Qwen3-MoE checkpoints. Routing may differ between batch shapes by rounding; the gate measures how far."""

    model_types = ("qwen3_moe",)
    harmless = {"max_window_layers": None}  # noqa: RUF012 - read-only

    def window(self, config: Any, layer: int) -> int | None:
        """Sliding window of the layer, which the config sets for all of them or none."""
        return config.sliding_window if config.use_sliding_window else None
