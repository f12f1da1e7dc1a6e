"""Runs a sweep: every cell once, whatever dies on the way, and a sentence for each that could not be measured."""

import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from notelens.errors import InputError
from notelens.runs import manifest as m
from notelens.runs.cell import Job, Outcome
from notelens.runs.config import RunConfig
from notelens.runs.files import held
from notelens.runs.launcher import Event, InProcess, Launcher
from notelens.runs.sweep_config import Cell, Sweep
from notelens.runs.sweep_folder import Mark, SweepFolder, entry_of, incompetence, open_sweep, write_marks
from notelens.runs.sweep_tables import write_sweep_tables

ATTEMPTS = 3
"""How often a cell is tried whose worker dies; each time it continues from its records."""


class Watcher(Protocol):
    """Who is told about a sweep."""

    def begin(self, n_cells: int, n_finished: int) -> None:
        """The sweep begins; ``n_finished`` of its cells are on record already."""
        ...

    def cell(self, key: str) -> None:
        """A cell begins."""
        ...

    def event(self, event: Event) -> None:
        """A stage or an item of a cell."""
        ...

    def ended(self, key: str, sentence: str) -> None:
        """A cell is finished or marked."""
        ...

    def again(self, key: str, sentence: str) -> None:
        """A worker died; its cell will be tried again."""
        ...


