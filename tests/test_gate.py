"""The admission gate: right models pass, each kind of fault is refused by the check that is meant to see it."""

import copy
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import notelens.models.load as load_module
from notelens.cache.kv import KVCache
from notelens.errors import GateError, InputError, NonFiniteError, UnsupportedModelError
from notelens.models.base import Prefill
from notelens.models.families.llama import Llama
from notelens.models.gate import GateReport, run_gate
from notelens.models.load import wrap
from notelens.models.model import HFNoteModel
from tests.contracts import models as contract
from tests.tiny import broken_blind, broken_direct, new_tokenizer, tiny_hf

CHECKS = (
    "stored rows have the declared shape",
    "cached decode = full forward",
    "prefill in two parts = in one",
    "one prompt alone = the same among others",
    "identity patch changes nothing, bit for bit",
    "patch engine = copied cache",
    "patch engine = copied cache, beyond the window",
    "moved rows = rows computed in place, near",
    "moved rows = rows computed in place, far",
    "bridge without hooks = plain forward",
    "bridge decodes from the cache it is given",
)
SHAPE, DECODE, PARTS, ALONE, IDENTITY, ENGINE, BEYOND, SHIFT, FAR, BRIDGE, BRIDGE_CACHE = CHECKS
FIX = r"transformers>=5\.16\.1,<5\.20"


def model_of(hf: Any, kind: type[HFNoteModel] = HFNoteModel, family: Any = None, name: str = "model") -> HFNoteModel:
    family = family or load_module.family_for(hf.config)
    if family.eager_only is not None:
        hf.set_attn_implementation("eager")
    return kind(hf.eval().requires_grad_(False), new_tokenizer(), family, name=name)


def failed(model: Any, *, bridge: bool = False) -> list[str]:
    return [c.name for c in run_gate(model, bridge=bridge).checks if not c.passed]


# --- right models pass ------------------------------------------------------------------------------------------------


def test_every_family_passes(any_model: Any) -> None:
    report = run_gate(any_model)
    slides = any(layer.window for layer in any_model.geometry.layers)
    assert [c.name for c in report.checks] == [c for c in CHECKS if slides or c != BEYOND]
    assert report.passed, "\n".join(report.lines())
    assert report.failure() == "all checks passed"
    for check in report.checks:  # a factor of 10 between what float32 does and what is allowed
        assert check.difference is not None and check.difference <= check.tolerance / 10
        assert check.tolerance > 0 or check.name in (IDENTITY, SHAPE)


def test_known_wrong_readers_are_still_sound_machines() -> None:
    """The gate judges the machinery, not the claim: models without notes must be measurable."""
    for model in (broken_direct(), broken_blind()):
        assert model.gate is not None and model.gate.passed and not model.ungated


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes(name: str, dtype: torch.dtype) -> None:
    report = run_gate(model_of(contract.random_hf(name, dtype=dtype)), bridge=False)
    assert report.passed, "\n".join(report.lines())


# --- a bridge that ignores its cache (transformers 5.24 with transformer-lens 4.3.0) ----------------------------------


class DroppingBridge:
    """A bridge whose attention never sees the cache it is given: it decodes from an empty one, without an error."""

    def __init__(self, inner: Any, returns: str) -> None:
        self.inner, self.returns = inner, returns

    def __call__(self, ids: Any, past_key_values: Any = None, return_type: str = "logits", **options: Any) -> Any:
        fresh = DynamicCache()
        logits, used = self.inner(ids, past_key_values=fresh, return_type="logits_and_cache", **options)
        if return_type == "logits":
            return logits
        if self.returns == "grown":  # rows are stored behind the given ones, yet nothing attended to those
            for layer, new in enumerate(used.layers):
                past_key_values.update(new.keys, new.values, layer)
        given = {
            "fresh": used,
            "untouched": past_key_values,
            "grown": past_key_values,
            "empty": DynamicCache(),
            "none": None,
        }
        return logits, given[self.returns]


