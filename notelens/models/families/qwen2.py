"""Qwen2 and Qwen2.5: grouped-query attention with biased projections."""

from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class Qwen2(FamilySpec):
    """Qwen2 and Qwen2.5 dense checkpoints."""

    model_types = ("qwen2",)
    window = window_from_layer_types
