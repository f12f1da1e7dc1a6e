"""notelens: the notes that transformers take at prefill, measured, edited and moved.

``import notelens`` is cheap and does not import torch; names are resolved on first use.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "load": "notelens.models.load",
    "KVCache": "notelens.cache.kv",
    "Context": "notelens.context",
    "ContextStore": "notelens.context",
    "Prompt": "notelens.prompt",
    "Pair": "notelens.prompt",
    "Span": "notelens.prompt",
    "Piece": "notelens.spans",
    "make_prompt": "notelens.spans",
    "Site": "notelens.intervene.engine",
    "Reader": "notelens.intervene.engine",
    "swap_effects": "notelens.intervene.engine",
    "note_map": "notelens.circuits.note_map",
    "EditableContext": "notelens.edits.context",
    "pair_from_text": "notelens.circuits.text_pair",
}

__all__ = [
    "Context",
    "ContextStore",
    "EditableContext",
    "KVCache",
    "Pair",
    "Piece",
    "Prompt",
    "Reader",
    "Site",
    "Span",
    "__version__",
    "load",
    "make_prompt",
    "note_map",
    "pair_from_text",
    "swap_effects",
]

if TYPE_CHECKING:
    from notelens.cache.kv import KVCache as KVCache
    from notelens.circuits.note_map import note_map as note_map
    from notelens.circuits.text_pair import pair_from_text as pair_from_text
    from notelens.context import Context as Context
    from notelens.context import ContextStore as ContextStore
    from notelens.edits.context import EditableContext as EditableContext
    from notelens.intervene.engine import Reader as Reader
    from notelens.intervene.engine import Site as Site
    from notelens.intervene.engine import swap_effects as swap_effects
    from notelens.models.load import load as load
    from notelens.prompt import Pair as Pair
    from notelens.prompt import Prompt as Prompt
    from notelens.prompt import Span as Span
    from notelens.spans import Piece as Piece
    from notelens.spans import make_prompt as make_prompt


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'notelens' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
