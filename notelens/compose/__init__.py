"""Composing caches: skills that are compiled once and spliced anywhere, and the composers that join them.

Nothing is imported before it is used.
"""

from typing import TYPE_CHECKING, Any

_LAZY = {
    "COMPOSERS": "notelens.compose.registry",
    "composer": "notelens.compose.registry",
    "compose": "notelens.compose.join",
    "Composed": "notelens.compose.base",
    "Composer": "notelens.compose.base",
    "Cost": "notelens.compose.base",
    "Skill": "notelens.compose.skill",
    "compile_skill": "notelens.compose.skill",
    "fit_link": "notelens.compose.link",
    "Link": "notelens.compose.link",
    "Calibration": "notelens.compose.link",
    "Linked": "notelens.compose.linked",
    "References": "notelens.compose.references",
    "compare": "notelens.compose.fidelity",
    "first_token": "notelens.compose.timing",
}

__all__ = [
    "COMPOSERS",
    "Calibration",
    "Composed",
    "Composer",
    "Cost",
    "Link",
    "Linked",
    "References",
    "Skill",
    "compare",
    "compile_skill",
    "compose",
    "composer",
    "first_token",
    "fit_link",
]

if TYPE_CHECKING:
    from notelens.compose.base import Composed as Composed
    from notelens.compose.base import Composer as Composer
    from notelens.compose.base import Cost as Cost
    from notelens.compose.fidelity import compare as compare
    from notelens.compose.join import compose as compose
    from notelens.compose.link import Calibration as Calibration
    from notelens.compose.link import Link as Link
    from notelens.compose.link import fit_link as fit_link
    from notelens.compose.linked import Linked as Linked
    from notelens.compose.references import References as References
    from notelens.compose.registry import COMPOSERS as COMPOSERS
    from notelens.compose.registry import composer as composer
    from notelens.compose.skill import Skill as Skill
    from notelens.compose.skill import compile_skill as compile_skill
    from notelens.compose.timing import first_token as first_token


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'notelens.compose' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
