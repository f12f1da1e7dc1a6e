"""Per-layer windows as ``layer_types`` declares them."""

from typing import Any

from notelens.errors import UnsupportedModelError
from notelens.models.base import FamilySpec


def window_from_layer_types(self: FamilySpec, config: Any, layer: int) -> int | None:
    """The window of ``layer``: ``config.sliding_window`` where its type is ``sliding_attention``.

    Raises:
        UnsupportedModelError: a layer type that is neither full nor sliding attention.
    """
    kind = config.layer_types[layer]
    if kind == "full_attention":
        return None
    if kind == "sliding_attention":
        return config.sliding_window
    raise UnsupportedModelError(
        f"{config.model_type}: layer {layer} has type {kind!r}; known: full or sliding attention"
    )
