"""Where the cells of a sweep run: in this process, in worker processes, or (:mod:`notelens.runs.ray_launcher`) on Ray.

A launcher takes jobs and reports events. A worker that dies is an event too; whether its cell is tried again is decided by
:mod:`notelens.runs.sweep`.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import notelens
from notelens.errors import InputError
from notelens.runs.cell import Job, OneModel, Outcome, one_line, run_cell


@dataclass(frozen=True)
class Event:
    """Something about a cell.

    Attributes:
        key: of the cell.
        kind: ``stage`` (``text`` begins, ``done`` of ``total`` items are on record), ``item`` (one more), ``note``,
            ``done`` (with ``outcome``) or ``died`` (``text`` says of what).
    """

    key: str
    kind: Literal["stage", "item", "note", "done", "died"]
    text: str = ""
    total: int = 0
    done: int = 0
    outcome: Outcome | None = None


Emit = Callable[[Event], None]


class Launcher(Protocol):
    """Runs jobs."""

    @property
    def slots(self) -> int:
        """How many jobs may run at once."""
        ...

    def start(self, job: Job) -> None:
        """Begin a job; there must be a free slot."""
        ...

    def wait(self, emit: Emit) -> None:
        """Wait until something happened and report it; may return without an event."""
        ...

    def stop(self) -> None:
        """End everything that runs, at once; records are kept."""
        ...


class Reporter:
    """A :class:`~notelens.runs.progress.Progress` that turns into events."""

    def __init__(self, key: str, emit: Emit) -> None:
        self.key, self.emit = key, emit

    def stage(self, probe: str, stage: str, total: int, done: int) -> None:
        """A stage begins."""
        self.emit(Event(self.key, "stage", f"{probe} ({stage})", total, done))

    def item(self) -> None:
        """One more item."""
        self.emit(Event(self.key, "item"))

    def note(self, text: str) -> None:
        """One line for people."""
        self.emit(Event(self.key, "note", text))


class InProcess:
    """One cell after the other in this process; the model stays loaded between the cells that share it."""

    slots = 1

    def __init__(self) -> None:
        self._job: Job | None = None
        self._loader = OneModel()

    def start(self, job: Job) -> None:
        """Take the next job."""
        self._job = job

    def wait(self, emit: Emit) -> None:
        """Run the job."""
        job, self._job = self._job, None
        if job is not None:
            outcome = run_cell(job, Reporter(job.key, emit), self._loader)
            emit(Event(job.key, "done", outcome=outcome))

    def stop(self) -> None:
        """Nothing runs beside this process."""


def as_json(event: Event) -> str:
    """One line."""
    return json.dumps(asdict(event)) + "\n"


def from_json(data: dict[str, Any]) -> Event:
    """The event that :func:`as_json` wrote."""
    outcome = data["outcome"]
    return Event(**{**data, "outcome": Outcome(**outcome) if outcome is not None else None})


@dataclass
class _Worker:
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]
    job: Job | None = None
    deadline: float | None = None
    overdue: bool = False
    rest: bytes = field(default=b"")


class LocalWorkers:
    """Worker processes on this machine; each keeps the last model that it loaded.

    Args:
        jobs: how many.
        limit_minutes: a cell that takes longer is stopped (and tried again from its records).
        imports: modules that every worker imports first, for instance one that registers a probe.

    Raises:
        InputError: ``jobs`` is not positive.
    """

    def __init__(self, jobs: int, *, limit_minutes: float | None = None, imports: Sequence[str] = ()) -> None:
        if jobs < 1:
            raise InputError(f"--jobs {jobs}: must be at least 1")
        self.slots, self.limit, self.imports = jobs, limit_minutes, tuple(imports)
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def start(self, job: Job) -> None:
        """Give the job to an idle worker, or to a new one."""
        worker = next((w for w in self._workers if w.job is None), None) or self._spawn()
        worker.job = job
        worker.deadline = time.monotonic() + 60 * self.limit if self.limit is not None else None
        if worker.process.stdin is not None:
            with contextlib.suppress(OSError):  # it died meanwhile; its end of file says so
                worker.process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
                worker.process.stdin.flush()

    def _spawn(self) -> _Worker:
        root = str(Path(notelens.__file__).parents[1])
        found = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, n_cpus() // self.slots)))
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the worker ends)
        process = subprocess.Popen(
            [sys.executable, "-m", "notelens.runs.worker", *self.imports],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
        )  # fmt: skip
        worker = _Worker(process, log)
        self._workers.append(worker)
        if process.stdout is not None:
            self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        return worker

    def wait(self, emit: Emit) -> None:
        """Read what the workers say; stop those that take too long."""
        deadlines = [w.deadline for w in self._workers if w.deadline is not None and not w.overdue]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(timeout):
            worker: _Worker = key.data
            chunk = os.read(key.fd, 2**16)
            if not chunk:
                self._buried(worker, emit)
                continue
            *lines, worker.rest = (worker.rest + chunk).split(b"\n")
            for line in lines:
                event = from_json(json.loads(line))
                if event.kind == "done":
                    worker.job = worker.deadline = None
                emit(event)
        for worker in self._workers:
            if worker.deadline is not None and time.monotonic() >= worker.deadline and not worker.overdue:
                worker.overdue = True
                worker.process.kill()  # its end of file follows

    def _buried(self, worker: _Worker, emit: Emit) -> None:
        job, code = worker.job, self._end(worker)
        if job is None:
            worker.log.close()
            return
        if worker.overdue:
            why = f"the cell took longer than {self.limit:g} minutes"
        elif code < 0:
            why = f"the worker was killed by {signal.Signals(-code).name}"
        else:
            worker.log.seek(max(0, worker.log.seek(0, os.SEEK_END) - 4000))
            said = [line for line in worker.log.read().decode("utf-8", "replace").splitlines() if line.strip()]
            why = f"the worker ended with exit code {code}{': ' + one_line(said[-1], 300) if said else ''}"
        worker.log.close()
        emit(Event(job.key, "died", why))

    def _end(self, worker: _Worker) -> int:
        self._workers.remove(worker)
        for pipe in (worker.process.stdout, worker.process.stdin):
            if pipe is not None:
                if pipe is worker.process.stdout:
                    self._selector.unregister(pipe)
                with contextlib.suppress(OSError):
                    pipe.close()
        return worker.process.wait()

    def stop(self) -> None:
        """Kill the workers; whole records are on disk at any moment."""
        for worker in list(self._workers):
            worker.process.kill()
            self._end(worker)
            worker.log.close()
        self._selector.close()


def n_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
