"""Holds an engine for as long as somebody holds its pipe: ``python keeper.py STOP_S LOG COMMAND...``; standard library only.

The engine runs in a process group of its own. When it ends, or when standard input is closed (whoever started this has
stopped, or died of whatever cause), everything that the engine started is ended too: first asked, then killed. On Linux this
process also adopts what the engine leaves behind, so that not even a child in another group survives.

There are two such processes: the one that was started stands in for the one that holds the engine. For a worker that a cluster
ends may kill its own children first (Ray's does), and the one that holds the engine must live on to end it.

Standard output says what happened, one JSON object a line: ``{"pid": ...}`` or ``{"error": ...}``, then ``{"code": ...}``.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

POLL_S = 0.05
LAST_S = 5.0
"""How long killed processes may take to disappear."""
PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """Become the parent of orphaned descendants; without effect where the system knows no such thing."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Processes whose parent is this one, from ``/proc``."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rsplit(b")", 1)[1].split()[1]) == os.getpid():
                        found.append(int(name))
    return found


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap() -> None:
    """Take the exit codes of adopted processes, so that they disappear."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end(engine: "subprocess.Popen[bytes]", stop_s: float) -> None:
    """End the engine and all that it started, within ``stop_s`` and :data:`LAST_S` seconds."""
    signal_group(engine.pid, signal.SIGTERM)
    deadline = time.monotonic() + stop_s
    while time.monotonic() < deadline and engine.poll() is None:
        time.sleep(POLL_S)
    deadline = time.monotonic() + LAST_S
    while time.monotonic() < deadline:
        there = signal_group(engine.pid, signal.SIGKILL)
        left = [pid for pid in children() if pid != engine.pid or engine.poll() is None]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        engine.poll()
        if engine.returncode is not None:
            reap()
        if not there and not left:
            return
        time.sleep(POLL_S)


def stand_in(keeper: int) -> int:
    """Be there for as long as the keeper is, and end as it does; pass on what it is asked."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    for end in (sys.stdin.fileno(), sys.stdout.fileno()):
        os.close(end)
    return abs(os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]))


def main(arguments: list[str]) -> int:
    """Hold the engine; the exit code is 0 unless it could not be started."""
    keeper = os.fork()
    return stand_in(keeper) if keeper else hold(arguments)


def hold(arguments: list[str]) -> int:
    """Start the engine and hold it."""
    stop_s, log, *command = arguments
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    adopt()
    try:
        with open(log, "ab") as file:
            engine = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
    except OSError as e:
        say({"error": f"{e.filename or command[0]}: {(e.strerror or str(e)).lower()}"})
        return 1
    say({"pid": engine.pid})
    while engine.poll() is None and not asked:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
    end(engine, float(stop_s))
    say({"code": engine.poll()})
    return 0


def say(line: dict[str, object]) -> None:
    """One line to whoever listens; nobody need."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
