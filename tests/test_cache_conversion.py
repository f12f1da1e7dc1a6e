"""Caches of transformers: read where every row is there, refused by name where not."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache, LinearAttentionLayer, QuantizedLayer

from notelens.attention.move import move_rows
from notelens.cache.fp8 import dequantise, quantise
from notelens.cache.hf import crop, from_transformers, recurrent_state, to_transformers
from notelens.cache.kv import KVCache
from notelens.errors import CacheError, UnsupportedModelError
from tests.contracts import attention as moves
from tests.contracts import models as contract

IDS = contract.random_ids(11)


def filled(model: Any, store: Any) -> Any:
    with torch.no_grad():
        model.hf(torch.tensor([IDS]), past_key_values=store, use_cache=True)
    return store


class EightBitLayer(QuantizedLayer):
    """Eight bits per number, one scale per row: what quanto and HQQ do, without either."""

    def __init__(self) -> None:
        super().__init__(nbits=8, axis_key=0, axis_value=0, q_group_size=64, residual_length=4)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        scale = tensor.abs().amax(-1, keepdim=True) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor: Any) -> torch.Tensor:
        return q_tensor[0].to(q_tensor[1].dtype) * q_tensor[1]


def eight_bits(n_layers: int) -> Cache:
    return Cache(layers=[EightBitLayer() for _ in range(n_layers)])


@pytest.fixture(scope="module")
def llama() -> Any:
    return contract.note_model("llama")


def same(a: KVCache, b: KVCache, atol: float = 2e-5) -> None:
    assert a.token_ids == b.token_ids and torch.equal(a.positions, b.positions)
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        assert float((x - y).abs().max()) <= atol


# --- static -----------------------------------------------------------------------------------------------------------


def test_a_static_cache_is_read_up_to_its_counter(llama: Any) -> None:
    store = filled(llama, StaticCache(config=llama.hf.config, max_cache_len=32))
    assert store.layers[0].keys.shape[2] == 32
    same(from_transformers(store, IDS), llama.prefill(IDS).cache)


def test_a_static_cache_with_another_number_of_tokens_is_refused(llama: Any) -> None:
    store = filled(llama, StaticCache(config=llama.hf.config, max_cache_len=32))
    with pytest.raises(CacheError, match=r"layer 0 of the cache \(StaticLayer\) holds 11 rows for 12 tokens"):
        from_transformers(store, (*IDS, 3))
    with pytest.raises(CacheError, match="holds 11 rows for 10 tokens"):
        from_transformers(store, IDS[:10])


def test_a_static_window_that_dropped_rows_is_refused() -> None:
    model = contract.note_model("mistral")
    store = filled(model, StaticCache(config=model.hf.config, max_cache_len=32))
    with pytest.raises(CacheError, match=r"StaticSlidingWindowLayer\) holds 8 rows for 11 tokens; pass a DynamicCache"):
        from_transformers(store, IDS)


def test_cropping_is_checked(llama: Any) -> None:
    cache = llama.prefill(IDS[:4]).cache
    assert crop(cache, 4) is cache and len(crop(cache, 3)) == 3
    for n in (0, -9, 6):
        with pytest.raises(CacheError, match=f"{n} rows of a cache that has 4"):
            crop(cache, n)


# --- dynamic, sliding, offloaded --------------------------------------------------------------------------------------


def test_pairs_go_in_and_come_out_again(llama: Any) -> None:
    cache = llama.prefill(IDS).cache
    same(from_transformers(to_transformers(cache), IDS), cache, 0.0)
    empty = DynamicCache()
    with torch.no_grad():
        llama.hf(torch.tensor([IDS]), past_key_values=empty, use_cache=True)
    assert empty.get_seq_length() == 11, "an empty cache is a cache: it is judged by its length"
    same(from_transformers(empty, IDS), cache)


def test_a_sliding_cache_that_dropped_rows_is_refused() -> None:
    model = contract.note_model("mistral")
    store = filled(model, DynamicCache(config=model.hf.config))
    assert store.get_seq_length() == 11 and store.layers[0].keys.shape[2] == 7, (
        "two numbers: tokens seen and rows stored"
    )
    with pytest.raises(CacheError, match=r"DynamicSlidingWindowLayer\) holds 7 rows for 11 tokens"):
        from_transformers(store, IDS)


def test_a_model_that_ignored_its_cache_is_noticed(llama: Any) -> None:
    with pytest.raises(CacheError, match="the cache is empty after 11 tokens: the model ignored it"):
        from_transformers(DynamicCache(), IDS)
    with pytest.raises(CacheError, match="the model ignored it"):
        from_transformers(eight_bits(3), IDS)


def test_an_offloaded_cache_is_read(llama: Any) -> None:
    store = filled(llama, DynamicCache())
    for layer in store.layers[1:]:
        layer.offload()
    same(from_transformers(store, IDS), llama.prefill(IDS).cache)


def test_one_sequence_of_a_batch(llama: Any) -> None:
    store = DynamicCache()
    with torch.no_grad():
        llama.hf(torch.tensor([IDS, IDS[::-1]]), past_key_values=store, use_cache=True)
    same(from_transformers(store, IDS[::-1], batch_index=1), llama.prefill(IDS[::-1]).cache)
    for index in (2, -1):
        with pytest.raises(CacheError, match=f"sequence {index} of a batch of 2"):
            from_transformers(store, IDS, batch_index=index)


# --- quantised --------------------------------------------------------------------------------------------------------


def test_a_quantised_cache_is_dequantised_and_says_so(llama: Any) -> None:
    store = filled(llama, eight_bits(3))
    exact, found = llama.prefill(IDS).cache, from_transformers(store, IDS)
    assert not found.exact and found.history == ("rows dequantised from 8 bits (EightBitLayer)",)
    same(found, exact, 0.05)
    assert max(float((a - b).abs().max()) for a, b in zip(found.keys, exact.keys, strict=True)) > 0.0
    with torch.no_grad():
        llama.hf(torch.tensor([[3, 4]]), position_ids=torch.tensor([[11, 12]]), past_key_values=store, use_cache=True)
    assert len(from_transformers(store, (*IDS, 3, 4))) == 13, "rows that still wait unquantised are read too"


def test_eight_bit_keys_move_within_a_stated_error(llama: Any) -> None:
    """Dequantise, turn in full precision, quantise again: at most half a step per quantisation, so one step in all."""
    layer = EightBitLayer()
    exact = llama.prefill(IDS).cache
    stored = from_transformers(filled(llama, eight_bits(3)), IDS)
    moved, wanted = move_rows(llama, stored, 3), move_rows(llama, exact, 3)
    again = layer._dequantize(layer._quantize(moved.keys[0][None], 0))[0]
    step = exact.keys[0].abs().amax(-1, keepdim=True) * 2**0.5 / 127
    assert bool(((again - wanted.keys[0]).abs() <= 1.5 * step).all())
    assert float((again - wanted.keys[0]).abs().max()) > 0.0


def test_fp8_rows_need_their_scale_and_count_saturation() -> None:
    rows = torch.linspace(-600, 600, 13).reshape(1, 13)
    full, report = dequantise(quantise(rows, 1.0), 1.0, source="engine default")
    assert (report.n_saturated, report.n, report.source) == (4, 13, "engine default")
    assert float(full.abs().max()) == 448.0 and "4 of 13 saturated" in report.note
    full, report = dequantise(quantise(rows, 2.0), 2.0, source="calibration")
    assert report.n_saturated == 0 and float((full - rows).abs().max() / 600) <= 2.0**-4
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(CacheError, match="cannot be undone"):
            dequantise(quantise(rows, 1.0), scale, source="?")
    with pytest.raises(CacheError, match="is not an 8-bit float"):
        dequantise(rows, 1.0, source="?")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_bare_eight_bit_rows_are_refused(llama: Any, dtype: torch.dtype) -> None:
    store = filled(llama, DynamicCache())
    for layer in store.layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    with pytest.raises(UnsupportedModelError, match="dequantise it first with its scale"):
        from_transformers(store, IDS)


# --- others -----------------------------------------------------------------------------------------------------------


def test_a_recurrent_state_is_read_with_its_rows() -> None:
    model = contract.note_model("falcon_h1")
    store = filled(model, DynamicCache(config=model.hf.config))
    cache = from_transformers(store, IDS)
    same(cache, model.prefill(IDS).cache)
    state = cache.states[11]
    for a, b in zip(state.scan, model.prefill(IDS).cache.states[11].scan, strict=True):
        assert float((a - b).abs().max()) <= 1e-5
    before = cache.digest()
    with torch.no_grad():
        model.hf(torch.tensor([[3]]), past_key_values=store, use_cache=True)
    assert cache.digest() == before, "the state is a copy: the model writes into its own"
    assert recurrent_state(DynamicCache()) is None


def test_what_has_no_rows_is_refused(llama: Any) -> None:
    store = filled(llama, DynamicCache())
    with pytest.raises(UnsupportedModelError, match="encoder-decoder cache holds rows of an encoder"):
        from_transformers(EncoderDecoderCache(store, DynamicCache()), IDS)
    with pytest.raises(UnsupportedModelError, match="LinearAttentionLayer without plain keys and values"):
        from_transformers(Cache(layers=[LinearAttentionLayer()]), IDS)
    with pytest.raises(UnsupportedModelError, match="a tuple is not a transformers cache"):
        from_transformers((), IDS)
    blocks = DynamicCache()
    blocks.update(torch.zeros(1, 2, 11, 8), torch.zeros(1, 2, 11, 8), 0)
    blocks.layers[0].keys = torch.zeros(3, 4, 2, 2, 8)
    with pytest.raises(UnsupportedModelError, match="unknown layout"):
        from_transformers(blocks, IDS)


def test_running_without_storing_leaves_a_cache_as_it_was(llama: Any) -> None:
    cache = llama.prefill(IDS[:6]).cache
    before = cache.digest()
    with torch.no_grad():
        llama.hf(torch.tensor([[3]]), past_key_values=to_transformers(cache), use_cache=False)
    at_once = llama.prefill([3, 4, 5], cache)
    past = cache
    for token in (3, 4, 5):
        one = llama.prefill([token], past)
        past = one.cache
    assert cache.digest() == before
    assert float((one.hidden - at_once.hidden).abs().max()) <= 2e-5
    same(past, at_once.cache)


def test_rows_are_detached(llama: Any) -> None:
    store = DynamicCache()
    hf = contract.random_hf("llama")
    hf(torch.tensor([IDS]), past_key_values=store, use_cache=True)
    assert store.layers[0].keys.requires_grad
    cache = from_transformers(store, IDS)
    assert not any(t.requires_grad for t in (*cache.keys, *cache.values))
    assert moves.gap(cache.keys[0].clone(), llama.prefill(IDS).cache.keys[0]) <= 1e-5
