"""Sweeps: same records whatever the launcher, a dead worker loses nothing, and what cannot be measured is marked."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import ConfigError, InputError, RecordError
from notelens.probes import PROBES
from notelens.runs import manifest as m
from notelens.runs import runner
from notelens.runs.files import LOCK, held
from notelens.runs.launcher import Event, InProcess, LocalWorkers
from notelens.runs.records import FILE, read_records
from notelens.runs.runner import execute
from notelens.runs.sweep import ATTEMPTS, Unwatched, make_launcher, run_sweep
from notelens.runs.sweep_config import Sweep, load_sweep
from notelens.runs.sweep_folder import read_sweep_folder
from notelens.runs.yamlfile import parse_document
from notelens.tasks import TASKS
from tests import sweep_cases as cases

WORKER = ("tests.sweep_worker",)
FOUR = "[good, ungated, unpacked, better]"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The fakes are in the registries for one test, and in the worker processes of that test."""
    for registry in (PROBES, TASKS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    monkeypatch.setattr(runner, "default_loader", runner.default_loader)
    cases.install()
    cases.LOADED.clear()
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv(cases.MARKS, str(tmp_path / "marks"))
    monkeypatch.setenv("PYTHONPATH", str(cases.ROOT))
    yield


class Watcher(Unwatched):
    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = []
        self.items: dict[str, int] = {}

    def ended(self, key: str, sentence: str) -> None:
        self.said.append(("ended", key, sentence))

    def again(self, key: str, sentence: str) -> None:
        self.said.append(("again", key, sentence))

    def event(self, event: Event) -> None:
        if event.kind == "item":
            self.items[event.key] = self.items.get(event.key, 0) + 1


def records(folder: Path) -> dict[str, list[bytes]]:
    """Lines of every cell's records without the header, which holds times."""
    out = {}
    for path in sorted(folder.rglob(FILE)):
        lines = path.read_bytes().splitlines()
        out[str(path.parent.relative_to(folder))] = [line for line in lines if json.loads(line)["kind"] != "run"]
    return out


def tables(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix in (".md", ".csv", ".tex")} | {
        name: (folder / name).read_bytes() for name in ("table.json", "wide.json", "sweep.json", "marks.json")
    }


# --- cells ------------------------------------------------------------------------------------------------------------


def test_every_cell_is_an_ordinary_run_in_its_own_folder(tmp_path: Path) -> None:
    sweep = cases.sweep()
    watcher = Watcher()
    result = run_sweep(sweep, tmp_path / "out", watcher=watcher)
    assert (result.n_cells, result.n_measured, result.n_read, result.marks) == (8, 64, 0, {})
    for cell in sweep.cells:
        execute(cell.config, tmp_path / "alone" / "cells" / cell.key)
        assert watcher.items[cell.key] == 8
    assert records(tmp_path / "out") == records(tmp_path / "alone") and len(records(tmp_path / "out")) == 8
    for name in ("table.md", "table.csv", "table.tex", "table.json"):
        one, two = ((tmp_path / f / "cells" / sweep.cells[0].key / name).read_bytes() for f in ("out", "alone"))
        assert one == two
    values = [[row["value"] for row in read_records(p.parent).all_aggregates()] for p in (tmp_path / "out").rglob(FILE)]
    assert len({json.dumps(v) for v in values}) == 4  # two seeds and two tasks; the two fakes decide alike


def test_a_model_is_loaded_once_for_all_of_its_cells(tmp_path: Path) -> None:
    run_sweep(cases.sweep(), tmp_path / "out")
    assert cases.LOADED == ["good", "better"]


def test_a_finished_sweep_is_not_run_again(tmp_path: Path) -> None:
    run_sweep(cases.sweep(), tmp_path / "out")
    before, files = records(tmp_path / "out"), tables(tmp_path / "out")
    cases.LOADED.clear()
    again = run_sweep(cases.sweep(), tmp_path / "out")
    assert (again.n_measured, again.n_read, cases.LOADED, again.marks) == (0, 0, [], {})
    assert records(tmp_path / "out") == before and tables(tmp_path / "out") == files


def test_a_grid_may_grow_and_keeps_what_it_has(tmp_path: Path) -> None:
    run_sweep(cases.sweep("[good]"), tmp_path / "out")
    result = run_sweep(cases.sweep("[better]"), tmp_path / "out")
    assert result.n_cells == 4 and result.n_measured == 32
    assert [e.model for e in read_sweep_folder(tmp_path / "out").entries] == ["good"] * 4 + ["better"] * 4
    rows = json.loads((tmp_path / "out" / "table.json").read_text())
    assert {r["label"] for r in rows} == {"good", "better"}


def test_a_dry_run_keeps_nothing(tmp_path: Path) -> None:
    result = run_sweep(cases.sweep(FOUR), tmp_path / "out", dry_run=True)
    assert result.folder is None and result.n_measured == 4 * 2 * 2 and not (tmp_path / "out").exists()
    assert {mark.kind for mark in result.marks.values()} == {"gate", "package"}


# --- marks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_what_cannot_be_measured_is_marked_with_its_reason_and_the_rest_goes_on(
    tmp_path: Path, jobs: int | None
) -> None:
    models = "[good, ungated, unpacked, nowhere, toolarge, fool, better]"
    launcher = make_launcher("local", jobs, None, None, WORKER)
    result = run_sweep(cases.sweep(models), tmp_path / "out", launcher=launcher)
    kinds = {key.split("/")[0]: mark.kind for key, mark in result.marks.items()}
    assert kinds == {
        "ungated": "gate", "unpacked": "package", "nowhere": "model", "toolarge": "failed", "fool": "incompetent",
    }  # fmt: skip
    assert len(result.marks) == 20 and result.n_measured == 3 * 4 * 8
    for mark in result.marks.values():
        assert mark.reason and "\n" not in mark.reason and mark.attempts == 1 and "Traceback" not in mark.reason
    assert result.marks["toolarge/low/seed-0"].reason == "RuntimeError: CUDA out of memory. Tried to allocate 3 TiB"
    assert result.marks["fool/low/seed-0"].reason.startswith("count: none of 16 rows")
    folder = read_sweep_folder(tmp_path / "out")
    assert folder.marks == result.marks
    assert {folder.state(e) for e in folder.entries if e.model in ("good", "better", "fool")} == {"finished"}


