"""The runner: killed, cut, repeated or refused, a run ends with the same records, or says in a sentence why not.

This file is also the program that its kill test runs (``python test_runner.py <command> <folder>``), so that the fake
probe, task and model below are the same ones there.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from notelens.errors import (
    CompetenceError,
    ConfigError,
    GateError,
    InputError,
    MissingPackageError,
    RecordError,
    TaskError,
)
from notelens.probes import PROBES
from notelens.probes.base import Aggregate, Item, Probe, Row, mean_lines, rate_lines
from notelens.runs import manifest as m
from notelens.runs.config import RunConfig, validate
from notelens.runs.files import LOCK, held
from notelens.runs.records import FILE, read_records
from notelens.runs.runner import execute
from notelens.runs.tables import render
from notelens.runs.yamlfile import parse_document
from notelens.tasks import TASKS

ROOT = Path(__file__).parents[1]

# --- a probe, a task and a model that cost nothing --------------------------------------------------------------------


class FakeTask:
    name = "fake_task"

    def __init__(self, *, families: int = 6, short: bool = False) -> None:
        self.families, self.short = families, short

    def instances(self, tokenizer: Any, n: int, seed: int) -> list[Any]:
        n = n - 1 if self.short else n
        return [SimpleNamespace(id=f"i{seed}-{k:03d}", family=f"f{k % self.families}") for k in range(n)]


class FakeProbe(Probe):
    """Two stages; the second depends on the rows of the first."""

    name = "fake"
    stages: ClassVar[tuple[str, ...]] = ("map", "follow")
    measured: ClassVar[list[str]] = []

    def __init__(self, *, pause_ms: float = 0.0, wrong: float = 0.1, bad: str = "") -> None:
        self.pause_ms, self.wrong, self.bad = pause_ms, wrong, bad

    def items(self, instances: Sequence[Any], stage: str, earlier: Sequence[Row]) -> list[Item]:
        if self.bad == "few" and len(instances) < 6:
            raise InputError("measure more instances")
        if stage == "map":
            kept = list({i.id: i for i in instances}) if self.bad != "twice" else ["same", "same"]
            return [Item(name, stage, next((i for i in instances if i.id == name), None)) for name in kept]
        best = sorted(earlier, key=lambda r: (r.excluded is not None, -float(r.values.get("recovery") or 0.0), r.item))
        if self.bad == "incompetent_in_items" and all(r.excluded for r in earlier):
            raise CompetenceError("fake: no pair to follow")
        return [Item(f"{r.item}>{rank}", stage, r) for rank, r in enumerate(best[: len(best) // 2])]

    def measure(self, store: Any, item: Item) -> list[Row]:
        time.sleep(self.pause_ms / 1000)
        FakeProbe.measured.append(f"{item.stage}/{item.id}")
        rng = random.Random(f"{item.stage}/{item.id}")
        base = 0.0 if item.stage == "map" else float(item.payload.values["recovery"] or 0.0)
        rows = []
        for direction in ("denoising", "noising"):
            wrong = rng.random() < self.wrong
            value = base + rng.gauss(0.9, 0.2)
            if self.bad == "nan" and item.id.endswith("3"):
                value = math.nan
            values = {"recovery": value, "flipped": value > 0.8, "competent": not wrong}
            if self.bad == "type":
                values["oops"] = object()
            row_item = "other" if self.bad == "row" else item.id
            excluded = "recipient wrong" if wrong else None
            rows.append(Row(row_item, item.stage, f"f{rng.randrange(6)}", direction, excluded, values, {"form": "x"}))
        return rows

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        lines = mean_lines(self.name, rows, {"recovery": "recovery"}, seed=seed)
        lines += rate_lines(self.name, rows, {"flipped": "flip_rate"})
        return lines + rate_lines(self.name, rows, {"competent": "competence"}, include_excluded=True)


class OtherProbe(FakeProbe):
    name = "other"


class FakeModel:
    tokenizer = None

    def __init__(self, **facts: Any) -> None:
        gate = {"passed": facts.pop("passed", True), "key": "k", "checks": []}
        self._facts = {
            "name": "fake-model", "revision": "r1", "weights_hash": "w1", "dtype": "float32", "device": "cpu",
            "attention_kernel": "sdpa", "versions": {}, "gate": gate, "ungated": not gate["passed"], **facts,
        }  # fmt: skip

    def facts(self) -> dict[str, Any]:
        return self._facts


def fake_loader(name: str, **_: Any) -> Any:
    return FakeModel()


def refusing_loader(name: str, **_: Any) -> Any:
    raise AssertionError("the model was loaded although there was nothing to do")


NAMES = {"fake": "FakeProbe", "other": "OtherProbe"}


def register() -> None:
    for name, cls in NAMES.items():
        if name not in PROBES:
            PROBES.add(name, f"{__name__}:{cls}")
    if "fake_task" not in TASKS:
        TASKS.add("fake_task", f"{__name__}:FakeTask")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fakes are in the registries for one test; contracts over the registries never see them."""
    for registry in (PROBES, TASKS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    register()
    FakeProbe.measured.clear()
    yield


def config(text: str = "", *, params: str = "{}", n: int = 12, name: str = "demo") -> RunConfig:
    base = f"name: {name}\nmodel: {{name: fake-model}}\ntask: {{name: fake_task, n: {n}}}\nfigures: false\n"
    base += f"probes:\n  - name: fake\n    params: {params}\n  - name: other\n    params: {params}\n"
    return validate(parse_document(base + text, "x.yaml"))


def lines(folder: Path, kinds: Sequence[str] = ("instance", "item", "aggregate", "probe")) -> list[bytes]:
    raw = (folder / FILE).read_bytes().splitlines()
    return [line for line in raw if json.loads(line)["kind"] in kinds]


# --- a run and its records --------------------------------------------------------------------------------------------


def test_a_run_leaves_manifest_records_and_tables(tmp_path: Path) -> None:
    result = execute(config(), tmp_path / "run", loader=fake_loader)
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {
        "manifest.json", FILE, LOCK, "table.md", "table.csv", "table.tex", "table.json"
    }  # fmt: skip
    records = read_records(folder)
    assert result.n_measured == len(records.items) == 48 and result.n_read == 0 and result.gate == "passed"
    assert records.offset == (folder / FILE).stat().st_size
    manifest = m.read_manifest(folder)
    assert manifest is not None
    assert manifest["state"] == "finished" and manifest["config"]["task"]["n"] == 12 and manifest["seed"] == 0
    assert {"python", "torch", "transformers", "transformer-lens", "numpy", "scikit-learn", "notelens"} <= set(
        manifest["sessions"][0]["versions"]
    )
    assert "commit" in manifest["sessions"][0] and manifest["model"]["gate"]["passed"] is True
    header = records.runs[0]
    assert header["facts"] == manifest["model"] and header["config"] == manifest["config_hash"]
    for line in (*records.rows(), *records.all_aggregates()):
        assert (line["gate"], line["config"], line["model"]) == ("passed", manifest["config_hash"], "fake-model")
        assert line["swap"] == "isolated"


def test_aggregates_are_those_of_the_probe(tmp_path: Path) -> None:
    """The oracle runs the probe in memory, without records, and estimates from its rows."""
    execute(config(), tmp_path / "run", loader=fake_loader)
    expected = FakeProbe().run(SimpleNamespace(), FakeTask().instances(None, 12, 0), seed=0)  # type: ignore[arg-type]  # a fake store
    found = read_records(tmp_path / "run").aggregates["fake"]
    assert len(found) == len(expected.aggregates) == 9
    for line, aggregate in zip(found, expected.aggregates, strict=True):
        e = aggregate.estimate
        assert (line["metric"], line["method"]) == (aggregate.metric, aggregate.method)
        assert [line[k] for k in ("value", "lo", "hi", "n", "n_clusters")] == [e.value, e.lo, e.hi, e.n, e.n_clusters]
        assert line["reasons"] == dict(aggregate.reasons) and line["n_excluded"] == aggregate.n_excluded


def test_no_record_names_a_place_on_this_machine(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run", loader=fake_loader)
    for path in (tmp_path / "run").iterdir():
        text = path.read_text()
        for place in (str(tmp_path), str(ROOT), str(Path.home()) + "/", os.uname().nodename):
            assert place not in text, (path.name, place)


def test_a_run_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert m.commit() == {"commit": None, "dirty": None}


def test_the_same_configuration_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        execute(config(), tmp_path / name, loader=fake_loader)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    for table in ("table.md", "table.csv", "table.tex", "table.json"):
        assert (tmp_path / "a" / table).read_bytes() == (tmp_path / "b" / table).read_bytes()


def test_an_ungated_model_is_in_every_record(tmp_path: Path) -> None:
    result = execute(config(), tmp_path / "run", loader=lambda name, **_: FakeModel(passed=False))  # type: ignore[arg-type]
    assert result.gate == "ungated" and "UNGATED" in render(result.table, "md")
    records = read_records(tmp_path / "run")
    assert {line["gate"] for line in (*records.rows(), *records.all_aggregates())} == {"ungated"}


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = execute(config(), tmp_path / "run", loader=fake_loader)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.name != LOCK}
    FakeProbe.measured.clear()
    again = execute(config(), tmp_path / "run", loader=refusing_loader)
    assert again.n_measured == 0 and again.n_read == 48 and FakeProbe.measured == []
    assert render(again.table, "md") == render(first.table, "md")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.name != LOCK} == before


