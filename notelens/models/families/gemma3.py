"""Gemma-3 text: five sliding layers to one full layer, each kind with its own rotation."""

from typing import Any

from torch import nn

from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class Gemma3(FamilySpec):
    """Gemma-3 text checkpoints."""

    model_types = ("gemma3_text",)
    harmless = {"hidden_act": ("gelu_pytorch_tanh",), "sliding_window_pattern": None}  # noqa: RUF012 - read-only
    window = window_from_layer_types
    required = {"attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)}  # noqa: RUF012 - read-only

    def writers(self, layer: Any) -> tuple[nn.Module, nn.Module]:
        """The norms behind attention and MLP, whose outputs are added to the residual stream."""
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm

    def final_softcap(self, config: Any) -> float | None:
        """Soft cap on output logits."""
        return config.final_logit_softcapping
