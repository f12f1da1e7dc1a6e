"""The text behind an editable context: literal parts and fields, and the tokens they become.

The prompt is rendered once with placeholders; afterwards only values are put in. Values may hold other fields (nesting), fields
may be mentioned several times. Text is always encoded as a whole, so that rows and tokens of a fresh prompt agree.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from notelens.errors import FieldError, SeamError, SpanError
from notelens.prompt import Prompt, Span
from notelens.registry import nearest
from notelens.spans import PLACEHOLDER, Rendering, encode, locate, offsets, refuse_special, render


@dataclass(frozen=True)
class Node:
    """A part of the text.

    Attributes:
        text: characters, or the name of a field.
        field: ``text`` is a field's name and stands for its value.
        mark: what put the part there afterwards (``erratum:<field>``, ``hoisted:<field>``); empty for the original text.
    """

    text: str
    field: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Tokens:
    """What the text became.

    Attributes:
        ids: token ids of the whole prompt.
        mentions: token spans of every field, one per mention.
        tail: first row of the tail (request and template), ``len(ids)`` where there is none.
        text: the characters.
    """

    ids: tuple[int, ...]
    mentions: Mapping[str, tuple[Span, ...]]
    tail: int
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "mentions", MappingProxyType(dict(self.mentions)))

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, name: str) -> tuple[int, ...]:
        """Rows of all mentions of a field, ascending."""
        return tuple(sorted({p for span in self.mentions[name] for p in span.positions}))


@dataclass(frozen=True)
class FieldText:
    """A rendered prompt with fields.

    Attributes:
        nodes: parts in order.
        values: value of every field; may hold ``{{other}}``.
        tail: index of the first node of the tail; errata and hoisted fields go in front of it.
        pinned: token ids behind the text (generated or appended), kept as they are.
        updates: values that a later line states, where they differ from what stands in the field's place.
    """

    nodes: tuple[Node, ...]
    values: Mapping[str, str]
    tail: int
    pinned: tuple[int, ...] = ()
    updates: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for name in ("values", "updates"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    # --- making one -------------------------------------------------------------------------------------------------------

    @classmethod
    def from_template(
        cls,
        tokenizer: Any,
        text: str,
        fields: Mapping[str, str],
        *,
        request: str = "",
        system: str | None = None,
        rendering: Rendering = "chat",
        mentions: str = "one",
    ) -> "FieldText":
        """A user message whose fields are marked ``{{name}}``, or found by their value.

        Args:
            tokenizer: renders and encodes.
            text: the message. A field that is not marked in it is searched for by its value.
            fields: name to value.
            request: end of the message that follows everything mutable; errata are put in front of it.
            system: system text; fields may be marked in it too.
            rendering: ``chat``, ``plain`` or ``raw``.
            mentions: ``one`` refuses a value that is found more than once, ``all`` takes every place.

        Raises:
            FieldError: a field is not found, found twice where one was meant, or its value cannot be used.
            SpanError: text with special tokens, or a template that does not show the message once.
        """
        if not fields:
            raise FieldError("no fields are declared; give at least one name with its value")
        if mentions not in ("one", "all"):
            raise FieldError(f"mentions is {mentions!r}; use 'one' or 'all'")
        for name, part in (("message", text), ("request", request), ("system", system or "")):
            refuse_special(tokenizer, name, part)
        values = {name: check_value(tokenizer, name, value) for name, value in fields.items()}
        marked = {m for part in (text, request, system or "", *values.values()) for m in PLACEHOLDER.findall(part)}
        for name in values:
            if name not in marked:
                text = _mark(text, name, values[name], mentions)
        content = text + request
        if not content.strip():
            raise FieldError("the message is empty")
        shown, at = render(tokenizer, content, rendering, system)
        cut = min(at + len(text), at + len(content.rstrip()) if content not in shown else at + len(content))
        head, rest = _split(shown[:cut], values), _split(shown[cut:], values)
        made = cls((*head, *rest), values, len(head))
        made.expand()
        return made

    @classmethod
    def from_prompt(cls, tokenizer: Any, prompt: Prompt, names: Mapping[str, str]) -> "FieldText":
        """The text of a prompt with spans.

        Args:
            tokenizer: the one that made the prompt.
            prompt: its spans give the fields; its ``request`` region the tail.
            names: span name to field name.

        Raises:
            FieldError: the prompt has no such span, or its parts hold different text.
            SeamError: the prompt's tokens are not those of its text.
        """
        try:
            where = offsets(tokenizer, prompt.text, prompt.token_ids)
        except SpanError as e:
            raise SeamError(f"the text of prompt {prompt.id!r} encodes to other tokens than the prompt has: {e}") from e
        cuts: list[tuple[int, int, str]] = []
        values: dict[str, str] = {}
        for span, name in names.items():
            if span not in prompt.spans:
                raise FieldError(f"prompt {prompt.id!r} has no span {span!r}; it has {', '.join(sorted(prompt.spans))}")
            for part in prompt.spans[span]:
                a, b = where[part.start][0], where[part.stop - 1][1]
                a += len(prompt.text[a:b]) - len(prompt.text[a:b].lstrip())
                b -= len(prompt.text[a:b]) - len(prompt.text[a:b].rstrip())
                if values.setdefault(name, prompt.text[a:b]) != prompt.text[a:b]:
                    raise FieldError(
                        f"field {name!r} is {values[name]!r} in one place and {prompt.text[a:b]!r} in another; give the "
                        "places different names"
                    )
                cuts.append((a, b, name))
        request = [i for i, label in enumerate(prompt.regions) if label == "request"]
        tail = where[request[0]][0] if request else len(prompt.text)
        tail += len(prompt.text[tail:]) - len(prompt.text[tail:].lstrip()) if request else 0
        nodes: list[Node] = []
        at, tail_node = 0, None
        for a, b, name in [*sorted(cuts), (len(prompt.text), len(prompt.text), "")]:
            for stop in (tail, a) if at <= tail < a else (a,):
                if stop > at:
                    nodes.append(Node(prompt.text[at:stop]))
                at = stop
                if at == tail:
                    tail_node = len(nodes)
            if name:
                nodes.append(Node(name, field=True))
                at = b
        return cls(tuple(nodes), values, len(nodes) if tail_node is None else tail_node)

    # --- changing it ------------------------------------------------------------------------------------------------------

    def with_value(self, tokenizer: Any, name: str, value: str) -> "FieldText":
        """The same text with another value.

        Raises:
            FieldError: no such field, or a value that cannot be used.
        """
        self.check_field(name)
        made = replace(self, values={**self.values, name: check_value(tokenizer, name, value)})
        made.expand()
        return made

    def with_line(self, nodes: Sequence[Node], *, drop: str = "") -> "FieldText":
        """The same text with ``nodes`` in front of the tail; earlier nodes with the mark ``drop`` are left out."""
        head = [n for n in self.nodes[: self.tail] if not drop or n.mark != drop]
        made = [*head, *nodes]
        return replace(self, nodes=(*made, *self.nodes[self.tail :]), tail=len(made))

    def with_update(self, name: str, value: str) -> "FieldText":
        """The same text, in which a line now states this value."""
        return replace(self, updates={**self.updates, name: value})

    def without_updates(self, name: str) -> "FieldText":
        """The same text without the lines that updated a field."""
        head = [n for n in self.nodes[: self.tail] if n.mark != f"erratum:{name}"]
        others = {k: v for k, v in self.updates.items() if k != name}
        return replace(self, nodes=(*head, *self.nodes[self.tail :]), tail=len(head), updates=others)

    @property
    def current(self) -> dict[str, str]:
        """The value of every field that counts: what the last line says, otherwise what stands in the field's place."""
        return {**self.values, **self.updates}

    def followed_by(self, ids: Sequence[int]) -> "FieldText":
        """The same text with further tokens behind it."""
        return replace(self, pinned=(*self.pinned, *ids))

    def check_field(self, name: str) -> None:
        """Check that a field exists.

        Raises:
            FieldError: it does not; the message lists the nearest names.
        """
        if name not in self.values:
            raise FieldError(f"the prompt has no field {name!r}; {nearest(name, sorted(self.values))}")

    # --- what it becomes --------------------------------------------------------------------------------------------------

    def expand(self) -> tuple[str, dict[str, list[tuple[int, int]]], int]:
        """Characters, character ranges of every field's mentions, and where the tail begins.

        Raises:
            FieldError: a value holds an unknown field, or itself.
        """
        out: list[str] = []
        ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in self.values}

        def put(text: str, path: tuple[str, ...]) -> None:
            at = 0
            for match in PLACEHOLDER.finditer(text) if path else ():
                out.append(text[at : match.start()])
                value(match.group(1), path)
                at = match.end()
            out.append(text[at:])

        def value(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                raise FieldError(f"field {name!r} holds itself: {' > '.join((*path, name))}")
            if name not in self.values:
                raise FieldError(f"there is no field {name!r}; {nearest(name, sorted(self.values))}")
            start = sum(map(len, out))
            put(self.values[name], (*path, name))
            ranges[name].append((start, sum(map(len, out))))

        tail_at = 0
        for i, node in enumerate(self.nodes):
            if i == self.tail:
                tail_at = sum(map(len, out))
            if node.field:
                value(node.text, ())
            else:
                put(node.text, ())
        text = "".join(out)
        return text, ranges, len(text) if self.tail >= len(self.nodes) else tail_at

    def tokenise(self, tokenizer: Any) -> Tokens:
        """Ids, token spans of all mentions, and the tail.

        Raises:
            SeamError: a field's border lies inside a token.
        """
        text, ranges, tail_at = self.expand()
        ids = encode(tokenizer, text, templated=True)
        mentions: dict[str, tuple[Span, ...]] = {}
        for name, found in ranges.items():
            try:
                mentions[name] = tuple(locate(tokenizer, text, ids, a, b) for a, b in found)
            except SpanError as e:
                raise SeamError(f"field {name!r} with the value {self.values[name]!r}: {e}") from e
        where = offsets(tokenizer, text, ids)
        tail = next((i for i, (a, b) in enumerate(where) if b > tail_at and (a, b) != (0, 0)), len(ids))
        return Tokens((*ids, *self.pinned), mentions, tail, text)


def check_value(tokenizer: Any, name: str, value: str) -> str:
    """The value without white space at its ends.

    Raises:
        FieldError: it is empty, or holds a special token of the tokenizer.
    """
    if not value.strip():
        raise FieldError(
            f"the value of field {name!r} is empty; a cached field needs at least one token (write 'none')"
        )
    try:
        refuse_special(tokenizer, f"value of field {name!r}", value)
    except SpanError as e:
        raise FieldError(str(e)) from e
    return value.strip()


@dataclass(frozen=True)
class Alignment:
    """How rows of the old prompt relate to rows of the new one.

    Attributes:
        edited: rows of the new prompt that hold the field.
        kept: ``(old start, old stop, new start)`` of every block with the same tokens.
        deltas: difference of token numbers per mention.
    """

    edited: tuple[int, ...]
    kept: tuple[tuple[int, int, int], ...]
    deltas: tuple[int, ...]

    @property
    def length_changes(self) -> bool:
        """Whether any mention has another number of tokens."""
        return any(self.deltas)


def align(old: Tokens, new: Tokens, name: str) -> Alignment:
    """Match rows outside the field.

    Raises:
        SeamError: tokens outside the field differ, because the value merged with a neighbour.
    """
    before, after = (sorted(t.mentions[name], key=lambda s: s.start) for t in (old, new))
    if len(before) != len(after):
        raise SeamError(
            f"field {name!r} is mentioned {len(before)} times in the old prompt, {len(after)} in the new one"
        )
    kept: list[tuple[int, int, int]] = []
    borders = list(zip([0, *(s.stop for s in before)], [*(s.start for s in before), len(old)], strict=True))
    others = list(zip([0, *(s.stop for s in after)], [*(s.start for s in after), len(new)], strict=True))
    for (a, b), (c, d) in zip(borders, others, strict=True):
        if old.ids[a:b] != new.ids[c:d]:
            raise SeamError(
                f"with the new value of field {name!r} the tokens outside it change (rows {a}..{b - 1} before, {c}..{d - 1} "
                "after): the value merges with its neighbour. Put white space around the field or use full_prefill on a new "
                "context"
            )
        if a < b:
            kept.append((a, b, c))
    edited = tuple(p for span in after for p in span.positions)
    deltas = tuple(len(y.positions) - len(x.positions) for x, y in zip(before, after, strict=True))
    return Alignment(edited, tuple(kept), deltas)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _mark(text: str, name: str, value: str, mentions: str) -> str:
    """The text with a placeholder where the value stands."""
    places = list(re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", text))
    if not places:
        raise FieldError(
            f"field {name!r} is not in the message: neither {{{{{name}}}}} nor its value {value!r}; mark its place with two "
            "braces on each side"
        )
    if len(places) > 1 and mentions == "one":
        raise FieldError(
            f"the value {value!r} of field {name!r} is in the message {len(places)} times (characters "
            f"{', '.join(str(m.start()) for m in places)}); mark the place that is meant with {{{{{name}}}}}, or pass "
            "mentions='all'"
        )
    for match in reversed(places):
        text = f"{text[: match.start()]}{{{{{name}}}}}{text[match.end() :]}"
    return text


def _split(text: str, values: Mapping[str, str]) -> tuple[Node, ...]:
    """Text as nodes."""
    nodes: list[Node] = []
    at = 0
    for match in PLACEHOLDER.finditer(text):
        name = match.group(1)
        if name not in values:
            raise FieldError(f"the prompt has the field {name!r} without a value; {nearest(name, sorted(values))}")
        nodes += [Node(text[at : match.start()]), Node(name, field=True)]
        at = match.end()
    return tuple(n for n in [*nodes, Node(text[at:])] if n.text)


__all__ = ["Alignment", "FieldText", "Node", "Tokens", "align", "check_value", "common_prefix"]
