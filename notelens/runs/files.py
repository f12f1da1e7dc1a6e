"""A folder that one run holds at a time; files that are whole or absent come from :mod:`notelens._files`."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from notelens._files import reason, write_atomic
from notelens.errors import FolderInUseError, InputError, RecordError

__all__ = ["LOCK", "held", "make_folder", "reason", "write_atomic"]

LOCK = "run.lock"


def make_folder(folder: Path) -> None:
    """Create ``folder`` and what lies above it, if need be.

    Raises:
        InputError: it is a file, or lies below one.
        RecordError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{folder}: is a file, or lies below one; choose another folder with --out") from None
    except OSError as e:
        raise RecordError(f"{folder}: could not be created ({reason(e)}); choose another folder with --out") from e


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Create ``folder`` if need be and hold it for this process; the hold ends with the process, however it dies.

    Raises:
        FolderInUseError: another process holds it.
        InputError: it is not a folder.
        RecordError: it cannot be created or locked.
    """
    import fcntl

    make_folder(folder)
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise RecordError(f"{folder / LOCK}: could not be opened ({reason(e)})") from e
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise FolderInUseError(
                f"{folder}: another run (process {holder}) is writing here; wait for it, or choose another "
                "folder with --out"
            ) from None
        except OSError as e:
            raise RecordError(f"{folder / LOCK}: could not be locked ({reason(e)})") from e
        with contextlib.suppress(
            OSError
        ):  # the number is for the message above only; a full disk must not stop a reader
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield folder
    finally:
        os.close(handle)
