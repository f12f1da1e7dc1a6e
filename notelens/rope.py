"""Rotations: moving cached keys by a difference of positions, in float32 or better."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Pairing = Literal["half", "adjacent"]


def rotate(
    keys: Float[Tensor, "*heads pos d_key"],
    delta: int | Tensor,
    inv_freq: Float[Tensor, " pairs"],
    *,
    pairing: Pairing = "half",
) -> Float[Tensor, "*heads pos d_key"]:
    """Turn already rotated keys by ``delta`` positions.

    A rotation by position followed by this one equals a rotation by ``position + delta``; magnitude factors (YaRN) were
    applied once and cancel. Channels beyond ``2 * len(inv_freq)`` are not rotary and stay bit-identical.

    Args:
        keys: stored keys.
        delta: positions to move by, one number or one per row.
        inv_freq: the layer's own inverse frequencies.
        pairing: ``half`` pairs channel i with i + d/2 (Llama), ``adjacent`` pairs 2i with 2i + 1 (GPT-J, Cohere, GLM).

    Returns:
        Keys of the same type; angles and rotation are computed in float64, cast back once.
    """
    width = 2 * inv_freq.shape[0]
    steps = torch.as_tensor(delta, dtype=torch.float64, device=keys.device)
    angle = steps[..., None] * inv_freq.to(torch.float64)
    cos, sin = angle.cos(), angle.sin()
    turned, rest = keys[..., :width].to(torch.float64), keys[..., width:]
    if pairing == "half":
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
        moved = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        moved = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([moved.to(keys.dtype), rest], dim=-1)
