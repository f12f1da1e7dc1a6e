"""YAML as plain data that remembers its lines. Only what JSON can say is accepted, read by the rules of YAML 1.2.

So ``3e-5`` is a number, ``no`` and ``2026-01-01`` are text, and there are no aliases, tags, repeated keys or second
documents. Everything else is a :class:`~notelens.errors.ConfigError` of one line that begins with file and line.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from notelens.errors import ConfigError

Plain = str | int | float | bool | None | list[Any] | dict[str, Any]
Keys = tuple[str | int, ...]

MAX_BYTES = 2**20
"""A configuration is written by hand; a larger file is something else."""
MAX_DEPTH = 24
MAX_DIGITS = 300


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (the base class declares it so)


_INT, _FLOAT, _BOOL, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))
_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
for _tag, _pattern in (
    (_NULL, r"~|null|Null|NULL|"),
    (_BOOL, r"true|True|TRUE|false|False|FALSE"),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    (_FLOAT, rf"{_NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), None)


@dataclass(frozen=True)
class Document:
    """A mapping and where each of its values stands.

    Attributes:
        source: name of the file for messages.
        data: the mapping.
        places: ``file:line`` (or the ``--set`` that gave it) by path of keys.
    """

    source: str
    data: Mapping[str, Plain]
    places: Mapping[Keys, str]

    def place(self, path: Sequence[str | int]) -> str:
        """Where the value at ``path`` stands, or the nearest thing around it."""
        keys = tuple(path)
        while keys and keys not in self.places:
            keys = keys[:-1]
        return self.places.get(keys, self.source)


def read_document(path: str | Path) -> Document:
    """Read a configuration file.

    Raises:
        ConfigError: the file is missing, unreadable, too large, not UTF-8, or not one YAML mapping.
    """
    source = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{source}: is a folder, not a configuration file") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL byte in the name
        raise ConfigError(f"{source!r}: cannot be read ({e})") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_BYTES} bytes; this is not a configuration")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw[: e.start].count(b"\n") + 1
        raise ConfigError(f"{source}:{line}: byte 0x{raw[e.start]:02x} is not UTF-8; save the file as UTF-8") from None
    return parse_document(text, source)


def parse_document(text: str, source: str) -> Document:
    """Parse the text of a configuration.

    Raises:
        ConfigError: it is not one YAML mapping of plain values.
    """
    places: dict[Keys, str] = {}
    node = _compose(text, source)
    if node is None:
        raise ConfigError(f"{source}: is empty")
    data = _Builder(source, places).build(node, ())
    if not isinstance(data, dict):
        where = f"{source}:{_line(node.start_mark)}"
        raise ConfigError(f"{where}: a configuration is a mapping of keys to values, not {kind(data)}")
    return Document(source, data, places)


def parse_value(text: str, source: str) -> Plain:
    """Parse one value, as written behind ``--set key=``.

    Raises:
        ConfigError: it is not a plain YAML value.
    """
    node = _compose(text, source)
    return None if node is None else _Builder(source, {}, lines=False).build(node, ())


def kind(value: object) -> str:
    """What a value is, in words."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(mark: Any) -> int:
    return int(mark.line) + 1


def _compose(text: str, source: str) -> Any:
    """The one root node; everything that composing would follow without end is refused on the way."""
    try:
        depth, documents = 0, 0
        for event in yaml.parse(text, Loader=_Loader):
            where = f"{source}:{_line(event.start_mark)}"
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{where}: alias '*{event.anchor}' is not supported; write the value out")
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise ConfigError(f"{where}: tag {tag!r} is not supported; write a plain value")
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise ConfigError(f"{where}: a second document begins; a configuration is one document")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ConfigError(f"{where}: nested more than {MAX_DEPTH} levels deep")
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = f":{_line(mark)}" if mark else ""
        raise ConfigError(f"{source}{line}: not YAML: {_flat(e.problem or e.context or 'syntax error')}") from None
    except yaml.reader.ReaderError as e:
        line = text[: e.position].count("\n") + 1
        raise ConfigError(f"{source}:{line}: character U+{int(e.character):04X} is not allowed in YAML") from None
    except (ValueError, OverflowError) as e:  # escapes and version numbers out of range
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{source}: not YAML: {_flat(str(e))}") from None


def _flat(text: str) -> str:
    text = " ".join(text.split())
    if "\\t" in text:
        return f"{text}; indent with spaces, not with tabs"
    return text


@dataclass
class _Builder:
    """Turns nodes into plain values and notes their lines."""

    source: str
    places: dict[Keys, str]
    lines: bool = True

    def at(self, node: Any) -> str:
        return f"{self.source}:{_line(node.start_mark)}" if self.lines else self.source

    def build(self, node: Any, path: Keys) -> Plain:
        self.places.setdefault(path, self.at(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: Any, path: Keys) -> dict[str, Plain]:
        out: dict[str, Plain] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = kind(key) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise ConfigError(f"{self.at(key_node)}: a key must be text, not {shown}")
            if key in out:
                first = self.places[(*path, key)].rsplit(":", 1)[-1]
                raise ConfigError(f"{self.at(key_node)}: key {key!r} is given twice; the first is on line {first}")
            self.places[(*path, key)] = self.at(key_node)
            out[key] = self.build(value_node, (*path, key))
        return out

    def _scalar(self, node: Any) -> Plain:
        text: str = node.value
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return text.lower() == "true"
        if node.tag in (_INT, _FLOAT):
            if len(text) > MAX_DIGITS:
                raise ConfigError(f"{self.at(node)}: a number of {len(text)} digits")
            if node.tag == _INT:
                return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
            value = math.inf if text[-1].isalpha() else float(text)  # letters at the end: .inf or .nan
            if not math.isfinite(value):
                raise ConfigError(f"{self.at(node)}: {text} is not a finite number")
            return value
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(f"{self.at(node)}: text holds half of a surrogate pair") from None
        return text
