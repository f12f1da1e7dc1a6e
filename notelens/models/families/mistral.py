"""Mistral: grouped-query attention, a sliding window on every layer where the config sets one."""

from typing import Any

from notelens.models.base import FamilySpec


class Mistral(FamilySpec):
    """Mistral checkpoints (version 0.3 has no window)."""

    model_types = ("mistral",)

    def window(self, config: Any, layer: int) -> int | None:
        """Sliding window of the layer, as the config sets it for all of them."""
        return config.sliding_window
