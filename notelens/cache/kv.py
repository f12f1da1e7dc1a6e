"""The cached keys and values of one prefilled sequence, as an immutable value."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from notelens.errors import CacheError, NonFiniteError

if TYPE_CHECKING:
    from notelens.cache.room import Room


@dataclass(frozen=True)
class RecurrentState:
    """What the recurrent layers of a hybrid hold behind some number of tokens; it has no rows.

    Attributes:
        conv: per layer, the last inputs of the short convolution.
        scan: per layer, the state of the scan.
    """

    conv: tuple[Tensor, ...]
    scan: tuple[Tensor, ...]


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer for one sequence, with the absolute position and id of every row.

    Nothing in the library writes to rows that are there: running a model from a cache leaves it as it is, and every operation
    returns a new cache that may share rows with the old one.

    Attributes:
        keys: per layer, ``[kv_head, pos, d_key]``, rotated to ``positions`` where the layer uses RoPE.
        values: per layer, ``[kv_head, pos, d_value]``.
        positions: absolute position of every row, strictly increasing, int64 ``[pos]``.
        token_ids: id of the token of every row.
        history: empty for an exact cache (equal to a fresh prefill of ``token_ids``); otherwise what was done to it.
        states: of hybrids, the recurrent state behind the first ``n`` rows, for some ``n``; empty for other models.
        room: memory that the rows are views of and that further rows may be written into, where there is some.

    Raises:
        CacheError: lengths, shapes, dtypes or devices disagree, or positions do not increase.
    """

    keys: tuple[Float[Tensor, "kv_head pos d_key"], ...]
    values: tuple[Float[Tensor, "kv_head pos d_value"], ...]
    positions: Int[Tensor, " pos"]
    token_ids: tuple[int, ...]
    history: tuple[str, ...] = ()
    states: Mapping[int, RecurrentState] = field(default_factory=dict)
    room: "Room | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise CacheError(
                f"a cache needs keys and values for every layer, got {len(self.keys)} and {len(self.values)}"
            )
        n = len(self.token_ids)
        if self.positions.dtype != torch.int64 or self.positions.shape != (n,):
            raise CacheError(
                f"{n} token ids but positions {tuple(self.positions.shape)} of type {self.positions.dtype}"
            )
        if n > 1 and not bool((self.positions[1:] > self.positions[:-1]).all()):
            raise CacheError("positions of a cache must strictly increase")
        if n and int(self.positions[0]) < 0:
            raise CacheError(f"positions of a cache start at {int(self.positions[0])}; they cannot be negative")
        first = self.keys[0]
        for layer, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            for name, tensor in (("keys", k), ("values", v)):
                if tensor.ndim != 3 or tensor.shape[1] != n:
                    raise CacheError(
                        f"layer {layer}: {name} have shape {tuple(tensor.shape)}; expected [kv_head, {n}, width] "
                        f"for {n} tokens"
                    )
                if tensor.requires_grad:
                    raise CacheError(f"layer {layer}: {name} carry gradients; detach them before caching")
                if tensor.dtype != first.dtype or tensor.device != first.device:
                    raise CacheError(
                        f"layer {layer}: {name} are {tensor.dtype} on {tensor.device}, layer 0 is {first.dtype} on "
                        f"{first.device}"
                    )
            if k.shape[0] != v.shape[0]:
                raise CacheError(f"layer {layer}: {k.shape[0]} key heads but {v.shape[0]} value heads")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        mark = "exact" if self.exact else f"approximate ({'; '.join(self.history)})"
        return (
            f"KVCache({len(self)} tokens, {self.n_layers} layers, {self.dtype}, {self.nbytes / 2**20:.1f} MiB, {mark})"
        )

    @property
    def n_layers(self) -> int:
        """Number of layers that store rows."""
        return len(self.keys)

    @property
    def exact(self) -> bool:
        """Whether all rows equal a fresh prefill of ``token_ids``."""
        return not self.history

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored rows."""
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.keys[0].device

    @property
    def next_position(self) -> int:
        """The absolute position of the next token (not the number of rows where rows have been removed)."""
        return int(self.positions[-1]) + 1 if len(self) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def check_finite(self) -> "KVCache":
        """Return self.

        Raises:
            NonFiniteError: a row holds NaN or infinity; the message names layer and position.
        """
        for layer, pair in enumerate(zip(self.keys, self.values, strict=True)):
            for name, tensor in zip(("keys", "values"), pair, strict=True):
                bad = ~torch.isfinite(tensor).all(dim=-1).all(dim=0)
                if bool(bad.any()):
                    row = int(bad.nonzero()[0])
                    raise NonFiniteError(f"layer {layer}: {name} of row {row} are not finite")
        return self

    def digest(self) -> str:
        """SHA-256 over ids, positions and every row; equal digests mean bit-identical caches."""
        h = hashlib.sha256(repr((self.token_ids, self.positions.tolist())).encode())
        states = [t for n in sorted(self.states) for t in (*self.states[n].conv, *self.states[n].scan)]
        for tensor in (*self.keys, *self.values, *states):
            h.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return h.hexdigest()

    def replace_tensors(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], *, history: tuple[str, ...]
    ) -> "KVCache":
        """The same rows' ids, positions and recurrent state with other keys and values and the given history."""
        return KVCache(tuple(keys), tuple(values), self.positions, self.token_ids, history, self.states)
