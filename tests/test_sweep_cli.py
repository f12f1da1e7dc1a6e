"""Sweeps on the command line: recognised, shown live, with exit code 3 where a cell is marked."""

import io
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from notelens.probes import PROBES
from notelens.runs import cli, runner, sweep_cli
from notelens.runs.files import held
from notelens.runs.launcher import Event
from notelens.runs.sweep import run_sweep
from notelens.tasks import TASKS
from tests import sweep_cases as cases

SMOKE = cases.ROOT / "configs" / "smoke" / "sweep.yaml"
QUICKSTART = cases.ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in (PROBES, TASKS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    monkeypatch.setattr(runner, "default_loader", runner.default_loader)
    cases.install()
    yield


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out, err = invoke(capsys, *arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, (code, out, err)
    return err


def write(text: str) -> str:
    Path("sweep.yaml").write_text(text)
    return "sweep.yaml"


@pytest.mark.usefixtures("fakes")
def test_run_recognises_a_sweep_and_table_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = invoke(capsys, "run", write(cases.text()))
    assert code == 0 and "8 cells, 64 items measured; cells, long and wide tables: runs/demo" in out
    assert "[8/8] better/high/seed-1: finished, 8 items" in err and "8 cells, 0 of them on record" in err
    code, out, err = invoke(capsys, "run", "sweep.yaml")
    assert code == 0 and "8 cells, 0 items measured" in out and "8 cells, 8 of them on record" in err
    rows = json.loads(invoke(capsys, "table", "runs/demo", "--format", "json")[1])
    assert {(r["label"], r["task"], r["seed"]) for r in rows} == {
        (label, task, seed) for label in ("good", "better") for task in ("low", "high") for seed in (0, 1)
    }
    for layout in ("long", "wide"):
        for format in ("md", "csv", "tex", "json"):
            code, out, err = invoke(capsys, "table", "runs/demo", "--layout", layout, "--format", format)
            assert (code, err) == (0, "") and "good" in out
    assert "unknown layout 'wid'; did you mean 'wide'" in failed(capsys, "table", "runs/demo", "--layout", "wid")
    cell = "runs/demo/cells/good/low/seed-0"
    assert invoke(capsys, "table", cell)[0] == 0
    assert "--layout wide is for the folder of a sweep" in failed(capsys, "table", cell, "--layout", "wide")


@pytest.mark.usefixtures("fakes")
def test_marked_cells_end_in_exit_code_3_with_their_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = invoke(capsys, "run", write(cases.text("[ungated, good]")), "--set", "sweep.seeds=[0]")
    assert code == 3 and "4 cells, 16 items measured, 2 marked (gate: 2)" in out
    assert err.splitlines()[-2:] == [
        "marked ungated/low/seed-0: ungated failed its gate at cached decode",
        "marked ungated/high/seed-0: ungated failed its gate at cached decode",
    ]
    assert "Traceback" not in err
    code, out, _ = invoke(capsys, "run", "sweep.yaml", "--dry-run", "--out", "other")
    assert code == 3 and "nothing was kept" in out and not Path("other").exists()


@pytest.mark.usefixtures("fakes")
def test_merge_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("good", "better"):
        assert invoke(capsys, "run", write(cases.text(f"[{model}]")), "--out", model)[0] == 0
    code, out, _ = invoke(capsys, "merge", "both", "good", "better")
    assert (code, out) == (0, "both: 8 cells, 8 finished, 8 copied now\n")
    assert "holds no sweep" in failed(capsys, "merge", "both", "nothing")
    failed(capsys, "merge", "both")


@pytest.mark.usefixtures("fakes")
def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write(cases.text())
    assert "are for sweeps; this file has no 'sweep'" in failed(capsys, "run", str(QUICKSTART), "--jobs", "2")
    assert "--launcher ray needs --address" in failed(capsys, "run", sweep, "--launcher", "ray")
    assert "unknown launcher 'slurm'" in failed(capsys, "run", sweep, "--launcher", "slurm")
    assert "unknown key 'sedes'; did you mean 'seeds'" in failed(capsys, "run", sweep, "--set", "sweep.sedes=[1]")
    assert "--set sweep.seeds=[1, -1]: 'sweep.seeds.1' must be at least 0" in failed(
        capsys, "run", sweep, "--set", "sweep.seeds=[1, -1]"
    )
    with held(Path("runs/demo")):
        assert "another run" in failed(capsys, "run", sweep)


@pytest.mark.usefixtures("fakes")
def test_an_unreachable_cluster_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object() if name == "ray" else real(name, *a))
    found = failed(capsys, "run", write(cases.text()), "--launcher", "ray", "--address", "127.0.0.1:9")
    assert "nothing answers there" in found and not Path("runs").exists()


@pytest.mark.usefixtures("fakes")
def test_ctrl_c_says_how_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(name: str, **_: object) -> object:
        if name == "better":
            raise KeyboardInterrupt
        return cases.CountModel(name)

    with monkeypatch.context() as patch:
        patch.setattr(cases, "loader", stop)
        code, _, err = invoke(capsys, "run", write(cases.text()))
    assert code == 130
    assert err.splitlines()[-1] == "stopped: what is measured is kept in runs/demo; run the same command to continue"


@pytest.mark.usefixtures("fakes")
def test_a_terminal_shows_a_bar_for_the_sweep_and_for_the_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, _, err = invoke(capsys, "run", write(cases.text("[good, ungated]")))
    assert code == 3 and "cells" in err and "[1/8] good/low/seed-0: finished, 8 items" in err and "8/8" in err


def test_bars_follow_the_events_of_several_cells() -> None:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=io.StringIO())) as shown:
        bars = sweep_cli.Bars(shown)
        bars.begin(3, 1)
        for key in ("a", "b"):
            bars.cell(key)
            bars.event(Event(key, "stage", "locality (measure)", 10, 4))
        bars.event(Event("a", "item"))
        by_name = {t.description: (t.completed, t.total) for t in shown.tasks}
        assert by_name == {"cells": (1, 3), "a  locality (measure)": (5, 10), "b  locality (measure)": (4, 10)}
        bars.again("b", "the worker was killed")
        bars.ended("a", "finished")
        assert {t.description: (t.completed, t.total) for t in shown.tasks} == {"cells": (2, 3)}


