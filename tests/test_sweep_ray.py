"""Sweeps on Ray: a cluster of three nodes on this machine, workers and nodes that die, and addresses that do not answer."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notelens.errors import InputError, MissingPackageError, RecordError
from notelens.probes import PROBES
from notelens.runs import ray_launcher, runner
from notelens.runs.cell import Job
from notelens.runs.ray_launcher import APPEND, RayWorkers, _Running, apply, changes, connect
from notelens.runs.records import FILE, RecordWriter, read_records
from notelens.runs.serve_sweep import load_serve_sweep
from notelens.runs.sweep import make_launcher, run_sweep
from notelens.runs.yamlfile import parse_document
from notelens.tasks import TASKS
from tests import serve_cases, serve_ray_program
from tests import sweep_cases as cases

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed (extra 'ray')")


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in (PROBES, TASKS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    monkeypatch.setattr(runner, "default_loader", runner.default_loader)
    cases.install()
    yield


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What the sweeps of ``tests.sweep_ray_program`` came to, and their folder."""
    return run_program("tests.sweep_ray_program", tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What the sweeps of ``tests.serve_ray_program`` came to, and their folder."""
    return run_program("tests.serve_ray_program", tmp_path_factory.mktemp("serve-ray"))


def run_program(module: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Run a program that starts a cluster and writes ``found.json``."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(cases.ROOT),
        "PYTHONWARNINGS": "ignore",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        cwd=cases.ROOT, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads((folder / "found.json").read_text())


def records(folder: Path) -> dict[str, list[bytes]]:
    """Lines of every cell's records without the header, which holds times."""
    out = {}
    for path in sorted(folder.rglob(FILE)):
        lines = path.read_bytes().splitlines()
        out[str(path.parent.relative_to(folder))] = [line for line in lines if json.loads(line)["kind"] != "run"]
    return out


def values(folder: Path) -> dict[str, list[Any]]:
    """Values of every row, without the hash of the configuration."""
    rows = {key: [json.loads(line) for line in lines] for key, lines in records(folder).items()}
    return {key: [row["values"] for row in found if row["kind"] == "instance"] for key, found in rows.items()}


@needs_ray
@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_records_as_this_process(
    cluster: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, found = cluster
    plain = found["plain"]
    here = run_sweep(cases.sweep("[good, ungated, nowhere, better]"), tmp_path / "here")
    assert plain["slots"] == 3 and (plain["n_cells"], plain["n_measured"], plain["n_items"]) == (16, 64, 64)
    assert records(folder / "plain") == records(tmp_path / "here")
    assert {k: v[0] for k, v in plain["marks"].items()} == {k: v.kind for k, v in here.marks.items()}
    assert plain["marks"]["nowhere/low/seed-0"] == ["model", "unknown model 'nowhere'; known names: good"]
    for name in ("table.md", "table.csv", "table.json", "wide.md", "wide.json", "sweep.json", "marks.json"):
        assert (folder / "plain" / name).read_bytes() == (tmp_path / "here" / name).read_bytes(), name


@needs_ray
@pytest.mark.slow
def test_a_killed_ray_worker_loses_nothing(cluster: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, found = cluster
    killed = found["killed"]
    assert killed["marks"] == {} and len(killed["again"]) == 2
    assert all(s.startswith("the worker was lost (") and "\n" not in s for s in killed["again"])
    run_sweep(cases.sweep("[good, fragile]"), tmp_path / "whole")
    assert values(folder / "killed") == values(tmp_path / "whole")
    assert sum(len(read_records(p).runs) for p in (folder / "killed").rglob(FILE)) >= 9  # one cell was continued


@needs_ray
@pytest.mark.slow
def test_a_node_that_disappears_loses_nothing(cluster: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, found = cluster
    assert found["node"]["marks"] == {} and len(found["node"]["again"]) >= 1
    run_sweep(cases.sweep("[good, better]"), tmp_path / "whole")
    assert values(folder / "node") == values(tmp_path / "whole")


@needs_ray
@pytest.mark.slow
def test_a_cluster_without_a_gpu_is_a_sentence(cluster: tuple[Path, dict[str, Any]]) -> None:
    marks = cluster[1]["gpu"]["marks"]
    why = "no node of the Ray cluster has a GPU, and the configuration asks for device 'cuda'"
    assert len(marks) == 4 and all(mark == ["worker", why] for mark in marks.values())


@needs_ray
@pytest.mark.slow
def test_serving_benchmarks_on_a_cluster_write_what_this_process_writes(
    serving: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, found = serving
    marks = {
        "ends/serve/seed-0": ["engine", "the engine ended before it was ready (RuntimeError: no memory for a single block); "
                              "its log is ends/serve/seed-0/engine.log"],
        "big/serve/seed-0": ["worker", "no node of the Ray cluster has a GPU, and the configuration asks for 'gpus: 1'"],
    }  # fmt: skip
    assert found["plain"]["marks"] == marks
    sweep = json.dumps(serve_cases.sweep(serve_ray_program.ENGINES))
    run_sweep(load_serve_sweep(parse_document(sweep, "x.yaml")), tmp_path / "here")
    here, there = serve_cases.contents(tmp_path / "here"), serve_cases.contents(folder / "plain")
    assert here == there and len(here) == 2 * (3 + 4 * 4)
    for label in ("one", "two"):
        a, b = (root / "cells" / label / "serve" / "seed-0" for root in (tmp_path / "here", folder / "plain"))
        assert {p.name for p in a.iterdir()} == {p.name for p in b.iterdir()}
        assert (a / "engine.log").read_bytes() == (b / "engine.log").read_bytes() == b"ready\n"
    assert "no memory" in (folder / "plain" / "cells" / "ends" / "serve" / "seed-0" / "engine.log").read_text()


@needs_ray
@pytest.mark.slow
def test_no_engine_outlives_its_cell_on_a_cluster(serving: tuple[Path, dict[str, Any]]) -> None:
    """Neither where a cell takes too long nor at Ctrl-C; every engine has two children, one in a group of its own."""
    folder, found = serving
    assert found["limit"]["marks"]["held/serve/seed-0"][1].startswith("the cell took longer than 0.2 minutes")
    assert found["stop"]["marks"] == "stopped"
    assert [(found[name]["n_children"], found[name]["gone"]) for name in ("limit", "stop")] == [(2, True)] * 2
    for name in ("limit", "stop"):
        cell = folder / name / "cells" / "held" / "serve" / "seed-0"
        assert [key[1] for key in read_records(cell).items] == ["capacity"], "what was measured is kept"


@needs_ray
@pytest.mark.slow
def test_something_that_is_no_ray_cluster_is_a_sentence_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "JOIN_SECONDS", 8.0)
    start = time.monotonic()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        message = rf"--address {address}: no Ray cluster .* answers there within 8 s"
        with pytest.raises(InputError, match=message) as caught:
            connect(address)
    assert "\n" not in str(caught.value) and time.monotonic() - start < 60


def test_an_address_where_nothing_answers_is_a_sentence_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(InputError, match=rf"--address {address}: nothing answers there \(connection refused\)"):
        connect(address)
    assert time.monotonic() - start < 6


@pytest.mark.parametrize("address", ["", "here", "ray://h:10001", "h:0", "h:99999", "h:12x", "a b:1"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(InputError, match="write auto, or HOST:PORT"):
        connect(address)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else real(name, *a))
    with pytest.raises(MissingPackageError, match=r"needs ray; install it with: pip install 'notelens\[ray\]'"):
        make_launcher("ray", None, "127.0.0.1:6379", None)


# --- what travels -----------------------------------------------------------------------------------------------------


def test_a_folder_is_mirrored_from_what_is_new(tmp_path: Path) -> None:
    """The records travel as appended bytes, also half lines; other files whole, and only when they change."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    sent: dict[str, tuple[int, bytes]] = {}
    names: list[list[str]] = []

    def sync() -> None:
        found = list(changes(one, sent))
        names.append([name for name, _, _ in found])
        for change in found:
            apply(two, change)

    (one / "manifest.json").write_text("{}")
    with RecordWriter(one / FILE) as writer:
        writer.write([{"kind": "run", "config": "c"}])
        sync()
        writer.write([{"kind": "item", "experiment": "e", "stage": "s", "item": "1", "n_lines": 0}])
        sync()
    with (one / FILE).open("ab") as file:
        file.write(b'{"schema_version": 1, "ki')
    sync()
    (one / "run.lock").write_text("1")
    (one / ".table.md.7.part").write_text("x")
    (one / "manifest.json").write_text('{"state": "finished"}')
    (one / "figures").mkdir()
    (one / "figures" / "a.png").write_bytes(b"\x89")
    sync()
    sync()
    assert names == [["manifest.json", FILE], [FILE], [FILE], ["figures/a.png", "manifest.json"], []]
    for name in (FILE, "manifest.json", "figures/a.png"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert len(read_records(two).items) == 1


def test_a_log_is_sent_once_and_goes_behind_those_of_earlier_attempts(tmp_path: Path) -> None:
    two = tmp_path / "two"
    for attempt in ("one", "again"):
        folder, sent = tmp_path / attempt, dict[str, tuple[int, bytes]]()
        folder.mkdir()
        for text in (b"loading\n", b"ready\n"):
            with (folder / "engine.log").open("ab") as log:
                log.write(text)
            assert list(changes(folder, dict(sent))) == [("engine.log", APPEND, text)], "what is new, and no more"
            for change in changes(folder, sent):
                apply(two, change)
        assert list(changes(folder, sent)) == []
    assert (two / "engine.log").read_bytes() == 2 * b"loading\nready\n"


def test_the_limit_of_a_cell_counts_from_when_a_node_begins_it() -> None:
    """Cells that wait for a free GPU may wait for hours."""
    launcher, cancelled, ready = RayWorkers.__new__(RayWorkers), list[Any](), list[Any]()
    stream = iter([([], [])])
    launcher.limit, launcher._refused = 0.0, []
    launcher._running = {stream: _Running(Job("a", {}, "f", False, {}), contextlib.ExitStack())}
    launcher._ray = SimpleNamespace(
        wait=lambda streams, **_: (list(ready), []), get=lambda batch: batch,
        cancel=lambda stream, force: cancelled.append(stream), exceptions=SimpleNamespace(RayError=OSError),
    )  # fmt: skip
    launcher.wait(lambda event: None)
    assert cancelled == []
    ready.append(stream)
    launcher.wait(lambda event: None)
    assert cancelled == [stream]


def test_records_that_do_not_follow_on_each_other_are_refused(tmp_path: Path) -> None:
    apply(tmp_path, (FILE, 0, b"abc"))
    with pytest.raises(RecordError, match="holds 3 bytes, but a worker continues at 5"):
        apply(tmp_path, (FILE, 5, b"def"))
    assert (tmp_path / FILE).read_bytes() == b"abc"
