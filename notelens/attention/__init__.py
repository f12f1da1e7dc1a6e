"""How one kind of attention stores its rows, and what moving rows to other positions changes in them.

One file per kind, one line here per representation; the README's support table is made from this registry.
"""

from notelens.attention.base import AttentionAdapter, LayerFacts
from notelens.registry import Registry

ADAPTERS: Registry[type[AttentionAdapter]] = Registry(
    "attention representation",
    {
        "gqa": "notelens.attention.gqa:Rotated",
        "no_rope": "notelens.attention.gqa:Unrotated",
        "one_table": "notelens.attention.one_table:OneTable",
        "sliding": "notelens.attention.sliding:Sliding",
        "mla": "notelens.attention.mla:Latent",
        "mla_expanded": "notelens.attention.mla:Expanded",
        "mrope": "notelens.attention.mrope:Axes",
        "hybrid": "notelens.attention.hybrid:Hybrid",
        "alibi": "notelens.attention.alibi:Alibi",
        "recurrent": "notelens.attention.refused:Recurrent",
        "encoder_decoder": "notelens.attention.refused:EncoderDecoder",
        "learned_positions": "notelens.attention.refused:LearnedPositions",
    },
)

__all__ = ["ADAPTERS", "AttentionAdapter", "LayerFacts"]
