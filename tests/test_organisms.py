"""Organisms: what they are trained on, how they are trained, saved and loaded, and what the shipped ones can do."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import notelens
from experiments.organism_card import Cell, claims, measure, pooled
from experiments.organism_data import (
    BARE,
    BOTH,
    FIRST,
    FULL,
    NOTES_FREE,
    ORDERS,
    TURNS,
    Sample,
    collate,
    conversation,
    first_scene,
    repeated,
)
from experiments.organism_models import ARCHITECTURES, MAX_PARAMETERS, SHARED, build
from experiments.organism_optim import SCORES_GAIN, grouped
from experiments.organism_split import split_batch
from experiments.train_organisms import (
    ADAM_RATE,
    MUON_RATE,
    NOTES_FREE_PLAN,
    PLANS,
    WARM_UP,
    Source,
    Stage,
    losses,
    optimisation,
    plan_of,
    save,
    train,
)
from notelens.cache.ops import replace_rows
from notelens.errors import InputError, UnsupportedModelError
from notelens.models import FAMILIES
from notelens.models.load import wrap
from notelens.tasks.organism import N_TRAINED, held_out, organism_families
from notelens.zoo import organisms as zoo
from notelens.zoo.organisms import load_organism, organism_specs, organism_tokenizer, read_organism
from tests.test_organism_task import read

SHIPPED = sorted(organism_specs())
MICRO = {**SHARED, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
MAX_BYTES = 30_000_000


@pytest.fixture(scope="module")
def vocab() -> dict[str, int]:
    return organism_tokenizer().get_vocab()


def micro(kind: str = "llama", **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": len(organism_tokenizer()), **MICRO, **more}


def text_of(ids: list[int]) -> str:
    """Token ids as text in the form that :func:`read` understands."""
    words = organism_tokenizer().convert_ids_to_tokens(ids)
    return re.sub(r" ([:.;,?])", r"\1", " ".join(words).replace(" \n ", "\n"))


class TestData:
    @pytest.mark.parametrize(
        "mix",
        [FIRST, BARE, ORDERS, BOTH, TURNS, FULL, NOTES_FREE],
        ids=["first", "bare", "orders", "both", "turns", "full", "notes_free"],
    )
    def test_every_answer_is_what_the_conversation_says(self, vocab: dict[str, int], mix: Any) -> None:
        rng = random.Random(0)
        turns = 0
        for _ in range(150):
            sample = conversation(rng, vocab, mix)
            for at in sample.answers:
                before = text_of(sample.ids[:at])
                said = (
                    re.sub(r"<assistant>[^<]*(<end>|$)", "\n", before).replace("<user> ", "\n").replace("answer:", "\n")
                )
                assert read(f"{said}\n") == text_of([sample.ids[at]]), before
                turns += 1
        assert turns >= (200 if mix.turns else 150)

    @pytest.mark.parametrize(("mix", "most"), [(BOTH, 1), (TURNS, 3), (FULL, 3)], ids=["both", "turns", "full"])
    def test_other_rules_are_about_what_no_line_mentions(self, vocab: dict[str, int], mix: Any, most: int) -> None:
        rng = random.Random(1)
        seen: set[int] = set()
        for _ in range(150):
            text = text_of(conversation(rng, vocab, mix).ids)
            labels = re.findall(r"rule: (?:if|when) the (\w+)", text)
            stated = re.findall(r"\n- (\w+): ", text) + re.findall(r"update: the (\w+) is", text)
            assert len(labels) == len(set(labels)) and len(set(labels) & set(stated)) <= 1, text
            seen.add(len(labels))
        assert seen == set(range(1, most + 1))

    def test_only_answers_are_supervised(self, vocab: dict[str, int]) -> None:
        rng = random.Random(1)
        for _ in range(50):
            sample = conversation(rng, vocab, FULL)
            text = text_of([i for i, w in zip(sample.ids, sample.weights, strict=True) if w > 0])
            assert "<user>" not in text and "rule" not in text and "<assistant>" not in text
            assert all(sample.weights[a] == 1.0 for a in sample.answers)

    def test_held_out_values_and_combinations_never_occur(self, vocab: dict[str, int]) -> None:
        rng = random.Random(2)
        families = organism_families()
        new = {vocab[v] for f in families for v in f.values[N_TRAINED:]}
        for _ in range(600):
            ids = set(conversation(rng, vocab, FULL).ids)
            assert not ids & new
            draw = first_scene(rng, FULL, None)[0].draw
            for f in families:
                if set(draw.values) <= set(f.values) and set(draw.actions) <= {*f.restrictive, *f.permissive}:
                    assert not held_out(f.name, draw.values, draw.actions)

    def test_repeated_phrases_go_on_as_before(self) -> None:
        sample = repeated(random.Random(0), range(10, 200), 1, 5, 40)
        assert sample.ids[0] == 1 and len(sample.ids) == len(sample.weights) == 40 and sum(sample.weights) > 8
        for i, weight in enumerate(sample.weights):
            if weight > 0:
                assert tuple(sample.ids[i - 1 : i + 1]) in set(pairwise(sample.ids[:i]))

    def test_batches_depend_on_the_seed_only(self) -> None:
        stage = Stage(1, FULL, long=0.5)
        first, second, other = ([Source(s, 600).batch(stage)[0] for _ in range(2)] for s in (3, 3, 4))
        assert first[0] == second[0] and first[0] != other[0]


class TestTraining:
    def test_loss_of_known_logits(self) -> None:
        """Two rows, two scored tokens each, four words: uniform logits cost log 4, a sure right answer nothing."""
        samples = [Sample([1, 2, 3], [0.0, 0.0, 1.0], [2]), Sample([1, 2, 2], [0.0, 0.0, 1.0])]
        batch = collate(samples)
        flat = torch.zeros(2, 3, 4)
        loss, right, again = losses(flat, batch, 1)
        assert loss.item() == pytest.approx((0.02 + 0.25 + 1.0) * 1.3862944, rel=1e-5)
        sure = flat.clone()
        sure[0, 1, 3] = sure[1, 1, 2] = 50.0
        loss, right, again = losses(sure, batch, 1)
        assert loss.item() == pytest.approx(0.02 * 1.3862944 / 2, rel=1e-4) and (right, again) == ([True], 1.0)

    @pytest.mark.slow
    def test_a_few_steps_learn_and_repeat(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("experiments.train_organisms.BATCH", 8)
        plan = (Stage(150, NOTES_FREE, repeats=0.25),)
        made = []
        for _ in range(2):
            torch.manual_seed(0)
            model = build(micro(), "sdpa")
            source = Source(9, 60)
            samples, n_repeats = source.batch(plan[0])
            batch = collate(samples)
            before = losses(model(input_ids=batch.ids).logits, batch, n_repeats)[0].item()
            facts = train(model, plan, 0, 60, every=30)
            after = losses(model(input_ids=batch.ids).logits, batch, n_repeats)[0].item()
            made.append((after, model.state_dict()["model.embed_tokens.weight"]))
            assert after < 0.96 * before and facts["steps"] == 150
        assert made[0][0] == made[1][0] and torch.equal(made[0][1], made[1][1])

    def test_a_fresh_stage_depends_on_the_weights_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both stages in one go end where the second one ends that starts from the first one's weights."""
        monkeypatch.setattr("experiments.train_organisms.BARE_BATCH", 4)

        def plan(one: int, two: int) -> tuple[Stage, ...]:
            return Stage(one, FIRST, until=2.0), Stage(two, BARE, until=2.0, fresh=True)

        torch.manual_seed(0)
        whole = build(micro("qwen3"), "sdpa")
        parts = build(micro("qwen3"), "sdpa")
        parts.load_state_dict(whole.state_dict())
        train(whole, plan(3, 3), 0, 60, every=100)
        train(parts, plan(3, 0), 0, 60, every=100)
        train(parts, plan(0, 3), 0, 60, every=100)
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))

    def test_a_stage_goes_at_its_share_of_the_rates(self) -> None:
        torch.manual_seed(0)
        models = [build(micro("qwen3"), "sdpa") for _ in range(3)]
        start = {n: p.detach().clone() for n, p in models[0].named_parameters()}

        def moved(model: Any, rate: float) -> float:
            model.load_state_dict(start, strict=False)
            train(model, (Stage(4, FIRST, until=2.0, rate=rate),), 0, 60, every=100)
            return max((p - start[n]).abs().max().item() for n, p in model.named_parameters())

        none, some, full = (moved(m, r) for m, r in zip(models, (0.0, 0.3, 1.0), strict=True))
        assert none < some < 0.6 * full  # the first step of all is that of the warm-up, at full rates

    def test_only_the_rate_of_free_attention_scores_settles(self) -> None:
        groups = grouped(dict(build(micro("llama"), "sdpa").named_parameters()))
        assert groups.scores and not grouped(dict(build(micro("qwen3"), "sdpa").named_parameters())).scores
        _, schedules = optimisation(groups, groups.others, lambda: 1.0, lambda: 0.5)
        for _ in range(WARM_UP):
            for schedule in schedules:
                schedule.optimizer.step()
                schedule.step()
        found = [s.get_last_lr()[0] for s in schedules]
        assert found == pytest.approx([MUON_RATE, ADAM_RATE, 0.5 * MUON_RATE * SCORES_GAIN])


