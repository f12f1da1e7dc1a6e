"""M-RoPE: golden tables of positions, axes of channels, and moving an image along one axis."""

from typing import Any

import pytest
import torch

from notelens.attention.move import adapters, move_along, move_rows
from notelens.attention.mrope import grid_positions, pair_axes, text_and_axes
from notelens.errors import CacheError, UnsupportedModelError
from tests.contracts import attention as moves
from tests.contracts import models as contract

NAMES = ("qwen2_5_vl", "qwen3_vl")

GOLDEN_VIDEO = [
    [0, 1, 2, 3, 3, 3, 3, 5, 5, 5, 5, 5, 6],
    [0, 1, 2, 3, 3, 4, 4, 3, 3, 4, 4, 5, 6],
    [0, 1, 2, 3, 4, 3, 4, 3, 4, 3, 4, 5, 6],
]
"""Three words, a video of 2 frames of 2 x 2 tokens with 2 positions per frame, two words; transformers 5.16 to 5.19."""


def positions_of_video() -> torch.Tensor:
    text = torch.arange(3).expand(3, -1)
    video = grid_positions(3, (2, 4, 4), merge=2, interval=2.0)
    return torch.cat([text, video, torch.arange(5, 7).expand(3, -1)], dim=1)


def test_positions_of_a_video_are_the_golden_table() -> None:
    assert positions_of_video().tolist() == GOLDEN_VIDEO


def test_transformers_numbers_a_video_the_same_way() -> None:
    hf = contract.random_hf("qwen2_5_vl")
    hf.config.vision_config.tokens_per_second, hf.config.vision_config.spatial_merge_size = 2, 2
    kinds = torch.tensor([[0] * 3 + [2] * 8 + [0] * 2])
    found, deltas = hf.model.get_rope_index(
        torch.ones_like(kinds), kinds, video_grid_thw=torch.tensor([[2, 4, 4]]), second_per_grid_ts=torch.tensor([1.0])
    )
    assert found[:, 0].tolist() == GOLDEN_VIDEO and deltas.tolist() == [[7 - 13]]


@pytest.mark.parametrize(
    ("section", "layout", "axes"),
    [
        ([2, 1, 1], "sectioned", [0, 0, 1, 2]),
        ([4, 2, 2], "sectioned", [0, 0, 0, 0, 1, 1, 2, 2]),
        ([4, 2, 2], "interleaved", [0, 1, 2, 0, 1, 2, 0, 0]),
        ([24, 20, 20], "interleaved", [0, 1, 2] * 20 + [0] * 4),
    ],
)
def test_axes_of_channels(section: list[int], layout: Any, axes: list[int]) -> None:
    assert pair_axes(section, layout).tolist() == axes


@pytest.mark.parametrize(
    ("section", "layout"), [([8], "sectioned"), ([4, 0, 4], "sectioned"), ([1, 1, 6], "interleaved")]
)
def test_impossible_sections_are_refused(section: list[int], layout: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="mrope_section"):
        pair_axes(section, layout)


@pytest.mark.parametrize("name", NAMES)
def test_text_moves_like_plain_rope(name: str) -> None:
    model = contract.note_model(name)
    assert moves.span_problems(model) == []
    assert moves.axes_problems(model) == []


@pytest.mark.parametrize("name", NAMES)
def test_an_image_moves_along_the_temporal_axis_only(name: str) -> None:
    """Channels of the temporal axis of the image's rows change, all others stay bit-identical."""
    model = contract.note_model(name)
    cache = moves.span(model)
    moved = move_along(model, cache, range(2, 8), 200, "temporal")
    assert torch.equal(moved.positions, cache.positions) and "temporal" in moved.history[-1]
    for adapter, before, after in zip(adapters(model), cache.keys, moved.keys, strict=True):
        temporal = torch.cat([adapter.facts.axes == 0] * 2)
        assert torch.equal(before[:, :, ~temporal], after[:, :, ~temporal])
        assert torch.equal(before[:, [0, 1, 8, 9, 10, 11]], after[:, [0, 1, 8, 9, 10, 11]])
        changed = (before[:, 2:8][:, :, temporal] != after[:, 2:8][:, :, temporal]).float().mean()
        assert float(changed) > 0.9
    back = move_along(model, moved, range(2, 8), -200, "temporal")
    assert max(moves.gap(a, b) for a, b in zip(back.keys, cache.keys, strict=True)) <= moves.TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_an_image_with_its_own_axes_moves_as_a_whole_with_the_sequence(name: str) -> None:
    model = contract.note_model(name)
    cache = moves.span(model)
    along = cache
    for axis in ("temporal", "height", "width"):
        along = move_along(model, along, range(moves.N), 50, axis)
    together = move_rows(model, cache, 50)
    assert max(moves.gap(a, b) for a, b in zip(along.keys, together.keys, strict=True)) <= moves.TOLERANCE


def test_other_shapes_of_position_ids_are_errors() -> None:
    three, four = torch.zeros(3, 1, 5), torch.arange(4).view(4, 1, 1).expand(4, 1, 5)
    assert text_and_axes(three)[0] is None
    text, axes = text_and_axes(four)
    assert text is not None and text.shape == (1, 5) and axes[0, 0, 0] == 1 and axes.shape == (3, 1, 5)
    for bad in (torch.zeros(1, 5), torch.zeros(2, 1, 5), torch.zeros(5, 1, 5)):
        with pytest.raises(CacheError, match=r"M-RoPE position ids have shape .*\[3, batch, pos\]"):
            text_and_axes(bad)


def test_one_axis_models_and_unknown_axes_are_refused() -> None:
    llama, vl = contract.note_model("llama"), contract.note_model("qwen2_5_vl")
    with pytest.raises(UnsupportedModelError, match="layer 0 of llama has one position axis; use move_rows"):
        move_along(llama, moves.span(llama), [0], 1, "temporal")
    with pytest.raises(CacheError, match="unknown axis 'time'; known: temporal, height, width"):
        move_along(vl, moves.span(vl), [0], 1, "time")
    with pytest.raises(CacheError, match="of a cache with 12 rows"):
        move_along(vl, moves.span(vl), [12], 1, "temporal")


def test_deltas_of_an_earlier_image_do_not_reach_a_later_prompt() -> None:
    """transformers keeps them on the module; prompts of ours go past it."""
    model = contract.note_model("qwen2_5_vl")
    before = model.prefill(contract.random_ids())
    try:
        model.hf.model.rope_deltas = torch.tensor([[-6]])
        after = model.prefill(contract.random_ids())
    finally:
        model.hf.model.rope_deltas = None
    assert torch.equal(before.hidden, after.hidden) and before.cache.digest() == after.cache.digest()
