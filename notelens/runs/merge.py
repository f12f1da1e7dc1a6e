"""Joins sweeps that were made in parts, on several machines or at several times."""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from notelens.errors import ConfigError, InputError, RecordError
from notelens.runs.config import UNHASHED, differences
from notelens.runs.files import LOCK, held, make_folder, reason
from notelens.runs.manifest import DECIDING, FIXED_FACTS, Manifest, read_manifest
from notelens.runs.records import read_records
from notelens.runs.serve_record import ENGINE_FACTS, fixed_facts
from notelens.runs.sweep_folder import (
    CELLS,
    Entry,
    SweepFolder,
    check_free,
    check_same_shared,
    is_sweep_folder,
    read_sweep_folder,
    write_marks,
    write_sweep_folder,
)
from notelens.runs.sweep_tables import write_sweep_tables


@dataclass(frozen=True)
class Merged:
    """What a merge came to.

    Attributes:
        n_cells, n_finished: of the result.
        n_copied: cells that were copied by this call.
        twice: cells that several parts have finished; the first part's are kept.
    """

    n_cells: int
    n_finished: int
    n_copied: int
    twice: tuple[str, ...]


def merge(out: Path, parts: Sequence[Path]) -> Merged:
    """Join the cells of several sweep folders in ``out``, which may be one of an earlier merge, or of a sweep.

    A cell that several parts have is taken from the one that finished it, else from the one with the most items; a sweep
    can be continued in ``out``. The parts are not changed. Killed in the middle, the same call goes on.

    Args:
        out: new folder, or that of a sweep, whose cells come first.
        parts: folders of sweeps.

    Raises:
        ConfigError: the parts were made with different tasks, probes, software, models or engines; nothing is written.
        InputError: a folder is in use or holds no sweep.
        RecordError: a file cannot be read or written.
    """
    if not parts:
        raise InputError("give at least one folder to merge")
    paths = [p.resolve() for p in (out, *parts)]
    for path, shown in zip(paths[1:], parts, strict=True):
        if paths.count(path) > 1:
            raise InputError(f"{shown}: is given twice; every folder is merged once")
    for part in parts:
        read_sweep_folder(part)  # before a lock file is made in it
    with contextlib.ExitStack() as stack:
        for folder in (out, *parts):
            stack.enter_context(held(folder))
        begun = is_sweep_folder(out)
        if not begun:
            check_free(out)
        sources = [read_sweep_folder(f) for f in ((out, *parts) if begun else parts)]
        _check(sources)
        return _join(out, sources)


def _check(sources: Sequence[SweepFolder]) -> None:
    """All cells of all sources could stand in one sweep.

    Raises:
        ConfigError: with what differs.
    """
    first = sources[0]
    models: dict[str, tuple[Path, Manifest]] = {}
    began: tuple[Path, Manifest] | None = None
    configs: dict[str, tuple[SweepFolder, Entry]] = {}
    for source in sources:
        check_same_shared(source.path, first.shared, source.shared)
        for entry in source.entries:
            other, known = configs.setdefault(entry.key, (source, entry))
            path, manifest = source.cell(entry.key), read_manifest(source.cell(entry.key))
            if known.config != entry.config:
                raise ConfigError(
                    f"{path}: {_config_change(other.cell(entry.key), manifest)}; merge them into two folders"
                )
            if manifest is None:
                continue
            began = began or (path, manifest)
            _same("software", began, (path, manifest), DECIDING, lambda m: m["sessions"][0]["versions"])
            seen = models.setdefault(entry.model, (path, manifest))
            if source.kind == "serve":
                _same("engine", seen, (path, manifest), ENGINE_FACTS, lambda m: fixed_facts(m["engine"]))
            else:
                _same("model", seen, (path, manifest), FIXED_FACTS, lambda m: m["model"])


def _config_change(other: Path, manifest: Manifest | None) -> str:
    before = read_manifest(other)
    if before is None or manifest is None:
        return f"has another configuration than {other}"
    old, new = ({k: v for k, v in m["config"].items() if k not in UNHASHED} for m in (before, manifest))
    return f"has another configuration than {other} ({', '.join(differences(old, new)[:6])})"


def _same(
    what: str, one: tuple[Path, Manifest], two: tuple[Path, Manifest], names: Sequence[str],
    facts: Callable[[Manifest], Mapping[str, Any]],
) -> None:  # fmt: skip
    a, b = facts(one[1]), facts(two[1])
    changed = [f"{n} {a.get(n)} -> {b.get(n)}" for n in names if a.get(n) != b.get(n)]
    if changed:
        raise ConfigError(
            f"{two[0]}: was made with other {what} than {one[0]} ({', '.join(changed)}), so their numbers do not belong "
            "together; merge them into two folders"
        )


def _join(out: Path, sources: Sequence[SweepFolder]) -> Merged:
    entries: dict[str, Entry] = {e.key: e for source in sources for e in source.entries}
    first = sources[0]
    folder = SweepFolder(out, first.name, first.description, first.shared, tuple(entries.values()), {}, first.kind)
    make_folder(out / CELLS)
    write_sweep_folder(folder)
    n_copied, n_finished, twice = 0, 0, []
    marks = {}
    for entry in folder.entries:
        having = [s for s in sources if any(e.key == entry.key for e in s.entries)]
        finished = [s for s in having if s.state(entry) == "finished"]
        n_finished += bool(finished)
        if len(finished) > 1:
            twice.append(entry.key)
        best = finished[0] if finished else max(having, key=lambda s: len(read_records(s.cell(entry.key)).items))
        if best.path != out and best.state(entry) != "absent":
            _copy(best.cell(entry.key), folder.cell(entry.key))
            n_copied += 1
        mark = next((s.marks[entry.key] for s in (best, *having) if entry.key in s.marks), None)
        if mark is not None and (not finished or mark.kind == "incompetent"):
            marks[entry.key] = mark
    folder = replace(folder, marks=marks)
    write_marks(folder)
    write_sweep_tables(out)
    return Merged(len(folder.entries), n_finished, n_copied, tuple(twice))


def _copy(source: Path, target: Path) -> None:
    """Copy a cell's folder so that it is whole or absent.

    Raises:
        InputError: the cell is being written.
        RecordError: it cannot be copied.
    """
    make_folder(target.parent)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    with held(source):
        try:
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(source, part, ignore=shutil.ignore_patterns(LOCK, ".*.part"))
            if target.exists():
                shutil.rmtree(target)
            os.replace(part, target)
        except (OSError, shutil.Error) as e:
            shutil.rmtree(part, ignore_errors=True)
            why = reason(e) if not isinstance(e, shutil.Error) else "a file in it could not be read"
            raise RecordError(
                f"{target}: could not be copied from {source} ({why}); what was merged before is intact"
            ) from e
