"""Agents: a prompt that lives for many turns, edited instead of prefilled again.

Nothing is imported before it is used.
"""

from typing import TYPE_CHECKING, Any

_LAZY = {
    "Session": "notelens.agents.session",
    "Reply": "notelens.agents.session",
    "ToolResult": "notelens.agents.session",
    "SessionReport": "notelens.agents.accounts",
    "Turn": "notelens.agents.accounts",
    "break_even": "notelens.agents.accounts",
    "EveryTurns": "notelens.agents.anchor",
    "Never": "notelens.agents.anchor",
    "OnDrift": "notelens.agents.anchor",
}

__all__ = [
    "EveryTurns",
    "Never",
    "OnDrift",
    "Reply",
    "Session",
    "SessionReport",
    "ToolResult",
    "Turn",
    "break_even",
]

if TYPE_CHECKING:
    from notelens.agents.accounts import SessionReport as SessionReport
    from notelens.agents.accounts import Turn as Turn
    from notelens.agents.accounts import break_even as break_even
    from notelens.agents.anchor import EveryTurns as EveryTurns
    from notelens.agents.anchor import Never as Never
    from notelens.agents.anchor import OnDrift as OnDrift
    from notelens.agents.session import Reply as Reply
    from notelens.agents.session import Session as Session
    from notelens.agents.session import ToolResult as ToolResult


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'notelens.agents' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
