"""Loading models: what the library needs of them, one spec per family, and the admission gate."""

from notelens.models.base import FamilySpec, Geometry, LayerGeometry, NoteModel, Prefill
from notelens.registry import Registry

FAMILIES: Registry[type[FamilySpec]] = Registry(
    "model family",
    {
        "llama": "notelens.models.families.llama:Llama",
        "qwen3": "notelens.models.families.qwen3:Qwen3",
        "mistral": "notelens.models.families.mistral:Mistral",
        "mixtral": "notelens.models.families.mixtral:Mixtral",
        "gemma2": "notelens.models.families.gemma2:Gemma2",
        "gemma3_text": "notelens.models.families.gemma3:Gemma3",
        "gpt_oss": "notelens.models.families.gpt_oss:GptOss",
    },
)

__all__ = ["FAMILIES", "FamilySpec", "Geometry", "LayerGeometry", "NoteModel", "Prefill"]
