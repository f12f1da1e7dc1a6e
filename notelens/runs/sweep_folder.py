"""What a sweep's folder holds beside its cells.

``sweep.json`` says which cells there are, ``marks.json`` which of them could not be measured, and why. Each cell is the
folder of an ordinary run below ``cells/``.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from notelens.errors import ConfigError, InputError, RecordError
from notelens.runs.config import config_hash, differences
from notelens.runs.files import LOCK, make_folder, reason, write_atomic
from notelens.runs.manifest import FILE as RUN_MANIFEST
from notelens.runs.manifest import check_same_config, check_same_software, read_manifest
from notelens.runs.records import read_records
from notelens.runs.sweep_config import Cell, Sweep, SweepKind

FILE, MARKS, CELLS = "sweep.json", "marks.json", "cells"
SWEEP_VERSION = 1

Kind = Literal["gate", "package", "model", "incompetent", "worker", "failed", "engine", "partial"]
State = Literal["finished", "unfinished", "absent"]


@dataclass(frozen=True)
class Entry:
    """A cell as ``sweep.json`` lists it.

    Attributes:
        model, task, seed: its place in the grid.
        config: hash of its configuration.
    """

    model: str
    task: str
    seed: int
    config: str

    @property
    def key(self) -> str:
        """``model/task/seed-0``."""
        return f"{self.model}/{self.task}/seed-{self.seed}"


@dataclass(frozen=True)
class Mark:
    """Why a cell has no (full) result.

    Attributes:
        kind: ``gate``, ``package``, ``model`` (not there, or not understood), ``incompetent``, ``worker`` (it died) or
            ``failed``; of a serving benchmark also ``engine`` (it does not start, or cannot be measured) and ``partial``.
        reason: one sentence.
        attempts: how often the cell was tried.
    """

    kind: Kind
    reason: str
    attempts: int = 1


@dataclass(frozen=True)
class SweepFolder:
    """A sweep's folder as read.

    Attributes:
        path: of the folder.
        name, description: of the sweep.
        shared: what all cells have in common.
        entries: cells, in order.
        marks: by key of the cell.
        kind: what a cell is; a run where the file does not say.
    """

    path: Path
    name: str
    description: str
    shared: Mapping[str, Any]
    entries: tuple[Entry, ...]
    marks: Mapping[str, Mark]
    kind: SweepKind = "run"

    def cell(self, key: str) -> Path:
        """Folder of a cell."""
        return self.path / CELLS / key

    def state(self, entry: Entry) -> State:
        """How far a cell is.

        Raises:
            RecordError: its manifest cannot be read.
        """
        manifest = read_manifest(self.cell(entry.key))
        if manifest is None:
            return "absent"
        return "finished" if manifest["state"] == "finished" else "unfinished"


def is_sweep_folder(folder: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (folder / FILE).is_file()


def read_sweep_folder(folder: Path) -> SweepFolder:
    """Read what a sweep's folder says about its cells.

    Raises:
        InputError: the folder holds no sweep.
        RecordError: a file cannot be read.
    """
    data = _read(folder / FILE)
    if data is None:
        raise InputError(
            f"{folder}: holds no sweep (no {FILE}); give the folder that 'notelens run SWEEP.yaml' wrote to"
        )
    try:
        if data["sweep_version"] != SWEEP_VERSION:
            raise RecordError(
                f"{folder / FILE}: version {data['sweep_version']!r}, but this notelens reads {SWEEP_VERSION}; use the "
                "version that wrote it"
            )
        marks = {key: Mark(**mark) for key, mark in (_read(folder / MARKS) or {}).items()}
        entries = tuple(Entry(**entry) for entry in data["cells"])
        kind: SweepKind = "serve" if data.get("kind") == "serve" else "run"
        return SweepFolder(folder, data["name"], data["description"], data["shared"], entries, marks, kind)
    except (KeyError, TypeError, AttributeError) as e:
        raise RecordError(f"{folder / FILE}: is damaged ({e}); restore it, or start the sweep in another folder") from e


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as e:
        raise RecordError(f"{path}: could not be read ({reason(e)})") from e
    except ValueError as e:
        raise RecordError(f"{path}: is not JSON ({e}); restore it, or start the sweep in another folder") from e
    if not isinstance(data, dict):
        raise RecordError(f"{path}: is not a mapping; restore it, or start the sweep in another folder")
    return cast(dict[str, Any], data)


def write_sweep_folder(folder: SweepFolder) -> None:
    """Write ``sweep.json``.

    Raises:
        RecordError: it could not be written; the old one is intact.
    """
    data = {
        "sweep_version": SWEEP_VERSION,
        "kind": folder.kind,
        "name": folder.name,
        "description": folder.description,
        "shared": folder.shared,
        "cells": [asdict(entry) for entry in folder.entries],
    }
    write_atomic(folder.path / FILE, json.dumps(data, indent=1) + "\n")


def write_marks(folder: SweepFolder) -> None:
    """Write ``marks.json``, in the order of the cells.

    Raises:
        RecordError: it could not be written; the old one is intact.
    """
    marks = {e.key: asdict(folder.marks[e.key]) for e in folder.entries if e.key in folder.marks}
    write_atomic(folder.path / MARKS, json.dumps(marks, indent=1) + "\n")


def open_sweep(sweep: Sweep, out: Path) -> SweepFolder:
    """Begin a sweep's folder, or continue it; the caller holds the folder.

    Cells of an earlier grid with the same task and probes are kept beside those of this one.

    Raises:
        InputError: the folder holds something else.
        ConfigError: it was begun with another configuration, or under other library versions.
    """
    mine = tuple(entry_of(cell) for cell in sweep.cells)
    if not is_sweep_folder(out):
        check_free(out)
        folder = SweepFolder(out, sweep.name, sweep.description, sweep.shared, mine, {}, sweep.kind)
    else:
        before = read_sweep_folder(out)
        check_same_shared(out, before.shared, sweep.shared)
        for cell in sweep.cells:
            manifest = read_manifest(before.cell(cell.key))
            if manifest is not None:
                check_same_config(before.cell(cell.key), manifest, cell.config)
        keys = {entry.key for entry in mine}
        others = tuple(entry for entry in before.entries if entry.key not in keys)
        order = {entry.key: i for i, entry in enumerate(before.entries)}
        entries = sorted((*mine, *others), key=lambda e: order.get(e.key, len(order)))
        folder = replace(before, name=sweep.name, description=sweep.description, entries=tuple(entries))
        check_software(folder)
    make_folder(out / CELLS)
    write_sweep_folder(folder)
    return folder


def entry_of(cell: Cell) -> Entry:
    """A cell's line in ``sweep.json``."""
    return Entry(cell.model, cell.task, cell.seed, config_hash(cell.config))