def test_a_run_that_died_before_its_tables_needs_no_model(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run", loader=fake_loader)
    manifest = m.read_manifest(tmp_path / "run")
    assert manifest is not None
    m.write_manifest(tmp_path / "run", {**manifest, "state": "running"})
    table = (tmp_path / "run" / "table.md").read_bytes()
    (tmp_path / "run" / "table.md").unlink()
    execute(config(), tmp_path / "run", loader=refusing_loader)
    assert (tmp_path / "run" / "table.md").read_bytes() == table


def test_a_cut_last_line_is_dropped_and_only_that_item_is_measured_again(tmp_path: Path) -> None:
    execute(config(), tmp_path / "whole", loader=fake_loader)
    execute(config(), tmp_path / "run", loader=fake_loader)
    manifest = m.read_manifest(tmp_path / "run")
    assert manifest is not None
    m.write_manifest(tmp_path / "run", {**manifest, "state": "running"})
    raw = (tmp_path / "run" / FILE).read_bytes()
    at = raw.index(b'"kind": "item"', len(raw) // 3)
    (tmp_path / "run" / FILE).write_bytes(raw[: at + 20])
    kept = len(read_records(tmp_path / "run").items)
    FakeProbe.measured.clear()
    result = execute(config(), tmp_path / "run", loader=fake_loader)
    assert 0 < kept < 48 and len(FakeProbe.measured) == result.n_measured == 48 - kept
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_a_write_error_keeps_what_is_finished_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(config(), tmp_path / "whole", loader=fake_loader)
    real, left = os.write, [10]

    def full_after_ten(handle: int, data: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full_after_ten)
        with pytest.raises(RecordError, match=r"no space left on device.*finished items are kept; make room and run"):
            execute(config(), tmp_path / "run", loader=fake_loader)
    assert len(read_records(tmp_path / "run").items) == 9
    execute(config(), tmp_path / "run", loader=fake_loader)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


@pytest.mark.slow
def test_killed_nine_times_and_resumed_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for hash_seed, command in (("0", "once"), ("1", "killed")):
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), command, str(tmp_path / command)],
            env={**environment, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    deaths = int(done.stdout.split()[-1])
    assert deaths >= 9
    assert len(read_records(tmp_path / "killed").runs) > 3
    assert lines(tmp_path / "killed", ("aggregate",)) == lines(tmp_path / "once", ("aggregate",))
    assert lines(tmp_path / "killed") == lines(tmp_path / "once")
    for table in ("table.md", "table.csv", "table.tex", "table.json"):
        assert (tmp_path / "killed" / table).read_bytes() == (tmp_path / "once" / table).read_bytes()


def _killed(folder: Path) -> None:
    """Fork a child that runs, kill it when the records have grown by some random number of bytes; repeat."""
    rng = random.Random(4)
    deaths = 0
    while True:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                execute(config(params="{pause_ms: 4}", n=40), folder, loader=fake_loader)
                code = 0
            finally:
                os._exit(code)
        path = folder / FILE
        start = path.stat().st_size if path.exists() else 0
        limit = start + rng.randrange(1, 9000) if deaths < 9 else None
        while True:
            finished, status = os.waitpid(child, os.WNOHANG)
            if finished:
                break
            if limit is not None and path.exists() and path.stat().st_size >= limit:
                os.kill(child, signal.SIGKILL)
                limit = None
            time.sleep(0.0005)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        deaths += 1
        if rng.random() < 0.5:  # what a crash of the machine leaves: half a line
            with path.open("ab") as file:
                file.write(b'{"schema_version": 1, "kind": "instance", "exper')
    print(deaths)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_another_configuration_does_not_continue_a_run(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run", loader=fake_loader)
    before = (tmp_path / "run" / FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"begun with another configuration \(seed: 0 -> 1\).*--out"):
        execute(config("seed: 1\n"), tmp_path / "run", loader=refusing_loader)
    with pytest.raises(ConfigError, match=r"probes.0.params.wrong: \(absent\) -> 0.2, .*task.n: 12 -> 13"):
        execute(config(params="{wrong: 0.2}", n=13), tmp_path / "run", loader=refusing_loader)
    assert (tmp_path / "run" / FILE).read_bytes() == before
    execute(config("description: other words\n", name="renamed"), tmp_path / "run", loader=refusing_loader)


def _unfinish(folder: Path) -> None:
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[: len(raw) // 2])


def test_other_versions_or_weights_do_not_continue_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(config(), tmp_path / "run", loader=fake_loader)
    _unfinish(tmp_path / "run")
    with pytest.raises(ConfigError, match="weights_hash w1 -> w2, dtype float32 -> bfloat16"):
        execute(config(), tmp_path / "run", loader=lambda n, **_: FakeModel(weights_hash="w2", dtype="bfloat16"))  # type: ignore[arg-type]
    now = m.versions()
    with monkeypatch.context() as patched:
        patched.setattr(m, "versions", lambda: {**now, "torch": "9.9"})
        with pytest.raises(ConfigError, match=rf"other versions \(torch {now['torch']} -> 9.9\)".replace("+", r"\+")):
            execute(config(), tmp_path / "run", loader=refusing_loader)
    result = execute(config(), tmp_path / "run", loader=fake_loader)
    assert result.n_measured > 0 and result.n_read > 0
    manifest = m.read_manifest(tmp_path / "run")
    assert manifest is not None and len(manifest["sessions"]) == 2


def test_two_runs_at_once_on_one_folder(tmp_path: Path) -> None:
    with held(tmp_path / "run"), pytest.raises(InputError, match=r"another run .* is writing here"):
        execute(config(), tmp_path / "run", loader=fake_loader)
    execute(config(), tmp_path / "run", loader=fake_loader)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="is not empty and holds no run"):
        execute(config(), tmp_path, loader=refusing_loader)
    with pytest.raises(InputError, match="is a file"):
        execute(config(), tmp_path / "thesis.txt", loader=refusing_loader)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_wrong_parameters_are_refused_before_a_folder_or_a_model_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="probe 'fake' has no parameter 'wrongg'; did you mean 'wrong'"):
        execute(config(params="{wrongg: 1}"), tmp_path / "run", loader=refusing_loader)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [GateError("failed its gate"), InputError("unknown model"), MissingPackageError("x")])
