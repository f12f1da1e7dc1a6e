"""Qwen2 and Qwen2.5: grouped-query attention with biased projections."""

from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class Qwen2(FamilySpec):
    """Qwen2 and Qwen2.5 dense checkpoints."""

    model_types = ("qwen2",)
    harmless = {"use_mrope": (False,)}  # noqa: RUF012 - read-only
    window = window_from_layer_types
