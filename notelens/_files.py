"""Files that are whole or absent, and a lock that ends with the process that holds it."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from notelens.errors import RecordError

PART = ".part"
"""Ending of a file that is being written. One that is left over belonged to a process that died."""


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of either.

    Raises:
        RecordError: it could not be written; the old file is intact.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{PART}")
    try:
        with open(part, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise RecordError(f"{path}: could not be written ({reason(e)}); what was there before is intact") from e


def reason(error: OSError) -> str:
    """What the operating system says, without numbers and paths."""
    return (error.strerror or str(error) or type(error).__name__).lower()


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Wait for the lock file ``path`` and hold it; the hold ends with the process, however it dies.

    Args:
        path: created when missing, never removed.
        shared: with other readers, instead of alone.

    Raises:
        RecordError: it cannot be created or locked.
    """
    import fcntl

    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise RecordError(f"{path}: could not be opened ({reason(e)})") from e
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        except OSError as e:
            raise RecordError(f"{path}: could not be locked ({reason(e)})") from e
        yield
    finally:
        os.close(handle)
