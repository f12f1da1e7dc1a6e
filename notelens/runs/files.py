"""Files that are whole or absent, and a folder that one run holds at a time."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from notelens.errors import FolderInUseError, InputError, RecordError

LOCK = "run.lock"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a small file so that a reader sees the old one or the new one, never half of either.

    Raises:
        RecordError: it could not be written; the old file is intact.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
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
