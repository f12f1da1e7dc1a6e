"""gpt-oss: alternating sliding and full layers, learned attention sinks, a mixture of experts."""

from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class GptOss(FamilySpec):
    """gpt-oss checkpoints; only eager attention knows the sinks."""

    model_types = ("gpt_oss",)
    harmless = {"experts_per_token": None, "initial_context_length": None}  # noqa: RUF012 - read-only
    window = window_from_layer_types
    eager_only = "attention sinks"
