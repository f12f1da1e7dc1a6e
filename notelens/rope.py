"""Rotations: moving cached keys by a difference of positions, in float32 or better."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING or find_spec(
    "jaxtyping"
):  # annotations only: a serving engine's environment has torch and nothing of ours
    from jaxtyping import Float

Pairing = Literal["half", "adjacent"]
BLOCK_BYTES = 2**20
"""Keys are turned in blocks of rows that stay in a core's cache between the three passes; smaller ones cost more calls."""
N_TABLES = 4
_TABLES: list[tuple[tuple[str, torch.dtype], Tensor, Tensor, Tensor, Tensor]] = []
"""The last tables of one difference per row, as all layers ask for the same: pairing and type, steps, frequencies, table."""


def rotate(
    keys: "Float[Tensor, '*heads pos d_key']",
    delta: int | Tensor,
    inv_freq: "Float[Tensor, ' pairs']",
    *,
    pairing: Pairing = "half",
    out: Tensor | None = None,
) -> "Float[Tensor, '*heads pos d_key']":
    """Turn already rotated keys by ``delta`` positions.

    A rotation by position followed by this one equals a rotation by ``position + delta``; magnitude factors (YaRN) were
    applied once and cancel. Channels beyond ``2 * len(inv_freq)`` are not rotary and stay bit-identical.

    Args:
        keys: stored keys.
        delta: positions to move by, one number or one per row.
        inv_freq: the layer's own inverse frequencies.
        pairing: ``half`` pairs channel i with i + d/2 (Llama), ``adjacent`` pairs 2i with 2i + 1 (GPT-J, Cohere, GLM).
        out: memory for the result, of the shape and type of ``keys`` and apart from them.

    Returns:
        Keys of the same type; angles are computed in float64, the rotation in float32 (float64 for such keys), cast back once.
    """
    width, n = 2 * inv_freq.shape[0], keys.shape[-2]
    work = torch.float64 if keys.dtype == torch.float64 else torch.float32
    cos, sin = _table(torch.as_tensor(delta, device=keys.device), inv_freq, work, pairing)
    out = torch.empty_like(keys, memory_format=torch.contiguous_format) if out is None else out
    if width < keys.shape[-1]:
        out[..., width:] = keys[..., width:]
    row_bytes = max(1, keys[..., :1, :width].numel()) * work.itemsize
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        c, s = (t[rows] if t.ndim == 2 else t for t in (cos, sin))
        source, target = keys[..., rows, :width].to(work), out[..., rows, :width]
        turned = target if target.dtype == work else torch.empty_like(source)
        (a, b), (x, y) = _halves(source, pairing), _halves(turned, pairing)
        torch.mul(source, c, out=turned)
        x.addcmul_(b, s, value=-1)
        y.addcmul_(a, s)
        if turned is not target:
            target.copy_(turned)
    return out


def _halves(keys: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """First and second channels of all pairs, as views."""
    if pairing == "half":
        half = keys.shape[-1] // 2
        return keys[..., :half], keys[..., half:]
    return keys[..., 0::2], keys[..., 1::2]


def _table(delta: Tensor, inv_freq: Tensor, work: torch.dtype, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Cosines of every rotary channel and sines of every pair: of one row where all move alike, otherwise of each."""
    if delta.numel() and bool((delta == delta.flatten()[0]).all()):
        delta = delta.flatten()[0]
    if delta.ndim:
        for kind, steps, frequencies, cos, sin in _TABLES:
            if kind == (pairing, work) and _same(steps, delta) and _same(frequencies, inv_freq):
                return cos, sin
    angle = delta.to(torch.float64)[..., None] * inv_freq.to(torch.float64)
    cos, sin = angle.cos().to(work), angle.sin().to(work)
    cos = torch.cat([cos, cos], dim=-1) if pairing == "half" else cos.repeat_interleave(2, dim=-1)
    if delta.ndim:
        _TABLES.insert(0, ((pairing, work), delta.clone(), inv_freq.clone(), cos, sin))
        del _TABLES[N_TABLES:]
    return cos, sin


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
