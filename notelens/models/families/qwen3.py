"""Qwen3: grouped-query attention with normalised queries and keys."""

from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class Qwen3(FamilySpec):
    """Qwen3 dense checkpoints."""

    model_types = ("qwen3",)
    window = window_from_layer_types
