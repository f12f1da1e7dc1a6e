"""Weight editing: the rank-one update is what the formula says, both baselines flip, and every bit is put back."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.edit_cases import Case, instance_case
from experiments.edit_harness import Stage, cases_of, run
from experiments.weight_editing import (
    FACTS,
    WeightConfig,
    WeightEditing,
    capitals,
    held_out,
    lookups,
    unrelated,
)
from experiments.weight_edits import Keys, Target, covariance, down_proj, lora, rome
from notelens.errors import ConfigError, UnsupportedModelError
from notelens.zoo.organisms import organism_tokenizer
from tests.contracts.models import random_hf
from tests.tiny import FORMS, ids_of, tiny_hf, tiny_instance, tiny_instances, wrapped

CONFIGS = Path(__file__).parents[1] / "experiments" / "configs"
TEXT = "start parcel is f0 , w0 w1 if t0 then , ; w2 . please decide : ?"
PROMPT = ids_of(TEXT.split())
TEXTS = [
    ids_of(f"start visit is f{i % 3} , w{i} w{i + 1} if t{i % 2} then , ; please decide ?".split()) for i in range(8)
]
LAYER = 1


@pytest.fixture
def model() -> Any:
    """A random decoder of its own for every test, so that a weight which is not put back harms nobody else."""
    return wrapped(copy.deepcopy(random_hf("llama")), "llama", gate=False)


def state(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.hf.named_parameters()}


def same(model: Any, before: dict[str, torch.Tensor]) -> bool:
    now = dict(model.hf.named_parameters())
    return now.keys() == before.keys() and all(torch.equal(p, before[n]) for n, p in now.items())


def another(model: Any, subject: int = 3) -> Target:
    """The sixth likeliest next token; the subject is the field."""
    order = model.next_logits(model.prefill(PROMPT).hidden).argsort(descending=True)
    return Target(PROMPT, subject, int(order[5]))


def outputs(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """What the edited projection gives for every token."""
    found: list[torch.Tensor] = []
    handle = down_proj(model, LAYER).register_forward_hook(lambda _, __, out: found.append(out[0].clone()))
    try:
        model.prefill(ids)
    finally:
        handle.remove()
    return found[0]


def test_the_update_is_the_smallest_that_maps_the_key_to_the_value(model: Any) -> None:
    keys, target, before = covariance(model, LAYER, TEXTS), another(model), state(model)
    weight = down_proj(model, LAYER).weight
    assert keys.n_tokens == sum(map(len, TEXTS))
    plain, old = outputs(model, PROMPT), weight.detach().clone()
    inputs: list[torch.Tensor] = []
    handle = down_proj(model, LAYER).register_forward_pre_hook(lambda _, args: inputs.append(args[0][0].clone()))
    model.prefill(PROMPT)
    handle.remove()
    start = float(torch.softmax(model.next_logits(model.prefill(PROMPT).hidden), -1)[target.answer])
    with rome(model, target, keys) as made:
        change = (weight - old).double()
        moved = outputs(model, PROMPT) - plain
        assert made.probability > start and made.steps >= 1
    values = torch.linalg.svdvals(change)
    assert values[0] > 0 and values[1] < 1e-5 * values[0], "rank one"
    key = inputs[0][target.subject].double()
    assert torch.allclose(change @ key, moved[target.subject].double(), atol=1e-4), "the key maps to the value"
    # smallest in the metric of ordinary keys: the row space is C^-1 k, so what is C-orthogonal to the key does not move
    towards = keys.inverse @ key
    row = change[change.abs().sum(1).argmax()]
    assert torch.cosine_similarity(row, towards, dim=0).abs() > 1 - 1e-6
    other = torch.randn(len(key), dtype=torch.float64)
    other -= (other @ towards) / (towards @ towards) * towards
    assert (change @ other).abs().max() < 1e-5 * (change @ key).abs().max()
    assert same(model, before)


def test_covariance_is_the_damped_second_moment_of_the_inputs(model: Any) -> None:
    keys = covariance(model, LAYER, TEXTS)
    found: list[torch.Tensor] = []
    handle = down_proj(model, LAYER).register_forward_pre_hook(lambda _, args: found.append(args[0][0].double()))
    for ids in TEXTS:
        model.prefill(ids)
    handle.remove()
    every = torch.cat(found)
    moment = every.T @ every / len(every)
    moment += 0.01 * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    assert torch.allclose(keys.inverse @ moment, torch.eye(len(moment), dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("name", ["rome", "lora"])
def test_both_baselines_flip_and_every_bit_comes_back(name: str, model: Any) -> None:
    """Random weights read next to nothing from another row, so the subject is the last token here."""
    before, target = state(model), another(model, len(PROMPT) - 1)
    grads = {n: p.requires_grad for n, p in model.hf.named_parameters()}
    modules = [n for n, _ in model.hf.named_modules()]
    keys = covariance(model, LAYER, TEXTS)
    start = model.next_logits(model.prefill(PROMPT).hidden)

    def editor() -> Any:
        return rome(model, target, keys, steps=60, clamp=100.0) if name == "rome" else lora(model, target, steps=60)

    with editor() as made:
        edited = model.next_logits(model.prefill(PROMPT).hidden)
        assert int(edited.argmax()) == target.answer and made.ms > 0
        assert not torch.equal(edited, start)
    assert same(model, before) and torch.equal(model.next_logits(model.prefill(PROMPT).hidden), start)
    assert [n for n, _ in model.hf.named_modules()] == modules
    assert {n: p.requires_grad for n, p in model.hf.named_parameters()} == grads
    with pytest.raises(RuntimeError, match="stop"), editor():
        raise RuntimeError("stop")
    assert same(model, before) and [n for n, _ in model.hf.named_modules()] == modules


def test_what_cannot_be_edited_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers 0\.\.2, not 7"):
        covariance(model, 7, TEXTS)
    experts = wrapped(copy.deepcopy(random_hf("qwen3_moe")), "qwen3_moe", gate=False)
    with pytest.raises(UnsupportedModelError, match="no single down_proj"):
        covariance(experts, 1, TEXTS)


def test_a_norm_behind_the_projection_does_not_hide_it() -> None:
    model = wrapped(copy.deepcopy(random_hf("gemma3_text")), "gemma3_text", gate=False)
    assert down_proj(model, 1) is model.hf.model.layers[1].mlp.down_proj


# --- the experiment on the hand-set decoder -----------------------------------------------------------------------------


class Tiny(WeightEditing):
    """The experiment on prompts of the hand-set decoder."""

    def keys(self, model: Any, config: Any) -> Keys:
        return covariance(model, config.layer, TEXTS)

    @staticmethod
    def held_out(model: Any, config: Any, case: Case) -> list[Case]:
        backwards = case.values[0] == "f1"
        return [instance_case(tiny_instance(form, case.family, 7), backwards=backwards) for form in FORMS]

    @staticmethod
    def unrelated(model: Any, config: Any, stage: Stage, case: Case) -> list[Case]:
        return [instance_case(tiny_instance(form, "badge", 3)) for form in FORMS]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Any]]:
    def requests(model: Any, config: Any, stage: Stage) -> list[Any]:
        return [] if stage.name == "validation" else [instance_case(i) for i in tiny_instances(4, FORMS)]

    config = WeightConfig(
        name="w", model="tiny", task="tiny", n=4, layer=0, steps=200,
        arms=("rome", "lora", "in_place", "full_suffix", "auto"), facts="lookup",
    )  # fmt: skip
    model = wrapped(tiny_hf(), "tiny-own")
    before = state(model)
    lines = run(Tiny(), config, tmp_path_factory.mktemp("weights"), model, source=requests)
    assert same(model, before)
    yield {(r["metric"], r["method"]): r for r in lines}


def test_arms_of_the_cache_leave_every_other_request_alone(finished: dict[Any, Any]) -> None:
    for method, right in (("in_place", 0.0), ("full_suffix", 1.0), ("auto", 1.0)):
        assert finished["p_correct", method]["value"] == right and finished["p_correct", method]["n"] == 4
        for metric in ("contamination", "collateral", "largest_logit_change"):
            assert finished[metric, method]["value"] == 0.0, "measured: not a bit moved"
        assert finished["contamination", method]["n_requests"] == 16
        assert finished["restored", method]["value"] == 1.0


def test_a_rank_one_edit_at_the_field_has_nothing_to_hold_on_to(finished: dict[Any, Any]) -> None:
    """The hand-set MLP multiplies field and trigger, and at the field itself there is no trigger: its key is zero."""
    line = finished["p_correct", "rome"]
    assert line["n"] == 0 and line["reasons"] == {"refused (EditError)": 4}


def test_fine_tuning_flips_the_target_and_whoever_shares_its_weights(finished: dict[Any, Any]) -> None:
    assert finished["p_correct", "lora"]["value"] == 1.0 == finished["restored", "lora"]["value"]
    assert finished["contamination", "lora"]["value"] > 0 and finished["largest_logit_change", "lora"]["value"] > 1.0
    assert finished["cost_ms", "lora"]["value"] > finished["cost_ms", "auto"]["value"] > 0


def test_facts_have_a_subject_and_neighbours(smollm2_tokenizer: Any) -> None:
    class Model:
        tokenizer: Any = smollm2_tokenizer

    model: Any = Model()
    found = capitals(model, 12)
    assert len({f.id for f in found}) == 12 and len({f.family for f in found}) == len(FACTS)
    for fact in found:
        decoded = smollm2_tokenizer.decode([fact.target.token_ids[fact.target.subject]])
        assert decoded.strip() and fact.family.endswith(decoded.strip())
        assert fact.target.answer != fact.old and all(a != fact.target.answer for _, a in fact.neighbours)
        assert len(fact.neighbours) == len(FACTS) - 2
    model.tokenizer = organism_tokenizer()
    config = WeightConfig.read(CONFIGS / "weight-editing-organisms.yaml", n=4)
    looked = lookups(model, config)
    assert len(looked) == 4
    for fact in looked:
        value = organism_tokenizer().decode([fact.target.token_ids[fact.target.subject]])
        assert value == organism_tokenizer().decode([fact.old]) and fact.neighbours
        assert all(right != fact.old or fact.target.token_ids != ids for ids, right in fact.neighbours)
    with pytest.raises(ConfigError, match="use capitals or lookup"):
        from experiments.weight_editing import facts

        facts(model, config.model_copy(update={"facts": "rivers"}))


@pytest.mark.parametrize("name", ["smollm2", "organisms"])
def test_held_out_requests_hold_the_old_value(name: str, smollm2_tokenizer: Any) -> None:
    class Model:
        tokenizer: Any = smollm2_tokenizer if name == "smollm2" else organism_tokenizer()

    model: Any = Model()
    config = WeightConfig.read(CONFIGS / f"weight-editing-{name}.yaml", n=10)
    stage = WeightEditing().stages(config)[-1]
    cases = cases_of(model, config, stage)
    for case in cases[:2]:
        others = held_out(model, config, case)
        assert len(others) >= 3
        for other in others:
            assert other.values[0] == case.values[0] and other.family == case.family
            assert other.old.token_ids != case.old.token_ids
        assert {c.family for c in unrelated(model, config, stage, case)}.isdisjoint({case.family})
