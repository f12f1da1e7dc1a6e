"""Changing the type of a model's parameters without touching the tables that rotate its keys."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def cast_(model: Any, dtype: "torch.dtype") -> Any:
    """Give every floating parameter type ``dtype``, in place; returns the model.

    Buffers stay as they are: ``model.to(torch.bfloat16)`` would round the inverse frequencies of RoPE to 8 bits, which turns
    keys at position 1,000 by up to 2 radians too far. Tied parameters stay tied.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    return model
