"""Cells on a Ray cluster (extra ``ray``). No shared file system is needed: records are sent to this process as they are made.

A task on the cluster runs the cell in a temporary folder of its node and streams back what it appends to the records, so
this process is the only one that writes to the sweep's folder. A task that dies is started again, anywhere, from the
records that have arrived.
"""

import contextlib
import importlib
import importlib.util
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from notelens.errors import FolderInUseError, InputError, MissingPackageError, RecordError
from notelens.runs import manifest
from notelens.runs.cell import Job, OneModel, Outcome, one_line, refusal, run_cell
from notelens.runs.files import held, make_folder, reason, write_atomic
from notelens.runs.launcher import Emit, Event, Reporter, from_json
from notelens.runs.records import FILE, read_records
from notelens.runs.serve_record import ENGINE_LOG

CONNECT_SECONDS, JOIN_SECONDS, POLL_SECONDS = 5.0, 45.0, 1.0
JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
"""Tried in a process of its own first: where no cluster answers, Ray waits for minutes and then ends the process."""

REPLACE, APPEND = -1, -2
Change = tuple[str, int, bytes]
"""File below the cell's folder, offset, bytes; or how they are written: instead of the file, or behind what it holds."""

_LOADER = OneModel()
"""Of a worker process on the cluster; Ray keeps such processes, so the model stays loaded."""


# --- on the cluster ---------------------------------------------------------------------------------------------------


