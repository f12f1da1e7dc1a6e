"""Configs that are refused before any weight is loaded: unknown keys, unknown rotations, contradictions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from notelens.errors import UnsupportedModelError
from notelens.models.base import FamilySpec

BOOKKEEPING = frozenset(
    (
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
        "unk_token_id", "dtype", "torch_dtype", "model_type", "transformers_version", "quantization_config", "use_cache",
        "unsloth_version", "unsloth_fixed", "tokenizer_class", "bos_token", "eos_token", "pad_token", "suppress_tokens",
        "cache_implementation", "tie_encoder_decoder", "is_decoder", "cross_attention_hidden_size", "add_cross_attention",
        "pruned_heads", "prefix", "finetuning_task", "torchscript", "task_specific_params", "attn_implementation",
        "experts_implementation",
        # read by decoders, whether their config class declares them or not
        "head_dim", "tie_word_embeddings", "partial_rotary_factor",
    )
)  # fmt: skip
"""Keys that name, save or generate and compute nothing, and three that decoders read."""

ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(("factor",)),
    "proportional": frozenset(("factor",)),
    "dynamic": frozenset(("factor", "original_max_position_embeddings")),
    "llama3": frozenset(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": frozenset(
        ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
         "mscale_all_dim", "truncate")
    ),
    "longrope": frozenset(("short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings")),
}  # fmt: skip
"""What transformers 5.16 to 5.19 reads for each RoPE type, beside base, type and partial width."""
_ANY_ROPE = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))


def check_config(family: FamilySpec, config: Any) -> None:
    """Refuse a config with anything in it that is not understood.

    Raises:
        UnsupportedModelError: an unknown key, an unknown RoPE type or RoPE key, or entries that contradict each other; the
            message names it and the way out.
    """
    text = family.text_config(config)
    kind = config.model_type
    _unknown_keys(family, text, kind)
    for key, allowed in family.required.items():
        if getattr(text, key, allowed[0]) not in allowed:
            raise UnsupportedModelError(
                f"{kind}: {key}={getattr(text, key)!r} changes attention in a way that is not supported"
            )
    n_layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and len(kinds) != n_layers:
        raise UnsupportedModelError(
            f"{kind}: layer_types names {len(kinds)} layers and num_hidden_layers is {n_layers}; correct config.json"
        )
    for layer in range(n_layers):
        if kinds is not None and kinds[layer] == "sliding_attention" and not getattr(text, "sliding_window", None):
            raise UnsupportedModelError(
                f"{kind}: layer {layer} is sliding_attention, but sliding_window is not set; correct config.json"
            )
        window = family.window(text, layer)
        if window is not None and window < 1:
            raise UnsupportedModelError(f"{kind}: layer {layer} has a sliding window of {window} positions")
        if family.rope_theta(text, layer) is not None:
            _check_rope(family, family.rope(text, layer), kind, layer)


def _unknown_keys(family: FamilySpec, text: Any, kind: str) -> None:
    cls = type(text)
    # dir: a model that was loaded carries plans of the class (tensor parallelism) in its own config
    known = (
        {f.name for f in dataclasses.fields(cls)}
        | set(vars(cls()))
        | set(cls.attribute_map)
        | set(dir(cls))
        | BOOKKEEPING
    )
    for key, value in vars(text).items():
        if key in known or key.startswith("_"):
            continue
        if key not in family.harmless:
            raise UnsupportedModelError(
                f"{kind}: the config has a key {key!r} that neither transformers nor notelens knows, so nobody computes what "
                "it asks for. If it changes nothing of a forward pass, add it to "
                f"{type(family).__name__}.harmless or remove it from config.json"
            )
        allowed = family.harmless[key]
        if allowed is not None and value not in allowed:
            raise UnsupportedModelError(
                f"{kind}: {key}={value!r} is not computed by transformers; known to be without effect: "
                f"{', '.join(map(repr, allowed))}"
            )


def _check_rope(family: FamilySpec, rope: Mapping[str, Any], kind: str, layer: int) -> None:
    type_ = rope.get("rope_type", "default")
    known = ROPE_KEYS[type_] | _ANY_ROPE | set(family.rope_keys)
    unknown = sorted(set(rope) - known)
    if unknown:
        raise UnsupportedModelError(
            f"{kind}: layer {layer} has RoPE type {type_!r} with an unknown entry {unknown[0]!r}; it would be ignored. Known: "
            f"{', '.join(sorted(known))}"
        )
    width = rope.get("partial_rotary_factor", 1.0)
    if not 0 < width <= 1:
        raise UnsupportedModelError(f"{kind}: partial_rotary_factor {width} is not a share of a key")


def check_raw(raw: Mapping[str, Any], config: Any, kind: str) -> None:
    """Compare a config file with what transformers made of it.

    Raises:
        UnsupportedModelError: ``layer_types`` and the pattern number of one file describe different layers.
    """
    raw = raw.get("text_config") or raw
    pattern, kinds = raw.get("sliding_window_pattern"), raw.get("layer_types")
    if pattern is None or kinds is None:
        return
    by_number = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(len(kinds))]
    other = next((i for i, (a, b) in enumerate(zip(kinds, by_number, strict=True)) if a != b), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{kind}: layer {other} is {kinds[other]} by layer_types and {by_number[other]} by sliding_window_pattern "
            f"{pattern}; remove the wrong one from config.json"
        )
