"""Sliding windows: rows are kept, the mask hides them, and the adapter says which a reader still sees."""

from typing import Any

import pytest
import torch

from notelens.attention.move import check_readable, readable_rows
from notelens.errors import CacheError, UnsupportedModelError
from notelens.models.checks import check_raw
from notelens.models.load import family_for, wrap
from notelens.models.random import build_config
from tests.contracts import attention as moves
from tests.contracts import models as contract
from tests.tiny import new_tokenizer, wrapped

W = contract.WINDOW


@pytest.mark.parametrize("name", contract.SLIDING)
def test_rows_outside_the_window_are_not_readable(name: str) -> None:
    """Per layer: full layers see all 40 rows, sliding ones the last 8, the reader included; and so does the model."""
    model = contract.note_model(name)
    cache = model.prefill(contract.random_ids(40)).cache
    seen = readable_rows(model, cache, 39).sum(1).tolist()
    assert seen == [W if g.window else 40 for g in model.geometry.layers]
    assert [sum(moves.attended(model, i, 40)) for i in range(len(seen))] == seen
    assert all(k.shape[1] == 40 for k in cache.keys) and cache.next_position == 40


def test_a_field_that_left_the_window_is_named() -> None:
    mixed, all_slide = contract.note_model("gemma2"), contract.note_model("mistral")
    caches = [m.prefill(contract.random_ids()).cache for m in (mixed, all_slide)]
    assert check_readable(mixed, caches[0], [2, 3, 4]) == (1, 3), "the full layers"
    assert check_readable(mixed, caches[0], [15, 16]) == (0, 1, 2, 3)
    with pytest.raises(
        CacheError, match=r"rows 2..4 are not readable from position 20 in any layer of mistral: its windows reach"
    ):
        check_readable(all_slide, caches[1], [2, 3, 4])
    assert check_readable(all_slide, caches[1], [2, 3, 4], reader=9) == (0, 1, 2)
    for rows in ([], [20], [-1]):
        with pytest.raises(CacheError, match="of a cache with 20 rows"):
            check_readable(mixed, caches[0], rows)


def test_a_window_longer_than_the_prompt_keeps_everything() -> None:
    model = wrapped(contract.random_hf("mistral", sliding_window=512), "mistral", gate=False)
    cache = model.prefill(contract.random_ids(200)).cache
    assert len(cache) == 200 and bool(readable_rows(model, cache).all())


@pytest.mark.parametrize("name", contract.SLIDING)
def test_a_prompt_in_two_parts_is_the_prompt(name: str) -> None:
    model, ids = contract.note_model(name), contract.random_ids()
    whole, first = model.prefill(ids), model.prefill(ids[:4])
    rest = model.prefill(ids[4:], first.cache)
    assert (
        float((model.next_logits(rest.hidden) - model.next_logits(whole.hidden)).abs().max()) <= contract.SWAP_TOLERANCE
    )
    assert contract.row_problems(rest.cache, whole.cache) == []


@pytest.mark.parametrize("n", [6, 30])
def test_sinks_match_eager_attention_on_both_sides_of_the_window(n: int) -> None:
    model = contract.note_model("gpt_oss")
    assert any(float(layer.self_attn.sinks.abs().min()) > 0 for layer in model.hf.model.layers)
    donors = [contract.random_ids(n, changed=[2]), contract.random_ids(n, changed=[n - 3])]
    sites = [contract.Site((p,), donor=d) for p in range(n - 1) for d in (0, 1)]
    assert contract.swap_problems(model, contract.random_ids(n), donors, contract.ANSWERS, sites=sites) == []


def test_soft_caps_need_eager_attention() -> None:
    hf = contract.random_hf("gemma2")
    for layer in hf.model.layers:
        layer.self_attn.q_proj.weight.data *= 4
    hf.set_attn_implementation("eager")
    with torch.no_grad():
        capped = hf(torch.tensor([contract.random_ids()]), use_cache=False).logits
        hf.set_attn_implementation("sdpa")
        uncapped = hf(torch.tensor([contract.random_ids()]), use_cache=False).logits
    assert float((capped - uncapped).abs().max()) > 1e-2
    assert wrap(hf, new_tokenizer(), name="capped", gate=False).attention_kernel == "eager"


# --- one map of layers from both descriptions -------------------------------------------------------------------------


def gemma3(**settings: Any) -> Any:
    base = {k: v for k, v in contract._SMALL.items() if k != "num_hidden_layers"}
    return build_config(
        "gemma3_text", {**base, "num_hidden_layers": 6, "sliding_window": W, "query_pre_attn_scalar": 8, **settings}
    )


def test_layer_types_and_the_pattern_number_give_one_map() -> None:
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    by_name, by_number = gemma3(layer_types=kinds * 2), gemma3(sliding_window_pattern=3)
    maps = [[g.window for g in family_for(c).geometry(c).layers] for c in (by_name, by_number)]
    assert maps[0] == maps[1] == [W, W, None, W, W, None]


def test_contradictions_are_refused() -> None:
    raw = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window_pattern": 3}
    with pytest.raises(
        UnsupportedModelError, match="layer 2 is sliding_attention by layer_types and full_attention by"
    ):
        check_raw(raw, None, "gemma3_text")
    check_raw({**raw, "sliding_window_pattern": 6}, None, "gemma3_text")
    config = gemma3(sliding_window=None)
    with pytest.raises(UnsupportedModelError, match="layer 0 is sliding_attention, but sliding_window is not set"):
        family_for(config)
    config = gemma3()
    config.layer_types = config.layer_types[:4]
    with pytest.raises(UnsupportedModelError, match="layer_types names 4 layers and num_hidden_layers is 6"):
        family_for(config)
    with pytest.raises(UnsupportedModelError, match=r"attn_logit_softcapping=30\.0 changes attention"):
        family_for(gemma3(attn_logit_softcapping=30.0))
