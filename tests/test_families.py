"""Every family: cached decode = full forward, isolated swaps = one-token loop, rows move, and what is unknown is refused."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

import notelens
from notelens.cache.ops import replace_rows
from notelens.circuits.heads import read_heads
from notelens.errors import InputError, UnsupportedModelError
from notelens.intervene.engine import Reader, Site
from notelens.models import FAMILIES
from notelens.models.gate import run_gate
from notelens.models.load import family_for
from notelens.models.random import build_config
from tests.contracts import models as contract
from tests.contracts.published import PUBLISHED
from tests.tiny import new_tokenizer

NEW = ("qwen2", "qwen3_moe", "phi3", "smollm3", "olmo2", "glm", "glm4", "deepseek_v2", "deepseek_v3", "falcon_h1",
       "qwen2_5_vl", "qwen3_vl")  # fmt: skip
"""Families beyond those of the shared ``any_model`` fixture."""


@pytest.fixture(scope="module", params=NEW)
def family_model(request: pytest.FixtureRequest) -> Any:
    return contract.note_model(request.param)


def some_sites(model: Any, n_tokens: int, n_reader: int) -> list[Site]:
    geometry = model.geometry
    return contract.contract_sites(n_tokens, geometry.n_layers, geometry.layers[0].n_kv_heads, n_reader)


def test_cached_decode_equals_a_full_forward(family_model: Any) -> None:
    assert contract.decode_problems(family_model, contract.random_ids()) == []


@pytest.mark.parametrize("n_reader", [1, 4])
def test_the_engine_equals_the_one_token_loop(family_model: Any, n_reader: int) -> None:
    recipient, donors = contract.contract_ids(family_model.name)
    assert contract.swap_problems(family_model, recipient, donors, contract.ANSWERS, n_reader=n_reader) == []


def test_in_forward_swaps_equal_a_patched_forward(family_model: Any) -> None:
    recipient, donors = contract.contract_ids(family_model.name)
    assert contract.in_forward_problems(family_model, recipient, donors, contract.ANSWERS) == []


def test_equal_rows_are_nothing_bit_for_bit(family_model: Any) -> None:
    assert contract.noop_problems(family_model, contract.random_ids(), contract.ANSWERS) == []


def test_nothing_is_left_behind(family_model: Any) -> None:
    donor = contract.random_ids(changed=[3])
    assert contract.side_effect_problems(family_model, contract.random_ids(), donor) == []


# --- what is refused, by name -----------------------------------------------------------------------------------------


def config_of(kind: str, **settings: Any) -> Any:
    return build_config(kind, {**contract._SMALL, **contract.RANDOM[kind][1], **settings})


@pytest.mark.parametrize("kind", FAMILIES.names())
def test_an_unknown_key_is_refused(kind: str) -> None:
    family_for(config_of(kind))
    config = config_of(kind)
    FAMILIES.get(kind)().text_config(config).attention_twist = 3
    with pytest.raises(
        UnsupportedModelError, match=rf"{kind}: the config has a key 'attention_twist' .*\.harmless or remove it"
    ):
        family_for(config)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs_are_understood(kind: str) -> None:
    config = (
        build_config(kind, PUBLISHED[kind]) if kind != "qwen2_5_vl" else AutoConfig.for_model(kind, **PUBLISHED[kind])
    )
    assert family_for(config).geometry(config).n_layers > 0


def test_a_harmless_key_is_harmless_with_harmless_values_only() -> None:
    """What SmolLM2's own file carries: the flag that transformers ignores may only say what transformers does."""
    family_for(config_of("llama", rope_interleaved=False, is_llama_config=True))
    with pytest.raises(
        UnsupportedModelError, match="rope_interleaved=True is not computed by transformers; known to be without"
    ):
        family_for(config_of("llama", rope_interleaved=True))
    family_for(config_of("deepseek_v3", scoring_func="sigmoid", num_nextn_predict_layers=1))
    with pytest.raises(UnsupportedModelError, match="scoring_func='softmax'"):
        family_for(config_of("deepseek_v3", scoring_func="softmax"))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral", "rope_theta": 1e4}, "RoPE type 'spiral' is not supported; known: default, linear"),
        ({"rope_type": "default", "rope_theta": 1e4, "twist": 2}, "RoPE type 'default' with an unknown entry 'twist'"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 3}, "unknown entry 'beta_fast'"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}, "1.5 is not a share of a key"),
        ({"rope_type": "default", "rope_theta": None}, "no rope_theta for layer 0"),
    ],
)
def test_an_unknown_rotation_is_refused(rope: dict[str, Any], message: str) -> None:
    config = config_of("llama")
    config.rope_parameters = rope
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        family_for(config)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "recurrent: the state sums up all tokens"),
        ("rwkv", "recurrent: the state sums up all tokens"),
        ("t5", "encoder decoder: the encoder reads in both directions"),
        ("gpt2", "learned positions: the position is added to the embedding"),
        ("bloom", "alibi: no family runs on it"),
        ("jamba", "is not supported; supported: deepseek_v2,"),
    ],
)
def test_representations_without_movable_rows_are_refused(kind: str, reason: str) -> None:
    config = SimpleNamespace(model_type=kind)
    with pytest.raises(UnsupportedModelError, match=reason):
        family_for(config)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def saved(folder: Path, change: dict[str, Any], *, kind: str = "llama") -> str:
    hf = contract.random_hf(kind)
    hf.save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return str(folder)


