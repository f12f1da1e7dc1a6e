"""Architectures that are refused for what they are, so that the error can say why."""

from notelens.attention import ADAPTERS

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"),
        "recurrent",
    ),
    **dict.fromkeys(
        (
            "t5",
            "mt5",
            "umt5",
            "bart",
            "mbart",
            "pegasus",
            "led",
            "marian",
            "whisper",
            "t5gemma",
            "m2m_100",
            "blenderbot",
        ),
        "encoder_decoder",
    ),
    **dict.fromkeys(("gpt2", "opt", "gpt_neo", "biogpt", "gpt_bigcode", "xglm", "ctrl"), "learned_positions"),
    **dict.fromkeys(("bloom", "mpt"), "alibi"),
}
"""Model type to the representation that it has."""


def refusal(model_type: str) -> str | None:
    """Why a model type is refused; ``None`` where nothing is known of it."""
    if model_type not in REFUSED:
        return None
    return f"{REFUSED[model_type].replace('_', ' ')}: {ADAPTERS.get(REFUSED[model_type]).limits}"