def test_malformed_sweeps_end_in_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of a shipped sweep misspelled, every line left open, every line indented with a tab."""
    rng = random.Random(20260601)
    lines = SMOKE.read_text().splitlines()
    n_refused = 0
    for number, line in enumerate(lines):
        key = re.match(r"[-{ ]*([a-z]+):", line)
        if key is None:
            continue
        at = rng.randrange(key.start(1), key.end(1))
        for bad in (f"{line[:at]}q{line[at:]}", line.replace(":", ": [", 1), f"\t{line}"):
            path = write("\n".join([*lines[:number], bad, *lines[number + 1 :]]) + "\n")
            found = failed(capsys, "run", path, "--dry-run")
            assert "sweep.yaml" in found and 15 < len(found) < 1000, found
            n_refused += 1
    assert n_refused == 3 * 15


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [[], ["--jobs", "2"]])
def test_the_smoke_sweep_runs_dry_on_small_random_models(capsys: pytest.CaptureFixture[str], jobs: list[str]) -> None:
    code, out, err = invoke(capsys, "run", str(SMOKE), "--dry-run", *jobs)
    assert code == 0, err
    assert "4 cells, 12 items measured; nothing was kept" in out and "Traceback" not in err


@pytest.mark.slow
def test_random_models_give_the_same_records_in_this_process_and_in_workers(tmp_path: Path) -> None:
    """Real probes on real architectures, whole runs; random models decide nothing, so every cell is marked."""
    from notelens.models.load import default_cache_dir
    from notelens.models.random import random_model
    from notelens.runs.launcher import LocalWorkers
    from notelens.runs.records import FILE
    from notelens.runs.sweep_config import load_sweep
    from notelens.runs.yamlfile import parse_document

    names = []
    for family in ("llama", "gemma2"):
        hf, tokenizer = random_model(family, default_cache_dir())
        hf.save_pretrained(tmp_path / family)
        tokenizer.save_pretrained(tmp_path / family)
        names.append(f"{{name: {tmp_path / family}, label: {family}}}")
    text = SMOKE.read_text().replace("[smollm2]", f"[{', '.join(names)}]").replace("seeds: [0, 1]", "seeds: [0]")
    sweep = load_sweep(parse_document(text, "x.yaml"))
    here = run_sweep(sweep, tmp_path / "here")
    there = run_sweep(sweep, tmp_path / "there", launcher=LocalWorkers(2))
    assert here.marks == there.marks and {mark.kind for mark in here.marks.values()} == {"incompetent"}
    assert here.n_measured == there.n_measured > 0
    for cell in sweep.cells:
        one, two = ((tmp_path / f / "cells" / cell.key / FILE).read_text().splitlines() for f in ("here", "there"))
        a, b = ([json.loads(x) for x in lines if '"kind": "run"' not in x] for lines in (one, two))
        assert a == b and len(a) > 4
