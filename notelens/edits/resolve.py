"""From ``name`` or ``name@K`` to a method."""

from typing import Any

from notelens.edits import EDITS
from notelens.edits.base import EditMethod
from notelens.errors import EditError


def resolve(spec: str, **options: Any) -> EditMethod:
    """The method that ``spec`` names.

    Args:
        spec: a registered name; ``name@16`` or ``name@15%`` where the method takes K.
        options: of the method.

    Raises:
        UnknownNameError: no such method.
        EditError: K is missing, not wanted or not a number, or the method has no such option.
    """
    name, at, count = spec.partition("@")
    kind: type[EditMethod] = EDITS.get(name)
    if kind.takes_k != bool(at):
        need = f"{name} is written {name}@K, with rows or a share (16, 15%)" if kind.takes_k else f"{name} takes no K"
        raise EditError(f"method {spec!r}: {need}")
    try:
        made = kind(**options)
    except TypeError as e:
        raise EditError(f"method {spec!r}: {e}") from e
    if at:
        made.k = _count(spec, count)
    return made


def _count(spec: str, text: str) -> int | float:
    try:
        k = float(text[:-1]) / 100 if text.endswith("%") else int(text)
    except ValueError as e:
        raise EditError(f"method {spec!r}: K {text!r} is neither a whole number nor a share such as 15%") from e
    if k <= 0 or (isinstance(k, float) and k > 1):
        raise EditError(f"method {spec!r}: K must be at least 1 row, or a share up to 100%")
    return k


__all__ = ["resolve"]
