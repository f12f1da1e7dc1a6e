"""What an attention adapter is: the one place that knows how a layer's stored rows depend on their position."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from notelens.errors import CacheError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from notelens.rope import Pairing

Support = Literal["free", "adapter", "partial", "refused"]
"""``free``: rows carry no position; ``adapter``: rows move exactly; ``partial``: with the limits named; ``refused``: not."""


@dataclass(frozen=True)
class LayerFacts:
    """What a family knows about one layer; an adapter takes what it needs.

    Attributes:
        inv_freq: inverse frequencies as the model itself uses them, ``[pair]``; ``None`` where keys are not rotated.
        pairing: which channels of a *stored* key form a rotating pair.
        window: how many positions the layer sees back, itself included; ``None`` sees all.
        table_end: first position from which on the model would use other frequencies; ``None`` where one table holds.
        axes: M-RoPE axis (0 temporal, 1 height, 2 width) of every pair, int64 ``[pair]``.
        d_plain: channels of a stored key in front of the rotary ones.
    """

    inv_freq: "Float[Tensor, ' pair'] | None" = None
    pairing: "Pairing" = "half"
    window: int | None = None
    table_end: int | None = None
    axes: "Int[Tensor, ' pair'] | None" = None
    d_plain: int = 0


class AttentionAdapter(ABC):
    """One kind of stored attention row. The first line of a subclass's docstring stands in the README.

    Attributes:
        support: how far the representation is supported.
        moves: what a move changes in a row, for the README.
        limits: what does not work, for the README and ``notelens gate``; empty where nothing is missing.
        proof: the test that shows it, ``file::test``.
        recurrent: whether the layer also keeps a state that is not stored per token.
    """

    support: ClassVar[Support]
    moves: ClassVar[str]
    limits: ClassVar[str] = ""
    proof: ClassVar[str]
    recurrent: ClassVar[bool] = False

    def __init__(self, facts: LayerFacts) -> None:
        self.facts = facts

    @abstractmethod
    def move(
        self,
        keys: "Float[Tensor, 'kv_head pos d_key']",
        values: "Float[Tensor, 'kv_head pos d_value']",
        delta: "Tensor",
    ) -> "tuple[Tensor, Tensor]":
        """Rows at other positions, as if they had been computed there.

        Args:
            keys, values: stored rows, unchanged by the call.
            delta: positions to move by, int64 ``[pos]`` (``[3, pos]`` where axes move apart).

        Returns:
            Keys and values of the same types; what does not depend on the position is the same tensor.

        Raises:
            UnsupportedModelError: rows of this kind cannot be moved.

        Cost: one rotation of what is rotary; no forward pass.
        """

    def move_into(self, keys: "Tensor", values: "Tensor", delta: "Tensor", out: "tuple[Tensor, Tensor]") -> None:
        """As :meth:`move`, written into given memory, which is apart from ``keys`` and ``values``.

        Args:
            out: memory for keys and values, of their shapes.
        """
        for target, moved in zip(out, self.move(keys, values, delta), strict=True):
            target.copy_(moved)

    def check(self, old: "Int[Tensor, ' pos']", new: "Int[Tensor, ' pos']") -> None:
        """Check that rows may go from ``old`` to ``new`` positions.

        Raises:
            CacheError: the two would need different frequency tables.
        """
        end = self.facts.table_end
        for where, positions in (("are", old), ("would be", new)):
            if end is not None and len(positions) and int(positions.max()) >= end:
                raise CacheError(
                    f"rows {where} at position {int(positions.max())}, and from {end} on this model rotates with another "
                    "frequency table (dynamic or longrope); rows of two tables cannot be joined: keep the prompt below "
                    f"{end} positions, or prefill it in full"
                )

    def readable(self, positions: "Int[Tensor, ' pos']", reader: int) -> "Bool[Tensor, ' pos']":
        """Which rows a token at position ``reader`` can attend to in this layer."""
        seen = positions <= reader
        if self.facts.window is not None:
            seen = seen & (reader - positions < self.facts.window)
        return seen
