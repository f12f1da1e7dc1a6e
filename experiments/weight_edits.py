"""Two ways of putting a changed field into a model's weights instead of its cache: rank-one ROME, and LoRA fine-tuning.

Both are context managers that change a model in place and put every bit back. They make a model answer a prompt whose text
still holds the *old* value as if it held the new one; that is what a deployment does that keeps per-request state in weights.

ROME (arXiv:2202.05262), own implementation: the key ``k`` is the input of one layer's ``down_proj`` at the subject (the field's
last token); the value ``v`` is that projection's output there, moved by an offset which is optimised until the model gives the
new answer; the update is the smallest one (in the metric of ordinary text's keys, covariance ``C``) that maps ``k`` to ``v``:
``W + (v - W k) (C^-1 k)^T / (k^T C^-1 k)``.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.errors import EditError, MissingPackageError, UnsupportedModelError
from notelens.models.base import NoteModel

RIDGE = 1e-2
"""Added to the covariance, relative to its mean diagonal: few tokens of ordinary text do not span every direction."""
ENOUGH = 0.95
"""Probability of the new answer at which optimisation stops."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Target:
    """What the model shall say.

    Attributes:
        token_ids: the prompt, old value included.
        subject: position of the subject's last token.
        answer: id of the new next token.
    """

    token_ids: tuple[int, ...]
    subject: int
    answer: int


@dataclass(frozen=True)
class Made:
    """An edit that is in force.

    Attributes:
        ms: time it took, without what is prepared once per model.
        steps: of optimisation.
        probability: of the new answer behind the prompt, with the edit.
    """

    ms: float
    steps: int
    probability: float


@dataclass(frozen=True)
class Keys:
    """Second moment of one layer's ``down_proj`` inputs on ordinary text.

    Attributes:
        layer: of the model.
        inverse: inverse of the damped covariance, ``[d_mlp, d_mlp]``.
        n_tokens: tokens it comes from.
        ms: time it took.
    """

    layer: int
    inverse: Float[Tensor, "d_mlp d_mlp"]
    n_tokens: int
    ms: float


def down_proj(model: NoteModel, layer: int) -> torch.nn.Linear:
    """The projection that ROME edits.

    Raises:
        UnsupportedModelError: the layer has none (mixtures of experts), or its weight is not plain.
    """
    layers = model.family.layers(model.hf)
    if not 0 <= layer < len(layers):
        raise UnsupportedModelError(f"{model.name} has layers 0..{len(layers) - 1}, not {layer}")
    named = layers[layer].named_modules()
    linear = [m for name, m in named if name.split(".")[-1] == "down_proj" and isinstance(m, torch.nn.Linear)]
    found = linear[0] if len(linear) == 1 else None
    if found is None:
        raise UnsupportedModelError(f"{model.name}: layer {layer} has no single down_proj; rank-one edits need one")
    return found


@torch.no_grad()
def covariance(model: NoteModel, layer: int, texts: Sequence[Sequence[int]]) -> Keys:
    """Collect keys of ordinary text. Cost: one prefill of every text, and a factorisation."""
    began = time.perf_counter()
    module = down_proj(model, layer)
    total = torch.zeros(module.in_features, module.in_features, dtype=torch.float64)
    count = 0

    def add(_: Any, args: tuple[Tensor, ...]) -> None:
        nonlocal count
        keys = args[0].reshape(-1, args[0].shape[-1]).double().cpu()
        total.add_(keys.T @ keys)
        count += len(keys)

    handle = module.register_forward_pre_hook(add)
    try:
        for ids in texts:
            model.prefill(tuple(ids))
    finally:
        handle.remove()
    moment = total / max(count, 1)
    moment += RIDGE * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    inverse = torch.linalg.inv(moment)
    return Keys(layer, inverse, count, 1e3 * (time.perf_counter() - began))


