"""Cached keys and values: the value, pure operations on it, the bridge to transformers caches, and files.

Nothing is imported before it is used: the files (``artefact``, ``library``) need torch and safetensors only, so that a
serving engine's plug-in can read them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notelens.cache.kv import KVCache as KVCache

__all__ = ["KVCache"]


def __getattr__(name: str) -> Any:
    if name != "KVCache":
        raise AttributeError(f"module 'notelens.cache' has no attribute {name!r}")
    from notelens.cache.kv import KVCache

    return KVCache
