"""Gemma-2: alternating sliding and full layers, soft caps on attention scores and on output logits."""

from typing import Any

from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class Gemma2(FamilySpec):
    """Gemma-2 checkpoints."""

    model_types = ("gemma2",)
    window = window_from_layer_types

    def final_softcap(self, config: Any) -> float | None:
        return config.final_logit_softcapping
