"""Composers by name."""

from notelens.compose.base import Composer
from notelens.errors import ComposeError
from notelens.registry import Registry

COMPOSERS: Registry[type[Composer]] = Registry(
    "composer",
    {
        "full_prefill": "notelens.compose.full_prefill:FullPrefill",
        "no_shift": "notelens.compose.no_shift:NoShift",
        "shift": "notelens.compose.shift:Shift",
        "seam": "notelens.compose.seam:Seam",
        "epic": "notelens.compose.epic:Epic",
        "cacheblend": "notelens.compose.cacheblend:CacheBlend",
        "prefix_conditioned": "notelens.compose.prefix_conditioned:PrefixConditioned",
        "linked": "notelens.compose.linked:Linked",
        "references": "notelens.compose.references:References",
    },
)


def composer(method: str | Composer) -> Composer:
    """The composer written as ``name`` or ``name@value``, or the object itself.

    Raises:
        UnknownNameError: no such composer.
        ComposeError: the parameter is not one.
    """
    if isinstance(method, Composer):
        return method
    if not isinstance(method, str):
        raise ComposeError(f"a composer is named by text such as 'shift' or 'seam@4', not by a {type(method).__name__}")
    name, at, value = method.partition("@")
    return COMPOSERS.get(name).parse(value if at else None)


__all__ = ["COMPOSERS", "composer"]
