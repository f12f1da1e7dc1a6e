"""Gemma-2: alternating sliding and full layers, soft caps on attention scores and on output logits."""

from typing import Any

from torch import nn

from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class Gemma2(FamilySpec):
    """Gemma-2 checkpoints."""

    model_types = ("gemma2",)
    harmless = {"hidden_act": ("gelu_pytorch_tanh",)}  # noqa: RUF012 - read-only
    window = window_from_layer_types
    eager_only = "soft-capped attention scores"

    def writers(self, layer: Any) -> tuple[nn.Module, nn.Module]:
        """The norms behind attention and MLP, whose outputs are added to the residual stream."""
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm

    def final_softcap(self, config: Any) -> float | None:
        """Soft cap on output logits."""
        return config.final_logit_softcapping
