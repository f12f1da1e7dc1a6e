"""Every family: cached decode = full forward, isolated swaps = one-token loop, rows move, and what is unknown is refused."""

from typing import Any

import pytest

from notelens.intervene.engine import Site
from tests.contracts import models as contract

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