def test_a_model_that_is_not_admitted_leaves_no_records(tmp_path: Path, error: Exception) -> None:
    def loader(name: str, **_: Any) -> Any:
        raise error

    with pytest.raises(type(error)):
        execute(config(), tmp_path / "run", loader=loader)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [LOCK]
    execute(config(), tmp_path / "run", loader=fake_loader)


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run", loader=fake_loader)
    for text, message in (("{", "is not JSON"), ("[]", "is not a manifest"), ('{"manifest_version": 9}', "version 1")):
        (tmp_path / "run" / m.FILE).write_text(text)
        with pytest.raises(RecordError, match=message):
            execute(config(), tmp_path / "run", loader=refusing_loader)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("twice", TaskError, "stage 'map' has two items with the id 'same'"),
        ("type", RecordError, "a record holds a value of type object at oops"),
        ("row", RecordError, "gave a row of 'other'"),
    ],
)
def test_a_probe_that_breaks_its_contract(tmp_path: Path, bad: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        execute(config(params=f"{{bad: {bad}}}"), tmp_path / "run", loader=fake_loader)
    assert read_records(tmp_path / "run").items == {}


def test_a_task_with_too_few_instances(tmp_path: Path) -> None:
    short = config().model_copy(update={"task": config().task.model_copy(update={"params": {"short": True}})})
    with pytest.raises(TaskError, match="gave 11 of 12 instances; ask for fewer"):
        execute(short, tmp_path / "run", loader=fake_loader)


# --- rows without values ----------------------------------------------------------------------------------------------


def test_nan_excludes_its_row_and_is_counted(tmp_path: Path) -> None:
    execute(config(params="{bad: nan, wrong: 0}"), tmp_path / "run", loader=fake_loader)
    records = read_records(tmp_path / "run")
    nulled = [row for row in records.rows("fake") if "nulls" in row]
    assert nulled and all(row["excluded"] == "not finite" and row["values"]["competent"] is True for row in nulled)
    both = next(a for a in records.aggregates["fake"] if (a["metric"], a["method"]) == ("recovery", "both"))
    assert both["reasons"] == {"not finite": len(nulled)} and both["n"] == len(records.rows("fake")) - len(nulled)


@pytest.mark.parametrize("bad", ["", "incompetent_in_items"])
def test_a_model_that_decides_nothing_is_reported_and_its_records_are_kept(tmp_path: Path, bad: str) -> None:
    params = f"{{wrong: 1.0, bad: '{bad}'}}"
    results = [execute(config(params=params), tmp_path / "run", loader=fake_loader)]
    results.append(execute(config(params=params), tmp_path / "run", loader=refusing_loader))
    for result in results:
        assert len(result.incompetent) == 2 and result.incompetent[1].startswith(
            "fake:" if bad else "other: none of 48"
        )
        assert "NOT COMPETENT" in render(result.table, "md")
    assert results[0].incompetent == results[1].incompetent
    assert len(read_records(tmp_path / "run").rows()) == (48 if bad else 96)
    if not bad:
        assert "recipient wrong: 48" in results[0].incompetent[0]
        competence = next(a for a in results[0].table.rows if a["metric"] == "competence")
        assert competence["value"] == 0.0 and competence["n"] == 48


# --- dry runs ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_measures_two_instances_on_a_random_model_and_keeps_nothing(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def loader(name: str, **options: Any) -> Any:
        asked.append({"name": name, **options})
        return FakeModel()

    result = execute(config(params="{wrong: 1.0}"), tmp_path / "run", dry_run=True, loader=loader)
    assert asked == [
        {
            "name": "fake-model", "revision": None, "dtype": "float32", "device": "cpu", "attention": None,
            "competence": True, "allow_ungated": False, "dry_run": True,
        }
    ]  # fmt: skip
    assert result.folder is None and result.n_measured == 8 and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        *(p for p in sorted((ROOT / "configs" / "paper").glob("*.yaml")) if "\nsweep:" not in p.read_text()),
        ROOT / "configs" / "quickstart.yaml",
    ],
    ids=lambda p: p.stem,
)
def test_shipped_configurations_run_dry_on_their_architecture(path: Path) -> None:
    from notelens.runs.config import load_config

    loaded, document = load_config(path)
    result = execute(loaded, "unused", dry_run=True, document=document)
    assert result.gate == "passed"
    assert {row["experiment"] for row in result.table.rows} == {p.name for p in loaded.probes}


if __name__ == "__main__":
    register()
    if sys.argv[1] == "once":
        execute(config(params="{pause_ms: 4}", n=40), sys.argv[2], loader=fake_loader)
    else:
        _killed(Path(sys.argv[2]))
