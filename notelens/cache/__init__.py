"""Cached keys and values: the value, pure operations on it, and the bridge to transformers caches."""

from notelens.cache.kv import KVCache

__all__ = ["KVCache"]
