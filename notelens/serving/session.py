"""A prompt whose first bytes never change, so that an engine's prefix cache hits, although its fields do.

Three places for a field that changes between requests:

- ``erratum``: it stays as it was written, and one line near the end says what it is now (one line per field, the current
  value only; never a stack of corrections);
- ``hoisted``: it is not written in the prefix at all, and one line near the end says what it is;
- ``in_prefix``: it is rewritten where it stands, and everything behind it has to be prefilled anew (the baseline).

Lines stand between the conversation so far and the new request, and are not kept in the conversation: its bytes only grow.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from notelens.errors import FieldError, InputError
from notelens.registry import nearest

if TYPE_CHECKING:
    from notelens.serving.client import EngineClient, Reply

Mode = Literal["erratum", "hoisted", "in_prefix"]
Role = Literal["user", "assistant", "system"]
Message = dict[str, str]

ERRATUM = "Update: the {label} is now {value}.\n"
LINE = "The {label} is {value}.\n"
PLACE = "given below"
_MARK = re.compile(r"\{\{(\w+)\}\}")
_SPECIAL = re.compile(r"<\|[^|]*\|>|<(?:bos|eos|start_of_turn|end_of_turn)>|</?s>")
"""What chat templates write between turns; in a value it could open a turn of its own."""


class PromptSession:
    """A static prefix, declared fields, a conversation that grows, and updates that leave the prefix alone.

    Args:
        prefix: text with marks such as ``{{status}}``; a line break is added where it does not end with one.
        fields: what the marked fields are at the beginning.
        mode: where a changed field is written; see the module.
        system: text of a system message in front of everything.
        labels: what fields are called in sentences; their names with spaces when not given.
        role: of the message that holds the prefix; ``system`` goes with ``system=None`` only.
        erratum: template of the line for ``erratum``, with ``{label}`` and ``{value}``.
        line: the same for ``hoisted``.
        salt: cache salt for every request of the session; ``""`` is the same as none.

    Raises:
        FieldError: marks and fields differ, a template cannot be filled, or a value cannot be written.
        InputError: unknown mode or role.
    """

    def __init__(
        self,
        prefix: str,
        fields: Mapping[str, str],
        *,
        mode: Mode = "erratum",
        system: str | None = None,
        labels: Mapping[str, str] | None = None,
        role: Literal["user", "system"] = "user",
        erratum: str = ERRATUM,
        line: str = LINE,
        salt: str | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise InputError(f"unknown mode {mode!r}; {nearest(str(mode), list(get_args(Mode)))}")
        if role not in ("user", "system") or (role == "system" and system is not None):
            raise InputError(
                f"the prefix can be a user message, or the system message itself; role {role!r} is neither"
            )
        self.mode: Mode = mode
        self.system, self.role, self.salt = system, role, salt or None
        self._source = prefix if prefix.endswith("\n") else prefix + "\n"
        self._values = {name: _checked(name, value) for name, value in fields.items()}
        self._labels = {name: (labels or {}).get(name, name.replace("_", " ")) for name in fields}
        self._templates = {"erratum": _template(erratum), "hoisted": _template(line)}
        marked = set(_MARK.findall(prefix))
        if unknown := sorted(marked - set(fields)):
            raise FieldError(f"the prefix marks the field {unknown[0]!r}, which has no value; it has {sorted(fields)}")
        self._updated: dict[str, str] = {}
        self._turns: list[tuple[Message, bool]] = []  # with whether marks are filled anew for every request
        self._frozen = self._fill(self._source)

    @property
    def prefix(self) -> str:
        """The prefix as it is sent; except for ``in_prefix`` the same bytes for the whole session."""
        return self._fill(self._source) if self.mode == "in_prefix" else self._frozen

    @property
    def values(self) -> dict[str, str]:
        """What every field is now."""
        return {**self._values, **self._updated}

    def update(self, name: str, value: str) -> None:
        """Give a field a new value.

        A field that goes back to its first value keeps its line: answers in between may have spoken of another.

        Raises:
            FieldError: no such field, or the value cannot be written; nothing has changed.
        """
        if name not in self._values:
            raise FieldError(f"no field {name!r}; {nearest(name, sorted(self._values))}")
        self._updated[name] = _checked(name, value)

    def add(self, role: Role, text: str) -> None:
        """Append a turn; marks in it are filled with the values of this moment and stay so (but for ``in_prefix``).

        Raises:
            InputError: unknown role.
            FieldError: a mark of an unknown field.
        """
        if role not in get_args(Role):
            raise InputError(f"unknown role {role!r}; {nearest(str(role), list(get_args(Role)))}")
        if unknown := sorted(set(_MARK.findall(text)) - set(self._values)):
            raise FieldError(f"the turn marks the field {unknown[0]!r}; known are {sorted(self._values)}")
        anew = self.mode == "in_prefix"
        self._turns.append(({"role": role, "content": text if anew else self._fill(text)}, anew))

    def lines(self) -> str:
        """The lines in front of the next request: one per updated field (``hoisted``: one per field)."""
        if self.mode == "in_prefix":
            return ""
        told = self.values if self.mode == "hoisted" else self._updated
        template = self._templates[self.mode]
        return "".join(template.format(label=self._labels[n], value=told[n]) for n in self._values if n in told)

    def messages(self, request: str) -> list[Message]:
        """Messages of a chat request: everything so far, the lines, the request."""
        turns = [{**t, "content": self._fill(t["content"])} if anew else t for t, anew in self._turns]
        turns.append({"role": "user", "content": self.lines() + request})
        head: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        if self.role == "system" or turns[0]["role"] != "user":
            return [*head, {"role": self.role, "content": self.prefix}, *turns]
        first = {"role": "user", "content": self.prefix + turns[0]["content"]}
        return [*head, first, *turns[1:]]

    def text(self, request: str) -> str:
        """The same as plain text, for completion requests."""
        *before, last = (m["content"] for m in self.messages(request))
        return "".join([*(t if t.endswith("\n") else f"{t}\n" for t in before), last])

    async def ask(self, client: "EngineClient", request: str, *, max_tokens: int, **options: Any) -> "Reply":
        """Send a request and keep it and its answer as turns; the lines are not kept.

        Raises:
            ServingError: as :meth:`notelens.serving.client.EngineClient.chat`; the session is then as before.
        """
        reply = await client.chat(self.messages(request), max_tokens=max_tokens, salt=self.salt, **options)
        self._turns.append(({"role": "user", "content": request}, False))
        self._turns.append(({"role": "assistant", "content": reply.text}, False))
        return reply

    def _fill(self, text: str) -> str:
        values = dict.fromkeys(self._values, PLACE) if self.mode == "hoisted" else self._values
        if self.mode == "in_prefix" and self._updated:
            values = self.values
        return _MARK.sub(lambda m: values[m.group(1)], text)


def _checked(name: str, value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise FieldError(
            f"field {name!r}: {value!r} is empty or holds a line break or control character; write one line"
        )
    if found := _SPECIAL.search(value):
        raise FieldError(
            f"field {name!r}: {value!r} holds {found[0]!r}, which an engine may read as the start of a turn"
        )
    if _MARK.search(value):
        raise FieldError(f"field {name!r}: {value!r} holds a mark; values are plain text")
    return value


def _template(text: str) -> str:
    try:
        text.format(label="label", value="value")
    except (KeyError, IndexError, ValueError) as e:
        raise FieldError(f"the template {text!r} may only hold {{label}} and {{value}}: {e}") from e
    if "{value}" not in text or not text.endswith("\n"):
        raise FieldError(f"the template {text!r} must hold {{value}} and end with a line break")
    return text


__all__ = ["ERRATUM", "LINE", "PLACE", "Message", "Mode", "PromptSession"]
