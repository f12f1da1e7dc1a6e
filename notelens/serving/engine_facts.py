"""What an engine must be for skills to be written into its blocks, read from its configuration; everything else is refused.

The objects are vLLM's, but nothing of vLLM is imported: they are looked at by attribute, so that the rules can be tested
without an engine.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from notelens.cache.artefact import DTYPES, ModelTag, SkillHeader, check_model
from notelens.errors import EngineError, UnsupportedModelError
from notelens.rope import Pairing

POSITIONS = (1, 2, 3, 17, 64, 257, 1025)
"""Where the engine's rotary table is compared with a skill's frequencies."""
TABLE_TOLERANCE = 2e-3
"""Two float32 computations of one angle at position 1,025 differ by less than 1e-3; types below add their own step."""
_KINDS = {
    "MLAAttentionSpec": "MLA stores one latent row per token, of which only a slice turns",
    "SlidingWindowSpec": "sliding-window layers free the blocks that leave the window",
    "SlidingWindowMLASpec": "sliding-window layers free the blocks that leave the window",
    "ChunkedLocalAttentionSpec": "chunked local attention frees the blocks of earlier chunks",
    "MambaSpec": "recurrent layers keep a state, not rows per token",
}


@dataclass(frozen=True)
class EngineFacts:
    """An engine that skills can be written into.

    Attributes:
        model: the folder or name it was started with.
        dtype: of computation and of cached rows.
        block_size: tokens of a block.
        layer_names: of the attention layers, in order.
        shapes: (stored heads, key width, value width) of every layer.
    """

    model: str
    dtype: torch.dtype
    block_size: int
    layer_names: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]

    def check(self, header: SkillHeader, weights_sha256: str) -> None:
        """Check that a skill belongs to the engine's model. Tokens are compared with each request, RoPE tables by the worker.

        Args:
            header: of the skill.
            weights_sha256: of the engine's weights.

        Raises:
            ArtefactError: weights, type or shapes differ; one sentence says which.
        """
        of_skill = header.model
        dtype = str(self.dtype).removeprefix("torch.")
        tag = ModelTag(
            self.model,
            weights_sha256,
            of_skill.tokenizer_sha256,
            dtype,
            self.shapes,
            of_skill.frequencies,
            of_skill.tables,
        )
        check_model(header, tag)


@dataclass(frozen=True)
class Options:
    """What the engine's ``kv_connector_extra_config`` says.

    Attributes:
        skill_library: folder of the skills.
        weights_sha256: of the engine's weights, as ``notelens`` tags the model; computed from the folder when ``None``.
        memory_bytes: rows kept in memory; the store's default when ``None``.
    """

    skill_library: str
    weights_sha256: str | None = None
    memory_bytes: int | None = None

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> "Options":
        """From the engine's configuration.

        Raises:
            EngineError: an entry is missing, unknown or of the wrong kind.
        """
        known = ("skill_library", "weights_sha256", "memory_bytes")
        unknown = sorted(set(extra) - set(known))
        if unknown or not isinstance(extra.get("skill_library"), str):
            raise EngineError(
                f"kv_connector_extra_config needs 'skill_library' (a folder) and may have {', '.join(known[1:])}; "
                f"got {sorted(extra)}"
            )
        weights, memory = extra.get("weights_sha256"), extra.get("memory_bytes")
        if weights is not None and not re.fullmatch(r"[0-9a-f]{64}", str(weights)):
            raise EngineError(
                f"kv_connector_extra_config: weights_sha256 {weights!r} is no SHA-256 (64 hexadecimal digits)"
            )
        if memory is not None and (type(memory) is not int or memory < 0):
            raise EngineError(f"kv_connector_extra_config: memory_bytes {memory!r} is no number of bytes")
        return cls(extra["skill_library"], weights, memory)


def engine_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """The facts of an engine.

    Args:
        vllm_config: its ``VllmConfig``.
        kv_cache_config: its ``KVCacheConfig``.

    Raises:
        UnsupportedModelError: a layout that rows cannot be written into: sliding windows, MLA, recurrent layers, several groups
            of layers, quantised weights or caches.
        EngineError: prefix caching is off, load failures would fail requests, or several workers share the model.
    """
    cache, model, parallel = vllm_config.cache_config, vllm_config.model_config, vllm_config.parallel_config
    if not cache.enable_prefix_caching:
        raise EngineError("skills follow tokens that the engine has cached: start it with prefix caching enabled")
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise EngineError(
            "a skill that cannot be loaded must be computed instead: set kv_load_failure_policy to 'recompute' in the engine's "
            f"kv_transfer_config (it is {vllm_config.kv_transfer_config.kv_load_failure_policy!r})"
        )
    if parallel.world_size != 1:
        raise EngineError(
            f"skills are written by one worker; {parallel.world_size} would each need a part of the heads"
        )
    if model.quantization is not None:
        raise UnsupportedModelError(
            f"{model.model} runs with {model.quantization} weights; skills are compiled with the model's own"
        )
    dtype = model.dtype
    name = str(dtype).removeprefix("torch.")
    if cache.cache_dtype not in ("auto", name) or name not in DTYPES:
        raise UnsupportedModelError(
            f"the engine computes in {name} and caches in {cache.cache_dtype}; skills hold rows as they are computed "
            f"({', '.join(DTYPES)}): set kv_cache_dtype to 'auto'"
        )
    specs = _specs(kv_cache_config)
    names = sorted(specs, key=layer_index)
    if [layer_index(n) for n in names] != list(range(len(names))):
        raise UnsupportedModelError(f"attention layers are not numbered 0..{len(names) - 1}: {names[:3]}..")
    sizes = {int(specs[n].block_size) for n in names}
    if len(sizes) != 1:
        raise UnsupportedModelError(f"layers have blocks of {sorted(sizes)} tokens; one size is supported")
    shapes = tuple((specs[n].num_kv_heads, specs[n].head_size, specs[n].head_size_v) for n in names)
    return EngineFacts(str(model.model), dtype, sizes.pop(), tuple(names), shapes)


def layer_index(name: str) -> int:
    """The number in a layer's name.

    Raises:
        UnsupportedModelError: there is none, or more than one.
    """
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise UnsupportedModelError(f"the name of layer {name!r} does not hold exactly one number")
    return numbers[0]


def _specs(kv_cache_config: Any) -> dict[str, Any]:
    """The cache specification of every layer, all of full attention."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(g.kv_cache_spec).__name__ for g in groups})
        why = next((text for kind, text in _KINDS.items() if kind in kinds), "layers of different kinds")
        raise UnsupportedModelError(f"the engine keeps {len(groups)} groups of layers ({', '.join(kinds)}): {why}")
    group = groups[0]
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    specs = {n: several[n] if several is not None else group.kv_cache_spec for n in group.layer_names}
    for layer, spec in specs.items():
        kind = type(spec).__name__
        if kind != "FullAttentionSpec":
            raise UnsupportedModelError(
                f"layer {layer} is {kind}: {_KINDS.get(kind, 'rows of that kind are not understood')}"
            )
        window = spec.sliding_window or spec.attention_chunk_size
        if window is not None:
            raise UnsupportedModelError(f"layer {layer} sees {window} tokens back: {_KINDS['SlidingWindowSpec']}")
        if spec.num_head_slots is not None or spec.tokens_per_state != 1 or int(spec.kv_quant_mode) != 0:
            raise UnsupportedModelError(f"layer {layer} packs its rows in a way that is not understood")
    return specs


