"""Embedded models: real pretrained weights that come with a Python package, and adapters shipped with the library."""

from notelens.zoo.embedded import EMBEDDED, EmbeddedSpec, embedded_tokenizer, load_embedded

__all__ = ["EMBEDDED", "EmbeddedSpec", "embedded_tokenizer", "load_embedded"]
