"""Reading the residual stream with plain module hooks that always come off again."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from notelens.errors import UnsupportedModelError


@contextlib.contextmanager
def residual_stream(layers: nn.ModuleList, rows: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collect the residual stream at ``rows`` while a forward pass runs inside the block.

    Yields:
        A list that holds, after the forward pass, ``n_layers + 1`` detached tensors ``[len(rows), d_model]``: the input of
        the first layer, then the output of every layer.

    Raises:
        UnsupportedModelError: a layer's output is not ``[1, length, width]``.
    """
    found: list[Tensor] = []
    handles: list[Any] = []

    def take(hidden: Any, where: str) -> None:
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3 or hidden.shape[0] != 1:
            raise UnsupportedModelError(f"{where} is not a [1, length, width] tensor; residuals cannot be read here")
        found.append(hidden[0, list(rows)].detach().clone())

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(args[0] if args else kwargs.get("hidden_states"), "the input of the first layer")

    def after(_: nn.Module, __: Any, output: Any) -> None:
        take(output, "a layer's output")

    try:
        handles.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
        handles.extend(layer.register_forward_hook(after) for layer in layers)
        yield found
    finally:
        for handle in handles:
            handle.remove()
