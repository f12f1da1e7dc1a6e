"""Sweeps of serving benchmarks over fake engines: ordinary benchmarks wherever they run, marks, resuming, tables, refusals."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notelens.errors import ConfigError, InputError
from notelens.runs import manifest as m
from notelens.runs.cell import Job, Outcome
from notelens.runs.cli import main
from notelens.runs.config import config_hash, read_config
from notelens.runs.launcher import Emit, Event, LocalWorkers
from notelens.runs.manifest import read_manifest
from notelens.runs.merge import merge
from notelens.runs.ray_launcher import RayWorkers
from notelens.runs.records import FILE, read_records
from notelens.runs.serve_config import validate_serve
from notelens.runs.serve_sweep import load_serve_sweep
from notelens.runs.serve_tables import serve_table
from notelens.runs.sweep import Unwatched, run_sweep
from notelens.runs.sweep_config import Sweep
from notelens.runs.sweep_folder import read_sweep_folder
from notelens.runs.yamlfile import parse_document
from notelens.serving.engine import EngineCommand, free_port, running
from tests import serve_cases as cases

BENCH = Path(__file__).parents[1] / "configs" / "bench"
TWO = [cases.entry("one"), cases.entry("two", options={"model": "other", "block": 32})]
Capture = pytest.CaptureFixture[str]


def write(folder: Path, data: dict[str, Any]) -> str:
    """A configuration file; JSON is YAML."""
    (folder / "sweep.yaml").write_text(json.dumps(data, indent=1))
    return str(folder / "sweep.yaml")


def loaded(data: dict[str, Any]) -> Sweep:
    return load_serve_sweep(parse_document(json.dumps(data, indent=1), "x.yaml"))


def bench(capsys: Capture, folder: Path, data: dict[str, Any], *more: str) -> tuple[int, str, str]:
    """Run a sweep from the command line into ``folder/out``."""
    code = main(["serve-bench", write(folder, data), "--out", str(folder / "out"), *more])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of two engines and two seeds in this process."""
    folder = tmp_path_factory.mktemp("serve-sweep")
    data = cases.sweep(TWO)
    data["sweep"]["seeds"] = [0, 1]
    assert main(["serve-bench", write(folder, data), "--out", str(folder / "out")]) == 0
    return folder


