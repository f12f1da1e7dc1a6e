"""Grouped-query attention (multi-head and multi-query included): keys rotated per layer, or not at all."""

from typing import ClassVar

from torch import Tensor

from notelens.attention.base import AttentionAdapter, Support
from notelens.errors import UnsupportedModelError
from notelens.rope import rotate


class Rotated(AttentionAdapter):
    """MHA, MQA and GQA with RoPE: default, linear, llama3, YaRN, proportional; partial; half-split or adjacent pairs."""

    support: ClassVar[Support] = "adapter"
    moves: ClassVar[str] = "rotary channels of keys, with the layer's own frequencies; YaRN's magnitude cancels"
    proof: ClassVar[str] = "tests/test_attention.py::test_a_moved_span_equals_a_recomputed_one"

    def move(self, keys: Tensor, values: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Keys turned by the difference of positions; values are the same tensor."""
        if self.facts.inv_freq is None:
            raise UnsupportedModelError(
                f"{type(self).__name__} needs inverse frequencies; rows without RoPE are 'no_rope'"
            )
        return rotate(keys, delta.to(keys.device), self.facts.inv_freq, pairing=self.facts.pairing), values

    def move_into(self, keys: Tensor, values: Tensor, delta: Tensor, out: tuple[Tensor, Tensor]) -> None:
        """Turned on the way into place; one pass over keys, one copy of values."""
        if self.facts.inv_freq is None or self.facts.axes is not None:
            super().move_into(keys, values, delta, out)
            return
        rotate(keys, delta.to(keys.device), self.facts.inv_freq, pairing=self.facts.pairing, out=out[0])
        out[1].copy_(values)


class Unrotated(AttentionAdapter):
    """Layers without RoPE (SmolLM3's every fourth): rows carry no position."""

    support: ClassVar[Support] = "free"
    moves: ClassVar[str] = "nothing"
    proof: ClassVar[str] = "tests/test_attention.py::test_layers_without_rope_are_left_alone"

    def move(self, keys: Tensor, values: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The same tensors."""
        return keys, values
