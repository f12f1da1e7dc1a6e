"""Fewer rows from one layer to the next: what a pass drops from the inputs of the layers that follow."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from notelens.models.base import NoteModel

Narrowing = Callable[[int, Tensor, Tensor], Tensor]
"""``(layer, deviation, rows)``: which entries of ``rows`` (indices into it, ascending) run in the next layer. ``deviation`` is
the squared distance of the new from the old keys and values of each of them in this layer, relative to the old."""


class Dropping(Protocol):
    """Who decides what is dropped.

    Attributes:
        keep: entries that go on to the next layer; ``None`` where all do. Taken, and set to ``None``, by the next layer.
    """

    keep: Tensor | None


def deviation(new: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
    """Squared distance of new from old rows relative to the old, summed over keys and values, ``[row]``."""
    total = torch.zeros(new[0].shape[1], device=new[0].device)
    for a, b in zip(new, old, strict=True):
        total = total + (a - b).float().square().sum((0, 2)) / b.float().square().sum((0, 2)).clamp_min(1e-12)
    return total


@contextlib.contextmanager
def narrowed(model: NoteModel, state: Dropping) -> Iterator[None]:
    """Drop what does not go on from the inputs of every layer; the hooks come off in any case."""
    dropped: list[tuple[int, Tensor]] = []

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if state.keep is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            dropped.append((hidden.shape[1], state.keep))
            state.keep = None
        # the hidden states carry the last narrowing only, what the model repeats for every layer all of them
        hidden, *rest = args if args else (kwargs["hidden_states"],)
        if dropped and hidden.shape[1] == dropped[-1][0]:
            hidden = hidden[:, dropped[-1][1]]
        out = {k: _cut(v, dropped) for k, v in kwargs.items() if k != "hidden_states"}
        if args:
            return (hidden, *(_cut(a, dropped) for a in rest)), out
        return (), {"hidden_states": hidden, **out}

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in model.family.layers(model.hf)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut(value: Any, dropped: Sequence[tuple[int, Tensor]]) -> Any:
    """Tensors with one entry per token ``[1, token, ...]`` without the tokens that stopped."""
    if isinstance(value, tuple | list):
        return type(value)(_cut(v, dropped) for v in value)
    if isinstance(value, dict):
        return {k: _cut(v, dropped) for k, v in value.items()}
    if isinstance(value, Tensor) and value.ndim >= 2 and dropped and value.shape[1] == dropped[0][0]:
        for _, keep in dropped:
            value = value[:, keep]
    return value


__all__ = ["Dropping", "Narrowing", "deviation", "narrowed"]