class TestCells:
    def test_every_cell_is_an_ordinary_serving_benchmark(self, done: Path) -> None:
        cells = {str(p.parent.relative_to(done / "out" / "cells")) for p in (done / "out").rglob(FILE)}
        assert cells == {f"{label}/serve/seed-{seed}" for label in ("one", "two") for seed in (0, 1)}
        for cell in cells:
            manifest = read_manifest(done / "out" / "cells" / cell)
            assert manifest is not None and (manifest["kind"], manifest["state"]) == ("serve", "finished")
            engine = next(e for e in TWO if e["label"] == cell.split("/")[0])
            alone = cases.sweep([]) | {"engine": {k: v for k, v in engine.items() if k != "label"}}
            alone = {k: v for k, v in alone.items() if k != "sweep"} | {"seed": int(cell[-1])}
            assert config_hash(validate_serve(parse_document(json.dumps(alone), "y"))) == manifest["config_hash"]
            assert manifest["engine"]["model"] == {"one": "fake", "two": "other"}[cell.split("/")[0]]
            names = {p.name for p in (done / "out" / "cells" / cell).iterdir()}
            assert {"table.md", "table.json", "summary.md", "engine.log"} <= names

    def test_a_finished_sweep_starts_no_engine(self, done: Path, capsys: Capture) -> None:
        logs = {p: p.stat().st_size for p in (done / "out").rglob("engine.log")}
        before = {p.name: p.read_bytes() for p in (done / "out").iterdir() if p.suffix in (".md", ".csv", ".json")}
        assert main(["serve-bench", str(done / "sweep.yaml"), "--out", str(done / "out")]) == 0
        out, err = capsys.readouterr()
        assert "4 cells, 0 items measured" in out and "4 cells, 4 of them on record" in err
        assert len(logs) == 4 and all(p.stat().st_size == size for p, size in logs.items())
        after = {p.name: p.read_bytes() for p in (done / "out").iterdir() if p.suffix in (".md", ".csv", ".json")}
        assert after == before and {"table.md", "wide.md", "wide.csv", "sweep.json"} <= set(after)

    @pytest.mark.slow
    def test_local_workers_write_the_same_records(self, tmp_path: Path, done: Path, capsys: Capture) -> None:
        data = cases.sweep(TWO)
        data["sweep"]["seeds"] = [0, 1]
        code, out, err = bench(capsys, tmp_path, data, "--jobs", "2")
        assert code == 0 and "4 cells, 20 items measured" in out, err
        assert cases.contents(tmp_path / "out") == cases.contents(done / "out") and len(
            cases.contents(done / "out")
        ) == 4 * (3 + 4 * 4)
        assert cases.row_keys(tmp_path / "out") == cases.row_keys(done / "out")

    def test_cells_of_one_address_never_run_at_once(self, tmp_path: Path) -> None:
        """Three slots: both cells of the started engine run beside one of each address."""

        class Slots:
            slots = 3

            def __init__(self) -> None:
                self.jobs: deque[Job] = deque()
                self.seen: list[set[str]] = []

            def start(self, job: Job) -> None:
                self.jobs.append(job)
                self.seen.append({j.key for j in self.jobs})

            def wait(self, emit: Emit) -> None:
                emit(Event(self.jobs.popleft().key, "done", outcome=Outcome()))

            def stop(self) -> None:
                pass

        same = [cases.entry("a", url="http://h:1"), {**cases.entry("b", url="http://h:1/"), "model": "x"}]
        data = cases.sweep([*same, cases.entry("c")])
        data["sweep"]["seeds"] = [0, 1]
        launcher = Slots()
        run_sweep(loaded(data), tmp_path / "out", launcher=launcher)
        together = [sum(key[0] in "ab" for key in keys) for keys in launcher.seen]
        assert max(together) == 1 and max(map(len, launcher.seen)) == 3 and len(launcher.seen) == 6

    def test_gpus_are_kept_on_a_cluster_and_change_no_record(self) -> None:
        plain, some = (loaded(cases.sweep([{**cases.entry("a"), **more}])).cells[0] for more in ({}, {"gpus": 2}))
        assert (plain.n_gpus, some.n_gpus) == (0, 2) and config_hash(plain.config) == config_hash(some.config)
        launcher = RayWorkers.__new__(RayWorkers)  # without a cluster
        launcher.most_gpus, launcher._refused, launcher._running = 1, [], {}
        launcher.start(Job("a/serve/seed-0", {}, "nowhere", False, {}, "serve", 2))
        found: list[Event] = []
        launcher.wait(found.append)
        why = "no node of the Ray cluster has 2 GPUs, and the configuration asks for 'gpus: 2'"
        assert [e.outcome for e in found] == [Outcome("worker", why)]


