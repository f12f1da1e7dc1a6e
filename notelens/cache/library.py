"""A folder of skill files with an index, shared by processes: nothing half-written, nothing lost, oldest out first.

Every file is checked by itself (:mod:`notelens.cache.artefact`), so the index holds nothing that could not be made again
from the files: it only spares opening them. Writers take turns on a lock that the operating system releases when a
process dies. A death at any moment leaves the files that were finished: a leftover part is removed and a finished file
that is not yet indexed is taken in by the next process that writes or lists.
"""

import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from notelens._files import PART, locked, reason, write_atomic
from notelens.cache.artefact import (
    ENDING,
    ModelTag,
    SkillFile,
    SkillHeader,
    check_model,
    check_name,
    dump,
    parse,
)
from notelens.errors import ArtefactError, RecordError, UnknownNameError
from notelens.registry import nearest

logger = logging.getLogger(__name__)

INDEX = "index.json"
LOCK = "library.lock"
SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """One line of the index.

    Attributes:
        name: of the skill; its file is ``<name>.skill``.
        n_bytes, sha256: of the file.
        n_tokens, condition, scheme, exact, model, weights_sha256, dtype: as in the file's header.
    """

    name: str
    n_bytes: int
    sha256: str
    n_tokens: int
    condition: str
    scheme: str
    exact: bool
    model: str
    weights_sha256: str
    dtype: str


