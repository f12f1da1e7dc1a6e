"""A serving benchmark against a fake engine whose reuse and speed are known: numbers, records, faults, resuming."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notelens.errors import ConfigError, FolderInUseError, InputError, PrefixCacheError
from notelens.report.serving import draw_serving
from notelens.runs.cli import main
from notelens.runs.config import read_config
from notelens.runs.files import held
from notelens.runs.manifest import read_manifest
from notelens.runs.records import Records, read_records
from notelens.runs.serve import ServeResult, execute_serve
from notelens.runs.serve_config import load_serve_config
from notelens.runs.serve_tables import aggregates, benchmark_rows, merge_results, serve_table
from notelens.runs.sweep_config import is_sweep
from notelens.serving.client import Reply
from notelens.serving.load import GONE, Timed, closed_loop, open_loop, poisson_arrivals
from notelens.stats import block_statistic
from notelens.stats.blocks import block_length
from tests import serve_cases as cases
from tests.figure_checks import cut, overlaps

BENCH = sorted((Path(__file__).parents[1] / "configs" / "bench").glob("*.yaml"))
CONFIGS = [path for path in BENCH if not is_sweep(read_config(path))]
FAST = {"us": 45}


def reply(ttft: float = 0.0) -> Reply:
    """An answer that came after ``ttft`` seconds."""
    return Reply("x", time.perf_counter() - ttft, (ttft,), ttft, 1, 1, None, "stop")


def only(rows: Any, metric: str, method: str, **params: Any) -> dict[str, Any]:
    """The one row with these parameters and no others, but for the rate that was offered."""
    found = [
        r for r in rows
        if (r["metric"], r["method"]) == (metric, method)
        and {k: v for k, v in r["params"].items() if k not in ("offered_rps", "objective_ms")} == params
    ]  # fmt: skip
    assert len(found) == 1, (metric, method, params, len(found))
    return found[0]


def write(path: Path, data: dict[str, Any]) -> Path:
    """A configuration file; JSON is YAML."""
    path.write_text(json.dumps(data, indent=1))
    return path


class TestLoad:
    def test_arrivals_are_poisson_and_keep_their_pattern(self) -> None:
        due = poisson_arrivals(4000, 10.0, seed=1)
        gaps = np.diff((0.0, *due))
        assert abs(gaps.mean() - 0.1) < 0.005 and abs(gaps.std() / gaps.mean() - 1) < 0.05
        assert poisson_arrivals(4000, 20.0, seed=1) == pytest.approx(np.array(due) / 2)
        assert due != poisson_arrivals(4000, 10.0, seed=2) and poisson_arrivals(3, None, 0) == (0.0, 0.0, 0.0)
        with pytest.raises(InputError, match="must be positive"):
            poisson_arrivals(3, 0.0, 0)

    def test_waiting_counts_from_when_a_request_was_due(self) -> None:
        """A client that is kept busy for 0.2 s must not report that the first request was answered at once."""

        async def send(index: int) -> Reply:
            return reply()

        async def go() -> Any:
            load = asyncio.ensure_future(open_loop(send, [0.0, 0.05]))
            await asyncio.sleep(0)
            time.sleep(0.2)
            return await load

        found = asyncio.run(go())
        first, second = found.requests
        assert first.ttft_s > 0.19 and 0.14 < second.ttft_s < first.ttft_s and not found.ended

    def test_a_closed_loop_never_has_more_than_its_number_at_once(self) -> None:
        now, most = 0, 0

        async def send(index: int) -> Reply:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            return reply()

        found = asyncio.run(closed_loop(send, 9, 3))
        assert most == 3 and len(found.answered) == 9 and found.elapsed_s >= 0.03

    def test_when_the_engine_ends_nothing_is_waited_for(self) -> None:
        began = time.monotonic()

        async def send(index: int) -> Reply:
            if index == 0:
                return reply()
            await asyncio.sleep(600)
            raise AssertionError

        found = asyncio.run(open_loop(send, [0.0, 0.0, 300.0], alive=lambda: time.monotonic() - began < 0.2))
        assert time.monotonic() - began < 2 and found.ended
        assert [t.failure for t in found.requests] == ["", GONE, GONE] and len(found.answered) == 1

    def test_an_error_of_ours_is_not_taken_for_one_of_the_engine(self) -> None:
        async def send(index: int) -> Reply:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            asyncio.run(open_loop(send, [0.0]))
        assert Timed(0, 0.0, None, 1.0, None, GONE).ttft_s is None


class TestBlocks:
    def test_point_values_are_those_of_the_series(self) -> None:
        a, b = [1.0, 2.0, 3.0, 10.0], [2.0, 2.0, 2.0]
        found = block_statistic([a, b], lambda x, y: x.max(axis=1) / y.mean(axis=1), n_resamples=500)
        assert found.value == 5.0 and found.n == 3 and found.lo is not None and found.lo < found.value
        same = block_statistic([a, a], lambda x, y: x.mean(axis=1) / y.mean(axis=1), paired=True, n_resamples=50)
        assert (same.lo, same.hi, same.flags) == (1.0, 1.0, ("zero_width",)), "the same instances of both"
        with pytest.raises(InputError, match="unequal lengths"):
            block_statistic([a, b], lambda x, y: x.mean(axis=1) / y.mean(axis=1), paired=True)
        assert block_statistic([b], lambda x: x.mean(axis=1)).flags == ("zero_width",)
        assert block_statistic([[]], lambda x: x.mean(axis=1)).value is None
        assert block_statistic([[1.0]], lambda x: x.mean(axis=1)).flags == ("single_instance",)
        assert [block_length(n) for n in (1, 8, 9, 27, 96)] == [1, 2, 3, 3, 5]

    def test_intervals_of_series_that_resemble_themselves_are_wider(self) -> None:
        """AR(1) with 0.6: single draws would cover the mean in about 65 % of the cases, blocks in clearly more."""
        covered = {"iid": 0, "blocks": 0}
        for seed in range(60):
            rng = np.random.default_rng(seed)
            x = np.zeros(120)
            for t in range(1, 120):
                x[t] = 0.6 * x[t - 1] + rng.normal()
            found = block_statistic([x], lambda v: v.mean(axis=1), n_resamples=400, seed=seed)
            assert found.lo is not None and found.hi is not None
            covered["blocks"] += found.lo <= 0 <= found.hi
            half = 1.96 * x.std() / np.sqrt(120)
            covered["iid"] += abs(x.mean()) <= half
        assert covered["blocks"] >= covered["iid"] + 6 and covered["blocks"] >= 0.78 * 60, covered


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServeResult, Any, Path]:
    """A finished benchmark of all arms on a fake engine, what it was asked, and its folder."""
    folder = tmp_path_factory.mktemp("serve")
    arms = ["in_prefix", "hoisted", "erratum", "erratum_mid", "full"]
    with cases.engine(folder, **FAST) as engine:
        config = cases.parsed(url=engine.url, arms=arms, figures=True)
        done = execute_serve(config, folder / "run")
        asked = cases.asked(engine.url)["asked"]
        again = execute_serve(config, folder / "run")
        assert (again.n_measured, again.marks, cases.asked(engine.url)["asked"]) == (0, (), asked), (
            "finished is finished"
        )
        assert again.table == done.table
    return done, asked, folder / "run"


class TestBenchmark:
    def test_hit_rates_answers_and_ratios(self, small: tuple[ServeResult, Any, Path]) -> None:
        rows = small[0].table.rows
        assert small[0].marks == () and small[0].n_measured == 11
        for arm in ("hoisted", "erratum", "erratum_mid"):
            assert only(rows, "prefix_hit_rate", arm)["value"] > 0.93
            assert only(rows, "throughput_ratio", arm, load="saturation")["value"] > 1
        for arm in ("in_prefix", "full"):
            assert only(rows, "prefix_hit_rate", arm)["value"] < 0.05
        for arm in ("in_prefix", "hoisted", "erratum", "erratum_mid", "full"):
            right = only(rows, "p_correct", arm)
            assert (right["value"], right["n"], right["n_clusters"]) == (1.0, 12, 2) and right["lo"] < 0.9
            changed = only(rows, "p_correct", arm, changed=True)["n"], only(rows, "p_correct", arm, changed=False)["n"]
            assert sum(changed) == 12 and min(changed) > 0
            assert only(rows, "p_stale_answer", arm, changed=True)["value"] == 0.0

    def test_times_are_those_of_the_engine(self, small: tuple[ServeResult, Any, Path]) -> None:
        """About 1,000 words at 45 us are 45 ms of prefill; the tail of a hit is a tenth of that or less."""
        rows = small[0].table.rows
        cold = only(rows, "ttft_ms", "in_prefix", load="below", q=0.5)
        assert cold["value"] > 42 and cold["n"] == 6 and cold["lo"] is not None
        assert only(rows, "ttft_ms", "erratum", load="below", q=0.5)["value"] < cold["value"]
        assert "few_tail" in only(rows, "ttft_ms", "erratum", load="below", q=0.99)["flags"]
        assert 0 < only(rows, "capacity_rps", "in_prefix")["value"] < 22
        saturated = only(rows, "ttft_ms", "in_prefix", load="saturation", q=0.9)["value"]
        assert saturated > cold["value"], "waiting in the queue is part of the time to the first token"
        assert only(rows, "within_objective", "in_prefix", load="below")["value"] == 0.0
        assert only(rows, "goodput_rps", "in_prefix", load="below")["value"] == 0.0

    @pytest.mark.parametrize(
        ("batches", "each", "interval"), [(1, 8, False), (4, 3, False), (5, 3, True), (12, 1, True)]
    )
    def test_a_throughput_of_few_batches_has_no_interval(self, batches: int, each: int, interval: bool) -> None:
        """Eight answers that end within a millisecond of each other are one fact about an engine, not eight."""
        done = [10.0 * (i // each + 1) + 1e-4 * i for i in range(batches * each)]
        facts = dict.fromkeys(("offered_rate", "hit_rate", "queue_ms")) | {"elapsed_s": done[-1], "hit_reason": "none"}
        cell = [{"load": "saturation", "arm": "erratum", **facts}]
        cell += [{"excluded": None, "ttft_ms": 1.0, "itl_ms": 1.0, "done_s": s, "family": "a", "right": True, "changed": True,
                  "stale_answer": False} for s in done]  # fmt: skip
        manifest = {
            "seed": 0, "engine": {"model": "m", "version": "1"}, "config_hash": "x",
            "config": {"arms": ["erratum"], "ttft_objective_ms": 100.0},
        }  # fmt: skip
        rows = aggregates(Records(items={("serve", "cell", "erratum"): cell}), manifest)
        row = only(rows, "throughput_rps", "erratum", load="saturation")
        assert row["value"] == pytest.approx(len(done) / done[-1]) and row["n"] == len(done)
        assert (row["lo"] is not None) is interval
        assert ("few_batches" in row["flags"]) is not interval

    def test_timed_requests(self, small: tuple[ServeResult, Any, Path]) -> None:
        asked = small[1]
        assert not any({"prompt_logprobs", "logprobs", "echo"} & set(body) for body in asked)
        assert all(body["temperature"] == 0 and body["stream"] for body in asked)
        cells = [r for r in read_records(small[2]).rows() if r["request"] is None]
        salts = [c["salt"] for c in cells]
        assert all(len(s) <= 128 and not set(s) & set("@/\\") for s in salts), "vLLM refuses other salts"
        assert len(set(salts)) == len(salts) == 11, "no arm can feed another, nor one load the next"
        sent = [body.get("cache_salt") for body in asked]
        assert all(sent.count(c["salt"]) == c["n"] + 2 for c in cells), "warm-up and timed requests share a salt"
        rows = [r for r in read_records(small[2]).rows() if r["request"] is not None and r["load"] == "below"]
        assert {r["n_prompt"] > 900 for r in rows} == {True}
        due = {arm: [r["due_s"] for r in rows if r["arm"] == arm] for arm in ("in_prefix", "erratum")}
        assert due["in_prefix"] == due["erratum"], "every arm meets the same arrivals"

    def test_what_is_written(self, small: tuple[ServeResult, Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
        folder = small[2]
        manifest = read_manifest(folder)
        assert manifest is not None and manifest["state"] == "finished"
        assert manifest["engine"]["settings"] == {
            "block_size": 16,
            "prefix_caching": True,
            "cache_dtype": "auto",
            "n_blocks": 100,
        }
        names = {p.name for p in folder.iterdir()}
        assert {"table.md", "table.json", "summary.md", "records.jsonl", "figures"} <= names
        assert sorted(p.name for p in (folder / "figures").iterdir()) == ["ttft.png", "ttft.svg"]
        assert main(["table", str(folder), "--format", "json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert [r["value"] for r in shown] == [r["value"] for r in small[0].table.rows]
        summary = (folder / "summary.md").read_text()
        assert "PARTIAL" not in summary and summary.count("| saturation") == 5 and "blocks of 16 tokens" in summary

    def test_rows_for_the_benchmark_file(self, small: tuple[ServeResult, Any, Path], tmp_path: Path) -> None:
        rows = benchmark_rows(small[2], "cpu")
        keys = {(json.dumps(r["case"]), r["metric"]) for r in rows}
        assert {('{"arm": "erratum"}', "prefix_hit_rate"), ('{"arm": "in_prefix"}', "p_correct")} <= keys
        assert {('{"load": "below"}', "p90_ttft_ratio"), ('{"load": "saturation"}', "throughput_ratio")} <= keys
        ratio = next(r for r in rows if r["case"] == {"load": "below"} and r["metric"] == "p90_ttft_ratio")
        wide = only(small[0].table.rows, "p90_ttft_ratio", "erratum", load="below")
        assert wide["lo"] <= ratio["q1"] <= ratio["q3"] <= wide["hi"] and ratio["value"] == wide["value"]
        file = tmp_path / "results.json"
        other = {"benchmark": "ttft", "case": {"n": 1}, "metric": "ttft_ratio", "value": 2.0, "q1": 1, "q3": 3, "n": 1}
        old = {**rows[0], "value": -1.0}
        file.write_text(json.dumps([other, old]))
        merge_results(file, rows)
        assert json.loads(file.read_text()) == [other, *rows]

    def test_figure(self, small: tuple[ServeResult, Any, Path]) -> None:
        figure = draw_serving(small[0].table.rows)
        axes = figure.axes
        assert [a.get_yscale() for a in axes] == ["log", "log"] and [a.get_title() for a in axes] == [
            "median",
            "90th percentile",
        ]
        labels = axes[0].get_legend_handles_labels()[1]
        assert labels == ["in_prefix", "hoisted", "erratum", "erratum_mid", "full"]
        line = next(x for x in axes[1].lines if x.get_label() == "erratum")
        values = [
            only(small[0].table.rows, "ttft_ms", "erratum", load=x, q=0.9)["value"] for x in ("below", "saturation")
        ]
        assert list(line.get_ydata()) == values
        assert [t.get_text() for t in axes[0].get_xticklabels()][1] == "saturation\nall at once"
        assert cut(figure) == [] and overlaps(figure) == []
        said = " ".join(t.get_text() for t in figure.texts)
        assert "n = 6 requests a point" in said and "hollow: fewer than 5" in said, "6 requests make no 90th percentile"
        plain = draw_serving([{**r, "flags": []} for r in small[0].table.rows])
        assert "hollow" not in " ".join(t.get_text() for t in plain.texts)
        low, high = axes[0].get_ylim()
        ends = [
            r[k]
            for r in small[0].table.rows
            if r["metric"] == "ttft_ms"
            for k in ("lo", "hi")
            if r["params"]["q"] < 0.99
        ]
        assert low < min(ends) and max(ends) < high and {low, high} <= set(axes[0].get_yticks())
        assert "no request of any load" in str([t.get_text() for t in draw_serving([]).texts])

    def test_a_table_on_record_draws_the_figure_of_its_run(
        self, small: tuple[ServeResult, Any, Path], tmp_path: Path
    ) -> None:
        shutil.copy(small[2] / "table.json", tmp_path / "small.json")
        script = Path(__file__).parents[1] / "paper_figures" / "fig_serving.py"
        command = [sys.executable, str(script), str(tmp_path / "small.json")]
        refused = subprocess.run(command, capture_output=True, text=True, env=cases.pythonpath())
        assert refused.returncode == 2 and "needs --out" in refused.stderr
        subprocess.run([*command, "--out", str(tmp_path)], check=True, capture_output=True, env=cases.pythonpath())
        for name in ("ttft.png", "ttft.svg"):
            assert (tmp_path / name).read_bytes() == (small[2] / "figures" / name).read_bytes()

    def test_a_folder_is_continued_only_as_it_was_begun(self, small: tuple[ServeResult, Any, Path]) -> None:
        manifest = read_manifest(small[2])
        assert manifest is not None
        config = cases.parsed(url=manifest["config"]["engine"]["url"], arms=manifest["config"]["arms"], n=7)
        with pytest.raises(ConfigError, match="was begun with another configuration"):
            execute_serve(config, small[2])
        with held(small[2]), pytest.raises(FolderInUseError):
            execute_serve(config, small[2])
        with pytest.raises(InputError, match="holds no serving benchmark"):
            serve_table(small[2].parent)


def run(tmp_path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, str]:
    """Run a benchmark from the command line; exit code and what stderr says last."""
    path = write(tmp_path / "c.yaml", cases.config(options={**FAST, **options}, **changes))
    code = main(["serve-bench", str(path), "--out", str(tmp_path / "run")])
    return code, capsys.readouterr().err.strip().splitlines()[-1]


class TestFaults:
    def test_an_engine_that_is_killed_leaves_a_marked_record_that_is_continued(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The fake engine dies within the second cell, after 25 requests, and only the first time."""
        began = time.monotonic()
        options = {"die_after": 25, "once": str(tmp_path / "died"), "child": 1}
        code, said = run(tmp_path, options, capsys)
        assert code == 4 and time.monotonic() - began < 20
        assert said.startswith("error: the benchmark is partial: below/erratum: ") and "the engine ended during" in said
        folder = tmp_path / "run"
        assert not any(map(cases.exists, cases.children_of(folder / "engine.log"))), "nothing is left behind"
        manifest, records = read_manifest(folder), read_records(folder)
        assert manifest is not None and manifest["state"] == "partial"
        stages = [key[1:] for key in records.items]
        assert stages[:2] == [("capacity", "capacity/in_prefix"), ("cell", "below/in_prefix")]
        assert ("partial", "below/erratum#1") in stages or len(stages) == 2
        assert "serve" not in records.probes and "PARTIAL: below/erratum" in (folder / "summary.md").read_text()
        assert "PARTIAL" in (folder / "table.md").read_text()
        code, said = run(tmp_path, options, capsys)
        after = read_records(folder)
        assert code == 0, said
        assert next(k for k in after.items if k[1] == "cell")[2] == "below/in_prefix"
        assert {k: v for k, v in after.items.items() if k in records.items} == records.items, (
            "what was measured is kept"
        )
        assert len([k for k in after.items if k[1] == "cell"]) == 4 and "serve" in after.probes
        assert "PARTIAL" not in (folder / "table.md").read_text()

    def test_no_metrics_is_marked_and_not_zero(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, said = run(tmp_path, {"metrics": 0}, capsys, loads=[{"name": "saturation"}])
        assert code == 4 and "no prefix cache counters, so hit rates are unavailable" in said
        rows = serve_table(tmp_path / "run").rows
        hit = only(rows, "prefix_hit_rate", "erratum")
        assert hit["value"] is None and hit["n"] == 0 and "no counter" in str(hit["reasons"])
        assert only(rows, "p_correct", "erratum")["value"] == 1.0, "what can be measured is"
        assert only(rows, "p90_ttft_ratio", "erratum", load="saturation")["value"] > 1
        assert "unavailable" in (tmp_path / "run" / "summary.md").read_text()

    def test_a_request_that_is_never_answered(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Request 18 is one of the first cell; the others go on, and only that cell is measured again."""
        options = {"hang_after": 18, "once": str(tmp_path / "hung")}
        began = time.monotonic()
        code, said = run(tmp_path, options, capsys, timeout_s=1.5)
        assert code == 4 and time.monotonic() - began < 25
        assert "below/in_prefix: 1 of 6 requests were not answered (timeout)" in said
        records = read_records(tmp_path / "run")
        lost = [r for r in records.rows() if r.get("excluded")]
        assert [(r["excluded"], r["item"]) for r in lost] == [("timeout", "below/in_prefix#1")]
        assert {key[2] for key in records.items if key[1] == "cell"} == {
            "below/erratum",
            "saturation/in_prefix",
            "saturation/erratum",
        }
        code, _ = run(tmp_path, options, capsys, timeout_s=1.5)
        assert code == 0 and ("serve", "cell", "below/in_prefix") in read_records(tmp_path / "run").items

    def test_an_engine_that_hangs_for_good_does_not_hang_the_benchmark(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        began = time.monotonic()
        code, said = run(tmp_path, {"hang_from": 14}, capsys, timeout_s=1.0)
        assert code == 4 and "its warm-up was not answered in time" in said and time.monotonic() - began < 15

    def test_ctrl_c_keeps_whole_cells_and_leaves_nothing(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "c.yaml", cases.config(options={**FAST, "child": 1}, loads=[{"name": "slow", "rate": 0.2}])
        )
        folder = tmp_path / "run"
        command = [sys.executable, "-m", "notelens.runs.cli", "serve-bench", str(path), "--out", str(folder)]
        user = subprocess.Popen(
            command, env=cases.pythonpath(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=cases.interruptible,
        )  # fmt: skip
        assert user.stderr is not None
        for line in user.stderr:
            if line.startswith("capacity of the baseline"):
                break
        children = cases.children_of(folder / "engine.log")
        assert len(children) == 2 and all(map(cases.exists, children))
        user.send_signal(signal.SIGINT)
        said = user.stderr.read()
        user.stderr.close()
        assert user.wait(15) == 130 and said.endswith(
            "stopped: whole cells are kept; run the same command to continue\n"
        )
        assert not any(map(cases.exists, children))
        assert [key[1] for key in read_records(folder).items] == ["capacity"]
        assert "PARTIAL: not finished" in serve_table(folder).header[0]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"caching": 0}, "runs without prefix caching"),
            ({"caching": 2}, "had nothing cached of a prompt that it had just seen; start it with prefix caching on"),
            ({"salts": 0}, "under another salt, so arms would feed each other; write the salt into the prompt"),
        ],
    )
    def test_an_engine_that_cannot_be_measured(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], said: str
    ) -> None:
        code, line = run(tmp_path, options, capsys)
        assert code == 2 and said in line and not (tmp_path / "run" / "records.jsonl").exists()

    def test_salts_in_the_prompt_work_where_the_engine_knows_none(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        prompt = {"policy_tokens": 1000, "policies": 1, "salt": "prompt"}
        code, _ = run(tmp_path, {"salts": 0}, capsys, loads=[{"name": "saturation"}], prompt=prompt)
        rows = serve_table(tmp_path / "run").rows
        assert code == 0 and only(rows, "prefix_hit_rate", "in_prefix")["value"] < 0.05
        assert only(rows, "prefix_hit_rate", "erratum")["value"] > 0.9

    def test_the_answers_own_count_serves_where_metrics_are_missing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, line = run(tmp_path, {"metrics": 0, "details": 1, "caching": 0}, capsys)
        assert code == 2 and "had nothing cached" in line

    def test_a_prefix_shorter_than_a_block_is_said(self, tmp_path: Path) -> None:
        with cases.engine(tmp_path, us=1, block=1024) as engine:
            prompt = {"policy_tokens": 1500, "policies": 1}
            config = cases.parsed(url=engine.url, prompt=prompt, loads=[{"name": "saturation"}])
            done = execute_serve(config, tmp_path / "run")
        assert "shorter than two blocks of 1024 tokens" in str(done.table.header)

    def test_bad_input_is_one_sentence(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sentences: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
            (lambda c: c.update(engine={"url": "http://127.0.0.1:9"}), "nothing answers at http://127.0.0.1:9"),
            (lambda c: c.update(engine={"url": "nonsense"}), "is not the address of an engine"),
            (lambda c: c["engine"].update(url="http://x:1"), "either 'command' (it is started) or 'url'"),
            (lambda c: c["engine"].update(command=["vllm", "serve"]), "must say {port}"),
            (lambda c: c.update(arms=["erratum"]), "the baseline 'in_prefix' is not among the arms"),
            (lambda c: c.update(loads=[{"name": "x", "rate": 1, "multiple": 2}]), "both 'multiple' and 'rate'"),
            (lambda c: c.update(loads=[{"name": "x"}, {"name": "x"}]), "load 'x' is listed twice"),
            (lambda c: c.update(timout_s=3), "unknown key 'timout_s'; did you mean 'timeout_s'"),
            (lambda c: c["prompt"].update(extra={"prompt_logprobs": 1}), "asks for 'prompt_logprobs'"),
        ]
        for change, said in sentences:
            data = cases.config()
            change(data)
            path = write(tmp_path / "c.yaml", data)
            assert main(["serve-bench", str(path), "--out", str(tmp_path / "run")]) == 2
            err = capsys.readouterr().err
            assert said in err and err.count("\n") == 1, err
        with cases.engine(tmp_path) as engine:
            path = write(tmp_path / "c.yaml", cases.config(url=engine.url))
            arguments = ["serve-bench", str(path), "--out", str(tmp_path / "run"), "--set", "engine.model=other"]
            assert main(arguments) == 2 and "serves fake, but 'other' was asked for" in capsys.readouterr().err
            with pytest.raises(PrefixCacheError, match="nothing to measure"), cases.engine(tmp_path, caching=0) as off:
                execute_serve(cases.parsed(url=off.url), tmp_path / "off")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configurations_are_understood(path: Path) -> None:
    config = load_serve_config(path)
    assert config.name == path.stem.replace("_", "-") and config.engine.command is not None
    assert config.prompt.policy_tokens >= 2000 and config.loads[-1].rate is None and config.loads[-1].multiple is None
