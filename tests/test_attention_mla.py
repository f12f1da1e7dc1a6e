"""Latent caches: what is stored, what moves, and that the engine's expanded rows say the same."""

from typing import Any

import pytest
import torch

from notelens.attention import LayerFacts
from notelens.attention.mla import Expanded
from notelens.attention.move import adapters, move_rows
from notelens.cache.ops import replace_rows, slice_rows
from notelens.circuits.heads import read_heads
from notelens.intervene.attended import attended_cache
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.intervene.recompute import recompute_effects
from tests.contracts import attention as moves
from tests.contracts import models as contract
from tests.oracle.swap import full_logits
from tests.tiny import wrapped

NAMES = ("deepseek_v2", "deepseek_v3")


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return contract.note_model(request.param)


def test_the_latent_and_a_narrow_slice_are_stored(model: Any) -> None:
    cache = moves.span(model)
    for k, v, layer in zip(cache.keys, cache.values, model.geometry.layers, strict=True):
        assert tuple(k.shape) == (1, moves.N, 16) and tuple(v.shape) == (1, moves.N, 8)
        assert (layer.n_heads, layer.n_kv_heads, layer.d_key, layer.d_value) == (4, 1, 16, 8)


def test_only_the_rotary_slice_moves(model: Any) -> None:
    """16 latent channels stay bit for bit, 8 rotary channels turn; the value width of 12 is not mixed up with either."""
    cache = moves.span(model)
    moved = move_rows(model, cache, 200)
    there = moves.span(model, moves.START + 200)
    for layer in range(cache.n_layers):
        assert moved.keys[layer] is cache.keys[layer]
        assert not torch.equal(moved.values[layer], cache.values[layer])
        assert moves.gap(moved.values[layer], there.values[layer]) <= moves.DEEP


def test_moving_and_expanding_commute(model: Any) -> None:
    cache = moves.span(model)
    expanded_then = attended_cache(model, move_rows(model, cache, 77))
    wide = attended_cache(model, cache)
    for layer, adapter in enumerate(adapters(model)):
        assert tuple(wide.keys[layer].shape) == (4, moves.N, 24) and tuple(wide.values[layer].shape) == (4, moves.N, 12)
        facts = adapter.facts
        other = Expanded(LayerFacts(facts.inv_freq, facts.pairing, d_plain=16))
        k, v = other.move(wide.keys[layer], wide.values[layer], torch.full((moves.N,), 77))
        assert torch.equal(k[..., :16], wide.keys[layer][..., :16]) and v is wide.values[layer]
        assert moves.gap(k, expanded_then.keys[layer]) <= moves.TOLERANCE
        assert not torch.equal(k[..., 16:], wide.keys[layer][..., 16:])


def test_interleaved_and_plain_weights_store_the_same_pairs() -> None:
    """rope_interleave orders the projection's channels; stored rows pair i with i + 4 either way."""
    for interleave in (True, False):
        hf = contract.random_hf("deepseek_v3", rope_interleave=interleave)
        assert moves.span_problems(wrapped(hf, "deepseek_v3", gate=False)) == []


@pytest.mark.parametrize("parts", ["k", "v", "kv"])
def test_parts_are_those_that_are_stored(model: Any, parts: Any) -> None:
    """Latent alone, slice alone, both: the engine equals a decode from a cache in which just that was replaced."""
    ids, other = contract.random_ids(), contract.random_ids(changed=[3])
    base, donor = (model.prefill(i).cache for i in (ids, other))
    rows = (3, 6, 11)
    fast = swap_effects(model, base, [donor], [Site(rows, parts=parts), Site(rows, parts=parts, kv_heads=(0,))],
                        Reader.last(base, contract.ANSWERS))  # fmt: skip
    past = replace_rows(slice_rows(base, 0, 19), slice_rows(donor, 0, 19), rows, parts=parts)
    slow = model.answer_logits(model.prefill(ids[-1:], past).hidden, contract.ANSWERS)
    for logits in fast.logits:
        assert float((logits - slow).abs().max()) <= contract.SWAP_TOLERANCE
    assert float((fast.logits - fast.baseline).abs().max()) > 1e-3


def test_recomputed_rows_and_heads_run_on_latent_caches(model: Any) -> None:
    new, old = contract.random_ids(), contract.random_ids(changed=[3])
    stale = model.prefill(old).cache
    everything = recompute_effects(model, stale, new, [range(4, 19)], contract.ANSWERS, edited=[3])
    assert float((everything[0] - full_logits(model.hf, new, contract.ANSWERS)).abs().max()) <= contract.SWAP_TOLERANCE
    state = read_heads(model, stale, Reader.last(stale, contract.ANSWERS))
    assert tuple(state.outputs.shape) == (model.geometry.n_layers, 4, 12)
    assert float((state.logits - full_logits(model.hf, old, contract.ANSWERS)).abs().max()) <= contract.SWAP_TOLERANCE
