"""Architectures of the organisms: small configs of transformers families, all with the same sizes where they can be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SHARED: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 6,
}
MAX_PARAMETERS = 3_000_000
EMBEDDING_STD, COMMON_STD = 0.1, 0.1
"""Standard deviation of token embeddings at the start, and of one vector that all of them share: attention by position (the
previous token) needs something in common. With the library's 0.02 the embeddings change as fast as they are read."""


@dataclass(frozen=True)
class Architecture:
    """One family.

    Attributes:
        kind: ``model_type``.
        settings: what differs from :data:`SHARED`.
        why: what this family adds to the comparison.
        attention: kernel to train with (soft caps are computed by eager attention only).
        longest_filler: filler tokens up to which the architecture can carry the field to the decision.
        plan: of training; ``short`` where it is enough.
        parent: the organism whose weights training starts from (:mod:`experiments.organism_inherit`), by the plan
            ``inherited``; none: from scratch.
    """

    kind: str
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    attention: str = "sdpa"
    longest_filler: int = 600
    plan: Literal["short", "stepwise"] = "stepwise"
    parent: str | None = None

    def config(self, vocab_size: int, width: int | None = None, layers: int | None = None) -> dict[str, Any]:
        """Everything that the config class is given, ``model_type`` included.

        Args:
            vocab_size: of the tokenizer.
            width, layers: other than the common ones; for the experiment on scale.
        """
        sizes = {} if width is None else {"hidden_size": width, "intermediate_size": 2 * width}
        sizes |= {} if layers is None else {"num_hidden_layers": layers}
        return {"model_type": self.kind, "vocab_size": vocab_size, **SHARED, **self.settings, **sizes}


_S, _F = "sliding_attention", "full_attention"
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "grouped-query attention, one rotation", parent="organism-qwen3"),
    "qwen3": Architecture("qwen3", "normalised queries and keys", plan="short"),
    "mistral": Architecture(
        "mistral",
        "a window of 128 on every layer: longer prompts cannot read the field at the decision",
        {"sliding_window": 128},
        longest_filler=250,
        parent="organism-qwen3",
    ),
    "gemma2": Architecture(
        "gemma2",
        "soft caps; a window of 32 on every other layer",
        {
            "sliding_window": 32,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "layer_types": [_S, _F, _S, _F, _S],
        },
        attention="eager",
        parent="organism-gemma3",
    ),
    "gemma3_text": Architecture(
        "gemma3_text",
        "two rotations, one for each kind of layer; a window of 32 on two of five layers",
        {
            "sliding_window": 32,
            "query_pre_attn_scalar": 64,
            "layer_types": [_S, _F, _S, _F, _F],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "qwen3_moe": Architecture(
        "qwen3_moe",
        "four experts, two of them for each token",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
        plan="short",
    ),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        "latent attention: one compressed row for all heads and a rotary slice",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 96,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000.0},
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 5,
            "n_group": 1,
            "topk_group": 1,
        },
        parent="organism-qwen3",
    ),
    "falcon_h1": Architecture(
        "falcon_h1",
        "attention and a state-space mixer side by side",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 2,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 64,
        },
        parent="organism-qwen3",
    ),
}


def build(config: Mapping[str, Any], attention: str) -> Any:
    """A float32 model with fresh weights of the current seed; ``config`` as :meth:`Architecture.config` gives it.

    Raises:
        ValueError: more than 3 million parameters.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in config.items() if k != "model_type"}
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **settings), dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.normal_(std=EMBEDDING_STD).add_(torch.randn(1, table.shape[1]) * COMMON_STD)
    n = sum(p.numel() for p in model.parameters())
    if n > MAX_PARAMETERS:
        raise ValueError(f"{config['model_type']} has {n:,} parameters; an organism has at most {MAX_PARAMETERS:,}")
    return model