RETURNS = ("fresh", "untouched", "grown", "empty", "none")


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_a_bridge_that_ignores_its_cache_is_seen(name: str, returns: str) -> None:
    hf = tiny_hf() if name == "tiny" else contract.random_hf(name)
    model = model_of(hf)
    model.__dict__["bridge"] = DroppingBridge(contract.note_model(name).bridge, returns)
    report = run_gate(model)
    assert [c.name for c in report.checks if not c.passed] == [BRIDGE_CACHE]
    assert "transformers>=5.16.1,<5.20" in report.failure() and "5.24" in report.failure()


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = contract.note_model("llama").bridge
    monkeypatch.setattr(HFNoteModel, "bridge", property(lambda _: DroppingBridge(bridge, "fresh")))


@pytest.mark.usefixtures("dropping")
def test_the_refusal_names_the_fix() -> None:
    with pytest.raises(GateError, match=FIX) as caught:
        wrap(contract.random_hf("llama"), new_tokenizer(), name="model")
    message = str(caught.value)
    assert message.startswith(f"model failed its gate at {BRIDGE_CACHE}: ") and "allow_ungated=True" in message
    assert "\n" not in message


@pytest.mark.usefixtures("dropping")
def test_a_model_admitted_all_the_same_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="notelens"):
        model = wrap(contract.random_hf("llama"), new_tokenizer(), name="model", allow_ungated=True)
    assert any("although it failed its gate" in r.getMessage() for r in caplog.records)
    facts = model.facts()
    assert facts["ungated"] is True and facts["gate"]["passed"] is False
    assert [c["name"] for c in facts["gate"]["checks"] if not c["passed"]] == [BRIDGE_CACHE]
    json.dumps(facts)


def test_allowing_ungated_does_not_mark_a_model_that_passes() -> None:
    model = wrap(contract.random_hf("llama"), new_tokenizer(), name="model", allow_ungated=True)
    assert model.facts()["ungated"] is False and model.facts()["gate"]["passed"] is True


def test_a_model_without_a_gate_says_so() -> None:
    facts = contract.note_model("llama").facts()
    assert facts["ungated"] is True and facts["gate"] is None


# --- other faults, each seen by its own check -------------------------------------------------------------------------


class Forgetful(HFNoteModel):
    """Decodes from an empty cache, and claims to have used the one it was given."""

    def prefill(self, token_ids: Sequence[int], past: KVCache | None = None, **options: Any) -> Prefill:
        if past is None:
            return super().prefill(token_ids, **options)
        full = super().prefill((*past.token_ids, *token_ids))
        return Prefill(full.cache, super().prefill(token_ids, start=past.next_position).hidden, None)


class Misplaced(HFNoteModel):
    """New tokens stand one position too far."""

    def prefill(self, token_ids: Sequence[int], past: KVCache | None = None, **options: Any) -> Prefill:
        if past is not None:
            options["start"] = past.next_position + 1
        return super().prefill(token_ids, past, **options)


class Writing(HFNoteModel):
    """Changes the cache it runs from."""

    def prefill(self, token_ids: Sequence[int], past: KVCache | None = None, **options: Any) -> Prefill:
        out = super().prefill(token_ids, past, **options)
        if past is not None:
            past.values[0][0, 0, 0] += 1.0
        return out


@pytest.mark.parametrize(("kind", "check"), [(Forgetful, DECODE), (Misplaced, PARTS), (Writing, IDENTITY)])
def test_faults_of_the_runtime_are_seen(kind: type[HFNoteModel], check: str) -> None:
    assert check in failed(model_of(contract.random_hf("llama"), kind))


class WrongTheta(Llama):
    def inv_freq(self, model: Any, layer: int) -> Any:
        inv_freq = super().inv_freq(model, layer)
        return (inv_freq.double() ** 1.1).to(inv_freq.dtype)