class SkillLibrary:
    """A folder of skills.

    Args:
        folder: created when missing.
        budget_bytes: files are removed, least recently used first, when all together would exceed this; never the one
            being written. ``None``: no limit.

    Raises:
        ArtefactError: the folder is a file, or the budget is not positive.
        RecordError: the folder cannot be created.
    """

    def __init__(self, folder: str | Path, budget_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self.budget_bytes = budget_bytes
        if budget_bytes is not None and budget_bytes <= 0:
            raise ArtefactError(f"a budget of {budget_bytes} bytes holds nothing")
        if self.folder.exists() and not self.folder.is_dir():
            raise ArtefactError(f"{self.folder}: is a file, not a folder of skills")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise RecordError(f"{self.folder}: could not be created ({reason(e)})") from e

    def path(self, name: str) -> Path:
        """Where the file of a skill is."""
        return self.folder / (check_name(name) + ENDING)

    def put(self, skill: SkillFile, *, replace: bool = False) -> Entry:
        """Add a skill; the same skill again is no change.

        Args:
            skill: with the name it is kept under.
            replace: overwrite another skill of that name.

        Raises:
            ArtefactError: the name is taken by other rows, or the file alone exceeds the budget; nothing is written.
            RecordError: a file could not be written; what was there before is intact.
        """
        raw, name = dump(skill), skill.header.name
        if self.budget_bytes is not None and len(raw) > self.budget_bytes:
            raise ArtefactError(f"skill {name!r} has {len(raw)} bytes, the library may hold {self.budget_bytes}")
        entry = _entry(skill.header, raw)
        with locked(self.folder / LOCK):
            entries = self._reconcile()
            old = entries.pop(name, None)
            if old is not None and old.sha256 != entry.sha256:
                if not replace:
                    raise ArtefactError(f"the library holds another skill {name!r}; choose another name, or replace it")
                self._write_index(
                    entries
                )  # a death behind this line leaves a file that is read again, not a wrong entry
            if old != entry or not self.path(name).exists():
                write_atomic(self.path(name), raw)
            entries[name] = entry
            for victim in self._excess(entries, keep=name):
                self.path(victim).unlink(missing_ok=True)
                del entries[victim]
                logger.info("skill %s was the least recently used and is removed from %s", victim, self.folder)
            self._write_index(entries)
        self.touch(name)
        return entry

    def get(self, name: str, tag: ModelTag | None = None) -> SkillFile:
        """Read a skill, checked, and mark it as used now.

        Args:
            name: of the skill.
            tag: of the model that will use it; not compared when ``None``.

        Raises:
            UnknownNameError: there is none; the message lists the nearest names.
            ArtefactError: its file is damaged, holds another skill, or was made for another model.
        """
        path = self.path(name)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise UnknownNameError(
                f"no skill {name!r} in {self.folder}; {nearest(name, [e.name for e in self.entries()])}"
            ) from None
        except OSError as e:
            raise ArtefactError(f"{path}: cannot be read ({reason(e)})") from e
        skill = parse(raw, path.name)
        if skill.header.name != name:
            raise ArtefactError(f"{path.name}: holds skill {skill.header.name!r}; files must not be renamed")
        if tag is not None:
            check_model(skill.header, tag)
        self.touch(name)
        return skill

    def entries(self) -> list[Entry]:
        """All skills by name. Files that are damaged are not among them; :meth:`verify` names them."""
        with locked(self.folder / LOCK, shared=True):
            entries, complete = self._index(), not self._parts()
            if complete and entries is not None and set(entries) == set(self._names()):
                return [entries[name] for name in sorted(entries)]
        with locked(self.folder / LOCK):
            entries = self._reconcile()
            self._write_index(entries)
        return [entries[name] for name in sorted(entries)]

    def verify(self) -> dict[str, str | None]:
        """Read every file; name to what is wrong with it, ``None`` where it is whole."""
        found: dict[str, str | None] = {}
        indexed = {entry.name: entry for entry in self.entries()}
        for name in self._names():
            try:
                raw = self.path(name).read_bytes()
                header = parse(raw, self.path(name).name).header
                wrong = None if header.name == name else f"the file holds skill {header.name!r}"
                if wrong is None and name in indexed and _entry(header, raw) != indexed[name]:
                    wrong = "the file is a whole skill, but not the one that the index lists"
            except ArtefactError as e:
                wrong = str(e)
            except OSError as e:
                wrong = f"cannot be read ({reason(e)})"
            found[name] = wrong
        return found

    def remove(self, name: str) -> None:
        """Remove a skill, damaged or not.

        Raises:
            UnknownNameError: there is none.
            RecordError: it cannot be removed.
        """
        with locked(self.folder / LOCK):
            if not self.path(name).exists():
                raise UnknownNameError(f"no skill {name!r} in {self.folder}; {nearest(name, self._names())}")
            try:
                self.path(name).unlink()
            except OSError as e:
                raise RecordError(f"{self.path(name)}: could not be removed ({reason(e)})") from e
            self._write_index(self._reconcile())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._names()

    def __len__(self) -> int:
        return len(self.entries())

    def _names(self) -> list[str]:
        """Names of all skill files, sorted."""
        return sorted(p.name.removesuffix(ENDING) for p in self.folder.glob(f"*{ENDING}") if not p.name.startswith("."))

    def _parts(self) -> list[Path]:
        return list(self.folder.glob(f".*{PART}"))

    def _index(self) -> dict[str, Entry] | None:
        """What the index says; ``None`` where it is missing or cannot be trusted."""
        try:
            data = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            body = data["entries"]
            if data["schema"] != SCHEMA or data["sha256"] != _checksum(body):
                raise ValueError("its checksum is wrong")
            return {name: Entry(**line) for name, line in body.items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            logger.warning("the index of %s is damaged (%s) and is made again from the files", self.folder, e)
            return None

    def _reconcile(self) -> dict[str, Entry]:
        """The index brought in line with the files; the caller holds the lock, so parts belong to the dead."""
        for part in self._parts():
            part.unlink(missing_ok=True)
        known, found = self._index() or {}, {}
        for name in self._names():
            path = self.path(name)
            if name in known and known[name].n_bytes == path.stat().st_size:
                found[name] = known[name]
                continue
            try:
                raw = path.read_bytes()
                header = parse(raw, path.name).header
                if header.name != name:
                    raise ArtefactError(f"{path.name}: holds skill {header.name!r}")
                found[name] = _entry(header, raw)
            except ArtefactError as e:
                logger.warning("%s is left out of the index: %s", path.name, e)
        return found

    def _write_index(self, entries: dict[str, Entry]) -> None:
        body = {name: asdict(entries[name]) for name in sorted(entries)}
        data = {"schema": SCHEMA, "sha256": _checksum(body), "entries": body}
        write_atomic(self.folder / INDEX, json.dumps(data, indent=1) + "\n")

    def _excess(self, entries: dict[str, Entry], keep: str) -> list[str]:
        """Names to remove so that the rest fits the budget, least recently used first."""
        if self.budget_bytes is None:
            return []
        total, victims = sum(e.n_bytes for e in entries.values()), list[str]()
        for name in sorted((n for n in entries if n != keep), key=self._used):
            if total <= self.budget_bytes:
                break
            victims.append(name)
            total -= entries[name].n_bytes
        return victims

    def _used(self, name: str) -> tuple[int, str]:
        try:
            return self.path(name).stat().st_mtime_ns, name
        except FileNotFoundError:
            return 0, name

    def touch(self, name: str) -> None:
        """Mark a skill as used now. Last use is the file's time stamp: marking it needs no lock and cannot tear anything."""
        now = time.time_ns()
        try:
            os.utime(self.path(name), ns=(now, now))
        except OSError as e:
            logger.info("the use of skill %s could not be marked (%s)", name, reason(e))


def _entry(header: SkillHeader, raw: bytes) -> Entry:
    m = header.model
    return Entry(
        header.name, len(raw), hashlib.sha256(raw).hexdigest(), len(header.token_ids), header.condition, header.scheme,
        header.exact, m.name, m.weights_sha256, m.dtype,
    )  # fmt: skip


def _checksum(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


__all__ = ["Entry", "SkillLibrary"]
