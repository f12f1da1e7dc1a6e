"""Organisms that start from another family's weights: they can do at once most of what the parent can."""

import random
from typing import Any

import pytest
import torch

from experiments.organism_data import BARE, collate, conversation
from experiments.organism_inherit import inherit
from experiments.organism_models import ARCHITECTURES, build
from notelens.zoo.organisms import load_organism, organism_tokenizer

HEIRS = sorted(name for name, a in ARCHITECTURES.items() if a.parent)


def made(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    architecture = ARCHITECTURES[family]
    return build({**architecture.config(len(organism_tokenizer())), **more}, architecture.attention).eval()


@torch.no_grad()
def accuracy(model: Any) -> float:
    rng, vocab = random.Random(5), organism_tokenizer().get_vocab()
    batch = collate([conversation(rng, vocab, BARE) for _ in range(64)])
    best = model(input_ids=batch.ids, use_cache=False).logits[:, :-1].argmax(-1)
    return (best == batch.ids[:, 1:])[batch.answers[:, 1:]].float().mean().item()


@pytest.mark.parametrize("family", HEIRS)
def test_what_the_parent_can_is_there_before_any_training(family: str) -> None:
    model = made(family)
    assert accuracy(model) < 0.2
    left = inherit(model, ARCHITECTURES[family].parent or "")
    assert accuracy(model) > 0.8
    assert all("mamba" in name for name in left)


@torch.no_grad()
def test_heads_have_the_mean_length_that_the_parent_normalises_them_to() -> None:
    """In the first layer both see the same inputs, so a head divided by the norm's weight has length one on average."""
    model, (parent, _) = made("llama"), load_organism("organism-qwen3")
    inherit(model, "organism-qwen3")
    rng, vocab = random.Random(6), organism_tokenizer().get_vocab()
    batch = collate([conversation(rng, vocab, BARE) for _ in range(16)])
    layer, attention = model.model.layers[0], parent.model.layers[0].self_attn
    x = layer.input_layernorm(model.get_input_embeddings()(batch.ids))[batch.real]
    for part in ("q", "k"):
        heads = getattr(layer.self_attn, f"{part}_proj")(x).unflatten(-1, (-1, 64))
        unit = heads / getattr(attention, f"{part}_norm").weight
        lengths = unit.square().mean(-1).rsqrt().mean(0)
        assert torch.allclose(lengths, torch.ones_like(lengths), atol=0.25), (part, lengths)


def test_a_parent_of_other_sizes_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"of organism-qwen3 has shape \[271, 128\]; in llama it has shape \[271, 64\]"
    ):
        inherit(made("llama", hidden_size=64), "organism-qwen3")


def test_a_parent_with_parameters_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="in llama it is not there"):
        inherit(made("llama"), "organism-qwen3_moe")