class Unwatched:
    """Tells nobody."""

    def begin(self, n_cells: int, n_finished: int) -> None:
        """Nothing."""

    def cell(self, key: str) -> None:
        """Nothing."""

    def event(self, event: Event) -> None:
        """Nothing."""

    def ended(self, key: str, sentence: str) -> None:
        """Nothing."""

    def again(self, key: str, sentence: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class SweepResult:
    """What a sweep came to.

    Attributes:
        folder: where it is; ``None`` for a dry run.
        n_cells: of this grid.
        n_measured, n_read: items measured by this call, and items that were on record in cells that it touched.
        marks: why cells could not be measured, by key; not empty means exit code 3.
    """

    folder: Path | None
    n_cells: int
    n_measured: int
    n_read: int
    marks: dict[str, Mark]


def run_sweep(
    sweep: Sweep,
    out: str | Path,
    *,
    launcher: Launcher | None = None,
    watcher: Watcher | None = None,
    dry_run: bool = False,
) -> SweepResult:
    """Run a sweep, or continue it: finished cells are not measured again, marked ones are tried again.

    Args:
        sweep: from :func:`~notelens.runs.sweep_config.load_sweep` or :func:`~notelens.runs.serve_sweep.load_serve_sweep`.
        out: folder of the sweep; created, and held while this runs.
        launcher: where cells run; this process when not given.
        watcher: who is told about it.
        dry_run: every cell a few instances on a small random model; nothing is kept.

    Raises:
        ConfigError: parameters that the classes refuse; a folder begun with another configuration or version.
        InputError: the folder is in use or holds something else; a dry run of serving benchmarks.
        RecordError: a file of the sweep could not be written.
    """
    shown = watcher if watcher is not None else Unwatched()
    runs = launcher if launcher is not None else InProcess()
    try:
        _check(sweep, dry_run)
        if dry_run:
            with tempfile.TemporaryDirectory(prefix="notelens-dry-") as folder:
                return replace(_run(sweep, Path(folder), runs, shown, dry_run=True), folder=None)
        with held(Path(out)):
            return _run(sweep, Path(out), runs, shown, dry_run=False)
    finally:
        runs.stop()


def _check(sweep: Sweep, dry_run: bool) -> None:
    """Refuse wrong parameters before anything is measured."""
    if sweep.kind == "serve":
        if dry_run:
            raise InputError("a serving benchmark has no dry run; give its engines a small model")
        return
    from notelens.runs.plan import plan

    for cell in sweep.cells:
        if isinstance(cell.config, RunConfig):
            plan(cell.config, cell.document)


def _run(sweep: Sweep, out: Path, launcher: Launcher, watcher: Watcher, *, dry_run: bool) -> SweepResult:
    folder = open_sweep(sweep, out)
    done = {c.key for c in sweep.cells if folder.state(entry_of(c)) == "finished"}
    found = {key: incompetence(folder.cell(key)) for key in done}
    marks = {k: mark for k, mark in folder.marks.items() if k not in done}  # finished cells: what their records say
    folder = replace(folder, marks={**marks, **{k: mark for k, mark in found.items() if mark is not None}})
    todo = [c for c in sweep.cells if c.key not in done]
    watcher.begin(len(sweep.cells), len(sweep.cells) - len(todo))
    queue = _Queue(folder, todo, launcher, watcher, dry_run)
    queue.run()
    if not dry_run:
        write_marks(queue.folder)
        write_sweep_tables(out)
    keys = {cell.key for cell in sweep.cells}
    marks = {key: mark for key, mark in queue.folder.marks.items() if key in keys}
    return SweepResult(out, len(sweep.cells), queue.n_measured, queue.n_read, marks)


class _Queue:
    """Cells that wait, cells that run, and what became of the others."""

    def __init__(
        self, folder: SweepFolder, cells: Sequence[Cell], launcher: Launcher, watcher: Watcher, dry_run: bool
    ) -> None:
        again = {cell.key for cell in cells}
        self.folder = replace(folder, marks={k: v for k, v in folder.marks.items() if k not in again})
        self.waiting = deque(cells)
        self.running: dict[str, Cell] = {}
        self.attempts = dict.fromkeys(again, 0)
        self.launcher, self.watcher, self.dry_run = launcher, watcher, dry_run
        self.versions = m.versions()
        self.n_measured = self.n_read = 0

    def run(self) -> None:
        """Until nothing waits and nothing runs."""
        while self.waiting or self.running:
            while len(self.running) < self.launcher.slots and (cell := self._next()) is not None:
                self.running[cell.key] = cell
                self.attempts[cell.key] += 1
                self.watcher.cell(cell.key)
                self.launcher.start(self._job(cell))
            self.launcher.wait(self._on)

    def _next(self) -> Cell | None:
        """Take the first cell that may run beside those that do."""
        busy = {cell.alone for cell in self.running.values() if cell.alone}
        for i, cell in enumerate(self.waiting):
            if cell.alone not in busy:
                del self.waiting[i]
                return cell
        return None

    def _job(self, cell: Cell) -> Job:
        config, folder = cell.config.model_dump(mode="json"), str(self.folder.cell(cell.key))
        return Job(cell.key, config, folder, self.dry_run, self.versions, self.folder.kind, cell.n_gpus)

    def _on(self, event: Event) -> None:
        if event.kind == "done" and event.outcome is not None:
            self._ended(self.running.pop(event.key), event.outcome)
        elif event.kind == "died":
            self._died(self.running.pop(event.key), event.text)
        else:
            self.watcher.event(event)

    def _died(self, cell: Cell, why: str) -> None:
        n = self.attempts[cell.key]
        if n < ATTEMPTS:
            self.watcher.again(cell.key, why)
            self.waiting.appendleft(cell)
        else:
            self._ended(cell, Outcome("worker", f"{why}; tried {n} times, its records are kept"))

    def _ended(self, cell: Cell, outcome: Outcome) -> None:
        self.n_measured += outcome.n_measured
        self.n_read += outcome.n_read
        if outcome.kind is None:
            on_record = f" ({outcome.n_read} on record)" if outcome.n_read else ""
            self.watcher.ended(cell.key, f"finished, {outcome.n_measured + outcome.n_read} items{on_record}")
            return
        mark = Mark(outcome.kind, outcome.reason, self.attempts[cell.key])
        self.folder = replace(self.folder, marks={**self.folder.marks, cell.key: mark})
        if not self.dry_run:
            write_marks(self.folder)
        self.watcher.ended(cell.key, f"marked: {outcome.reason}")


def check_launcher(launcher: str, jobs: int | None, address: str | None, limit: float | None) -> None:
    """Refuse options that do not belong together.

    Raises:
        InputError: with the way out.
    """
    if launcher not in ("local", "ray"):
        raise InputError(f"unknown launcher {launcher!r}; known: local, ray")
    if launcher == "ray" and not address:
        raise InputError("--launcher ray needs --address, for instance --address auto or --address 10.0.0.1:6379")
    if launcher == "local" and address:
        raise InputError("--address belongs to --launcher ray")
    if limit is not None and (limit <= 0 or (launcher == "local" and jobs is None)):
        raise InputError(
            "--limit needs a positive number of minutes and worker processes to stop (--jobs or --launcher ray)"
        )
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs}: must be at least 1")


def make_launcher(
    launcher: str, jobs: int | None, address: str | None, limit: float | None, imports: Sequence[str] = ()
) -> Launcher:
    """The launcher that the options ask for.

    Raises:
        InputError: options that do not belong together, or a cluster that cannot be reached.
        MissingPackageError: ray is not installed.
    """
    from notelens.runs.launcher import LocalWorkers

    check_launcher(launcher, jobs, address, limit)
    if launcher == "ray":
        from notelens.runs.ray_launcher import RayWorkers

        return RayWorkers(str(address), jobs=jobs, limit_minutes=limit, imports=imports)
    if jobs is None:
        return InProcess()
    return LocalWorkers(jobs, limit_minutes=limit, imports=imports)
