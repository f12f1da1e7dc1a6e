"""OLMo-2: norms behind attention and MLP, normalised queries and keys."""

from typing import Any

from torch import nn

from notelens.models.base import FamilySpec


class Olmo2(FamilySpec):
    """OLMo-2 checkpoints."""

    model_types = ("olmo2",)

    def writers(self, layer: Any) -> tuple[nn.Module, nn.Module]:
        """The norms behind attention and MLP, whose outputs are added to the residual stream."""
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm
