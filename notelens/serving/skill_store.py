"""Skills of a library as an engine uses them: read and checked once, found again at the price of a look at the file."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from notelens._files import reason
from notelens.cache.artefact import SkillFile, SkillHeader, parse
from notelens.cache.library import SkillLibrary
from notelens.errors import ArtefactError, UnknownNameError
from notelens.registry import nearest
from notelens.serving.skill_loads import Known

MEMORY_BYTES = 2 * 2**30
"""Rows kept in memory unless the configuration says otherwise."""


@dataclass(frozen=True)
class _Seen:
    """What a look at a file found.

    Attributes:
        stat: inode, size and time of the file; a file with the same was not written since.
        signature: SHA-256 over the file's header, which holds a digest of everything else.
        header: of the skill.
        refused: why it may not be used, in one sentence; ``None`` where it may.
    """

    stat: tuple[int, int, int]
    signature: str
    header: SkillHeader
    refused: str | None


class SkillStore:
    """Skills by name, from a library that other processes write to.

    A skill that was removed is gone at once, also from memory; one that was replaced is read anew.

    Args:
        library: the folder.
        check: raises what forbids a skill, given its header.
        memory_bytes: rows kept in memory, the least recently used leave first; 0 keeps none.
    """

    def __init__(
        self,
        library: SkillLibrary,
        check: Callable[[SkillHeader], None] = lambda header: None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.library = library
        self.memory_bytes = memory_bytes
        self._check = check
        self._seen: dict[str, _Seen] = {}
        self._rows: OrderedDict[str, SkillFile] = OrderedDict()

    def find(self, name: str) -> Known:
        """The tokens of a skill and the signature of its file.

        Raises:
            UnknownNameError: there is none.
            ArtefactError: its file is damaged, or the skill may not be used here.

        Cost: a look at the file; where it changed, one pass over it.
        """
        seen = self._look(name)
        return Known(seen.header.token_ids, seen.signature)

    def rows(self, name: str, signature: str) -> SkillFile:
        """The rows of a skill.

        Args:
            name: of the skill.
            signature: of the content that is meant.

        Raises:
            UnknownNameError, ArtefactError: as :meth:`find`; or the file was replaced by another skill meanwhile.
        """
        seen = self._look(name)
        if seen.signature != signature:
            raise ArtefactError(f"skill {name!r} was replaced since the request was scheduled")
        if signature not in self._rows:
            _, _, skill = self._read(name)
            self._keep(seen.signature, skill)
            return skill
        self._rows.move_to_end(signature)
        self.library.touch(name)
        self._seen[name] = _Seen(self._stat(name), seen.signature, seen.header, seen.refused)
        return self._rows[signature]

    def _look(self, name: str) -> _Seen:
        stat, seen = self._stat(name), self._seen.get(name)
        if seen is None or seen.stat != stat:
            if seen is not None and self._signature(self._head(name)) == seen.signature:
                seen = _Seen(stat, seen.signature, seen.header, seen.refused)
            else:
                seen = self._read(name)[0]
            self._seen[name] = seen
        if seen.refused is not None:
            raise ArtefactError(seen.refused)
        return seen

    def _read(self, name: str) -> tuple[_Seen, str, SkillFile]:
        """Read and check the whole file."""
        stat = self._stat(name)
        try:
            raw = self.library.path(name).read_bytes()
        except OSError as e:
            raise self._missing(name, e) from e
        skill = parse(raw, self.library.path(name).name)
        if skill.header.name != name:
            raise ArtefactError(
                f"{self.library.path(name).name}: holds skill {skill.header.name!r}; files must not be renamed"
            )
        refused = None
        try:
            self._check(skill.header)
        except ArtefactError as e:
            refused = str(e)
        signature = self._signature(raw[: 8 + int.from_bytes(raw[:8], "little")])
        return _Seen(stat, signature, skill.header, refused), signature, skill

    def _keep(self, signature: str, skill: SkillFile) -> None:
        if skill.nbytes > self.memory_bytes:
            return
        self._rows[signature] = skill
        while sum(s.nbytes for s in self._rows.values()) > self.memory_bytes:
            self._rows.popitem(last=False)

    def _stat(self, name: str) -> tuple[int, int, int]:
        try:
            s = os.stat(self.library.path(name))
        except OSError as e:
            raise self._missing(name, e) from e
        return s.st_ino, s.st_size, s.st_mtime_ns

    def _missing(self, name: str, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            self._seen.pop(name, None)
            near = nearest(name, [e.name for e in self.library.entries()])
            return UnknownNameError(f"no skill {name!r} in {self.library.folder}; {near}")
        return ArtefactError(f"{self.library.path(name)}: cannot be read ({reason(error)})")

    def _head(self, name: str) -> bytes:
        """The header of a file, unchecked: only ever compared with one that was."""
        try:
            with open(self.library.path(name), "rb") as file:
                size = file.read(8)
                return size + file.read(min(int.from_bytes(size, "little"), 2**26))
        except OSError as e:
            raise self._missing(name, e) from e

    @staticmethod
    def _signature(head: bytes) -> str:
        return hashlib.sha256(head).hexdigest()


__all__ = ["MEMORY_BYTES", "SkillStore"]
