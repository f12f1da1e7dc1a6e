"""Loading models: what the library needs of them, one spec per family, and the admission gate."""

from notelens.models.base import FamilySpec, Geometry, LayerGeometry, NoteModel, Prefill
from notelens.registry import Registry

FAMILIES: Registry[type[FamilySpec]] = Registry(
    "model family",
    {
        "llama": "notelens.models.families.llama:Llama",
        "qwen2": "notelens.models.families.qwen2:Qwen2",
        "qwen3": "notelens.models.families.qwen3:Qwen3",
        "qwen3_moe": "notelens.models.families.qwen3_moe:Qwen3Moe",
        "mistral": "notelens.models.families.mistral:Mistral",
        "mixtral": "notelens.models.families.mixtral:Mixtral",
        "gemma2": "notelens.models.families.gemma2:Gemma2",
        "gemma3_text": "notelens.models.families.gemma3:Gemma3",
        "gpt_oss": "notelens.models.families.gpt_oss:GptOss",
        "phi3": "notelens.models.families.phi3:Phi3",
        "smollm3": "notelens.models.families.smollm3:SmolLM3",
        "olmo2": "notelens.models.families.olmo2:Olmo2",
        "glm": "notelens.models.families.glm:Glm",
        "glm4": "notelens.models.families.glm4:Glm4",
        "deepseek_v2": "notelens.models.families.deepseek_v2:DeepseekV2",
        "deepseek_v3": "notelens.models.families.deepseek_v3:DeepseekV3",
        "falcon_h1": "notelens.models.families.falcon_h1:FalconH1",
        "qwen2_5_vl": "notelens.models.families.qwen2_5_vl:Qwen25VL",
        "qwen3_vl": "notelens.models.families.qwen3_vl:Qwen3VL",
    },
)

__all__ = ["FAMILIES", "FamilySpec", "Geometry", "LayerGeometry", "NoteModel", "Prefill"]
