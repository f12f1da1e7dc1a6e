"""Changing the type of a model without touching the tables that rotate its keys."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def cast_(model: Any, dtype: "torch.dtype") -> Any:
    """Give every floating parameter and buffer type ``dtype``, in place, but for inverse frequencies; returns the model.

    ``model.to(torch.bfloat16)`` would round the inverse frequencies of RoPE to 8 bits, which turns keys at position 1,000 by up
    to 2 radians too far; transformers keeps them in float32 when it loads a checkpoint. Tied parameters stay tied.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype != dtype and "inv_freq" not in name:
            tensor.data = tensor.data.to(dtype)
    return model
