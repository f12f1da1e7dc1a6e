"""Training prompts of the adapter for long prompts: packed they are what they are alone, and groups part where they should."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.competence_data import ACTION_WEIGHT, Example
from experiments.packed_data import Groups, Phase, pack
from experiments.train_competence import padded, supervised_logits
from experiments.train_packed import RECIPES, data_hash, legs_of, loss_of
from notelens.zoo import embedded
from notelens.zoo.embedded import EMBEDDED

ADAPTERS = Path(embedded.__file__).parent / "adapters"
N_PAIRS = 24
PHASE = Phase(1, (((2, 9), 1.0),))
SIZE = PHASE.size


@pytest.fixture(scope="module")
def pairs(smollm2_tokenizer: Any) -> list[tuple[list[Example], list[Example]]]:
    groups = Groups(smollm2_tokenizer, 3, (2, 9), PHASE)
    return [groups.pair() for _ in range(N_PAIRS)]


def random_model(vocab: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def common(a: Example, b: Example) -> int:
    return sum(1 for _ in itertools.takewhile(lambda xy: xy[0] == xy[1], zip(a.ids, b.ids, strict=False)))


def test_a_packed_group_is_the_prompts_one_by_one(
    pairs: list[tuple[list[Example], list[Example]]], smollm2_tokenizer: Any
) -> None:
    model = random_model(len(smollm2_tokenizer))
    for examples in itertools.chain.from_iterable(pairs[:6]):
        packed = pack(examples)
        assert packed.ids.shape[1] < sum(len(e.ids) for e in examples)
        where = packed.weights[0] > 0
        hidden = model.model(
            input_ids=packed.ids, position_ids=packed.positions, attention_mask=packed.mask, use_cache=False
        ).last_hidden_state[0]
        ids, weights = padded(examples)
        alone = supervised_logits(model, ids, weights > 0)
        torch.testing.assert_close(model.lm_head(hidden[where.nonzero()[:, 0] - 1]), alone, atol=2e-4, rtol=1e-4)
        assert torch.equal(packed.ids[0][where], ids[weights > 0])
        assert torch.equal(packed.weights[0][where], weights[weights > 0])


def test_gradients_are_those_of_the_whole_prompts(
    pairs: list[tuple[list[Example], list[Example]]], smollm2_tokenizer: Any
) -> None:
    model = random_model(len(smollm2_tokenizer))
    examples = pairs[0][0]
    loss, right = loss_of(model, examples)
    loss.backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    ids, weights = padded(examples)
    logits = supervised_logits(model, ids, weights > 0)
    losses = torch.nn.functional.cross_entropy(logits, ids[weights > 0], reduction="none")
    ((losses * weights[weights > 0]).sum() / weights.sum()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(packed[name], p.grad, atol=1e-4, rtol=1e-2)
    assert 0 <= right <= 1


def test_groups_part_where_they_should_and_both_answers_occur(pairs: list[tuple[list[Example], list[Example]]]) -> None:
    shares: list[float] = []
    for first, second in pairs:
        assert len(first) == len(second) == SIZE
        for group in (first, second):
            together = min(common(a, b) for a, b in itertools.pairwise(group))
            shares.append(together / min(e.n_prompt for e in group))
            answers = {e.ids[i] for e in group for i, w in enumerate(e.weights) if w == ACTION_WEIGHT}
            assert len(answers) > 1
    assert min(shares) > 0.3 and max(shares) > 0.7  # at the rule; at the request


def test_groups_are_those_of_the_seed(smollm2_tokenizer: Any) -> None:
    a, b, c = (Groups(smollm2_tokenizer, seed, (2, 4), PHASE).pair() for seed in (1, 1, 2))
    assert a == b != c


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_whole(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.base in EMBEDDED and EMBEDDED[name].adapter_file.startswith(name.replace("-", "_"))
    for phase in recipe.phases:
        assert sum(share for _, share in phase.lines) == pytest.approx(1) == sum(share for _, share in phase.part)
        assert len(phase.asks) == phase.size


def test_the_shipped_adapter_was_trained_on_what_its_recipe_draws(smollm2_tokenizer: Any) -> None:
    card = json.loads((ADAPTERS / "smollm2_long_competence.json").read_text(encoding="utf-8"))
    assert data_hash(legs_of(smollm2_tokenizer, card["seed"], RECIPES["smollm2-long"])) == card["data_sha256"]