class PlainTheta(Llama):
    """Ignores the scaling of llama3: inverse frequencies from the base alone."""

    def inv_freq(self, model: Any, layer: int) -> Any:
        width, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
        return theta ** -(torch.arange(0, width, 2) / width)


class NoRotation(Llama):
    def inv_freq(self, model: Any, layer: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("name", "family"), [("llama", WrongTheta), ("llama3", WrongTheta), ("llama3", PlainTheta), ("llama", NoRotation)]
)
def test_a_wrong_rotation_is_refused(name: str, family: type[Llama]) -> None:
    report = run_gate(model_of(contract.random_hf(name), family=family()), bridge=False)
    assert [c.name for c in report.checks if not c.passed] == [SHIFT, FAR]
    assert "pairing, base or scaling" in report.failure()


def test_plain_theta_is_right_where_nothing_is_scaled() -> None:
    """The counterpart: the fault above is the missing scaling, not the way this test computes frequencies."""
    assert failed(model_of(contract.random_hf("llama"), family=PlainTheta())) == []


@pytest.mark.parametrize("name", list(contract.RANDOM))
def test_a_wrong_pairing_is_refused(name: str) -> None:
    hf = contract.random_hf(name)
    right = load_module.family_for(hf.config)
    wrong = type("Wrong", (type(right),), {"pairing": "half" if right.pairing == "adjacent" else "adjacent"})()
    found = failed(model_of(hf, family=wrong))
    assert found[:2] == [SHIFT, FAR] and all("moved" in name for name in found)


@pytest.mark.parametrize("layer", [0, 2])
def test_attention_that_bypasses_the_interface_is_refused(layer: int) -> None:
    """One layer keeps its own attention whatever the model is set to: the engine would never see it."""
    hf = contract.random_hf("llama")
    hf.set_attn_implementation("eager")
    attention = hf.model.layers[layer].self_attn
    attention.config = copy.deepcopy(attention.config)
    report = run_gate(model_of(hf), bridge=False)
    assert [c.name for c in report.checks if not c.passed] == [ENGINE]
    assert "does not go through transformers' attention interface" in report.failure()


def test_a_model_that_reads_nothing_is_refused() -> None:
    hf = contract.random_hf("llama")
    for layer in hf.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    report = run_gate(model_of(hf), bridge=False)
    assert [c.name for c in report.checks if not c.passed] == [ENGINE]
    assert "the model does not read its cache" in report.failure()


def test_a_bridge_on_other_weights_is_refused() -> None:
    model = model_of(contract.random_hf("llama"))
    other = contract.random_hf("llama")
    other.lm_head.weight.data *= 1.1
    model.__dict__["bridge"] = model_of(other).bridge
    assert BRIDGE in failed(model, bridge=True)


def test_overflow_is_refused() -> None:
    hf = contract.random_hf("llama")
    hf.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="not finite"):
        wrap(hf, new_tokenizer(), name="model")


def test_a_kernel_that_drops_the_soft_cap_is_seen() -> None:
    """sdpa runs Gemma-2 without a word and without the cap on its scores; the engine caps, so the two disagree."""
    hf = contract.random_hf("gemma2")
    model = model_of(hf)
    hf.set_attn_implementation("sdpa")
    assert ENGINE in failed(model)


def test_scores_that_a_kernel_cannot_cap_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"soft-capped attention scores, which attention 'sdpa' does not compute; use 'eager'"
    ):
        wrap(contract.random_hf("gemma2"), new_tokenizer(), name="capped", attention="sdpa")


def test_what_is_not_understood_is_refused() -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    default = {"rope_type": "default", "rope_theta": 1e4}
    hf = LlamaForCausalLM(LlamaConfig(**small, vocab_size=42, rope_parameters=default))
    hf.config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModelError, match="RoPE type 'spiral' is not supported; known: default"):
        wrap(hf, new_tokenizer(), name="spiral")
    hf.config.model_type = "persimmon"
    with pytest.raises(
        UnsupportedModelError, match=r"'persimmon' is not supported; supported: deepseek_v2, .*llama, .*never guessed"
    ):
        wrap(hf, new_tokenizer(), name="persimmon")