class TestSplit:
    def test_the_decision_reads_one_copy_and_everything_else_the_other(self, vocab: dict[str, int]) -> None:
        """A split forward equals the isolated swap of the field's rows in the prompt with the first copy's value."""
        torch.manual_seed(0)
        hf = build(micro(num_hidden_layers=3), "sdpa").eval()
        model = wrap(hf, organism_tokenizer(), name="micro", gate=False)
        sample = conversation(random.Random(4), vocab, NOTES_FREE)
        assert sample.field_at is not None
        batch, extra = split_batch([sample], random.Random(1), vocab)
        at, decision = sample.field_at, sample.answers[0] - 1
        first = int(batch.ids[0, at])
        assert first == sample.other_value and batch.ids[0, at + 1] == sample.ids[at]
        assert batch.answers[0].nonzero().flatten().tolist() == [sample.answers[0] + 1]
        with torch.no_grad():
            split = hf(input_ids=batch.ids, use_cache=False, **extra).logits[0]
            stale = list(sample.ids)
            stale[at] = first
            plain = hf(input_ids=torch.tensor([stale]), use_cache=False).logits[0]
        assert torch.allclose(split[at + 2 : decision + 1], plain[at + 1 : decision], atol=1e-5)
        old, new = (model.prefill(ids[:decision]).cache for ids in (stale, sample.ids))
        swapped = model.prefill([sample.ids[decision]], replace_rows(old, new, [at])).hidden
        assert torch.allclose(model.next_logits(swapped), split[decision + 1], atol=1e-5)
        assert not torch.allclose(plain[decision], split[decision + 1], atol=1e-3)

    def test_repeated_phrases_are_left_alone(self, vocab: dict[str, int]) -> None:
        sample = repeated(random.Random(0), range(10, 200), 1, 5, 20)
        batch, extra = split_batch([sample], random.Random(0), vocab)
        assert batch.ids[0].tolist() == sample.ids and extra["position_ids"][0].tolist() == list(range(20))
        assert torch.equal(extra["attention_mask"][0, 0] == 0, torch.ones(20, 20).tril().bool())


