"""Weight-only quantisation through torchao, and how far a model of lower precision is from float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from notelens.errors import InputError, MissingPackageError, UnsupportedModelError
from notelens.models.base import FamilySpec
from notelens.registry import nearest
from notelens.zoo.cast import cast_

if TYPE_CHECKING:
    from notelens.models.model import HFNoteModel

QUANTISATIONS = ("int8", "int4", "fp8")
INT4_GROUP = 32
N_TOKENS = 48
LARGEST_BYTES = 8 * 2**30
"""Float32 weights beyond this are not made for the sake of a drift; the record says so."""


@dataclass(frozen=True)
class Quantisation:
    """What was quantised.

    Attributes:
        kind: ``int8`` (one scale per row), ``int4`` (one per group of 32) or ``fp8`` (one per row).
        n_linear: linear layers whose weights are quantised.
        kept: what stays in the model's own type.
        version: of torchao.
    """

    kind: str
    n_linear: int
    kept: str
    version: str


def quantise_(hf: Any, family: FamilySpec, kind: str) -> Quantisation:
    """Quantise the weights of every linear layer of the decoder, in place.

    The unembedding, embeddings, norms and fused expert weights stay: single rows of the unembedding are read by number, and the
    others are no linear layers.

    Args:
        hf: a loaded model.
        family: its spec.
        kind: ``int8``, ``int4`` or ``fp8``.

    Raises:
        InputError: no such kind.
        MissingPackageError: torchao is not installed.
        UnsupportedModelError: this build cannot quantise so, or nothing was there to quantise.
    """
    if kind not in QUANTISATIONS:
        raise InputError(f"unknown quantisation {kind!r}; {nearest(kind, list(QUANTISATIONS))}")
    try:
        import torchao  # pyright: ignore[reportMissingImports]  # extra `quant`
        from torchao.quantization import (  # pyright: ignore[reportMissingImports]  # extra `quant`
            Float8WeightOnlyConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            quantize_,
        )
        from torchao.quantization.granularity import PerGroup  # pyright: ignore[reportMissingImports]  # extra `quant`
    except ImportError as e:
        raise MissingPackageError(
            "quantised weights need torchao; install it with: pip install 'notelens[quant]'"
        ) from e
    head = family.unembedding(hf)
    decoder = set(family.decoder(hf).modules())
    chosen = {m for m in decoder if isinstance(m, nn.Linear) and m is not head}
    if kind == "int4":
        chosen = {m for m in chosen if m.in_features % INT4_GROUP == 0}
    if not chosen:
        raise UnsupportedModelError(f"no linear layer of this model can be quantised to {kind}")
    config = {
        "int8": lambda: Int8WeightOnlyConfig(),
        "int4": lambda: IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # pyright: ignore[reportAttributeAccessIssue]  # torch has it, its stubs do not
            granularity=PerGroup(INT4_GROUP),
        ),
        "fp8": lambda: Float8WeightOnlyConfig(),
    }[kind]()
    try:
        quantize_(hf, config, filter_fn=lambda module, _: module in chosen)
    except (NotImplementedError, ImportError, AssertionError, RuntimeError) as e:
        raise UnsupportedModelError(f"this build of torch and torchao cannot quantise to {kind} here: {e}") from e
    hf.requires_grad_(False)
    done = sum(type(m.weight) is not nn.Parameter or type(m.weight.data) is not Tensor for m in chosen)
    if done != len(chosen):
        raise UnsupportedModelError(f"torchao left {len(chosen) - done} of {len(chosen)} linear layers as they were")
    return Quantisation(kind, done, "embeddings, norms, unembedding and fused experts", torchao.__version__)


@dataclass(frozen=True)
class Outputs:
    """What a drift compares: logits at every position and the cached rows of one prompt."""

    logits: Float[Tensor, "pos vocab"]
    rows: tuple[Float[Tensor, "head pos width"], ...]


@dataclass(frozen=True)
class Drift:
    """How far a model is from its own float32 version on one fixed prompt of random tokens.

    Attributes:
        n_tokens: length of the prompt.
        logit_max: largest difference of a logit.
        logit_relative: the same over the largest logit.
        kl_mean: mean divergence of the next-token distributions in nats, float32 first.
        top1_agreement: share of positions whose most likely token is the same.
        row_relative: largest difference of a cached row's entry over the largest entry of its layer.
    """

    n_tokens: int
    logit_max: float
    logit_relative: float
    kl_mean: float
    top1_agreement: float
    row_relative: float

    def as_json(self) -> dict[str, Any]:
        """Plain data for records."""
        return asdict(self)


@torch.no_grad()
def outputs(model: "HFNoteModel") -> Outputs:
    """Logits and rows of the fixed prompt. Cost: one forward over 48 tokens and one without a cache."""
    generator = torch.Generator().manual_seed(1)
    n = min(N_TOKENS, model.geometry.max_positions)
    ids = [int(i) for i in torch.randint(model.geometry.vocab_size, (n,), generator=generator)]
    cache = model.prefill(ids).cache
    hidden = model.family.decoder(model.hf)(
        input_ids=torch.tensor([ids], device=model.device), use_cache=False
    ).last_hidden_state[0]
    rows = tuple(t.float().cpu() for t in (*cache.keys, *cache.values))
    return Outputs(model.next_logits(hidden).float().cpu(), rows)


def drift(reference: Outputs, found: Outputs) -> Drift:
    """Compare the outputs of a model with those of its float32 version."""
    a, b = reference.logits, found.logits
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    gap = float((a - b).abs().max())
    rows = [
        float((x - y).abs().max() / x.abs().max().clamp_min(1e-30))
        for x, y in zip(reference.rows, found.rows, strict=True)
    ]
    return Drift(
        n_tokens=len(a),
        logit_max=gap,
        logit_relative=gap / float(a.abs().max().clamp_min(1e-30)),
        kl_mean=float((log_a.exp() * (log_a - log_b)).sum(-1).mean()),
        top1_agreement=float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        row_relative=max(rows),
    )


@contextmanager
def in_float32(hf: Any) -> Iterator[None]:
    """The model's own weights in float32 inside the block, and bit for bit as they were behind it: widening loses nothing."""
    before = [(t, t.dtype) for t in (*hf.parameters(), *hf.buffers()) if t.is_floating_point()]
    cast_(hf, torch.float32)
    try:
        yield
    finally:
        for tensor, dtype in before:
            tensor.data = tensor.data.to(dtype)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a parameter consists of: itself, or what a quantised one stores."""
    inner = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    flatten = getattr(inner, "__tensor_flatten__", None)
    if type(inner) is Tensor or flatten is None:
        return [tensor.detach()]
    names, _ = flatten()
    return [t for name in names for t in plain_tensors(getattr(inner, name))]


__all__ = [
    "QUANTISATIONS",
    "Drift",
    "Outputs",
    "Quantisation",
    "drift",
    "in_float32",
    "outputs",
    "plain_tensors",
    "quantise_",
]