# --- the report is cached by what it depends on -----------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models whose gate really ran."""
    seen: list[str] = []

    def counted(model: Any, *, bridge: bool = True) -> GateReport:
        seen.append(model.name)
        return run_gate(model, bridge=bridge)

    monkeypatch.setattr(load_module, "run_gate", counted)
    return seen


def admitted(cache_dir: Path, hf: Any = None, **options: Any) -> HFNoteModel:
    hf = hf if hf is not None else contract.random_hf("llama")
    return wrap(hf, new_tokenizer(), name="model", bridge=False, cache_dir=cache_dir, **options)


def test_the_gate_runs_once(tmp_path: Path, runs: list[str]) -> None:
    first, second = admitted(tmp_path), admitted(tmp_path)
    assert runs == ["model"]
    assert first.gate is not None and first.gate == second.gate and first.gate.key
    assert [p.name for p in (tmp_path / "gates").iterdir()] == [f"{first.gate.key}.json"]
    wrap(contract.random_hf("llama"), new_tokenizer(), name="model", bridge=False)
    assert len(runs) == 2, "without a cache folder nothing is cached"


def test_other_weights_run_it_again(tmp_path: Path, runs: list[str]) -> None:
    admitted(tmp_path)
    hf = contract.random_hf("llama")
    hf.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3
    admitted(tmp_path, hf)
    admitted(tmp_path, contract.random_hf("llama", dtype=torch.bfloat16))
    admitted(tmp_path, attention="eager")
    assert len(runs) == 4
    admitted(tmp_path)
    assert len(runs) == 4


def test_other_settings_with_the_same_weights_run_it_again(tmp_path: Path, runs: list[str]) -> None:
    """Two configs on identical tensors compute different things: the cached report of one says nothing on the other."""
    admitted(tmp_path)
    settings = {**contract.RANDOM["llama"][1]["rope_parameters"], "rope_theta": 500000.0}
    other = contract.random_hf("llama", rope_parameters=settings)
    plain = contract.random_hf("llama")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    admitted(tmp_path, other)
    assert len(runs) == 2


@pytest.mark.parametrize("package", ["transformers", "torch", "transformer-lens"])
def test_other_versions_run_it_again(
    tmp_path: Path, runs: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted(tmp_path)
    versions = {**load_module.library_versions(), package: "99.0"}
    monkeypatch.setattr(load_module, "library_versions", lambda: versions)
    admitted(tmp_path)
    assert len(runs) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"checks": [{"name": "x"}], "key": "k"}', '{"passed": true}'])
def test_a_damaged_report_is_not_trusted(
    tmp_path: Path, runs: list[str], content: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = admitted(tmp_path)
    assert model.gate is not None
    path = tmp_path / "gates" / f"{model.gate.key}.json"
    good = path.read_text()
    path.write_text(content)
    with caplog.at_level(logging.WARNING, logger="notelens"):
        assert admitted(tmp_path).gate == model.gate
    assert len(runs) == 2 and path.read_text() == good
    assert any("is damaged; running the gate again" in r.getMessage() for r in caplog.records)


def test_a_cached_failure_still_refuses(tmp_path: Path, runs: list[str]) -> None:
    def mute() -> Any:
        hf = contract.random_hf("llama")
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
        return hf

    for _ in range(2):
        with pytest.raises(GateError, match="does not read its cache"):
            admitted(tmp_path, mute())
    assert len(runs) == 1
    assert admitted(tmp_path, mute(), allow_ungated=True).facts()["ungated"] is True


def test_a_report_survives_json(tiny: Any) -> None:
    assert tiny.gate is not None
    assert GateReport.from_json(json.loads(json.dumps(tiny.gate.as_json()))) == tiny.gate
    assert len(tiny.gate.lines()) == len(CHECKS) - 1 and all(line.startswith("ok  ") for line in tiny.gate.lines())
