"""Organisms that start from another family's weights: they can do at once most of what the parent can."""

import random
from typing import Any

import pytest
import torch

from experiments.organism_data import BARE, collate, conversation
from experiments.organism_inherit import inherit
from experiments.organism_models import ARCHITECTURES, build
from notelens.zoo.organisms import organism_tokenizer

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


def test_a_parent_of_other_sizes_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"of organism-qwen3 has shape \[271, 128\]; in llama it has shape \[271, 64\]"
    ):
        inherit(made("llama", hidden_size=64), "organism-qwen3")


def test_a_parent_with_parameters_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="in llama it is not there"):
        inherit(made("llama"), "organism-qwen3_moe")
