"""Start an engine in a process of its own, or attach to one that runs; a started one never outlives its user."""

import contextlib
import errno
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from notelens.errors import InputError, PortInUseError, ServingError
from notelens.serving import keeper
from notelens.serving.client import base_url, need_httpx

READY_S, STOP_S, POLL_S = 600.0, 15.0, 0.25
HASH_SEED = 0
"""Python's hash seed of an engine: with another one in every process, equal prefixes would get unequal keys."""
TAIL_BYTES = 20_000


@dataclass(frozen=True)
class EngineCommand:
    """How to start an engine.

    Attributes:
        command: program and arguments; ``{port}`` and ``{host}`` stand for where it is to listen.
        host: address to listen on.
        port: to listen on; a free one when 0.
        variables: added to the environment of the engine; ``PYTHONHASHSEED`` is set too unless it is among them.
        ready_s: seconds it may take until it answers.
        stop_s: seconds it may take to end when asked; then it is killed.
    """

    command: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    ready_s: float = READY_S
    stop_s: float = STOP_S

    def __post_init__(self) -> None:
        if not self.command or not any("{port}" in part for part in self.command):
            raise InputError(
                f"the engine's command {list(self.command)} does not say {{port}}, so it could listen anywhere"
            )


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Whether an engine can listen there.

    Raises:
        PortInUseError: somebody else does.
        InputError: this machine has no such address.
    """
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
        try:
            s.bind((host, port))
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise InputError(f"no engine can listen on {host}:{port} ({(e.strerror or str(e)).lower()})") from None
            raise PortInUseError(
                f"port {port} on {host} is in use; choose another, 0 for a free one, or attach to what listens there"
            ) from None


class Engine:
    """A running engine; use as a context manager, which ends a started one.

    Attributes:
        url: its address.
        pid: of its first process; ``None`` where it was attached to.
        log: what it writes; ``None`` where it was attached to.
    """

    def __init__(self, url: str, process: "subprocess.Popen[bytes] | None" = None, pid: int | None = None,
                 log: Path | None = None, stop_s: float = STOP_S) -> None:  # fmt: skip
        self.url, self.pid, self.log = base_url(url), pid, log
        self._keeper, self._stop_s = process, stop_s

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def started(self) -> bool:
        """Whether it was started here."""
        return self._keeper is not None

    def alive(self) -> bool:
        """Whether its process runs; always true where it was attached to."""
        return self._keeper is None or self._keeper.poll() is None

    def stop(self) -> None:
        """End it and everything that it started; bounded in time, and without effect the second time."""
        if self._keeper is None:
            return
        process = self._keeper
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(self._stop_s + 2 * keeper.LAST_S)
        except subprocess.TimeoutExpired:
            for group in (self.pid, process.pid):
                if group is not None:
                    keeper.signal_group(group, 9)
            process.kill()
            process.wait()
        if process.returncode != 0 and self.pid is not None:  # the keeper itself was killed
            keeper.signal_group(self.pid, 9)
        if process.stdout is not None:
            process.stdout.close()

    def last_words(self) -> str:
        """The line of its log that most likely says why it ended; empty where there is none."""
        if self.log is None:
            return ""
        try:
            raw = self.log.read_bytes()[-TAIL_BYTES:]
        except OSError:
            return ""
        lines = [" ".join(line.split()) for line in raw.decode("utf-8", "replace").splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line or "error" in line]
        return (telling or lines or [""])[-1][:300]


def start(spec: EngineCommand, log: Path) -> Engine:
    """Start an engine and wait until it answers ``/v1/models``.

    Args:
        spec: how.
        log: file that gets what it writes; appended to.

    Raises:
        PortInUseError: somebody listens on its port already; nothing was started.
        ServingError: it cannot be started, ended, or did not answer in time; nothing is left behind.
    """
    need_httpx()
    if spec.port:
        check_port(spec.host, spec.port)
    port = spec.port or free_port(spec.host)
    command = [part.replace("{port}", str(port)).replace("{host}", spec.host) for part in spec.command]
    variables = {"PYTHONHASHSEED": str(HASH_SEED), **spec.variables}
    held = [
        sys.executable,
        keeper.__file__,
        str(spec.stop_s),
        str(log),
        "env",
        *(f"{k}={v}" for k, v in variables.items()),
    ]
    process = subprocess.Popen([*held, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    engine = Engine(f"http://{spec.host}:{port}", process, None, log, spec.stop_s)
    try:
        engine.pid = _pid(process, command)
        wait_ready(engine, spec.ready_s)
    except BaseException:
        engine.stop()
        raise
    return engine


def attach(url: str) -> Engine:
    """An engine that somebody else started; it is left running."""
    return Engine(url)


@contextlib.contextmanager
def running(spec: EngineCommand | str, log: Path) -> Iterator[Engine]:
    """A started engine, or with an address an attached one, for the duration of a ``with`` block."""
    with attach(spec) if isinstance(spec, str) else start(spec, log) as engine:
        yield engine


def _pid(process: "subprocess.Popen[bytes]", command: Sequence[str]) -> int:
    """What the keeper says first."""
    said = {}
    if process.stdout is not None and select.select([process.stdout], [], [], keeper.LAST_S * 4)[0]:
        with contextlib.suppress(ValueError):
            said = json.loads(process.stdout.readline() or b"{}")
    if "pid" not in said:
        raise ServingError(
            f"the engine {command[0]!r} cannot be started ({said.get('error', 'its keeper says nothing')})"
        )
    return int(said["pid"])


def wait_ready(engine: Engine, seconds: float) -> None:
    """Wait until the engine answers.

    Raises:
        ServingError: it ended, or did not answer in time.
    """
    httpx = need_httpx()
    deadline = time.monotonic() + seconds
    with httpx.Client(trust_env=False, timeout=2.0) as http:
        while True:
            if not engine.alive():
                raise ServingError(f"the engine ended before it was ready ({engine.last_words() or 'its log is empty'}); "
                                   f"its log is {engine.log}")  # fmt: skip
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{engine.url}/v1/models").status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise ServingError(
                    f"the engine did not answer at {engine.url} within {seconds:g} s; its log is {engine.log}"
                )
            time.sleep(POLL_S)


__all__ = [
    "HASH_SEED",
    "Engine",
    "EngineCommand",
    "attach",
    "check_port",
    "free_port",
    "running",
    "start",
    "wait_ready",
]