class TestTables:
    def test_the_long_table_has_the_rows_of_all_cells(self, done: Path, capsys: Capture) -> None:
        assert main(["table", str(done / "out"), "--format", "json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        for label in ("one", "two"):
            for seed in (0, 1):
                own = [r for r in rows if (r["label"], r["seed"]) == (label, seed)]
                alone = serve_table(done / "out" / "cells" / label / "serve" / f"seed-{seed}").rows
                assert [(r["metric"], r["value"], r["params"]) for r in own] == [
                    (r["metric"], r["value"], r["params"]) for r in alone
                ]
                assert own and {r["cell"] for r in own} == {f"{label}/serve/seed-{seed}"}
        assert main(["table", str(done / "out")]) == 0
        text = capsys.readouterr().out
        assert "Sweep of 4 cells (2 engines, 2 seeds); 4 are complete." in text and "MARKED" not in text
        assert "one: fake, version fake-1, blocks of 16 tokens, prefix caching on" in text
        assert "two: other, version fake-1, blocks of 32 tokens" in text and "| engine | seed | metric" in text

    def test_the_wide_table_has_a_row_for_every_engine(self, done: Path, capsys: Capture) -> None:
        assert main(["table", str(done / "out"), "--layout", "wide", "--format", "json"]) == 0
        one, two = json.loads(capsys.readouterr().out)
        assert (one["model"], one["seeds"], two["model"], one["source"]) == ("one", [0, 1], "two", "measured")
        wanted = {
            "hit_rate": ("prefix_hit_rate", {}), "p_correct": ("p_correct", {}),
            "p90_ttft_ratio_below": ("p90_ttft_ratio", {"load": "below"}),
            "throughput_ratio_saturation": ("throughput_ratio", {"load": "saturation"}),
        }  # fmt: skip
        assert set(wanted) == set(one) - {"source", "model", "task", "seeds", "marked"}
        for row in (one, two):
            for name, (metric, params) in wanted.items():
                values = [
                    next(
                        r["value"]
                        for r in serve_table(done / "out" / "cells" / row["model"] / "serve" / f"seed-{seed}").rows
                        if (r["metric"], r["method"], r["params"]) == (metric, "erratum", params)
                    )
                    for seed in (0, 1)
                ]
                assert row[name]["by_seed"] == values and row[name]["value"] == sum(values) / 2, name
            assert row["p_correct"]["value"] == 1.0 and row["hit_rate"]["value"] > 0.8
        for format in ("md", "csv", "tex"):
            assert main(["table", str(done / "out"), "--layout", "wide", "--format", format]) == 0
            text = capsys.readouterr().out
            assert "one" in text and "paper: " not in text
            if format == "md":
                titles = "| engine | hit rate | p90 TTFT ratio, below | throughput ratio, saturation | P(correct) |"
                assert titles in " ".join(text.split()) and "All columns are of the arm erratum" in text
            if format == "csv":
                assert [r["model"] for r in csv.DictReader(io.StringIO(text))] == ["one", "two"]


class TestMarks:
    def test_what_cannot_be_measured_is_marked_and_the_rest_goes_on(self, tmp_path: Path, capsys: Capture) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        engines = [
            cases.entry("ends", options={"exit": 1}), cases.entry("late", url=url), cases.entry("off", options={"caching": 0}),
            cases.entry("blind", options={"metrics": 0}), cases.entry("good"),
        ]  # fmt: skip
        data = cases.sweep(engines, loads=[{"name": "saturation"}])
        code, out, err = bench(capsys, tmp_path, data)
        assert code == 3 and "5 cells, 6 items measured, 4 marked (engine: 3, partial: 1)" in out, err
        said = dict(
            line.removeprefix("marked ").split(": ", 1) for line in err.splitlines() if line.startswith("marked")
        )
        assert said == {
            "ends/serve/seed-0": "the engine ended before it was ready (RuntimeError: no memory for a single block); its log "
            "is ends/serve/seed-0/engine.log",
            "late/serve/seed-0": said["late/serve/seed-0"],
            "off/serve/seed-0": said["off/serve/seed-0"],
            "blind/serve/seed-0": "the benchmark is partial: the engine's metrics have no prefix cache counters, so hit rates "
            "are unavailable",
        }
        assert f"nothing answers at {url}" in said["late/serve/seed-0"]
        assert "runs without prefix caching" in said["off/serve/seed-0"]
        folder = read_sweep_folder(tmp_path / "out")
        assert {folder.state(e) for e in folder.entries if e.model == "good"} == {"finished"}
        assert all("\n" not in mark.reason and str(tmp_path) not in mark.reason for mark in folder.marks.values())
        rows = json.loads((tmp_path / "out" / "table.json").read_text())
        marked = {r["label"]: r["reason"] for r in rows if r["metric"] == "marked"}
        assert set(marked) == {"ends", "late", "off", "blind"} and "partial" in marked["blind"]
        assert any(r["label"] == "blind" and r["metric"] == "throughput_ratio" for r in rows), (
            "what was measured is shown"
        )
        assert f"MARKED off/serve/seed-0: {said['off/serve/seed-0']}" in " ".join(out.replace("\\", "").split())
        good = cases.contents(tmp_path / "out" / "cells" / "good")
        with running(EngineCommand(cases.command(us=30), port=port, ready_s=20, stop_s=3), tmp_path / "log"):
            code, out, err = bench(capsys, tmp_path, data)
        assert code == 3 and "3 marked (engine: 2, partial: 1)" in out and "[5/5]" in err
        assert cases.contents(tmp_path / "out" / "cells" / "good") == good and "good/serve/seed-0: begins" not in err

    def test_partial_cells_alone_are_exit_code_4_and_are_continued(self, tmp_path: Path, capsys: Capture) -> None:
        """The engine dies within the second cell, and only the first time."""
        dies = cases.entry("dies", options={"die_after": 14, "once": str(tmp_path / "died")})
        data = cases.sweep([dies, cases.entry("good")])
        code, out, err = bench(capsys, tmp_path, data)
        assert code == 4 and "1 marked (partial: 1)" in out, err
        assert "marked dies/serve/seed-0: the benchmark is partial: below/erratum" in err
        cell = tmp_path / "out" / "cells" / "dies" / "serve" / "seed-0"
        kept = read_records(cell).items
        assert ("serve", "cell", "below/in_prefix") in kept and ("serve", "cell", "saturation/erratum") not in kept
        wide = json.loads((tmp_path / "out" / "wide.json").read_text())
        assert "partial" in wide[0]["marked"]["dies/serve/seed-0"] and wide[1]["marked"] == {}
        code, out, err = bench(capsys, tmp_path, data)
        assert code == 0 and "marked" not in out and "good/serve/seed-0: begins" not in err
        after = read_records(cell)
        assert {k: v for k, v in after.items.items() if k in kept} == kept and "serve" in after.probes
        assert json.loads((tmp_path / "out" / "marks.json").read_text()) == {}


class TestProcesses:
    @pytest.mark.slow
    def test_a_worker_that_dies_is_tried_again_from_its_records_and_leaves_no_engine(self, tmp_path: Path) -> None:
        class Watcher(Unwatched):
            killed = 0
            said: list[str] = []  # noqa: RUF012

            def event(self, event: Event) -> None:
                if event.kind == "stage" and event.text.startswith("saturation") and not self.killed:
                    self.killed = launcher._workers[0].process.pid
                    os.kill(self.killed, signal.SIGKILL)

            def again(self, key: str, sentence: str) -> None:
                self.said.append(sentence)

        launcher, watcher = LocalWorkers(1), Watcher()
        sweep = loaded(cases.sweep([cases.entry("a", options={"child": 1})]))
        result = run_sweep(sweep, tmp_path / "out", launcher=launcher, watcher=watcher)
        cell = tmp_path / "out" / "cells" / "a" / "serve" / "seed-0"
        assert result.marks == {} and watcher.said == ["the worker was killed by SIGKILL"]
        records = read_records(cell)
        assert len(records.runs) == 2 and len(records.items) == 5
        assert result.n_read >= 2, "what the first attempt had measured is not measured again"
        children = cases.children_of(cell / "engine.log")
        assert len(children) == 4 and cases.gone(children)

    @pytest.mark.slow
    def test_ctrl_c_leaves_no_engine_of_any_worker(self, tmp_path: Path) -> None:
        engines = [cases.entry(model, options={"child": 1, "model": model}) for model in ("a", "b")]
        path = write(tmp_path, cases.sweep(engines, loads=[{"name": "slow", "rate": 0.1}]))
        out = tmp_path / "out"
        command = [sys.executable, "-m", "notelens.runs.cli", "serve-bench", path, "--out", str(out), "--jobs", "2"]
        user = subprocess.Popen(
            command, env=cases.pythonpath(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=cases.interruptible,
        )  # fmt: skip
        assert user.stderr is not None
        began = time.monotonic()
        while len([p for p in out.rglob(FILE) if read_records(p).items]) < 2:
            assert time.monotonic() - began < 120 and user.poll() is None
            time.sleep(0.05)
        children = [pid for log in out.rglob("engine.log") for pid in cases.children_of(log)]
        assert len(children) == 4 and all(map(cases.exists, children))
        os.killpg(user.pid, signal.SIGINT)  # as a terminal does
        said = user.stderr.read()
        user.stderr.close()
        assert user.wait(15) == 130 and said.splitlines()[-1].startswith("stopped: what is measured is kept in ")
        assert cases.gone(children)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda d: d["sweep"].pop("engines"), "'sweep.engines' is missing"),
            (lambda d: d["sweep"].update(engines=[]), "'sweep.engines' must not be empty"),
            (lambda d: d.update(engine={"url": "http://h:1"}), "the engine is given twice; write either 'engine' or"),
            (lambda d: d["sweep"]["engines"][1].update(label="ONE"), "engine 'ONE' is listed twice in 'sweep'; give each"),
            (lambda d: d["sweep"].update(seeds=[1, 1]), "seed '1' is listed twice in 'sweep'; remove one"),
            (lambda d: (d["sweep"].update(seeds=[1]), d.update(seed=2)), "the seed is given twice"),
            (lambda d: d["sweep"]["engines"][1].pop("label"), "'sweep.engines.1.label' is missing"),
            (lambda d: d["sweep"]["engines"][1].update(label="a/b"), "'sweep.engines.1.label' must be at most 100 letters"),
            (lambda d: d["sweep"]["engines"][1].update(url="http://h:1"), "an engine needs either 'command'"),
            (lambda d: d["sweep"]["engines"][1].update(command=["vllm"]), "must say {port}"),
            (lambda d: d["sweep"]["engines"][1].update(gpu=1), "unknown key 'gpu'; did you mean 'gpus'"),
            (lambda d: d["sweep"]["engines"][1].update(gpus=-1), "'sweep.engines.1.gpus' must be at least 0, not -1"),
            (lambda d: d["sweep"].update(engines=[{"label": "a", "url": "http://h:1", "gpus": 1}]), "needs no 'gpus'"),
            (lambda d: d["sweep"].update(models=["a"]), "unknown key 'models'"),
            (lambda d: d["sweep"]["engines"][1].update({**TWO[0], "label": "same"}),
             "one/serve/seed-0 and same/serve/seed-0 are the same configuration"),
            (lambda d: d.update(arms=["erratum"]), "the baseline 'in_prefix' is not among the arms"),
            (lambda d: d["sweep"].update(seeds=list(range(5001))), "has 10002 cells, above the limit of 10000"),
        ],
    )  # fmt: skip
    def test_mistakes_are_one_sentence_with_file_and_line(
        self, tmp_path: Path, capsys: Capture, change: Callable[[dict[str, Any]], Any], said: str
    ) -> None:
        data = json.loads(json.dumps(cases.sweep(TWO)))
        change(data)
        code, out, err = bench(capsys, tmp_path, data)
        assert (code, out) == (2, "") and said in err and err.count("\n") == 1, err
        assert err.startswith(f"error: {tmp_path / 'sweep.yaml'}:") and not (tmp_path / "out").exists()
        line = int(err.split("sweep.yaml:")[1].split(":")[0])
        assert 1 <= line <= len((tmp_path / "sweep.yaml").read_text().splitlines())

    def test_options_that_do_not_belong_together(self, tmp_path: Path, capsys: Capture) -> None:
        single = write(tmp_path, cases.config(url="http://127.0.0.1:9"))
        for options in (["--jobs", "2"], ["--launcher", "ray", "--address", "auto"], ["--limit", "3"]):
            assert main(["serve-bench", single, *options]) == 2
            found = capsys.readouterr().err
            assert "are for sweeps; this file has no 'sweep'" in found and found.count("\n") == 1
        code, _, err = bench(capsys, tmp_path, cases.sweep(TWO), "--results", str(tmp_path / "r.json"))
        assert code == 2 and "--results takes the rows of one engine, and this file is a sweep of several" in err
        assert main(["run", str(tmp_path / "sweep.yaml")]) == 2
        assert "'sweep' lists engines to be timed; run this file with notelens serve-bench" in capsys.readouterr().err
        code, _, err = bench(capsys, tmp_path, cases.sweep(TWO), "--launcher", "ray")
        assert code == 2 and "--launcher ray needs --address" in err
        with pytest.raises(InputError, match="a serving benchmark has no dry run"):
            run_sweep(loaded(cases.sweep(TWO)), tmp_path / "out", dry_run=True)

    def test_another_configuration_does_not_continue_a_sweep(self, done: Path) -> None:
        data = json.loads((done / "sweep.yaml").read_text())
        with pytest.raises(ConfigError, match=r"begun with another configuration \(n: 3 -> 4\)"):
            run_sweep(loaded({**data, "n": 4}), done / "out")
        data["sweep"]["engines"][0]["ready_s"] = 21
        with pytest.raises(
            ConfigError, match=r"one/serve/seed-0: was begun with another.*engine.ready_s: 20.0 -> 21.0"
        ):
            run_sweep(loaded(data), done / "out")

    def test_parts_are_merged_unless_their_engines_differ(self, done: Path, tmp_path: Path) -> None:
        for name in ("a", "b"):
            shutil.copytree(done / "out", tmp_path / name)
        shutil.rmtree(tmp_path / "a" / "cells" / "two")
        shutil.rmtree(tmp_path / "b" / "cells" / "one")
        merged = merge(tmp_path / "both", [tmp_path / "a", tmp_path / "b"])
        assert (merged.n_cells, merged.n_finished, merged.n_copied) == (4, 4, 4)
        for name in ("table.md", "table.json", "wide.md", "wide.csv", "sweep.json"):
            assert (tmp_path / "both" / name).read_bytes() == (done / "out" / name).read_bytes(), name
        cell = tmp_path / "both" / "cells" / "one" / "serve" / "seed-0"
        manifest = read_manifest(cell)
        assert manifest is not None
        m.write_manifest(cell, {**manifest, "engine": {**manifest["engine"], "version": "fake-2"}})
        with pytest.raises(ConfigError, match=r"made with other engine than .*\(version fake-2 -> fake-1\)"):
            merge(tmp_path / "all", [tmp_path / "both", tmp_path / "a"])


def test_shipped_sweeps_are_understood_down_to_their_cells() -> None:
    sweep = load_serve_sweep(read_config(BENCH / "serve_models.yaml"))
    single = validate_serve(read_config(BENCH / "serve_qwen3_8b.yaml"))
    assert [c.key for c in sweep.cells] == [f"{x}/serve/seed-0" for x in ("qwen3-4b", "qwen3-8b", "llama-3.1-8b")]
    assert [c.n_gpus for c in sweep.cells] == [1, 1, 1] and sweep.name == "serve-models"
    assert config_hash(sweep.cells[1].config) == config_hash(single), "the same setting"
