"""The command line of sweeps: what a file with a section ``sweep`` does, ``notelens merge``, and live progress."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from notelens.errors import InputError
from notelens.runs.launcher import Event
from notelens.runs.sweep import SweepResult, Unwatched, Watcher, check_launcher, make_launcher, run_sweep
from notelens.runs.sweep_config import Sweep, is_sweep
from notelens.runs.sweep_folder import Mark
from notelens.runs.sweep_tables import render_sweep
from notelens.runs.yamlfile import Document

Say = Callable[[str], None]
Options = tuple[str, int | None, str | None, float | None]
"""Launcher, jobs, address, limit."""


def run_document(
    document: Document,
    load: Callable[[Document], Sweep],
    out: Path | None,
    options: Options,
    *,
    dry_run: bool,
    say: Say,
) -> list[Mark] | None:
    """Run the sweep of a document and print its tables.

    Args:
        document: of a configuration.
        load: makes a sweep of it.
        out: folder; ``runs/<name>`` when not given.
        options: of the launcher.
        dry_run: as for a run.
        say: prints one line for people.

    Returns:
        The marks of cells; ``None`` where the document has no section ``sweep``, and then nothing is done.

    Raises:
        KeyboardInterrupt: after a sentence about what is kept.
        InputError: options of a sweep for a document that has none.
        NotelensError: as :func:`~notelens.runs.sweep.run_sweep`.
    """
    if not is_sweep(document):
        if options != ("local", None, None, None):
            text = "--jobs, --launcher, --address and --limit are for sweeps; this file has no 'sweep'"
            raise InputError(f"{document.source}: {text}")
        return None
    check_launcher(*options)
    sweep = load(document)
    folder = out if out is not None else Path("runs") / sweep.name
    try:
        with watching(say) as watcher:
            result = run_sweep(sweep, folder, launcher=make_launcher(*options), watcher=watcher, dry_run=dry_run)
    except KeyboardInterrupt:
        kept = f"what is measured is kept in {folder}; run the same command to continue"
        say(f"stopped: {'nothing was kept' if dry_run else kept}")
        raise
    if dry_run:
        typer.echo(f"dry run of {sweep.name}: {_counts(sweep, result)}; nothing was kept")
    else:
        typer.echo(render_sweep(folder, "md", "wide"))
        typer.echo(f"{_counts(sweep, result)}; cells, long and wide tables: {folder}")
    for key, mark in result.marks.items():
        say(f"marked {key}: {mark.reason}")
    return list(result.marks.values())


def _counts(sweep: Sweep, result: SweepResult) -> str:
    kinds = Counter(mark.kind for mark in result.marks.values())
    marked = (
        f", {len(result.marks)} marked ({', '.join(f'{k}: {n}' for k, n in sorted(kinds.items()))})" if kinds else ""
    )
    return f"{result.n_cells} cells, {result.n_measured} items measured{marked}"


def merge_folders(out: Path, folders: Sequence[Path]) -> str:
    """Merge, and say in a line what came of it.

    Raises:
        NotelensError: as :func:`~notelens.runs.merge.merge`.
    """
    from notelens.runs.merge import merge

    done = merge(out, folders)
    twice = f"; finished by several parts, the first one's kept: {', '.join(done.twice)}" if done.twice else ""
    return f"{out}: {done.n_cells} cells, {done.n_finished} finished, {done.n_copied} copied now{twice}"


class Lines(Unwatched):
    """One line per cell that begins, ends or is tried again, for logs."""

    def __init__(self, say: Say) -> None:
        self.say, self.n_cells, self.n_ended = say, 0, 0

    def begin(self, n_cells: int, n_finished: int) -> None:
        """Say how many."""
        self.n_cells, self.n_ended = n_cells, n_finished
        self.say(f"{n_cells} cells, {n_finished} of them on record")

    def cell(self, key: str) -> None:
        """A cell begins."""
        self.say(f"{key}: begins")

    def ended(self, key: str, sentence: str) -> None:
        """Count it."""
        self.n_ended += 1
        self.say(f"[{self.n_ended}/{self.n_cells}] {key}: {sentence}")

    def again(self, key: str, sentence: str) -> None:
        """A worker died."""
        self.say(f"{key}: {sentence}; trying again from its records")


class Bars(Lines):
    """A bar for the sweep and one for every cell that runs; the lines stand above them."""

    def __init__(self, bars: Any) -> None:
        super().__init__(lambda text: bars.console.print(text, markup=False, highlight=False))
        self.bars, self.all, self.tasks = bars, None, dict[str, Any]()

    def begin(self, n_cells: int, n_finished: int) -> None:
        """The bar of the sweep."""
        super().begin(n_cells, n_finished)
        self.all = self.bars.add_task("cells", total=n_cells, completed=n_finished)

    def cell(self, key: str) -> None:
        """A new bar."""
        self.tasks[key] = self.bars.add_task(key, total=None)

    def event(self, event: Event) -> None:
        """Move the bar of a cell."""
        task = self.tasks.get(event.key)
        if task is not None and event.kind == "stage":
            self.bars.reset(task, total=event.total, completed=event.done, description=f"{event.key}  {event.text}")
        elif task is not None and event.kind == "item":
            self.bars.advance(task)

    def ended(self, key: str, sentence: str) -> None:
        """Remove the bar of the cell, move that of the sweep."""
        super().ended(key, sentence)
        self._remove(key)
        self.bars.advance(self.all)

    def again(self, key: str, sentence: str) -> None:
        """Remove the bar; the next attempt has a new one."""
        super().again(key, sentence)
        self._remove(key)

    def _remove(self, key: str) -> None:
        task = self.tasks.pop(key, None)
        if task is not None:
            self.bars.remove_task(task)


@contextlib.contextmanager
def watching(say: Say) -> Iterator[Watcher]:
    """Bars where stderr is a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield Lines(say)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield Bars(bars)
