"""Falcon-H1: attention and a state-space mixer side by side in every layer."""

from typing import Any, NoReturn

from torch import nn

from notelens.errors import UnsupportedModelError
from notelens.models.base import FamilySpec


class FalconH1(FamilySpec):
    """Falcon-H1 checkpoints: attention rows like Llama's, and a recurrent state beside them."""

    model_types = ("falcon_h1",)
    harmless = {  # noqa: RUF012 - read-only
        "mamba_use_mlp": (True,),
        "mlp_expansion_factor": None,
        "attn_layer_indices": (None,),
        "time_step_floor": None,
        "time_step_max": None,
        "time_step_min": None,
        "time_step_rank": None,
    }
    adapter = "hybrid"
    recurrent = True
    bridge_caches = False

    def final_norm(self, model: Any) -> nn.Module:
        """The norm in front of the unembedding."""
        return model.model.final_layernorm

    def writers(self, layer: Any) -> NoReturn:
        """Refuse: three parts write into the residual stream, each with a multiplier of its own.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "Falcon-H1 layers have three writers (mixer, attention, MLP) with multipliers, whose shares are not read"
        )

    def logit_scale(self, config: Any) -> float:
        """Factor on output logits."""
        return config.lm_head_multiplier
