"""What the library needs of a model: its geometry, a protocol for the runtime, and one spec per family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from notelens.errors import CacheError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor, nn

    from notelens.attention.base import AttentionAdapter
    from notelens.cache.kv import KVCache
    from notelens.models.gate import GateReport


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer's attention.

    Attributes:
        n_heads: query heads.
        n_kv_heads: stored heads; query head ``h`` reads stored head ``h // (n_heads // n_kv_heads)``. A latent cache stores
            one, which every query head reads through its own projection.
        d_key, d_value: widths of one stored row; of the latent and of its rotary slice in a latent cache.
        window: how many positions the layer sees back, itself included; ``None`` sees all.
        rope_theta: base of the rotation, or ``None`` where the layer is not rotated.
    """

    n_heads: int
    n_kv_heads: int
    d_key: int
    d_value: int
    window: int | None
    rope_theta: float | None


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model.

    Attributes:
        max_positions: positions that can be used.
        limit: why it is less than the config allows, or ``None``.
    """

    d_model: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerGeometry, ...]
    limit: str | None = None

    def check(self, cache: "KVCache", name: str) -> None:
        """Check that a cache can be one of this model's.

        Raises:
            CacheError: another number of layers, or rows of another shape; the message names the first layer that differs.
        """
        if cache.n_layers != self.n_layers:
            raise CacheError(
                f"the cache has {cache.n_layers} layers, {name} has {self.n_layers}; use a cache of this model"
            )
        for i, (layer, k, v) in enumerate(zip(self.layers, cache.keys, cache.values, strict=True)):
            found, wanted = (k.shape[0], k.shape[2], v.shape[2]), (layer.n_kv_heads, layer.d_key, layer.d_value)
            if found != wanted:
                raise CacheError(
                    f"layer {i}: the cache stores {found[0]} heads of key width {found[1]} and value width {found[2]}, {name} "
                    f"stores {wanted[0]} of {wanted[1]} and {wanted[2]}; use a cache of this model"
                )

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)


@dataclass(frozen=True)
class Prefill:
    """What one forward pass left behind.

    Attributes:
        cache: rows of everything cached so far and of the new tokens.
        hidden: final-norm output at the last position, ``[d_model]``.
        residuals: residual stream at the requested positions, ``[n_layers + 1, n_positions, d_model]`` (index 0 is the
            embedding, index ``l + 1`` the output of layer ``l``), or ``None`` when none were requested.
    """

    cache: "KVCache"
    hidden: "Float[Tensor, ' d_model']"
    residuals: "Float[Tensor, 'layers_and_embedding n d_model'] | None"


class NoteModel(Protocol):
    """A loaded model: plain transformers for prefill, decode and the patch engine, a bridge for hooks."""

    name: str
    geometry: Geometry
    tokenizer: Any
    gate: "GateReport | None"

    @property
    def revision(self) -> str:
        """Revision of the weights; their hash where none was given."""
        ...

    @property
    def device(self) -> "torch.device":
        """Where the parameters are."""
        ...

    @property
    def dtype(self) -> "torch.dtype":
        """Type of the parameters and of cached rows."""
        ...

    @property
    def attention_kernel(self) -> str:
        """Attention implementation of the plain model."""
        ...

    @property
    def hf(self) -> Any:
        """The plain transformers model."""
        ...

    @property
    def family(self) -> "FamilySpec":
        """Spec of the model's family."""
        ...

    @property
    def bridge(self) -> Any:
        """A ``TransformerBridge`` on the same parameter tensors, made on first use."""
        ...

    def prefill(
        self,
        token_ids: Sequence[int],
        past: "KVCache | None" = None,
        *,
        start: int | None = None,
        residuals_at: Sequence[int] = (),
    ) -> Prefill:
        """Run ``token_ids`` behind ``past``; ``residuals_at`` are indices into ``token_ids``."""
        ...

    def answer_logits(self, hidden: "Float[Tensor, '*batch d_model']", answer_ids: Sequence[int]) -> "Tensor":
        """Logits of ``answer_ids`` from final-norm outputs; only those rows of the unembedding are computed."""
        ...

    def next_logits(self, hidden: "Float[Tensor, '*batch d_model']") -> "Tensor":
        """Logits of the whole vocabulary."""
        ...

    def lens_logits(self, residual: "Float[Tensor, '*batch d_model']", answer_ids: Sequence[int]) -> "Tensor":
        """Logits of ``answer_ids`` read from a residual stream through the final norm (logit lens)."""
        ...

    def facts(self) -> dict[str, Any]:
        """What a record must say about the model: name, revision, dtype, kernel, device, versions, gate."""
        ...