def test_marked_cells_are_tried_again_and_incompetent_ones_stay_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sweep(cases.sweep("[ungated, fool]"), tmp_path / "out")
    (tmp_path / "out" / "marks.json").unlink()  # killed before it was written
    monkeypatch.setattr(cases, "REFUSALS", {})
    cases.LOADED.clear()
    result = run_sweep(cases.sweep("[ungated, fool]"), tmp_path / "out")
    assert cases.LOADED == ["ungated"] and {key.split("/")[0] for key in result.marks} == {"fool"}
    assert set(read_sweep_folder(tmp_path / "out").marks) == {
        f"fool/{t}/seed-{s}" for t in ("low", "high") for s in (0, 1)
    }


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_worker_processes_give_the_same_records_as_this_process(tmp_path: Path) -> None:
    run_sweep(cases.sweep(), tmp_path / "here")
    watcher = Watcher()
    result = run_sweep(cases.sweep(), tmp_path / "there", launcher=LocalWorkers(2, imports=WORKER), watcher=watcher)
    assert result.n_measured == 64 and set(watcher.items.values()) == {8} and cases.LOADED == ["good", "better"]
    assert records(tmp_path / "there") == records(tmp_path / "here")
    assert tables(tmp_path / "there") == tables(tmp_path / "here")


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    params = "{die: [3, 2]}"
    run_sweep(cases.sweep("[good, fragile]"), tmp_path / "whole")
    watcher = Watcher()
    sweep = cases.sweep("[good, fragile]", params)
    result = run_sweep(sweep, tmp_path / "out", launcher=LocalWorkers(2, imports=WORKER), watcher=watcher)
    died = [entry for entry in watcher.said if entry[0] == "again"]
    assert result.marks == {} and len(died) == 2
    assert all(sentence == "the worker was killed by SIGKILL" for _, _, sentence in died)
    n_sessions = {str(p): len(read_records(p).runs) for p in (tmp_path / "out").rglob(FILE)}
    assert max(n_sessions.values()) >= 2  # it was continued
    first = {
        k: [json.loads(x)["values"] for x in v if b'"instance"' in x] for k, v in records(tmp_path / "out").items()
    }
    assert first == {
        k: [json.loads(x)["values"] for x in v if b'"instance"' in x] for k, v in records(tmp_path / "whole").items()
    }
    measured = sum(watcher.items.values())
    assert measured == 64  # no item was measured twice


def one_cell(model: str, params: str) -> Sweep:
    text = cases.text(f"[{model}]", params).replace("seeds: [0, 1]", "seeds: [0]")
    return load_sweep(parse_document(text.replace("    - {label: low, params: {shift: 0.0}}\n", ""), "x.yaml"))


