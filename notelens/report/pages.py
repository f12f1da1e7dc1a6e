"""Pages of the documentation that are written from records: their command line, which writes a page or checks it."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from notelens.runs.files import make_folder, write_atomic


def page_command(
    page: Path, make: Callable[[], str], script: str, description: str | None, arguments: Sequence[str] | None = None
) -> tuple[int, str]:
    """Write a page, or with ``--check`` say whether it is up to date.

    Args:
        page: the file.
        make: its text, from the records.
        script: how the page is written, from the root of the repository.
        description: for ``--help``.
        arguments: of the command line; those of the process when ``None``.

    Returns:
        Exit code (1 where a checked page is out of date), and what to say.

    Raises:
        RecordError: the page cannot be written; an earlier version of it is intact.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    given, text = parser.parse_args(arguments), make()
    if not given.check:
        make_folder(page.parent)
        write_atomic(page, text)
        return 0, str(page)
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0, "up to date"
    return 1, f"{page.name} is out of date: python {script}"


__all__ = ["page_command"]