def test_a_sound_checkpoint_loads_and_passes(tmp_path: Path) -> None:
    model = notelens.load(saved(tmp_path, {}), cache_dir=tmp_path)
    assert model.gate is not None and model.gate.passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4}, r"config and weights contradict each other: \d+ missing keys, first model.layers.3"),
        ({"num_hidden_layers": 2}, r"contradict each other: \d+ unexpected keys, first model.layers.2"),
        ({"head_dim": 16}, "could not be loaded|contradict"),
        ({"rope_twist": True}, "a key 'rope_twist' that neither"),
    ],
)
def test_a_config_that_contradicts_its_weights_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModelError, InputError), match=message):
        notelens.load(saved(tmp_path, change), cache_dir=tmp_path)


# --- every family through load, gate and dry run ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", NEW)
def test_a_small_random_model_of_every_family_passes_its_gate(kind: str) -> None:
    model = contract.note_model(kind)
    report = run_gate(model, bridge=kind in ("qwen2", "deepseek_v2", "falcon_h1"))
    assert report.passed, "\n".join(report.lines())
    assert any("hooks run on whole prompts" in n for n in report.notes) == (kind in ("deepseek_v2", "falcon_h1"))


def test_a_family_is_what_its_config_says() -> None:
    layers = contract.note_model("smollm3").geometry.layers
    assert [g.rope_theta for g in layers] == [1e4, 1e4, 1e4, None]
    assert {g.window for g in contract.note_model("qwen3_moe").geometry.layers} == {None}
    assert FAMILIES.get("qwen3_moe")().window(SimpleNamespace(use_sliding_window=True, sliding_window=7), 0) == 7


def test_heads_share_stored_heads_in_order() -> None:
    """4 query heads, 2 stored: query heads 0 and 1 read stored head 0. A patch of one changes the outputs of those two."""
    model = contract.note_model("llama")
    ids, other = contract.random_ids(), contract.random_ids(changed=[3])
    base, donor = (model.prefill(i).cache for i in (ids, other))
    reader = Reader.last(base, contract.ANSWERS)
    before = read_heads(model, base, reader).outputs[0]
    for stored, readers in ((0, [0, 1]), (1, [2, 3])):
        patched = replace_rows(base, donor, range(3, 19), kv_heads=[stored], layers=(0, 1))
        moved = (read_heads(model, patched, reader).outputs[0] - before).abs().amax(-1) > 1e-6
        assert moved.nonzero()[:, 0].tolist() == readers
