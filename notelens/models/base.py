"""What the library needs of a model: its geometry, a protocol for the runtime, and one spec per family."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from notelens.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor, nn

    from notelens.cache.kv import KVCache
    from notelens.models.gate import GateReport


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer's attention.

    Attributes:
        n_heads: query heads.
        n_kv_heads: stored heads; query head ``h`` reads stored head ``h // (n_heads // n_kv_heads)``.
        d_key, d_value: widths of one stored row.
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
    """Sizes of a model."""

    d_model: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerGeometry, ...]

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
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    eager_only: ClassVar[str | None] = None

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

    def inv_freq(self, model: Any, layer: int) -> "Tensor | None":
        """Inverse frequencies that rotate a layer's keys, as the model itself uses them; ``None`` without RoPE."""
        return model.model.rotary_emb.inv_freq

    def writers(self, layer: Any) -> "tuple[nn.Module, nn.Module]":
        """The modules of a decoder layer whose outputs are added to the residual stream: attention side, MLP side."""
        return layer.self_attn, layer.mlp

    def final_softcap(self, config: Any) -> float | None:
        """Soft cap on output logits."""
        return None

    def window(self, config: Any, layer: int) -> int | None:
        """Sliding window of a layer, ``None`` for full attention."""
        return None

    def rope_theta(self, config: Any, layer: int) -> float | None:
        """Base of a layer's rotation; ``None`` where it is not rotated.

        Raises:
            UnsupportedModelError: the config names no base, or a RoPE type this spec does not know.
        """
        rope = getattr(config, "rope_parameters", None)
        if not rope or "rope_theta" not in rope:
            raise UnsupportedModelError(
                f"{config.model_type}: the config has no rope_theta; it is never guessed. Set rope_parameters explicitly"
            )
        if rope.get("rope_type", "default") not in self.rope_types:
            raise UnsupportedModelError(
                f"{config.model_type}: RoPE type {rope['rope_type']!r} is not supported; known: "
                f"{', '.join(self.rope_types)}"
            )
        return float(rope["rope_theta"])

    rope_types: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3", "yarn")

    def geometry(self, config: Any) -> Geometry:
        """Sizes from the config (never from weight shapes, which quantisation changes)."""
        c = self.text_config(config)
        d_head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        n_kv = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        layers = tuple(
            LayerGeometry(c.num_attention_heads, n_kv, d_head, d_head, self.window(c, i), self.rope_theta(c, i))
            for i in range(c.num_hidden_layers)
        )
        return Geometry(c.hidden_size, c.vocab_size, c.max_position_embeddings, layers)
