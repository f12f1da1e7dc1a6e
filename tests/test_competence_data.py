"""What competence adapters are trained on, how, and what their cards say."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import train_competence
from experiments.competence_data import (
    ALL_FORMS,
    KINDS,
    RECIPES,
    Example,
    Phase,
    Recipe,
    heldout_examples,
    training_batches,
)
from experiments.train_competence import (
    PROJECTIONS,
    halve_,
    padded,
    rate_share,
    right_answers,
    supervised_logits,
    write_card,
)
from notelens.tasks.scenarios import load_families
from notelens.zoo.embedded import EMBEDDED
from tests.test_packed_data import random_model

LONG = 300
RECIPE = Recipe(
    ((Phase(12, 6, KINDS, ALL_FORMS, 0.5, 2, 0.3, 0.0, 0.4),),),
    ((1e-3, 0.0),),
    (0,),
    long_tokens=LONG,
    long_batch=4,
    seen="",
)


@pytest.fixture(scope="module")
def batches(smollm2_tokenizer: Any) -> list[list[Example]]:
    return training_batches(smollm2_tokenizer, 0, RECIPE, 0)


def test_every_recipe_is_of_an_embedded_model_and_its_long_prompts_leave_the_window() -> None:
    assert set(RECIPES) <= set(EMBEDDED)
    assert all(len(recipe.legs) == len(recipe.rates) == len(recipe.draws) for recipe in RECIPES.values())
    assert RECIPES["gemma3-270m"].ask_long and RECIPES["gemma3-270m"].long_tokens > 512


def test_batches_are_pairs_with_different_answers(batches: list[list[Example]]) -> None:
    """Within a pair prompts differ, are of one kind, and one right answer is not the other."""
    assert len(batches) == 12
    for one, other in itertools.chain.from_iterable(zip(b[::2], b[1::2], strict=True) for b in batches):
        assert one.ids[: one.n_prompt] != other.ids[: other.n_prompt]
        assert one.ids[one.action_at] != other.ids[other.action_at]
        assert (one.kind, one.form, one.order, one.family) == (other.kind, other.form, other.order, other.family)


def test_a_leg_draws_by_the_seed_and_its_own_number(smollm2_tokenizer: Any) -> None:
    other, none = replace(RECIPE, draws=(5,)), replace(RECIPE, draws=(0,))
    found = [training_batches(smollm2_tokenizer, s, r, 0, 3) for s, r in ((0, other), (5, none), (0, none))]
    assert found[0] == found[1] != found[2]


def test_the_rate_of_a_leg_falls_to_its_last() -> None:
    assert rate_share(0, 100, 0.0) == pytest.approx(0.05) and rate_share(19, 100, 0.0) == 1.0
    assert rate_share(60, 100, 0.0) == pytest.approx(0.5) and rate_share(60, 100, 0.4) == pytest.approx(0.7)
    assert rate_share(100, 100, 0.4) == pytest.approx(0.4)
    long = [rate_share(s, 400, 0.0) for s in range(100)]  # the first leg of gemma3-270m is a quarter of such a one
    first, last = RECIPES["gemma3-270m"].rates[0]
    assert long == pytest.approx([rate_share(s, 100, last / first) for s in range(100)], abs=1e-3)


def test_long_batches_are_smaller(batches: list[list[Example]]) -> None:
    sizes = {(max(e.n_prompt for e in b) > LONG / 2, len(b)) for b in batches}
    assert sizes == {(False, 6), (True, 4)}
    long = [e for b in batches if len(b) == 4 for e in b]
    assert all(0.8 * LONG <= e.n_prompt <= 1.2 * LONG for e in long)


def test_heldout_prompts_are_of_other_families_and_of_the_length_asked(smollm2_tokenizer: Any) -> None:
    kept_out = {f.name for f in load_families() if f.split == "eval"}
    found = heldout_examples(smollm2_tokenizer, 0, 2, ("rule_first",), LONG, ("direct", "update"))
    assert {e.family for e in found} <= kept_out and {e.kind for e in found} == {"direct", "update"}
    assert len(found) == 2 * 4 * 2 and all(0.8 * LONG <= e.n_prompt <= 1.2 * LONG for e in found)
    assert {e.kind for e in heldout_examples(smollm2_tokenizer, 0, 1, ("rule_first",))} == set(KINDS)


def test_half_is_bfloat16_below_the_head_only(batches: list[list[Example]], smollm2_tokenizer: Any) -> None:
    model = random_model(len(smollm2_tokenizer))
    ids, weights = padded(batches[0])
    full = supervised_logits(model, ids, weights > 0)
    halve_(model)
    kinds = {n.rsplit(".", 2)[-2]: p.dtype for n, p in model.named_parameters()}
    assert {n for n, dtype in kinds.items() if dtype == torch.bfloat16} == set(PROJECTIONS)
    half = supervised_logits(model, ids, weights > 0)
    assert half.dtype == torch.float32 and not torch.equal(half, full)
    assert (half - full).norm() / full.norm() < 0.05
    assert len(right_answers(model, batches[0])) == len(batches[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_card_says_how_to_retrain_and_keeps_long_prompts_apart(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(b"weights")
    meta = {
        "model": "gemma3-270m", "dtype": dtype, "threads": 1, "seed": 3, "steps": 5, "prompts": 50, "trained_tokens": 999,
        "train_seconds": 60, "began_with_leg": 0, "families_sha256": "f" * 64, "data_sha256": "d" * 64,
        "learning_rates": [[1e-3, 5e-4], [4e-4, 0.0]], "train_families": ["a"], "eval_families": ["b"],
    }  # fmt: skip
    rows = [
        {"mode": m, "form": "swapped", "order": "rule_first", "accuracy": a, "n": 10}
        for m, a in zip(KINDS, (0.9, 0.8, 0.7, 0.6), strict=True)
    ]
    rows.append({"mode": "direct", "form": "all", "order": "rule_first", "accuracy": 0.1, "n": 10, "tokens": 640})
    write_card(path, meta, rows)
    text, card = path.with_suffix(".md").read_text(), json.loads(path.with_suffix(".json").read_text())
    assert "AdamW 0.001 to 0.0005, 0.0004 to 0,\n" in text
    assert ("--seed 3 --half`" in text) == (dtype == "bfloat16") and f"  {dtype}, seed 3, 1.0 minutes on 1" in text
    assert "direct 0.900, chain 0.800, update 0.700, update_chain 0.600" in text
    assert "| direct | all, 640 tokens | rule_first | 0.100 | 10 |" in text
    assert card["heldout"] == rows and card["mix"]["long_tokens"] == 640


def test_a_card_asks_other_prompts_than_those_that_training_was_watched_by(
    monkeypatch: pytest.MonkeyPatch, smollm2_tokenizer: Any
) -> None:
    asked: list[Example] = []

    def accuracy(_: Any, examples: list[Example], keys: list[str]) -> dict[str, tuple[float, int]]:
        asked.extend(examples)
        return dict.fromkeys({" ".join(getattr(e, key) for key in keys) for e in examples}, (0.5, 7))

    monkeypatch.setattr(train_competence, "load_embedded", lambda *_, **__: (None, smollm2_tokenizer))
    monkeypatch.setattr(train_competence, "merge_adapter_", lambda *_: 0)
    monkeypatch.setattr(train_competence, "accuracy", accuracy)
    rows = train_competence.evaluate("gemma3-270m", Path("none"), 0, 1)
    long = [r for r in rows if "tokens" in r]
    assert len(rows) == 4 * 4 * 2 + 2 * 2 and rows[-4:] == long
    assert {(r["mode"], r["form"], r["tokens"]) for r in long} == {("direct", "all", 640), ("update", "all", 640)}
    assert sum(600 <= e.n_prompt <= 680 for e in asked) == 2 * 4 * 2 and len(asked) == 4 * 4 * 2 + 2 * 4 * 2
    watched = heldout_examples(smollm2_tokenizer, 0, 1, ("value_first", "rule_first"))
    assert not {e.ids for e in watched} & {e.ids for e in asked}
