"""SmolLM3: grouped-query attention, every fourth layer without RoPE."""

from typing import Any, cast

from torch import Tensor

from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class SmolLM3(FamilySpec):
    """SmolLM3 checkpoints. ``no_rope_layers`` holds 1 where a layer *is* rotated; the gate checks it on the keys."""

    model_types = ("smollm3",)
    harmless = {"pretraining_tp": None, "max_window_layers": None}  # noqa: RUF012 - read-only
    window = window_from_layer_types

    def rope_theta(self, config: Any, layer: int) -> float | None:
        """Base of the rotation; ``None`` in layers without."""
        return super().rope_theta(config, layer) if config.no_rope_layers[layer] else None

    def inv_freq(self, model: Any, layer: int) -> Tensor | None:
        """Inverse frequencies, where the layer's own module uses them."""
        attention = cast(Any, self.layers(model)[layer].self_attn)
        return super().inv_freq(model, layer) if attention.use_rope else None
