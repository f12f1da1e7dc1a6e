"""Causal probes: one claim per file."""

from notelens.registry import Registry

PROBES: Registry[type] = Registry(
    "probe",
    {
        "locality": "notelens.probes.locality:Locality",
        "dissociation": "notelens.probes.dissociation:Dissociation",
        "timing": "notelens.probes.timing:Timing",
        "specificity": "notelens.probes.specificity:Specificity",
        "injection": "notelens.probes.injection:Injection",
        "suffix_concentration": "notelens.probes.suffix_concentration:SuffixConcentration",
        "token_stats": "notelens.probes.token_stats:TokenStats",
        "knockout": "notelens.probes.knockout:Knockout",
        "placebo": "notelens.probes.placebo:Placebo",
    },
)

__all__ = ["PROBES"]
