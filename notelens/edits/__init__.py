"""Editing a cached prompt: one method per file, each with its true cost (paper, section on editing)."""

from notelens.registry import Registry

EDITS: Registry[type] = Registry(
    "edit method",
    {
        "stale": "notelens.edits.stale:Stale",
        "full_prefill": "notelens.edits.full_prefill:FullPrefill",
        "full_suffix": "notelens.edits.full_suffix:FullSuffix",
        "in_place": "notelens.edits.in_place:InPlace",
        "hoist": "notelens.edits.hoist:Hoist",
        "erratum": "notelens.edits.erratum:Erratum",
        "field_erratum": "notelens.edits.field_erratum:FieldErratum",
        "selective": "notelens.edits.selective:Selective",
        "edit_local": "notelens.edits.edit_local:EditLocal",
        "carrier_window": "notelens.edits.carrier_window:CarrierWindow",
        "transplant": "notelens.edits.transplant:Transplant",
        "auto": "notelens.edits.auto:Auto",
    },
)

__all__ = ["EDITS"]