class FamilySpec:
    """Where a family keeps its parts inside a transformers model. Subclasses override what differs.

    Attributes:
        model_types: values of ``config.model_type`` that this spec understands.
        eager_only: what only eager attention computes (soft caps, sinks), or ``None`` where any kernel will do.
        adapter: name of the attention representation of all layers; by default what a layer's config says (``gqa``,
            ``no_rope``, ``sliding``, ``one_table``).
        pairing: which channels of a stored key rotate together.
        recurrent: layers also keep a state that is not stored per token.
        latent: stored rows are expanded before attention sees them (:meth:`attended`).
        bridge_caches: the TransformerBridge decodes from caches of the plain model.
        auto_class: the transformers class that loads a checkpoint.
        rope_types: kinds of rotation that are understood.
        rope_keys: entries of ``rope_parameters`` beyond those of transformers' own RoPE types.
        harmless: config keys unknown to transformers that change nothing a forward pass computes, each with the values for
            which that holds (``None``: any).
        required: config entries that must have one of these values.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    eager_only: ClassVar[str | None] = None
    adapter: ClassVar[str | None] = None
    pairing: ClassVar[Literal["half", "adjacent"]] = "half"
    recurrent: ClassVar[bool] = False
    latent: ClassVar[bool] = False
    bridge_caches: ClassVar[bool] = True
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    rope_types: ClassVar[tuple[str, ...]] = (
        "default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope"
    )  # fmt: skip
    rope_keys: ClassVar[tuple[str, ...]] = ()
    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {}
    required: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def text_config(self, config: Any) -> Any:
        """The part of the config that describes the decoder."""
        return config

    def decoder(self, model: Any) -> "nn.Module":
        """The module that maps ids to final-norm outputs."""
        return model.model

    def layers(self, model: Any) -> "nn.ModuleList":
        """Decoder layers in order."""
        return model.model.layers

    def final_norm(self, model: Any) -> "nn.Module":
        """The norm in front of the unembedding."""
        return model.model.norm

    def unembedding(self, model: Any) -> "nn.Linear":
        """The output head."""
        return model.lm_head

    def rotary(self, model: Any) -> "nn.Module":
        """The module that holds the inverse frequencies."""
        return model.model.rotary_emb

    def inv_freq(self, model: Any, layer: int) -> "Tensor | None":
        """Inverse frequencies that rotate a layer's keys, as the model itself uses them; ``None`` without RoPE."""
        config = self.text_config(model.config)
        if self.rope_theta(config, layer) is None:
            return None
        kind = self.rope_kind(config, layer)
        # the first table, also where a longer call of the model itself has replaced the one in use
        name = "original_inv_freq" if self.table_end(config, layer) is not None else "inv_freq"
        return getattr(self.rotary(model), name if kind is None else f"{kind}_{name}")

    def writers(self, layer: Any) -> "tuple[nn.Module, nn.Module]":
        """The modules of a decoder layer whose outputs are added to the residual stream: attention side, MLP side."""
        return layer.self_attn, layer.mlp

    def final_softcap(self, config: Any) -> float | None:
        """Soft cap on output logits."""
        return None

    def logit_scale(self, config: Any) -> float:
        """Factor on output logits."""
        return 1.0

    def window(self, config: Any, layer: int) -> int | None:
        """Sliding window of a layer, ``None`` for full attention."""
        return None

    def rope_kind(self, config: Any, layer: int) -> str | None:
        """Name of a layer's entry in ``rope_parameters`` where those differ between kinds of layers; ``None`` where not."""
        kinds = getattr(config, "layer_types", None)
        rope = getattr(config, "rope_parameters", None)
        return kinds[layer] if kinds and rope and kinds[layer] in rope else None

    def rope(self, config: Any, layer: int) -> dict[str, Any]:
        """Parameters of a layer's rotation.

        Raises:
            UnsupportedModelError: the config names no base.
        """
        rope, kind = getattr(config, "rope_parameters", None) or {}, self.rope_kind(config, layer)
        rope = rope if kind is None else rope[kind]
        if not rope or rope.get("rope_theta") is None:
            raise UnsupportedModelError(
                f"{config.model_type}: the config has no rope_theta for layer {layer}; it is never guessed. Set "
                "rope_parameters explicitly"
            )
        return rope

    def rope_theta(self, config: Any, layer: int) -> float | None:
        """Base of a layer's rotation; ``None`` where it is not rotated.

        Raises:
            UnsupportedModelError: the config names no base, or a RoPE type this spec does not know.
        """
        rope = self.rope(config, layer)
        if rope.get("rope_type", "default") not in self.rope_types:
            raise UnsupportedModelError(
                f"{config.model_type}: RoPE type {rope['rope_type']!r} is not supported; known: "
                f"{', '.join(self.rope_types)}"
            )
        return float(rope["rope_theta"])

    def table_end(self, config: Any, layer: int) -> int | None:
        """First position from which on a layer's frequencies would be others; ``None`` where they never change."""
        rope = self.rope(config, layer)
        if rope.get("rope_type") == "dynamic":
            return config.max_position_embeddings
        if rope.get("rope_type") == "longrope":
            return rope["original_max_position_embeddings"]
        return None

    def layer(self, config: Any, layer: int) -> LayerGeometry:
        """Sizes of one layer (never from weight shapes, which quantisation changes); ``config`` is the text config."""
        d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        n_kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return LayerGeometry(
            config.num_attention_heads, n_kv, d_head, d_head, self.window(config, layer), self.rope_theta(config, layer)
        )

    def geometry(self, config: Any) -> Geometry:
        """Sizes from the config."""
        c = self.text_config(config)
        layers = tuple(self.layer(c, i) for i in range(c.num_hidden_layers))
        ends = [e for i, g in enumerate(layers) if g.rope_theta is not None and (e := self.table_end(c, i)) is not None]
        if not ends:
            return Geometry(c.hidden_size, c.vocab_size, c.max_position_embeddings, layers)
        limit = f"from {min(ends)} on its RoPE of a length-dependent type would use another frequency table"
        return Geometry(c.hidden_size, c.vocab_size, min(*ends, c.max_position_embeddings), layers, limit)

    def attention(self, model: Any, layer: int) -> "AttentionAdapter":
        """The adapter of a layer's rows."""
        from notelens.attention import ADAPTERS, LayerFacts

        config = self.text_config(model.config)
        inv_freq, window = self.inv_freq(model, layer), self.window(config, layer)
        end = self.table_end(config, layer) if inv_freq is not None else None
        name = self.adapter or (
            "no_rope" if inv_freq is None else "one_table" if end is not None else "sliding" if window else "gqa"
        )
        return ADAPTERS.get(name)(LayerFacts(inv_freq, self.pairing, window, end, self.axes(config, layer)))

    def axes(self, config: Any, layer: int) -> "Tensor | None":
        """M-RoPE axis of every rotating pair; ``None`` with one position axis."""
        return None

    def attended(self, model: Any, layer: int, keys: "Tensor", values: "Tensor") -> "tuple[Tensor, Tensor]":
        """Keys and values as the attention function sees them, from stored rows ``[stored head, pos, width]``."""
        return keys, values
