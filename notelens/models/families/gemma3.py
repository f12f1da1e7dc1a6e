"""Gemma-3 text: five sliding layers to one full layer, each kind with its own rotation."""

from typing import Any

from torch import Tensor, nn

from notelens.errors import UnsupportedModelError
from notelens.models.base import FamilySpec
from notelens.models.families.sliding import window_from_layer_types


class Gemma3(FamilySpec):
    """Gemma-3 text checkpoints."""

    model_types = ("gemma3_text",)
    window = window_from_layer_types

    def inv_freq(self, model: Any, layer: int) -> Tensor | None:
        """Inverse frequencies of the layer's kind."""
        return getattr(model.model.rotary_emb, f"{model.config.layer_types[layer]}_inv_freq")

    def rope_theta(self, config: Any, layer: int) -> float | None:
        """Base of the layer's kind.

        Raises:
            UnsupportedModelError: no base, or a RoPE type that is not known.
        """
        rope = config.rope_parameters[config.layer_types[layer]]
        if rope.get("rope_type", "default") not in self.rope_types or "rope_theta" not in rope:
            raise UnsupportedModelError(
                f"{config.model_type}: layer {layer} has rope parameters {rope}; a type of {', '.join(self.rope_types)} and "
                "a rope_theta are needed"
            )
        return float(rope["rope_theta"])

    def writers(self, layer: Any) -> tuple[nn.Module, nn.Module]:
        """The norms behind attention and MLP, whose outputs are added to the residual stream."""
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm

    def final_softcap(self, config: Any) -> float | None:
        """Soft cap on output logits."""
        return config.final_logit_softcapping