def check_free(out: Path) -> None:
    """A new sweep wants an empty folder.

    Raises:
        InputError: it holds a run, or something else.
    """
    try:
        found = sorted(p.name for p in out.iterdir()) if out.is_dir() else []
    except OSError as e:
        raise InputError(f"{out}: cannot be read ({reason(e)}); choose another folder with --out") from e
    if RUN_MANIFEST in found:
        raise InputError(f"{out}: holds a single run, not a sweep; choose another folder with --out")
    strange = [name for name in found if name != LOCK and not name.endswith(".part")]
    if strange and strange != [CELLS]:  # cells alone: it died before sweep.json was written
        raise InputError(f"{out}: is not empty and holds no sweep ({strange[0]!r}); choose another folder with --out")


def check_same_shared(where: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Cells of one folder differ by the grid only.

    Raises:
        ConfigError: task or probes differ; the message lists how.
    """
    changed = differences(before, now)
    if changed:
        shown = ", ".join(changed[:6]) + (f" and {len(changed) - 6} more" if len(changed) > 6 else "")
        raise ConfigError(
            f"{where}: was begun with another configuration ({shown}); choose another folder with --out, or undo the change"
        )


def check_software(folder: SweepFolder) -> None:
    """A sweep with cells to measure is continued only under the library versions it began with.

    Raises:
        ConfigError: a version that may change numbers differs.
    """
    begun = [(e, m) for e in folder.entries if (m := read_manifest(folder.cell(e.key))) is not None]
    if len(begun) < len(folder.entries) or any(m["state"] != "finished" for _, m in begun):
        for entry, manifest in begun:
            check_same_software(folder.cell(entry.key), manifest)


def incompetence(cell: Path) -> Mark | None:
    """The mark of a finished cell, from its records: probes that the model could not be measured with.

    Raises:
        RecordError: the records cannot be read.
    """
    sentences = [str(end["incompetent"]) for end in read_records(cell).probes.values() if end.get("incompetent")]
    if not sentences:
        return None
    more = len(sentences) - 1
    return Mark("incompetent", f"{sentences[0]}{f' ({more} more probes)' if more else ''}")
