"""Rows run again in place equal a loop over single tokens that shares no code with the library."""

from typing import Any

import pytest
import torch

from notelens.cache.ops import concat, max_difference, slice_rows
from notelens.errors import PatchError, UnsupportedModelError
from notelens.intervene import run_rows as module
from notelens.intervene.rerun import rerun_rows
from tests.contracts.models import ROW_TOLERANCE, note_model, random_hf, random_ids
from tests.oracle.recompute import run_row
from tests.tiny import wrapped

N = 20


def stale(model: Any) -> Any:
    """Ten rows of one prompt in front of ten of another that were prefilled without them."""
    first, second = model.prefill(random_ids(10)).cache, model.prefill(random_ids(10, seed=1), start=10).cache
    return concat(first, second, history=("joined",))


@pytest.mark.parametrize("name", ["llama", "llama3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("rows", [(10,), (10, 11, 15), (3, 19), tuple(range(10, 20))], ids=str)
def test_equals_one_token_at_a_time(name: str, rows: tuple[int, ...]) -> None:
    model = note_model(name)
    cache = stale(model)
    found = rerun_rows(model, cache, rows)
    slow = list(zip(cache.keys, cache.values, strict=True))
    for row in rows:
        slow = run_row(model.hf, slow, cache.token_ids[row], row)
    wanted = cache.replace_tensors([k for k, _ in slow], [v for _, v in slow], history=())
    assert max_difference(found.cache, wanted) <= ROW_TOLERANCE
    if (name, rows) != ("mistral", (3, 19)):  # through a window of 8 these two rows do not see what is stale
        assert max_difference(cache, wanted) > 1e-2  # it had something to do
    assert found.tokens_run == len(rows) and found.survivors == rows and found.cache.history == ("joined",)


def test_all_rows_behind_exact_ones_are_a_fresh_prefill(any_model: Any) -> None:
    cache = stale(any_model)
    found = rerun_rows(any_model, cache, range(10, N))
    fresh = any_model.prefill(cache.token_ids)
    assert max_difference(found.cache, fresh.cache) <= ROW_TOLERANCE
    assert float((found.hidden - fresh.hidden).abs().max()) <= ROW_TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_slices_of_queries_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = note_model(name)
    cache = stale(model)
    whole = rerun_rows(model, cache, range(4, N))
    monkeypatch.setattr(module, "QUERY_BYTES", 1)
    assert max_difference(rerun_rows(model, cache, range(4, N)).cache, whole.cache) <= ROW_TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral"])
def test_rows_that_stop_keep_their_old_rows(name: str) -> None:
    """Narrowed to rows 12 and 17 behind layer 0: layer 0 as if all ran, later layers as if these two alone had run."""
    model = note_model(name)
    cache = stale(model)

    def narrow(layer: int, deviation: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert deviation.shape == rows.shape and bool((deviation >= 0).all())
        return ((rows == 12) | (rows == 17)).nonzero()[:, 0]

    found = rerun_rows(model, cache, range(10, N), narrow=narrow)
    everything = rerun_rows(model, cache, range(10, N)).cache
    assert found.survivors == (12, 17) and found.tokens_run == pytest.approx((10 + 2 * 2) / 3)
    assert torch.allclose(found.cache.values[0], everything.values[0], atol=ROW_TOLERANCE)
    kept = [r for r in range(N) if r not in (12, 17)]
    for layer in (1, 2):
        assert torch.equal(found.cache.keys[layer][:, kept], cache.keys[layer][:, kept])
        assert not torch.equal(found.cache.keys[layer][:, [12, 17]], cache.keys[layer][:, [12, 17]])
    # layer 1 of row 12 was computed from a layer 0 in which all rows were right
    assert torch.allclose(found.cache.values[1][:, 12], everything.values[1][:, 12], atol=ROW_TOLERANCE)
    assert not any(m._forward_pre_hooks for m in model.hf.modules())


def test_nothing_is_left_behind_after_an_error() -> None:
    model = note_model("llama")
    cache = stale(model)
    kernel, digest = model.attention_kernel, cache.digest()

    def narrow(layer: int, deviation: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        rerun_rows(model, cache, range(10, N), narrow=narrow)
    assert model.attention_kernel == kernel and cache.digest() == digest
    assert not any(m._forward_pre_hooks for m in model.hf.modules())


def test_bad_rows_and_caches() -> None:
    model = note_model("llama")
    cache = stale(model)
    for rows in ((), (-1,), (N,)):
        with pytest.raises(PatchError, match=r"to run again; there are rows 0\.\.19"):
            rerun_rows(model, cache, rows)
    with pytest.raises(PatchError, match="has 4 layers"):
        rerun_rows(model, note_model("gemma2").prefill(random_ids(5)).cache, (0,))


def test_rows_of_another_shape_are_refused() -> None:
    model = wrapped(random_hf("llama", head_dim=16), "wide", gate=False)
    with pytest.raises(UnsupportedModelError, match="cannot be run again in place"):
        rerun_rows(model, slice_rows(stale(note_model("llama")), 0, 5), (1,))
