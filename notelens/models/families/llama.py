"""Llama: grouped-query attention, one rotation for all layers."""

from notelens.models.base import FamilySpec


class Llama(FamilySpec):
    """Llama 2 and 3, SmolLM2 and other checkpoints of type ``llama``."""

    model_types = ("llama",)
    harmless = {  # noqa: RUF012 - read-only; what SmolLM2's files carry
        "is_llama_config": None,
        "rope_interleaved": (False,),
        "transformers.js_config": None,
    }
