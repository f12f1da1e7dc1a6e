"""Engines are started, found, and never left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from notelens.errors import InputError, PortInUseError, ServingError
from notelens.serving.engine import EngineCommand, attach, free_port, start
from tests import serve_cases as cases
from tests.serve_cases import gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def test_an_engine_is_started_with_a_hash_seed_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    with cases.engine(tmp_path, child=1) as engine:
        assert engine.started and engine.alive() and engine.pid is not None
        assert cases.asked(engine.url)["hash_seed"] == "0", "seen by the engine itself"
        children = cases.children_of(tmp_path / "engine.log")
        pids = [engine.pid, *children]
        assert len(children) == 2 and all(map(cases.exists, pids))
        assert os.getpgid(engine.pid) != os.getpgid(0) != os.getpgid(children[0])
    assert gone(pids, 0.5), "the one that left the process group too"
    assert not engine.alive()
    engine.stop()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_ends_the_engine(tmp_path: Path, error: type[BaseException]) -> None:
    pids: list[int] = []
    with pytest.raises(error), cases.engine(tmp_path) as engine:
        pids.append(engine.pid or 0)
        raise error
    assert gone(pids, 0.5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_does_not_outlive_a_killed_benchmark(tmp_path: Path, number: int) -> None:
    code = (
        "import sys, time, pathlib; from notelens.serving.engine import EngineCommand, start; "
        f"e = start(EngineCommand({cases.command(child=1)!r}, stop_s=2.0), pathlib.Path({str(tmp_path / 'log')!r})); "
        "print(e.pid, flush=True); time.sleep(600)"
    )
    user = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=cases.pythonpath())
    assert user.stdout is not None
    pids = [int(user.stdout.readline()), *cases.children_of(tmp_path / "log")]
    assert len(pids) == 3 and all(map(cases.exists, pids))
    user.send_signal(number)
    user.wait()
    user.stdout.close()
    assert gone(pids)


def test_an_engine_does_not_outlive_a_worker_that_kills_its_children_before_it_ends(tmp_path: Path) -> None:
    """As the workers of a Ray cluster do."""
    code = (
        "import os, sys, pathlib; from notelens.serving.engine import EngineCommand, start; "
        f"e = start(EngineCommand({cases.command(child=1)!r}, stop_s=2.0), pathlib.Path({str(tmp_path / 'log')!r})); "
        "print(e.pid, flush=True); sys.stdin.readline(); os.kill(e._keeper.pid, 9); os._exit(0)"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=cases.pythonpath()
    )
    assert user.stdout is not None
    pids = [int(user.stdout.readline()), *cases.children_of(tmp_path / "log")]
    assert len(pids) == 3 and all(map(cases.exists, pids))
    user.communicate(b"\n")
    assert gone(pids)


def test_an_engine_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    spec = EngineCommand(cases.command(stubborn=1), stop_s=0.3)
    engine = start(spec, tmp_path / "log")
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < 3 and gone([engine.pid or 0], 0.5)


def test_a_traceback_while_shutting_down_is_no_failure(tmp_path: Path) -> None:
    with cases.engine(tmp_path, traceback=1):
        pass
    assert "a traceback while shutting down" in (tmp_path / "engine.log").read_text()


def test_a_port_in_use_is_said_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            PortInUseError, match=rf"port {port} on 127.0.0.1 is in use; choose another, 0 for a free one"
        ):
            start(EngineCommand(cases.command(), port=port), tmp_path / "log")
    assert not (tmp_path / "log").exists()
    with pytest.raises(InputError, match=r"no engine can listen on 203\.0\.113\.1"):
        start(EngineCommand(cases.command(), host="203.0.113.1", port=port), tmp_path / "log")


def test_an_engine_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    spec = EngineCommand(cases.command(exit=1), ready_s=20)
    with pytest.raises(ServingError, match=r"ended before it was ready \(RuntimeError: no memory for a single block\)"):
        start(spec, tmp_path / "log")


def test_an_engine_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ServingError, match=r"did not answer at http://127.0.0.1:\d+ within 0.6 s"):
        start(EngineCommand(cases.command(slow_start=60, child=1), ready_s=0.6, stop_s=1), tmp_path / "log")
    assert time.monotonic() - began < 6 and gone(cases.children_of(tmp_path / "log"), 0.5)


def test_a_command_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not say \{port\}"):
        EngineCommand(("vllm", "serve", "model"))
    with pytest.raises(ServingError, match=r"ended before it was ready .*no-such-engine.*No such file"):
        start(EngineCommand(("no-such-engine", "{port}")), tmp_path / "log")


def test_attaching_leaves_the_engine_running(tmp_path: Path) -> None:
    with cases.engine(tmp_path) as engine:
        with attach(f"{engine.url}/v1") as other:
            assert other.url == engine.url and other.alive() and not other.started
        assert engine.alive() and json.dumps(cases.asked(engine.url))
    for wrong in ("127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", ""):
        with pytest.raises(InputError, match="is not the address of an engine"):
            attach(wrong)


def test_a_free_port_is_free() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", free_port()))
