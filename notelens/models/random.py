"""Small random models of a named architecture, for dry runs and tests: right code paths, meaningless numbers."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from notelens.errors import InputError
from notelens.models import FAMILIES
from notelens.zoo.embedded import EMBEDDED, embedded_tokenizer
from notelens.zoo.organisms import organism_specs, organism_tokenizer

KNOWN_ARCHITECTURES = {
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-4B": "qwen3",
    "meta-llama/Llama-3.1-8B-Instruct": "llama",
    "google/gemma-2-9b-it": "gemma2",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral",
}
"""Architectures of the paper's models, so that a dry run needs no network."""

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}


_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

_TOWER: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**_TOWER, "fullatt_block_indexes": [0], "window_size": 16},
    "qwen3_vl": {**_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
"""Smallest vision towers of the models that have one; prompts do not run them."""

EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 64},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 64, "num_hidden_layers": 6},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    },
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}},
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]}},
    "gpt_oss": {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def architecture(name: str) -> str:
    """``model_type`` of an embedded model, an organism, a known hub id, a family name, or a local folder.

    Raises:
        InputError: none of these.
    """
    if name in EMBEDDED:
        return EMBEDDED[name].model_type
    if name in organism_specs():
        return str(organism_specs()[name].card["config"]["model_type"])
    if name in FAMILIES:
        return name
    if name in KNOWN_ARCHITECTURES:
        return KNOWN_ARCHITECTURES[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(str(folder)).model_type
    known = ", ".join([*sorted(EMBEDDED), *sorted(KNOWN_ARCHITECTURES)])
    raise InputError(f"the architecture of {name!r} is not known without a download; a dry run knows: {known}")


def build_config(kind: str, settings: Mapping[str, Any]) -> Any:
    """A config of ``model_type`` ``kind``; of a vision-language model, ``settings`` are those of its text side."""
    from transformers import AutoConfig

    if kind not in TOWERS:
        return AutoConfig.for_model(kind, **copy.deepcopy(dict(settings)))
    tower = {**TOWERS[kind], "out_hidden_size": settings["hidden_size"]}
    tied = {"tie_word_embeddings": settings.get("tie_word_embeddings", False)}
    return AutoConfig.for_model(kind, text_config=copy.deepcopy(dict(settings)), vision_config=tower, **tied)


def build_model(config: Any) -> Any:
    """A float32 model of a config, with weights of the current seed."""
    import transformers

    auto = getattr(transformers, FAMILIES.get(config.model_type).auto_class)
    return auto.from_config(config, dtype=torch.float32)


def random_config(kind: str, vocab_size: int, **overrides: Any) -> Any:
    """A small config of ``model_type`` ``kind``; ``overrides`` replace single entries."""
    settings = {**SMALL, "vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings |= EXTRA.get(kind, {})
    return build_config(kind, {**settings, **overrides})


def random_model(name: str, cache_dir: Path, *, seed: int = 0) -> tuple[Any, Any]:
    """A small random model of the architecture of ``name``, with the embedded tokenizer, or the organisms' for one of them."""
    if name in organism_specs():
        tokenizer: Any = organism_tokenizer()
        settings = {k: v for k, v in organism_specs()[name].card["config"].items() if k != "model_type"}
        config = build_config(architecture(name), settings)
    else:
        tokenizer = embedded_tokenizer("smollm2", cache_dir=cache_dir)
        config = random_config(architecture(name), len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hf = build_model(config)
    return hf, tokenizer
