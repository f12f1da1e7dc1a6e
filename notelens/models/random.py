"""Small random models of a named architecture, for dry runs and tests: right code paths, meaningless numbers."""

from pathlib import Path
from typing import Any

import torch

from notelens.errors import InputError
from notelens.models import FAMILIES
from notelens.zoo.embedded import EMBEDDED, embedded_tokenizer
from notelens.zoo.organisms import organism_specs

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


EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 64},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 64, "num_hidden_layers": 6},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def architecture(name: str) -> str:
    """``model_type`` of an embedded model, an organism, a known hub id, a family name, or a local folder.

    Raises:
        InputError: none of these.
    """
    if name in EMBEDDED:
        return "llama"
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


def random_config(kind: str, vocab_size: int, **overrides: Any) -> Any:
    """A small config of ``model_type`` ``kind``; ``overrides`` replace single entries."""
    from transformers import AutoConfig

    settings = {**SMALL, "vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings |= EXTRA.get(kind, {})
    return AutoConfig.for_model(kind, **{**settings, **overrides})


def random_model(name: str, cache_dir: Path, *, seed: int = 0) -> tuple[Any, Any]:
    """A small random model of the architecture of ``name``, with the embedded tokenizer."""
    from transformers import AutoModelForCausalLM

    tokenizer = embedded_tokenizer("smollm2", cache_dir=cache_dir)
    config = random_config(architecture(name), len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return hf, tokenizer
