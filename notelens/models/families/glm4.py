"""GLM-4-0414: half of every key rotates, adjacent channels in pairs, norms behind attention and MLP."""

from typing import Any

from torch import nn

from notelens.models.families.glm import Glm


class Glm4(Glm):
    """GLM-4 checkpoints of type ``glm4``."""

    model_types = ("glm4",)

    def writers(self, layer: Any) -> tuple[nn.Module, nn.Module]:
        """The norms behind attention and MLP, whose outputs are added to the residual stream."""
        return layer.post_self_attn_layernorm, layer.post_mlp_layernorm
