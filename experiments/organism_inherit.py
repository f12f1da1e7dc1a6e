"""Organisms that start from another family's weights: what can be carried over is, and training mends the rest.

Families that do not normalise queries and keys need several times the steps for the first match between a field and a rule.
They start from an organism that does: the normalisation is folded into the matrices (each head divided by its mean length),
the heads of latent attention are read from a low-rank split of the keys and values. A card says so: such an organism shows
that its *architecture* can hold and move notes, and is no independent replication of how training finds them.
"""

import random
from collections.abc import Mapping
from typing import Any

import torch

from experiments.organism_data import FULL, collate, conversation
from notelens.zoo.organisms import load_organism, organism_tokenizer

N_TEXTS = 48
"""Conversations over which lengths of queries, keys and latents are averaged."""
FALCON = {
    "mlp.": "feed_forward.",
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm.": "model.final_layernorm.",
}
"""Other names of the same modules in Falcon-H1."""


@torch.no_grad()
def inherit(model: Any, parent: str) -> list[str]:
    """Overwrite the parameters of ``model`` that ``parent`` has in some form.

    Args:
        model: as :func:`experiments.organism_models.build` makes it; llama, mistral, gemma2, deepseek_v3 or falcon_h1.
        parent: a shipped organism that normalises queries and keys, with the same sizes.

    Returns:
        Names of the parameters that keep their fresh values, sorted.

    Raises:
        ValueError: a parameter of the parent has no place in the model, or another shape.
    """
    source, _ = load_organism(parent)
    lengths, moments = _statistics(source)
    tensors = _folded(source, lengths)
    kind = model.config.model_type
    if kind == "deepseek_v3":
        tensors = _latent(tensors, moments, model.config)
    if kind == "falcon_h1":
        tensors = {_renamed(name): t for name, t in tensors.items()}
    own = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            has = f"has shape {list(own[name].shape)}" if name in own else "is not there"
            raise ValueError(f"{name} of {parent} has shape {list(tensor.shape)}; in {kind} it {has}")
        own[name].copy_(tensor)
    return sorted(set(own) - set(tensors))


def _statistics(model: Any) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """Mean of one over the length of queries and keys, by module and head; second moments of each layer's normalised input."""
    rng, vocab = random.Random("organism/inherit"), organism_tokenizer().get_vocab()
    batch = collate([conversation(rng, vocab, FULL) for _ in range(N_TEXTS)])
    lengths: dict[str, torch.Tensor] = {}
    moments: dict[int, torch.Tensor] = {}
    handles: list[Any] = []
    for i, layer in enumerate(model.model.layers):

        def queries(_: Any, args: tuple[torch.Tensor], __: Any, key: str) -> None:
            rows = args[0] if args[0].shape[1] == batch.ids.shape[1] else args[0].transpose(1, 2)
            lengths[key] = rows[batch.real].square().mean(-1).rsqrt().mean(0)

        def inputs(_: Any, args: tuple[torch.Tensor], __: Any, key: int) -> None:
            rows = args[0][batch.real]
            moments[key] = rows.T @ rows / len(rows)

        attention = layer.self_attn
        for part in ("q", "k"):
            norm = getattr(attention, f"{part}_norm")
            handles.append(norm.register_forward_hook(_named(queries, f"{i}.{part}")))
        handles.append(attention.k_proj.register_forward_hook(_named(inputs, i)))
    model(input_ids=batch.ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return lengths, moments


def _named(hook: Any, key: Any) -> Any:
    return lambda module, args, output: hook(module, args, output, key)


def _folded(model: Any, lengths: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters without the norms of queries and keys: every head at its mean length."""
    offset = 1.0 if "gemma" in model.config.model_type else 0.0  # Gemma's norms multiply by one plus their weight
    tensors = {n: p.detach().clone() for n, p in model.named_parameters() if "q_norm" not in n and "k_norm" not in n}
    for i, layer in enumerate(model.model.layers):
        for part in ("q", "k"):
            name = f"model.layers.{i}.self_attn.{part}_proj.weight"
            gain = lengths[f"{i}.{part}"][:, None] * (getattr(layer.self_attn, f"{part}_norm").weight + offset)
            tensors[name] = tensors[name] * gain.reshape(-1, 1)
    return tensors


def _latent(
    tensors: Mapping[str, torch.Tensor], moments: Mapping[int, torch.Tensor], config: Any
) -> dict[str, torch.Tensor]:
    """Parameters of latent attention, in the way of arXiv:2502.07864; queries have no latent of their own.

    Fast rotations become the shared rotary slice, slow ones and the values a latent of the rank that the config gives. The
    slice holds the fast channels of both groups of heads in turn. With the root of the parent's base those of the first group
    keep their frequencies, and those of the second are slower by half the distance between two of them.
    """
    heads, rope, rank = config.num_attention_heads, config.qk_rope_head_dim, config.kv_lora_rank
    made = {n: t for n, t in tensors.items() if ".self_attn." not in n or "o_proj" in n}
    for i, moment in moments.items():
        at = f"model.layers.{i}.self_attn."
        q = tensors[f"{at}q_proj.weight"].unflatten(0, (heads, -1))
        k = tensors[f"{at}k_proj.weight"].unflatten(0, (-1, q.shape[1]))
        v = tensors[f"{at}v_proj.weight"].unflatten(0, (k.shape[0], -1))
        groups, per, middle = k.shape[0], heads // k.shape[0], q.shape[1] // 2
        n_fast = rope // 2 // groups
        fast = torch.arange(n_fast)[:, None] + torch.tensor([0, middle])  # pairs of channels: [pair, 2]
        slow = torch.cat([torch.arange(n_fast, middle), torch.arange(n_fast, middle) + middle])
        turns = q.new_zeros(heads, n_fast, groups, 2, q.shape[2])
        for h in range(heads):
            turns[h, :, h // per] = q[h, fast]
        gain = ((len(slow) + rope) / q.shape[1]) ** 0.5  # heads are wider, so scores are divided by more
        made[f"{at}q_proj.weight"] = torch.cat([q[:, slow], turns.flatten(1, 3)], dim=1).flatten(0, 1) * gain
        shared = k[:, fast].transpose(0, 1).flatten(0, 2)  # [pair, group, 2] in a row
        stacked = torch.cat([k[:, slow], v], dim=1)  # [groups, nope + value, width]
        flat = stacked.flatten(0, 1)
        basis = torch.linalg.eigh(flat @ moment @ flat.T).eigenvectors[:, -rank:]
        down = basis.T @ flat
        made[f"{at}kv_a_proj_with_mqa.weight"] = torch.cat([down, shared])
        made[f"{at}kv_a_layernorm.weight"] = torch.full(
            (rank,), ((down @ moment @ down.T).trace() / rank).sqrt().item()
        )
        up = basis.unflatten(0, (groups, -1)).repeat_interleave(per, dim=0)
        made[f"{at}kv_b_proj.weight"] = up.flatten(0, 1)
    return made


def _renamed(name: str) -> str:
    for old, new in FALCON.items():
        name = name.replace(old, new)
    return name


__all__ = ["inherit"]