@contextlib.contextmanager
def rome(
    model: NoteModel,
    target: Target,
    keys: Keys,
    *,
    steps: int = 25,
    learning_rate: float = 0.5,
    decay: float = 1e-3,
    clamp: float = 4.0,
) -> Iterator[Made]:
    """Inside the block the model has the rank-one edit; behind it every bit of the weight is as before.

    Args:
        model: changed in place.
        target: what it shall say.
        keys: from :func:`covariance` of the layer to edit.
        steps, learning_rate: of Adam on the offset.
        decay: weight of the offset's squared size, relative to that of the value it is added to.
        clamp: largest size of the offset, relative to the value's.

    Raises:
        EditError: the projection's input at the subject is zero.
        UnsupportedModelError: the layer has no single ``down_proj``.

    Cost: at most ``steps`` forward and backward passes over the prompt.
    """
    began = time.perf_counter()
    module = down_proj(model, keys.layer)
    ids = torch.tensor([list(target.token_ids)], device=model.device)
    key, value = _key_and_value(model, module, target)
    if float(key.norm()) == 0.0:
        raise EditError(
            f"{model.name}: the MLP of layer {keys.layer} does nothing at the subject, so there is no key to edit"
        )
    size = float(value.norm()) or 1.0
    offset = torch.zeros_like(value, requires_grad=True)
    optimiser = torch.optim.Adam([offset], lr=learning_rate * size / len(value) ** 0.5)

    def shift(_: Any, __: Any, out: Tensor) -> Tensor:
        made = out.clone()
        made[0, target.subject] = made[0, target.subject] + offset
        return made

    def penalty() -> Tensor:
        return decay * (offset @ offset) / size**2

    def limit() -> None:
        offset.mul_(min(1.0, clamp * size / max(float(offset.norm()), 1e-12)))

    handle = module.register_forward_hook(shift)
    try:
        taken = _optimise(model, ids, target.answer, optimiser, steps, penalty, limit)
    finally:
        handle.remove()
    towards = keys.inverse @ key.double().cpu()
    update = torch.outer(offset.detach().double().cpu(), towards) / (key.double().cpu() @ towards)
    before = module.weight.detach().clone()
    try:
        with torch.no_grad():
            module.weight.add_(update.to(module.weight))
        ms = 1e3 * (time.perf_counter() - began)
        with torch.no_grad():
            probability = float(_next_logp(model, ids)[target.answer].exp())
        yield Made(ms, taken, probability)
    finally:
        with torch.no_grad():
            module.weight.copy_(before)


@contextlib.contextmanager
def lora(
    model: NoteModel, target: Target, *, rank: int = 8, steps: int = 20, learning_rate: float = 2e-3, seed: int = 0
) -> Iterator[Made]:
    """Inside the block the model has a LoRA adapter fine-tuned on one request; behind it the module tree is as before.

    Args:
        model: changed in place.
        target: what it shall say; its ``subject`` plays no part.
        rank: of the adapter (all projections that the model has, alpha 2 x rank).
        steps, learning_rate: of AdamW.
        seed: of the adapter's first factors.

    Raises:
        MissingPackageError: peft is not installed.
        UnsupportedModelError: the model has none of the projections.

    Cost: at most ``steps`` forward and backward passes over the prompt.
    """
    try:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]  # extra `train`
    except ImportError as e:
        raise MissingPackageError("LoRA fine-tuning needs peft; install notelens[train]") from e
    began = time.perf_counter()
    hf = model.hf
    names = {n.rsplit(".", 1)[-1] for n, m in hf.named_modules() if isinstance(m, torch.nn.Linear)}
    wanted = [p for p in PROJECTIONS if p in names]
    if not wanted:
        raise UnsupportedModelError(f"{model.name} has none of the projections {', '.join(PROJECTIONS)}")
    ids = torch.tensor([list(target.token_ids)], device=model.device)
    trainable = {n: p.requires_grad for n, p in hf.named_parameters()}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=wanted, task_type="CAUSAL_LM")
        tuned: Any = get_peft_model(hf, config)
    try:
        hf.eval()
        optimiser = torch.optim.AdamW([p for p in hf.parameters() if p.requires_grad], lr=learning_rate)
        taken = _optimise(model, ids, target.answer, optimiser, steps)
        ms = 1e3 * (time.perf_counter() - began)
        with torch.no_grad():
            probability = float(_next_logp(model, ids)[target.answer].exp())
        yield Made(ms, taken, probability)
    finally:
        tuned.unload()
        if hasattr(hf, "peft_config"):
            del hf.peft_config
        for n, p in hf.named_parameters():
            p.requires_grad_(trainable[n])


def _optimise(
    model: NoteModel,
    ids: Tensor,
    answer: int,
    optimiser: torch.optim.Optimizer,
    steps: int,
    penalty: Callable[[], Tensor] | None = None,
    limit: Callable[[], None] | None = None,
) -> int:
    """Raise the probability of the answer until it is enough; returns the steps taken."""
    taken = 0
    with torch.enable_grad():
        while taken < steps:
            taken += 1
            logp = _next_logp(model, ids)[answer]
            if float(logp.detach().exp()) >= ENOUGH:
                break
            optimiser.zero_grad()
            (-logp if penalty is None else penalty() - logp).backward()
            optimiser.step()
            if limit is not None:
                with torch.no_grad():
                    limit()
    return taken


def _next_logp(model: NoteModel, ids: Tensor) -> Tensor:
    """Log-probabilities of the next token, float32."""
    logits = model.hf(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return torch.log_softmax(logits.float(), dim=-1)


def _key_and_value(model: NoteModel, module: torch.nn.Linear, target: Target) -> tuple[Tensor, Tensor]:
    """Input and output of the projection at the subject."""
    found: list[tuple[Tensor, Tensor]] = []

    def keep(_: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        found.append((args[0][0, target.subject].detach().clone(), out[0, target.subject].detach().clone()))

    handle = module.register_forward_hook(keep)
    try:
        model.prefill(target.token_ids)
    finally:
        handle.remove()
    return found[0]
