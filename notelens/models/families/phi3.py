"""Phi-3 and Phi-4-mini: fused projections, partial rotary width, longrope in the long-context variants."""

from typing import Any

from notelens.models.base import FamilySpec


class Phi3(FamilySpec):
    """Phi-3 and Phi-4-mini checkpoints; long-context ones within their first frequency table."""

    model_types = ("phi3",)

    def window(self, config: Any, layer: int) -> int | None:
        """Sliding window of the layer, as the config sets it for all of them."""
        return config.sliding_window
