"""Phi-3 and Phi-4-mini: fused projections, partial rotary width, longrope in the long-context variants."""

from typing import Any

from notelens.models.base import FamilySpec


class Phi3(FamilySpec):
    """Phi-3 and Phi-4-mini checkpoints; long-context ones within their first frequency table."""

    model_types = ("phi3",)
    harmless = {  # noqa: RUF012 - read-only
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
        "lm_head_bias": (False,),
        "mlp_bias": (False,),
        "attention_bias": (False,),
    }

    def window(self, config: Any, layer: int) -> int | None:
        """Sliding window of the layer, as the config sets it for all of them."""
        return config.sliding_window
