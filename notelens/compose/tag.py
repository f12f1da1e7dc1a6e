"""What identifies a model to cached rows: hashes of weights and tokenizer, type, shapes, RoPE tables."""

import hashlib
import json
import weakref
from typing import Any

from notelens.cache.artefact import ModelTag
from notelens.models.base import NoteModel

_TAGS: "weakref.WeakKeyDictionary[Any, ModelTag]" = weakref.WeakKeyDictionary()
_TOKENIZERS: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def model_tag(model: NoteModel) -> ModelTag:
    """The tag of a model; made once per model object. Cost the first time: a hash over the weights."""
    if model not in _TAGS:
        geometry = model.geometry
        tables: list[tuple[float, ...]] = []
        index: list[int | None] = []
        for layer in range(geometry.n_layers):
            inv_freq = model.family.inv_freq(model.hf, layer)
            if inv_freq is None:
                index.append(None)
                continue
            table = tuple(float(f) for f in inv_freq.tolist())
            if table not in tables:
                tables.append(table)
            index.append(tables.index(table))
        _TAGS[model] = ModelTag(
            name=model.name,
            weights_sha256=model.facts()["weights_hash"],
            tokenizer_sha256=tokenizer_hash(model.tokenizer),
            dtype=str(model.dtype).removeprefix("torch."),
            shapes=tuple((g.n_kv_heads, g.d_key, g.d_value) for g in geometry.layers),
            frequencies=tuple(tables),
            tables=tuple(index),
        )
    return _TAGS[model]


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 over everything that decides which ids a text gets (padding and truncation settings are left out)."""
    if tokenizer not in _TOKENIZERS:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            facts = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")}
        else:
            facts = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
        facts = {"tokenizer": facts, "special": {k: str(v) for k, v in tokenizer.special_tokens_map.items()}}
        _TOKENIZERS[tokenizer] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return _TOKENIZERS[tokenizer]


__all__ = ["model_tag", "tokenizer_hash"]