@pytest.mark.slow
def test_a_cell_whose_worker_dies_every_time_is_marked_after_a_bounded_number_of_attempts(tmp_path: Path) -> None:
    sweep = one_cell("fragile", "{die: [1, 1, 1]}")
    result = run_sweep(sweep, tmp_path / "out", launcher=LocalWorkers(1, imports=WORKER))
    why = f"the worker was killed by SIGKILL; tried {ATTEMPTS} times, its records are kept"
    assert [(k, v.kind, v.reason, v.attempts) for k, v in result.marks.items()] == [
        ("fragile/high/seed-0", "worker", why, ATTEMPTS)
    ]
    kept = read_records(tmp_path / "out" / "cells" / "fragile" / "high" / "seed-0")
    assert len(kept.items) == ATTEMPTS == 3  # one more each time
    again = run_sweep(sweep, tmp_path / "out")
    assert (again.marks, again.n_read, again.n_measured) == ({}, 3, 5)  # its deaths are over


@pytest.mark.slow
def test_a_cell_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notelens.runs.sweep.ATTEMPTS", 1)
    start = time.monotonic()
    launcher = LocalWorkers(1, imports=WORKER, limit_minutes=0.1)
    result = run_sweep(one_cell("good", "{pause_ms: 600000}"), tmp_path / "out", launcher=launcher)
    assert [(v.kind, v.reason) for v in result.marks.values()] == [
        ("worker", "the cell took longer than 0.1 minutes; tried 1 times, its records are kept")
    ]
    assert 6 <= time.monotonic() - start < 300


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_a_sentence(tmp_path: Path) -> None:
    result = run_sweep(one_cell("good", "{}"), tmp_path / "out", launcher=LocalWorkers(1, imports=("tests.not_there",)))
    reasons = {mark.reason for mark in result.marks.values()}
    assert reasons == {
        "the worker ended with exit code 1: ModuleNotFoundError: No module named 'tests.not_there'; tried 3 times, its "
        "records are kept"
    }


@pytest.mark.slow
def test_a_worker_with_other_versions_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = m.versions()
    monkeypatch.setattr("notelens.runs.sweep.m.versions", lambda: {**now, "torch": "0.1"})
    result = run_sweep(one_cell("good", "{}"), tmp_path / "out", launcher=LocalWorkers(1, imports=WORKER))
    assert all(
        v.reason.startswith(f"the worker has other versions (torch 0.1 -> {now['torch']})")
        for v in result.marks.values()
    )
    assert len(result.marks) == 1 and records(tmp_path / "out") == {}


@pytest.mark.slow
class Began(Unwatched):
    """Keeps how many cells were finished when the sweep began."""

    n_finished = -1

    def begin(self, n_cells: int, n_finished: int) -> None:
        self.n_finished = n_finished


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """The whole sweep is killed; its workers go, and the same command continues at once."""
    script = (
        "from tests import sweep_cases as c; from notelens.runs.launcher import LocalWorkers\n"
        "from notelens.runs.sweep import run_sweep; import sys; c.install()\n"
        f"run_sweep(c.sweep('[good]', '{{pause_ms: 100}}'), sys.argv[1], launcher=LocalWorkers(2, imports={WORKER}))\n"
    )
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", script, str(out)], cwd=cases.ROOT)
    while len(list(out.rglob(FILE))) < 2:
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    held_for = time.monotonic()
    for cell in {p.parent for p in out.rglob(FILE)}:
        while True:
            try:
                with held(cell):
                    break
            except InputError:
                assert time.monotonic() - held_for < 60
                time.sleep(0.02)
    before = Began()
    result = run_sweep(cases.sweep("[good]", "{pause_ms: 100}"), out, watcher=before)
    assert result.marks == {} and result.n_measured > 0
    # on a busy machine a cell may have ended before the kill; it is not touched again
    assert result.n_measured + result.n_read == 8 * (4 - before.n_finished)
    run_sweep(cases.sweep("[good]", "{pause_ms: 100}"), tmp_path / "whole")
    assert records(out) == records(tmp_path / "whole")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_two_sweeps_on_one_folder(tmp_path: Path) -> None:
    with (
        held(tmp_path / "out"),
        pytest.raises(InputError, match=r"another run \(process \d+\) is writing here; wait for it"),
    ):
        run_sweep(cases.sweep(), tmp_path / "out")