def table_pairing(frequencies: Sequence[float], ropes: Sequence[Any], layer: int) -> Pairing:
    """Which channels the engine turns together, once its rotary table is known to be the skill's.

    Args:
        frequencies: inverse frequencies of a layer of the skill.
        ropes: the engine's rotary embeddings.
        layer: for messages.

    Raises:
        UnsupportedModelError: no rotary embedding of the engine has this table.
    """
    freq = torch.tensor(frequencies, dtype=torch.float64)
    for rope in ropes:
        table = getattr(rope, "cos_sin_cache", None)
        if table is None or table.ndim != 2 or table.shape[1] != 2 * len(freq):
            continue
        at = torch.tensor([p for p in POSITIONS if p < len(table)])
        found = table[at.to(table.device)].double().cpu()
        size = table[0, : len(freq)].double().cpu()  # the cosine of angle 0: YaRN's magnitude
        angle = at[:, None].double() * freq
        wanted = torch.cat([angle.cos(), angle.sin()], dim=1)
        allowed = TABLE_TOLERANCE + 2 * torch.finfo(table.dtype).eps
        if bool((size > 0).all()) and float((found / torch.cat([size, size]) - wanted).abs().max()) <= allowed:
            return "half" if rope.is_neox_style else "adjacent"
    raise UnsupportedModelError(
        f"layer {layer} of the skill was rotated with another RoPE table (base or scaling) than any of the engine's; keys "
        "cannot be moved"
    )


__all__ = ["EngineFacts", "Options", "engine_facts", "layer_index", "table_pairing"]
