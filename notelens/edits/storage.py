"""Saving and loading editable contexts: safetensors with a JSON header, no pickle."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from notelens.cache.kv import KVCache
from notelens.cache.rows import Rows
from notelens.edits.context import EditableContext
from notelens.edits.dependencies import Dependencies
from notelens.edits.text import FieldText, Node
from notelens.errors import CacheError
from notelens.models.base import NoteModel

SCHEMA = 1
HEADER = "notelens_editable_context"


def save(context: EditableContext, path: str | Path, *, more: Mapping[str, str] | None = None) -> Path:
    """Write a context, its mark included. The file appears complete or not at all.

    Args:
        context: what is written.
        path: of the file.
        more: further entries of the file's metadata, which :func:`load` leaves alone.

    Raises:
        CacheError: the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise CacheError(f"{path.parent} is not a folder; make it before saving a context there")
    cache = context.rows.join()
    tensors: dict[str, torch.Tensor] = {
        "hidden": context.hidden.contiguous(),
        "positions": cache.positions.contiguous(),
    }
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        tensors[f"keys.{layer}"], tensors[f"values.{layer}"] = k.contiguous(), v.contiguous()
    if context.dependencies is not None:
        tensors["source"], tensors["weight"] = context.dependencies.source, context.dependencies.weight
    text = context.text
    header = {
        "schema": SCHEMA,
        "model": context.model.name,
        "revision": context.model.revision,
        "dtype": str(context.model.dtype),
        "key": context.key,
        "nodes": [[n.text, n.field, n.mark] for n in text.nodes],
        "values": dict(text.values),
        "tail": text.tail,
        "pinned": list(text.pinned),
        "updates": dict(text.updates),
        "row_ids": list(cache.token_ids),
        "history": list(context.history),
        "exact_rows": context.exact_rows,
        "touched": list(context.touched),
        "build_tokens": context.build_tokens,
        "build_ms": context.build_ms,
    }
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    save_file(
        {name: t.clone() for name, t in tensors.items()}, part, metadata={**(more or {}), HEADER: json.dumps(header)}
    )
    part.replace(path)
    return path


def load(model: NoteModel, path: str | Path) -> EditableContext:
    """Read a context that this very model made. Reports of earlier edits are not kept; the mark is.

    Raises:
        CacheError: no such file, not a saved context, another model, another type, or a header that contradicts the rows.

    Cost: reading; nothing is run.
    """
    path = Path(path)
    if not path.is_file():
        raise CacheError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt", device=str(model.device)) as handle:
            raw = (handle.metadata() or {}).get(HEADER)
            if raw is None:
                raise CacheError(f"{path} is a safetensors file, but not a saved context")
            header = json.loads(raw)
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, json.JSONDecodeError) as e:
        raise CacheError(f"{path} cannot be read: {e}") from e
    return _context(model, path, header, tensors)


def _context(model: NoteModel, path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> EditableContext:
    if header.get("schema") != SCHEMA:
        raise CacheError(f"{path} has schema {header.get('schema')!r}; this version reads {SCHEMA}")
    for name, ours in (("revision", model.revision), ("dtype", str(model.dtype))):
        if header[name] != ours:
            raise CacheError(
                f"{path} was made by {header['model']} with {name} {header[name]}, this is {model.name} with {ours}; rows only "
                "fit the model that made them"
            )
    n_layers = model.geometry.n_layers
    history = tuple(header["history"])
    cache = KVCache(
        tuple(tensors[f"keys.{i}"] for i in range(n_layers)),
        tuple(tensors[f"values.{i}"] for i in range(n_layers)),
        tensors["positions"].cpu(),
        tuple(header["row_ids"]),
        history,
    )
    nodes = tuple(Node(text, bool(field), mark) for text, field, mark in header["nodes"])
    text = FieldText(nodes, header["values"], header["tail"], tuple(header["pinned"]), header["updates"])
    tokens = text.tokenise(model.tokenizer)
    known = Dependencies(tensors["source"], tensors["weight"]) if "source" in tensors else None
    made = EditableContext(
        model,
        text,
        tokens,
        Rows.of(cache),
        tensors["hidden"],
        header["exact_rows"],
        tuple(header["touched"]),
        known,
        (),
        header["build_tokens"],
        header["build_ms"],
    )
    if len(cache) != len(tokens) or made.key != header["key"] or made.exact != (not history):
        raise CacheError(f"{path}: the header does not fit the rows or the text; the file was changed")
    return made


__all__ = ["load", "save"]