def test_a_cell_that_somebody_else_writes_is_marked(tmp_path: Path) -> None:
    with held(tmp_path / "out" / "cells" / "good" / "low" / "seed-0"):
        result = run_sweep(cases.sweep("[good]"), tmp_path / "out")
    mark = result.marks["good/low/seed-0"]
    assert len(result.marks) == 1 and mark.kind == "failed"
    assert mark.reason.startswith("good/low/seed-0: another run (process")


def test_another_configuration_does_not_continue_a_sweep(tmp_path: Path) -> None:
    run_sweep(cases.sweep("[good]"), tmp_path / "out")
    before = records(tmp_path / "out")
    with pytest.raises(
        ConfigError, match=r"begun with another configuration \(task.n: 8 -> 9\); choose another folder"
    ):
        run_sweep(load_sweep(parse_document(cases.text("[good]").replace("n: 8", "n: 9"), "x.yaml")), tmp_path / "out")
    with pytest.raises(
        ConfigError, match=r"cells/good/high/seed-0: was begun with another.*task.params.shift: 0.05 -> 0.5"
    ):
        run_sweep(load_sweep(parse_document(cases.text("[good]").replace("0.05", "0.5"), "x.yaml")), tmp_path / "out")
    assert records(tmp_path / "out") == before
    text = cases.text("[good]").replace("name: demo", "name: renamed\ndescription: other words")
    assert run_sweep(load_sweep(parse_document(text, "x.yaml")), tmp_path / "out").n_measured == 0


def test_other_versions_do_not_continue_an_unfinished_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_sweep(cases.sweep("[good]"), tmp_path / "out")
    now = m.versions()
    monkeypatch.setattr(m, "versions", lambda: {**now, "torch": "9.9"})
    run_sweep(cases.sweep("[good]"), tmp_path / "out")  # nothing is left to do
    with pytest.raises(ConfigError, match=r"other versions \(torch .* -> 9.9\)"):
        run_sweep(cases.sweep("[good, better]"), tmp_path / "out")


def test_folders_of_something_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="is not empty and holds no sweep"):
        run_sweep(cases.sweep(), tmp_path / "out")
    cell = cases.sweep().cells[0]
    execute(cell.config, tmp_path / "run")
    with pytest.raises(InputError, match="holds a single run, not a sweep"):
        run_sweep(cases.sweep(), tmp_path / "run")
    run_sweep(cases.sweep("[good]"), tmp_path / "sweep")
    with pytest.raises(InputError, match="is not empty and holds no run"):
        execute(cell.config, tmp_path / "sweep")


@pytest.mark.parametrize("damage", ["{", "[]", '{"sweep_version": 9}', '{"sweep_version": 1}'])
def test_a_damaged_sweep_file_is_one_sentence(tmp_path: Path, damage: str) -> None:
    run_sweep(cases.sweep("[good]"), tmp_path / "out")
    (tmp_path / "out" / "sweep.json").write_text(damage)
    with pytest.raises(RecordError, match=r"sweep.json: (is |version 9)") as caught:
        run_sweep(cases.sweep("[good]"), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_wrong_parameters_are_refused_before_a_folder_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x.yaml:12: probe 'count' has no parameter 'dye'; did you mean 'die'"):
        run_sweep(cases.sweep("[good]", "{dye: [1]}"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("cloud", None, None, None), "unknown launcher 'cloud'; known: local, ray"),
        (("ray", None, None, None), "--launcher ray needs --address"),
        (("local", 2, "h:1", None), "--address belongs to --launcher ray"),
        (("local", 0, None, None), "--jobs 0: must be at least 1"),
        (("local", None, None, 3.0), "--limit needs"),
        (("local", 2, None, -1.0), "--limit needs a positive number"),
    ],
)
def test_options_that_do_not_belong_together(options: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_launcher(*options)


def test_the_default_launcher_is_this_process() -> None:
    assert isinstance(make_launcher("local", None, None, None), InProcess)
    workers = make_launcher("local", 3, None, None)
    assert isinstance(workers, LocalWorkers) and workers.slots == 3


def test_no_file_of_a_sweep_names_a_place_on_this_machine(tmp_path: Path) -> None:
    run_sweep(cases.sweep("[good, nowhere, fool]"), tmp_path / "out")
    for path in (p for p in (tmp_path / "out").rglob("*") if p.is_file() and p.name != LOCK):
        found = path.read_text()
        for place in (str(tmp_path), str(cases.ROOT), str(Path.home()) + "/", os.uname().nodename):
            assert place not in found, (path.name, place)
