"""Qwen2.5-VL, text side: Qwen2 attention with three position axes in blocks of channels."""

from typing import Any

from torch import Tensor, nn

from notelens.attention.mrope import Layout, pair_axes
from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class Qwen25VL(FamilySpec):
    """Qwen2.5-VL checkpoints; prompts are text, images enter as positions."""

    model_types = ("qwen2_5_vl",)
    adapter = "mrope"
    auto_class = "AutoModelForImageTextToText"
    bridge_caches = False
    rope_keys = ("mrope_section", "mrope_interleaved")
    layout: Layout = "sectioned"
    window = window_from_layer_types

    def text_config(self, config: Any) -> Any:
        """The decoder's part of the config."""
        return getattr(config, "text_config", config)

    def decoder(self, model: Any) -> nn.Module:
        """The language model."""
        return model.model.language_model

    def layers(self, model: Any) -> nn.ModuleList:
        """Decoder layers in order."""
        return model.model.language_model.layers

    def final_norm(self, model: Any) -> nn.Module:
        """The norm in front of the unembedding."""
        return model.model.language_model.norm

    def rotary(self, model: Any) -> nn.Module:
        """The module that holds the inverse frequencies."""
        return model.model.language_model.rotary_emb

    def axes(self, config: Any, layer: int) -> Tensor | None:
        """Axis of every pair, from the config's sections."""
        return pair_axes(self.rope(config, layer)["mrope_section"], self.layout)
