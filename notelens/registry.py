"""Lazy registries: names mapped to ``"module:attribute"`` strings, resolved on first use."""

import difflib
import importlib
from collections.abc import Iterator
from typing import Generic, TypeVar, cast

from notelens.errors import UnknownNameError

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """One sentence that names the closest known names, or all of them when none is close."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {', '.join(repr(c) for c in close)}?"
    return f"known names: {', '.join(known) if known else '(none)'}"


class Registry(Generic[T]):
    """Maps names to lazily imported classes.

    Args:
        kind: what an entry is, in the singular; used in error messages.
        entries: initial ``name -> "package.module:Attribute"`` map.
    """

    def __init__(self, kind: str, entries: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._targets: dict[str, str] = {}
        for name, target in (entries or {}).items():
            self.add(name, target)

    def add(self, name: str, target: str) -> None:
        """Register ``target`` (``"module:Attribute"``) as ``name``.

        Raises:
            ValueError: the name is taken, or the target has no ``:``.
        """
        if name in self._targets:
            raise ValueError(f"{self.kind} {name!r} is already registered as {self._targets[name]!r}")
        if target.count(":") != 1:
            raise ValueError(f"{self.kind} {name!r}: target {target!r} is not 'module:Attribute'")
        self._targets[name] = target

    def get(self, name: str) -> T:
        """Import and return the entry.

        Raises:
            UnknownNameError: no such name; the message lists the nearest ones.
        """
        if name not in self._targets:
            raise UnknownNameError(f"unknown {self.kind} {name!r}; {nearest(name, self.names())}")
        module, attribute = self._targets[name].split(":")
        return cast(T, getattr(importlib.import_module(module), attribute))

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._targets)
