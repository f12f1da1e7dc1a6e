"""Which attention function a model runs, for as long as somebody needs another one."""

import contextlib
from collections.abc import Iterator

from notelens.models.base import NoteModel


@contextlib.contextmanager
def attention_switched(model: NoteModel, kernel: str) -> Iterator[None]:
    """Run a model with the attention function registered as ``kernel``; the one before comes back in any case."""
    before = model.attention_kernel
    model.hf.set_attn_implementation(kernel)
    try:
        yield
    finally:
        model.hf.set_attn_implementation(before)


__all__ = ["attention_switched"]
