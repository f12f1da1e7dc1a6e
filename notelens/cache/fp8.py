"""Rows stored as 8-bit floats: read with their scale, saturation counted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from notelens.errors import CacheError

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Fp8Report:
    """How rows left 8 bits.

    Attributes:
        scale: what stored numbers were multiplied with.
        source: where that scale came from.
        n_saturated: stored numbers at the largest value of the type; the original may have been larger.
        n: all numbers.
    """

    scale: float
    source: str
    n_saturated: int
    n: int

    @property
    def note(self) -> str:
        """One line for the history of a cache."""
        share = f"{self.n_saturated} of {self.n} saturated"
        return f"rows from fp8, scale {self.scale:g} ({self.source}), {share}"


def quantise(rows: Tensor, scale: float, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Rows divided by ``scale`` and stored in 8 bits; larger numbers saturate at the type's largest, as engines do it."""
    _check(dtype, scale)
    largest = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-largest, largest).to(dtype)


def dequantise(
    stored: Tensor, scale: float, *, source: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Fp8Report]:
    """Rows of an fp8 cache as full numbers.

    Args:
        stored: float8 rows.
        scale: the scale that they were stored with; it is never guessed.
        source: where the scale was read (checkpoint, engine default, calibration); kept in the report.

    Raises:
        CacheError: not a float8 type, or a scale that is not positive.
    """
    _check(stored.dtype, scale)
    full = stored.to(torch.float32)
    n_saturated = int((full.abs() >= torch.finfo(stored.dtype).max).sum())
    return (full * scale).to(dtype), Fp8Report(scale, source, n_saturated, stored.numel())


def _check(dtype: torch.dtype, scale: float) -> None:
    if dtype not in FP8_TYPES:
        raise CacheError(f"{dtype} is not an 8-bit float; known: {', '.join(map(str, FP8_TYPES))}")
    if not scale > 0:
        raise CacheError(f"a scale of {scale} cannot be undone; read it from the checkpoint or the engine's settings")


__all__ = ["FP8_TYPES", "Fp8Report", "dequantise", "quantise"]
