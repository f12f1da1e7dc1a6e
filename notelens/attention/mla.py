"""Multi-head latent attention (DeepSeek): a position-free latent, and a narrow rotary slice that all heads share."""

from typing import ClassVar

import torch
from torch import Tensor

from notelens.attention.base import AttentionAdapter, Support
from notelens.errors import UnsupportedModelError
from notelens.rope import rotate


class Latent(AttentionAdapter):
    """MLA latent caches (DeepSeek-V2, V3): one latent and one rotary slice per token."""

    support: ClassVar[Support] = "adapter"
    moves: ClassVar[str] = "the rotary slice, stored as values; the latent, stored as keys, stays bit-identical"
    limits: ClassVar[str] = "hooks run on whole prompts only, not behind a cache"
    proof: ClassVar[str] = "tests/test_attention_mla.py::test_only_the_rotary_slice_moves"

    def move(self, keys: Tensor, values: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The latent as it is, the rotary slice turned."""
        if self.facts.inv_freq is None:
            raise UnsupportedModelError("a latent cache needs the inverse frequencies of its rotary slice")
        return keys, rotate(values, delta.to(values.device), self.facts.inv_freq, pairing=self.facts.pairing)


class Expanded(AttentionAdapter):
    """MLA expanded caches: keys of plain and rotary channels, values of another width."""

    support: ClassVar[Support] = "adapter"
    moves: ClassVar[str] = "the last rotary channels of every key"
    limits: ClassVar[str] = "what attention and the patch engine see; transformers stores the latent"
    proof: ClassVar[str] = "tests/test_attention_mla.py::test_moving_and_expanding_commute"

    def move(self, keys: Tensor, values: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Plain channels and values as they are, the rotary channels turned."""
        if self.facts.inv_freq is None:
            raise UnsupportedModelError("an expanded cache needs the inverse frequencies of its rotary channels")
        plain, rotary = keys[..., : self.facts.d_plain], keys[..., self.facts.d_plain :]
        turned = rotate(rotary, delta.to(keys.device), self.facts.inv_freq, pairing=self.facts.pairing)
        return torch.cat([plain, turned], dim=-1), values