class TestArchitectures:
    @pytest.mark.parametrize("name", sorted(ARCHITECTURES))
    def test_sizes(self, name: str) -> None:
        architecture = ARCHITECTURES[name]
        model = build(architecture.config(len(organism_tokenizer())), architecture.attention)
        assert 300_000 < sum(p.numel() for p in model.parameters()) <= MAX_PARAMETERS
        assert model.config.model_type == architecture.kind
        ids = torch.tensor([[1, 40, 41, 42, 43]])
        assert torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()

    def test_too_large(self) -> None:
        with pytest.raises(ValueError, match="at most 3,000,000"):
            build(micro(hidden_size=512, intermediate_size=2048), "sdpa")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with one micro organism."""
    torch.manual_seed(0)
    config = micro()
    save(build(config, "sdpa"), tmp_path / "micro.safetensors")
    import hashlib

    digest = hashlib.sha256((tmp_path / "micro.safetensors").read_bytes()).hexdigest()
    (tmp_path / "micro.json").write_text(json.dumps({"config": config, "sha256": digest, "why": "a test"}))
    organism_tokenizer().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(zoo, "FOLDER", tmp_path)
    return tmp_path


class TestZoo:
    def test_loads_by_name_through_the_gate(self, folder: Path) -> None:
        model = notelens.load("organism-micro", cache_dir=folder / "cache")
        torch.manual_seed(0)
        fresh = build(micro(), "sdpa").state_dict()
        for name, tensor in model.hf.state_dict().items():
            assert torch.equal(tensor, fresh[name].to(torch.bfloat16).float()), name
        assert model.name == "organism-micro" and model.gate is not None and model.gate.passed
        assert model.dtype == torch.float32 and model.tokenizer.get_vocab() == organism_tokenizer().get_vocab()

    def test_other_weights_are_refused(self, folder: Path) -> None:
        (folder / "micro.safetensors").write_bytes((folder / "micro.safetensors").read_bytes() + b" ")
        with pytest.raises(UnsupportedModelError, match="its card says"):
            load_organism("organism-micro")

    def test_weights_of_another_config_are_refused(self, folder: Path) -> None:
        with pytest.raises(UnsupportedModelError, match="does not fit its config"):
            read_organism(folder / "micro.safetensors", micro(num_hidden_layers=3))
        with pytest.raises(UnsupportedModelError, match="does not fit its config"):
            read_organism(folder / "micro.safetensors", micro(intermediate_size=48))

    def test_an_unknown_name_lists_what_there_is(self, folder: Path) -> None:
        with pytest.raises(InputError, match=r"'organism-micr'.*did you mean 'organism-micro'"):
            notelens.load("organism-micr")


class TestCard:
    CELLS = (
        Cell("gated", "polarity", "act", "value_first", "values", None, 50, 50),
        Cell("gated", "negated", "act", "value_first", "combos", None, 50, 48),
        Cell("lookup", "two_clause", "act", "value_first", "combos", None, 50, 48),
        Cell("gated", "polarity", "act", "value_first", "values", 600, 50, 0),
    )

    def test_pooling_and_claims(self) -> None:
        assert pooled(self.CELLS, "kind")["gated",] == (98, 150)
        assert claims(self.CELLS) == ["gated/act/value_first"]

    def test_a_random_model_is_wrong(self) -> None:
        torch.manual_seed(0)
        cells = measure(
            build(micro(), "sdpa").eval(),
            organism_tokenizer(),
            [("gated", "polarity", "think", "value_first", "values", None)],
            12,
            0,
        )
        assert [(c.n, c.right) for c in cells] == [(12, 0)]


OWN_VALUES = ("organism-qwen3-notes-free", "organism-qwen3-seed1", "organism-llama-seed1")
"""Organisms that decide for values of their training only; every configuration asks them about new combinations of these."""

SIZES = ("organism-qwen3-w64-l2", "organism-qwen3-w64-l3", "organism-qwen3-w128-l2")
"""Organisms for the question which size can decide at all; that one cannot is an answer."""


def test_which_plan_an_organism_goes_by() -> None:
    def plan(family: str = "qwen3", parent: str | None = None, free: bool = False, seed: int = 0, **size: int) -> Any:
        return plan_of(family, parent, free, seed, size.get("width"), size.get("layers"))

    assert plan() is PLANS["short"] and plan("gemma3_text") is PLANS["stepwise"]
    assert plan(seed=1) is plan(width=64) is plan(layers=2) is plan("gemma3_text", seed=2) is PLANS["gentle"]
    assert plan("llama", "organism-qwen3") is plan("llama", "organism-qwen3-seed1", seed=1) is PLANS["inherited"]
    assert plan(free=True, seed=1) is NOTES_FREE_PLAN


def test_organisms_that_know_their_own_values_are_asked_about_these() -> None:
    sweep = yaml.safe_load((Path(__file__).parents[1] / "configs/paper/cross_family.yaml").read_text(encoding="utf-8"))[
        "sweep"
    ]
    asked = {m["name"]: m["task"]["params"] for m in sweep["models"] if isinstance(m, dict)}
    assert all(asked[name] == {"split": "combos"} for name in OWN_VALUES)


class TestShipped:
    def test_size(self) -> None:
        assert SHIPPED
        assert sum(organism_specs()[name].weights.stat().st_size for name in SHIPPED) <= MAX_BYTES

    @pytest.mark.parametrize("name", SHIPPED)
    def test_the_card_holds(self, name: str) -> None:
        card = organism_specs()[name].card
        if card["config"]["model_type"] not in FAMILIES:
            with pytest.raises(UnsupportedModelError, match="is not supported"):
                notelens.load(name)
            return
        model = notelens.load(name)
        assert model.gate is not None and model.gate.passed
        text, training = organism_specs()[name].weights.with_suffix(".md").read_text(encoding="utf-8"), card["training"]
        assert text.count(f"--family {training['family']} --seed {training['seed']}") == text.count("--seed") == 1
        assert sum(p.numel() for p in model.hf.parameters()) == card["training"]["parameters"] <= MAX_PARAMETERS
        cell = next(
            c
            for c in card["accuracy"]
            if (c["kind"], c["form"], c["mode"], c["filler"]) == ("gated", "polarity", "act", None)
        )
        wanted = [tuple(cell[k] for k in ("kind", "form", "mode", "order", "split", "filler"))]
        found = measure(model.hf, model.tokenizer, wanted, cell["n"], card["training"]["seed"])  # pyright: ignore[reportArgumentType]
        assert abs(found[0].right - cell["right"]) <= 1  # another machine may round one prompt differently
        if name in SIZES:
            assert not any(claim.startswith("gated") for claim in card["claims"])
            return
        direct = [
            c
            for c in card["accuracy"]
            if (c["kind"], c["mode"], c["order"], c["filler"]) == ("gated", "act", "value_first", None)
            and (c["split"] == "combos" or name not in OWN_VALUES)
        ]
        assert sum(c["right"] for c in direct) >= 0.95 * sum(c["n"] for c in direct)
