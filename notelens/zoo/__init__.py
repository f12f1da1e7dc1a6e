"""Models that come with a package: embedded pretrained weights with shipped adapters, and organisms trained from scratch."""

from notelens.zoo.embedded import EMBEDDED, EmbeddedSpec, embedded_tokenizer, load_embedded
from notelens.zoo.organisms import OrganismSpec, load_organism, organism_specs, organism_tokenizer

__all__ = [
    "EMBEDDED",
    "EmbeddedSpec",
    "OrganismSpec",
    "embedded_tokenizer",
    "load_embedded",
    "load_organism",
    "organism_specs",
    "organism_tokenizer",
]
