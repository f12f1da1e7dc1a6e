"""M-RoPE: three position axes (temporal, height, width), each turning its own pairs of channels."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from notelens.attention.base import Support
from notelens.attention.gqa import Rotated
from notelens.errors import CacheError, UnsupportedModelError
from notelens.rope import rotate

AXES = ("temporal", "height", "width")
Layout = Literal["sectioned", "interleaved"]


def pair_axes(section: Sequence[int], layout: Layout) -> Int[Tensor, " pair"]:
    """Which axis turns each pair of channels.

    Args:
        section: number of pairs of the temporal, height and width axis, as ``mrope_section`` of the config.
        layout: ``sectioned`` (Qwen2.5-VL: one block per axis) or ``interleaved`` (Qwen3-VL: T H W T H W ..., T at the end).

    Raises:
        UnsupportedModelError: the sections are not three positive numbers, or do not fit an interleaved layout.
    """
    if len(section) != 3 or any(n < 1 for n in section):
        raise UnsupportedModelError(f"mrope_section {list(section)} must be three positive numbers of pairs")
    if layout == "sectioned":
        return torch.repeat_interleave(torch.arange(3), torch.tensor(list(section)))
    axes = torch.zeros(sum(section), dtype=torch.int64)
    for axis in (1, 2):
        if axis + 3 * (section[axis] - 1) >= len(axes):
            raise UnsupportedModelError(f"mrope_section {list(section)} does not fit an interleaved layout")
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def text_and_axes(position_ids: Int[Tensor, "row batch pos"]) -> tuple[Tensor | None, Int[Tensor, "3 batch pos"]]:
    """Split what transformers takes as M-RoPE position ids: (text positions or ``None``, the three axes).

    Raises:
        CacheError: neither ``[3, batch, pos]`` nor ``[4, batch, pos]`` (text positions first), which is all that the supported
            transformers versions understand.
    """
    if position_ids.ndim != 3 or position_ids.shape[0] not in (3, 4):
        raise CacheError(
            f"M-RoPE position ids have shape {tuple(position_ids.shape)}; give [3, batch, pos] (temporal, height, width) or "
            "[4, batch, pos] (text positions first)"
        )
    return (position_ids[0], position_ids[1:]) if position_ids.shape[0] == 4 else (None, position_ids)


def grid_positions(
    start: int, grid: tuple[int, int, int], *, merge: int = 1, interval: float = 1.0
) -> Int[Tensor, "3 pos"]:
    """Positions of an image or video of ``grid`` (frames, height, width in patches) that begins at ``start``.

    Args:
        merge: patches per side that the vision tower merges into one token.
        interval: temporal distance of frames (Qwen2.5-VL: tokens per second times seconds per frame; 1 for an image).

    Returns:
        ``[3, token]``; text behind it goes on at ``start + max(height, width) / merge``, as transformers 5.16 to 5.19 does it.
    """
    frames, height, width = grid[0], grid[1] // merge, grid[2] // merge
    t = (torch.arange(frames) * interval).long()
    axes = torch.meshgrid(t, torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack(axes).reshape(3, -1) + start


class Axes(Rotated):
    """M-RoPE, sectioned (Qwen2.5-VL) and interleaved (Qwen3-VL): each axis turns its own pairs."""

    support: ClassVar[Support] = "adapter"
    moves: ClassVar[str] = (
        "pairs of the axes that moved: all three for text, the temporal ones for an image moved in time"
    )
    limits: ClassVar[str] = "the text side; images enter as positions, the vision tower is not run"
    proof: ClassVar[str] = "tests/test_attention_mrope.py::test_an_image_moves_along_the_temporal_axis_only"

    def move(self, keys: Tensor, values: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Keys turned pair by pair; ``delta`` is ``[pos]`` (all axes alike) or ``[3, pos]``."""
        facts = self.facts
        if facts.inv_freq is None or facts.axes is None or len(facts.axes) != len(facts.inv_freq):
            raise UnsupportedModelError("M-RoPE needs an inverse frequency and an axis for every pair")
        if delta.ndim == 1 or delta.shape[0] == 1:
            return rotate(keys, delta.reshape(-1).to(keys.device), facts.inv_freq, pairing=facts.pairing), values
        if delta.shape != (3, keys.shape[-2]):
            raise CacheError(f"{keys.shape[-2]} rows but differences of shape {tuple(delta.shape)}; give [3, pos]")
        out = keys
        for axis in range(3):  # a pair of another axis has frequency 0 here, which leaves its channels bit-identical
            only = torch.where(facts.axes.to(keys.device) == axis, facts.inv_freq, torch.zeros_like(facts.inv_freq))
            if bool(delta[axis].any()):
                out = rotate(out, delta[axis].to(keys.device), only, pairing=facts.pairing)
        return out, values
