"""DeepSeek-V2: latent attention; the rotary slice is stored with adjacent channels in pairs."""

from typing import Any, cast

import torch
from torch import Tensor

from notelens.models.base import FamilySpec, LayerGeometry


class DeepseekV2(FamilySpec):
    """DeepSeek-V2 checkpoints: a latent and a rotary slice per token."""

    model_types = ("deepseek_v2",)
    adapter = "mla"
    latent = True
    pairing = "adjacent"
    bridge_caches = False
    harmless = {  # noqa: RUF012 - read-only
        "moe_layer_freq": (1,),
        "ep_size": None,
        "seq_aux": None,
        "aux_loss_alpha": None,
        "scoring_func": ("softmax",),
    }

    def layer(self, config: Any, layer: int) -> LayerGeometry:
        """Sizes of what is stored: one latent, one rotary slice."""
        width, slice_ = config.kv_lora_rank, config.qk_rope_head_dim
        return LayerGeometry(config.num_attention_heads, 1, width, slice_, None, self.rope_theta(config, layer))

    def attended(self, model: Any, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Latent and rotary slice expanded to the keys and values of every query head, by the layer's own projection."""
        attention = cast(Any, self.layers(model)[layer].self_attn)
        with torch.no_grad():
            k, v = attention.expand_kv(keys[None], values[None])
        return k[0], v[0]
