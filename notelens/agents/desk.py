"""The smallest environment in which a stale state has consequences: a desk with one record and one rule.

An agent calls ``action(label = value)``: what to do, and the state on which that is based. The desk refuses a call whose state
is not its own (somebody else has changed the record meanwhile) and an action that the rule does not give for the state. It
speaks the organisms' language (:mod:`notelens.tasks.organism`, mode ``call``), and takes any other two-valued decision too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from notelens.errors import AgentError, RefusedError
from notelens.registry import nearest

CALL = re.compile(r"^\s*(?P<action>[^\s(]+)\s*\(\s*(?P<label>[^=()]+?)\s*=\s*(?P<value>[^()]+?)\s*\)")


@dataclass(frozen=True)
class Call:
    """A call as it was parsed.

    Attributes:
        action: what to do.
        label, value: the state that it is based on; ``None`` where the agent does not say.
    """

    action: str
    label: str | None = None
    value: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Call":
        """From ``action(label = value)``.

        Raises:
            RefusedError: the text is no call.
        """
        found = CALL.match(text)
        if found is None:
            raise RefusedError(f"{text.strip()[:60]!r} is no call; write action(label = value)")
        return cls(found["action"].lower(), found["label"].lower(), found["value"].lower())


@dataclass
class Desk:
    """A record and the rule for it.

    Args:
        label: what the record's field is called.
        value: its value now.
        rule: action by value.

    Raises:
        AgentError: the rule says nothing about the value.
    """

    label: str
    value: str
    rule: Mapping[str, str]
    done: list[Call] = field(default_factory=list[Call])

    def __post_init__(self) -> None:
        self.rule = MappingProxyType({k.lower(): v.lower() for k, v in self.rule.items()})
        self.change(self.value)

    def change(self, value: str) -> None:
        """The world changes the record.

        Raises:
            AgentError: the rule says nothing about the value.
        """
        if value.lower() not in self.rule:
            raise AgentError(
                f"the rule of the desk says nothing about {self.label} {value!r}; {nearest(value, list(self.rule))}"
            )
        self.value = value.lower()

    def execute(self, call: Call) -> None:
        """Do it, if the state is right.

        Raises:
            RefusedError: another label, a stale state, or an action that the rule does not give; nothing was done.
        """
        if call.label is not None and call.label != self.label.lower():
            raise RefusedError(f"there is no {call.label!r} on record, only {self.label!r}")
        if call.value is not None and call.value != self.value:
            raise RefusedError(f"stale state: the {self.label} is {self.value!r}, not {call.value!r}")
        if call.action != self.rule[self.value]:
            raise RefusedError(f"{call.action!r} is not allowed while the {self.label} is {self.value!r}")
        self.done.append(call)


def attempt(desk: Desk, text: str, answers: Sequence[str] = ()) -> str | None:
    """Execute what an agent said; returns why it was refused, ``None`` where it was done.

    Args:
        desk: may change.
        text: a call, or one of ``answers`` where these are given (then no state is claimed).
    """
    try:
        desk.execute(Call(text.strip().lower()) if answers else Call.parse(text))
    except RefusedError as e:
        return str(e)
    return None


__all__ = ["Call", "Desk", "attempt"]