def stream_cell(
    job: Mapping[str, Any], before: Mapping[str, bytes], imports: Sequence[str]
) -> "Iterator[tuple[list[dict[str, Any]], list[Change]]]":
    """Run a cell on this node and yield its events with what they changed in its folder.

    Args:
        job: fields of a :class:`~notelens.runs.cell.Job`.
        before: files of the cell's folder to continue from.
        imports: modules to import first.
    """
    yield [], []  # it has begun: until now it may have waited for a node with room
    for module in imports:
        importlib.import_module(module)
    events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="notelens-cell-") as scratch:
        folder = Path(scratch) / "cell"
        folder.mkdir()
        for name, content in before.items():
            (folder / name).write_bytes(content)
        here = replace(Job(**job), folder=str(folder))

        def work() -> None:
            try:
                outcome = run_cell(here, Reporter(here.key, events.put), _LOADER)
                events.put(Event(here.key, "done", outcome=outcome))
            except BaseException as e:  # of this thread; the stream raises it again, or it would wait for ever
                events.put(e)
                raise

        threading.Thread(target=work, daemon=True).start()
        sent = {name: (len(content), content) for name, content in before.items()}
        while True:
            batch = [events.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(events.get_nowait())
            for event in batch:
                if isinstance(event, BaseException):
                    raise event
            good = [asdict(event) for event in batch if isinstance(event, Event)]
            yield good, list(changes(folder, sent))
            if any(event["kind"] == "done" for event in good):
                return


def changes(folder: Path, sent: dict[str, tuple[int, bytes]]) -> Iterator[Change]:
    """What is new in a folder since the last call.

    The records and an engine's log only grow, so what was appended is sent; other files are sent whole when they differ. A log
    begins anew with every attempt at a cell, so it goes behind what earlier ones wrote.
    """
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.endswith((".part", ".lock")):
            continue
        if name in (FILE, ENGINE_LOG):
            start = sent.get(name, (0, b""))[0]
            with path.open("rb") as file:
                file.seek(start)
                more = file.read()
            if more:
                sent[name] = (start + len(more), b"")
                yield name, start if name == FILE else APPEND, more
            continue
        with contextlib.suppress(FileNotFoundError):  # replaced between the listing and the reading
            content = path.read_bytes()
            if sent.get(name) != (len(content), content):
                sent[name] = (len(content), content)
                yield name, REPLACE, content


# --- on the machine that keeps the records ----------------------------------------------------------------------------


@dataclass
class _Running:
    job: Job
    lock: contextlib.ExitStack
    deadline: float | None = None
    overdue: bool = False


class RayWorkers:
    """A launcher on a running Ray cluster.

    Args:
        address: ``auto`` or ``HOST:PORT``; this machine must be a node of the cluster.
        jobs: cells at once; as many as the cluster has processors when not given.
        limit_minutes: a cell that takes longer from when a node begins it is stopped (and tried again from its records).
        imports: modules that every worker imports first.

    Raises:
        MissingPackageError: ray is not installed.
        InputError: no cluster answers at the address within :data:`JOIN_SECONDS`.
    """

    def __init__(
        self, address: str, *, jobs: int | None = None, limit_minutes: float | None = None, imports: Sequence[str] = ()
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingPackageError("--launcher ray needs ray; install it with: pip install 'notelens[ray]'")
        self._ray, self._own = connect(address)
        self.limit, self.imports = limit_minutes, tuple(imports)
        self.resources: dict[str, float] = self._ray.cluster_resources()
        self.slots = jobs if jobs is not None else max(1, int(self.resources.get("CPU", 1)))
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self.most_gpus = int(max((resources.get("GPU", 0) for resources in nodes), default=0))
        self._running: dict[Any, _Running] = {}
        self._refused: list[Event] = []

    def start(self, job: Job) -> None:
        """Send the job and what is on record of its cell to the cluster."""
        n_gpus = 0 if job.dry_run else job.n_gpus
        if n_gpus > self.most_gpus:
            asked = "device 'cuda'" if job.kind == "run" else f"'gpus: {n_gpus}'"
            what = "a GPU" if n_gpus == 1 else f"{n_gpus} GPUs"
            why = f"no node of the Ray cluster has {what}, and the configuration asks for {asked}"
            self._refused.append(Event(job.key, "done", outcome=Outcome("worker", why)))
            return
        lock, before = contextlib.ExitStack(), dict[str, bytes]()
        if not job.dry_run:
            folder = Path(job.folder)
            try:
                lock.enter_context(held(folder))
            except FolderInUseError as e:
                self._refused.append(Event(job.key, "done", outcome=Outcome("failed", refusal(e, job))))
                return
            for name in (manifest.FILE, FILE):
                if (folder / name).is_file():
                    before[name] = (folder / name).read_bytes()
            if FILE in before:
                whole = read_records(folder).offset
                before[FILE] = before[FILE][:whole]
                os.truncate(folder / FILE, whole)
        remote = self._ray.remote(num_cpus=1, num_gpus=n_gpus, max_retries=0, num_returns="streaming")(stream_cell)
        self._running[remote.remote(asdict(job), before, self.imports)] = _Running(job, lock)

    def wait(self, emit: Emit) -> None:
        """Take in what arrived within a second."""
        while self._refused:
            emit(self._refused.pop())
        if not self._running:
            return
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=POLL_SECONDS)
        for stream in ready:
            self._read(stream, emit)
        for stream, running in self._running.items():
            if running.deadline is not None and time.monotonic() >= running.deadline and not running.overdue:
                running.overdue = True
                self._ray.cancel(stream, force=True)

    def _read(self, stream: Any, emit: Emit) -> None:
        running = self._running[stream]
        try:
            events, changed = self._ray.get(next(stream))
        except StopIteration:
            self._ended(stream)
            emit(Event(running.job.key, "died", "the worker ended without a result"))
            return
        except self._ray.exceptions.RayError as e:
            self._ended(stream)
            emit(Event(running.job.key, "died", self._why(running, e)))
            return
        if self.limit is not None and running.deadline is None:
            running.deadline = time.monotonic() + 60 * self.limit
        if not running.job.dry_run:
            for change in changed:
                apply(Path(running.job.folder), change)
        for event in map(from_json, events):
            if event.kind == "done":
                self._ended(stream)
            emit(event)

    def _why(self, running: _Running, error: Exception) -> str:
        if running.overdue:
            return f"the cell took longer than {self.limit:g} minutes"
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        if isinstance(error, self._ray.exceptions.RayTaskError):  # its last line is that of the traceback on the node
            return f"the worker failed: {one_line(said[-1] if said else type(error).__name__, 300)}"
        return f"the worker was lost ({type(error).__name__}: {one_line(said[0] if said else '', 200)})"

    def _ended(self, stream: Any) -> None:
        self._running.pop(stream).lock.close()

    def stop(self) -> None:
        """Cancel what runs and leave the cluster."""
        for stream in list(self._running):
            self._ray.cancel(stream, force=True)
            self._ended(stream)
        if self._own:
            self._ray.shutdown()


def apply(folder: Path, change: Change) -> None:
    """Write what a worker sent.

    Raises:
        RecordError: it could not be written, or does not follow on what is there.
    """
    name, offset, content = change
    path = folder / name
    make_folder(path.parent)
    if offset == REPLACE:
        write_atomic(path, content)
        return
    try:
        with path.open("ab") as file:
            if offset != APPEND and file.tell() != offset:
                raise RecordError(f"{path}: holds {file.tell()} bytes, but a worker continues at {offset}; run again")
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        if isinstance(e, RecordError):
            raise
        raise RecordError(f"{path}: could not be written ({reason(e)}); whole records before it are kept") from e


def connect(address: str) -> tuple[Any, bool]:
    """The module ``ray``, connected, and whether it was connected here.

    Every step is bounded in time.

    Raises:
        InputError: no such cluster.
    """
    joined = sys.modules.get("ray")
    if joined is not None and joined.is_initialized():
        return joined, False
    if address != "auto":
        found = re.fullmatch(r"([A-Za-z0-9._-]+):([0-9]{1,5})", address)
        if found is None or not 0 < int(found[2]) < 2**16:
            raise InputError(
                f"--address {address}: write auto, or HOST:PORT of the cluster's head, for instance 10.0.0.1:6379"
            )
        try:
            socket.create_connection((found[1], int(found[2])), timeout=CONNECT_SECONDS).close()
        except OSError as e:
            raise InputError(
                f"--address {address}: nothing answers there ({reason(e)}); is the Ray cluster up?"
            ) from None
    command = [sys.executable, "-c", JOIN, address]
    try:
        joins = subprocess.run(command, capture_output=True, timeout=JOIN_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        joins = False
    if not joins:
        raise InputError(
            f"--address {address}: no Ray cluster that this machine is a node of answers there within {JOIN_SECONDS:g} s"
        )
    import ray  # pyright: ignore[reportMissingImports]  # extra `ray`

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise InputError(
            f"--address {address}: this machine could not join the Ray cluster ({one_line(str(e), 300)})"
        ) from None
    return ray, True
