"""DeepSeek-V3 and R1: latent attention; the rotary slice is stored half-split, whatever the weights' order."""

from notelens.models.families.deepseek_v2 import DeepseekV2


class DeepseekV3(DeepseekV2):
    """DeepSeek-V3 and R1 checkpoints.

    ``rope_interleave`` says how the projection orders the channels; transformers writes the rotated halves behind one another
    either way, so what is *stored* pairs channel i with i + d/2.
    """

    model_types = ("deepseek_v3",)
    pairing = "half"
    harmless = {  # noqa: RUF012 - read-only
        "moe_layer_freq": (1,),
        "ep_size": None,
        "seq_aux": None,
        "aux_loss_alpha": None,
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "num_nextn_predict_layers": None,
    }
