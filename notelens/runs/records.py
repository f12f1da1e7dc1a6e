"""``records.jsonl``: append-only, one line per measured row and per aggregate, whole groups or nothing.

A group is written by one call and ends with its own end marker (``item``, ``probe`` or ``run``). What stands behind the
last end marker was cut off by a crash or a full disk: it is dropped, and that item is measured again.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from notelens.errors import RecordError
from notelens.runs.files import reason

SCHEMA_VERSION = 1
FILE = "records.jsonl"
MAX_LINE_BYTES = 4 * 2**20
"""A longer line holds something that is not a record."""

WAY_OUT = "restore the file, or start a new run in another folder"
END_MARKERS = ("run", "item", "probe")
Line = dict[str, Any]
ItemKey = tuple[str, str, str]
"""(experiment, stage, item id)."""


def plain(value: object) -> tuple[Any, dict[str, str]]:
    """A value as JSON can hold it, and why parts of it are null.

    Numbers of numpy and torch become Python numbers. NaN and infinity become ``None``, with the reason under their
    path. Of an array or tensor with axes only shape and type are kept.

    Raises:
        RecordError: a value of another type, or a key that is not text.
    """
    nulls: dict[str, str] = {}
    return _plain(value, "", nulls), nulls


def _plain(value: object, path: str, nulls: dict[str, str]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nulls[path] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        return None
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = cast(Any, value)
        shape = [int(n) for n in array.shape]
        if not shape:
            return _plain(array.item(), path, nulls)
        return {"shape": shape, "dtype": str(array.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for key, child in cast(Mapping[Any, Any], value).items():
            if not isinstance(key, str):
                raise RecordError(f"a record holds the key {key!r} at {path or 'its root'}; keys must be text")
            out[key] = _plain(child, f"{path}.{key}" if path else key, nulls)
        return out
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{path}.{i}", nulls) for i, v in enumerate(cast(Sequence[Any], value))]
    raise RecordError(
        f"a record holds a value of type {type(value).__name__} at {path or 'its root'}; only what JSON knows is kept"
    )


def encode(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """The text of a group, built in full before any file is touched.

    Raises:
        RecordError: a value that cannot be kept, or a line above :data:`MAX_LINE_BYTES`.
    """
    out: list[str] = []
    for line in lines:
        data, nulls = plain(line)
        if nulls:
            data["nulls"] = nulls
        text = json.dumps({"schema_version": SCHEMA_VERSION, **data}, allow_nan=False, separators=(", ", ": "))
        if len(text) > MAX_LINE_BYTES:
            raise RecordError(
                f"a record of {len(text)} bytes ({line.get('experiment')}, {line.get('item')}) is above the limit of "
                f"{MAX_LINE_BYTES}; keep numbers per position, not activations"
            )
        out.append(text + "\n")
    return "".join(out).encode("ascii")


@dataclass
class Records:
    """What a records file holds in whole groups.

    Attributes:
        runs: headers, one per process that wrote.
        items: instance lines of every finished item, in the order written.
        aggregates: aggregate lines by experiment.
        probes: end marker of every finished probe, by experiment.
        offset: bytes up to the end of the last whole group.
        dropped: bytes behind it.
    """

    runs: list[Line] = field(default_factory=list[Line])
    items: dict[ItemKey, list[Line]] = field(default_factory=dict[ItemKey, list[Line]])
    aggregates: dict[str, list[Line]] = field(default_factory=dict[str, list[Line]])
    probes: dict[str, Line] = field(default_factory=dict[str, Line])
    offset: int = 0
    dropped: int = 0

    def rows(self, experiment: str | None = None) -> list[Line]:
        """Instance lines, of one experiment or of all."""
        return [row for key, rows in self.items.items() if experiment in (None, key[0]) for row in rows]

    def all_aggregates(self) -> list[Line]:
        """Aggregate lines of all experiments, in the order written."""
        return [line for lines in self.aggregates.values() for line in lines]

    def check(self, group: Sequence[Line]) -> None:
        """Whether a group can be taken in.

        Raises:
            RecordError: the group does not hold what its end marker says, or was there before.
        """
        end = group[-1]
        if end["kind"] == "run" and len(group) == 1:
            return
        wanted = "instance" if end["kind"] == "item" else "aggregate"
        if len(group) - 1 != end.get("n_lines") or any(line["kind"] != wanted for line in group[:-1]):
            raise RecordError(f"the group that ends with {end['kind']} {end.get('item', '')!r} is incomplete")
        if end["kind"] == "item" and item_key(end) in self.items:
            raise RecordError(f"item {item_key(end)} is recorded twice")
        if end["kind"] == "probe" and end["experiment"] in self.probes:
            raise RecordError(f"the aggregates of {end['experiment']!r} are recorded twice")

    def add(self, group: Sequence[Line]) -> None:
        """Take in a whole group that passed :meth:`check`."""
        body, end = list(group[:-1]), group[-1]
        if end["kind"] == "run":
            self.runs.append(end)
        elif end["kind"] == "item":
            self.items[item_key(end)] = body
        else:
            self.aggregates[str(end["experiment"])] = body
            self.probes[str(end["experiment"])] = end


def item_key(end: Line) -> ItemKey:
    """Key of the item that an end marker closes."""
    return str(end["experiment"]), str(end["stage"]), str(end["item"])


def read_records(path: Path) -> Records:
    """Read a records file, or the one inside a run's folder; a missing file is an empty one.

    Raises:
        RecordError: the file cannot be read, is of a newer schema, or was damaged before its end.
    """
    path = path / FILE if path.is_dir() else path
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Records()
    except OSError as e:
        raise RecordError(f"{path}: could not be read ({reason(e)})") from e
    records = Records()
    group: list[Line] = []
    bad: int | None = None
    start = 0
    for number, text in enumerate(raw.split(b"\n")[:-1], start=1):  # what stands behind the last newline is cut
        start += len(text) + 1
        line = _parse(text)
        if line is None:
            bad = bad or number
            continue
        if line["schema_version"] != SCHEMA_VERSION:
            raise RecordError(
                f"{path}:{number}: schema version {line['schema_version']!r}, but this notelens reads "
                f"{SCHEMA_VERSION}; use the version that wrote it"
            )
        group.append(line)
        if line["kind"] in END_MARKERS:
            if bad is not None:
                raise RecordError(f"{path}:{bad}: this line is damaged although whole records follow; {WAY_OUT}")
            try:
                records.check(group)
                records.add(group)
            except (KeyError, RecordError) as e:
                raise RecordError(f"{path}:{number}: {e}; {WAY_OUT}") from e
            group, records.offset = [], start
    records.dropped = len(raw) - records.offset
    return records


def _parse(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(line, dict) and {"schema_version", "kind"} <= set(cast(dict[str, Any], line))
    return cast(Line, line) if whole else None


class RecordWriter:
    """Appends whole groups to a records file; use as a context manager while the folder is held.

    Opening drops what a crash left behind the last whole group.

    Args:
        path: of the file.

    Raises:
        RecordError: as :func:`read_records`, or the file cannot be opened for writing.

    Attributes:
        records: what the file holds, kept up to date.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = read_records(path)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if self.records.dropped:
                os.ftruncate(self._file, self.records.offset)
            os.lseek(self._file, self.records.offset, os.SEEK_SET)
        except OSError as e:
            raise RecordError(f"{path}: could not be opened for writing ({reason(e)})") from e

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def write(self, group: Sequence[Mapping[str, Any]]) -> list[Line]:
        """Write a group that ends with an end marker, and make sure that it is on disk.

        Returns:
            The lines as a reader will see them; work with these, so that a resumed run computes from the same numbers.

        Raises:
            RecordError: the group is not whole, or could not be written; the file ends with the last whole group, as
                before.
        """
        text = encode(group)
        lines = [cast(Line, json.loads(t)) for t in text.splitlines()]
        self.records.check(lines)
        try:
            rest = memoryview(text)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as e:
            raise RecordError(self._undone(e)) from e
        self.records.add(lines)
        self.records.offset += len(text)
        return lines

    def _undone(self, error: OSError) -> str:
        """Take back a half-written group; the sentence for the error."""
        kept = f"{self.path}: a record could not be written ({reason(error)})"
        again = "make room and run the same command again: it continues behind the last whole record"
        try:
            os.ftruncate(self._file, self.records.offset)
            os.lseek(self._file, self.records.offset, os.SEEK_SET)
        except OSError:
            return f"{kept}; the half-written end will be dropped when the run is resumed; {again}"
        return f"{kept}; all {len(self.records.items)} finished items are kept; {again}"
