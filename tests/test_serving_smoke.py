"""A serving benchmark end to end on a real engine: vLLM on a CPU, SmolLM2 with its adapter merged, a tiny load."""

import os
from pathlib import Path
from typing import Any

import pytest

from experiments import merge_adapter
from notelens.runs.records import read_records
from notelens.runs.serve import ServeResult, execute_serve
from notelens.runs.serve_config import load_serve_config

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("NOTELENS_SERVE_PYTHON", ROOT / ".venv-serve/bin/python"))
CONFIG = ROOT / "configs/bench/serve_smollm2.yaml"
N = 3
BIND = "VLLM_CPU_OMP_THREADS_BIND"
SETTINGS = (
    f"n={N}", "prompt.policy_tokens=700", "prompt.policies=1", "capacity.n=2", "arms=[in_prefix, erratum]",
    "loads=[{name: below, multiple: 0.8}, {name: saturation}]", "figures=false",
)  # fmt: skip
needs_engine = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is not there (make serve-env)")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> ServeResult:
    folder = tmp_path_factory.mktemp("serve")
    assert merge_adapter.main(["smollm2", str(folder / "model")]) == 0
    config = load_serve_config(CONFIG, SETTINGS)
    assert config.engine.command is not None
    command = [str(PYTHON), *config.engine.command[1:]]
    command = [f"--model={folder / 'model'}" if part.startswith("--model=") else part for part in command]
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    variables = {k: v for k, v in config.engine.env.items() if k != BIND}
    if cpus and cpus == list(range(cpus[0], cpus[-1] + 1)):
        variables[BIND] = f"{cpus[0]}-{cpus[-1]}"
    engine = config.engine.model_copy(update={"command": tuple(command), "env": variables})
    return execute_serve(config.model_copy(update={"engine": engine}), folder / "run")


def value(done: ServeResult, metric: str, arm: str, **params: Any) -> Any:
    rows = [r for r in done.table.rows if r["metric"] == metric and r["method"] == arm]
    [row] = [r for r in rows if {k: v for k, v in r["params"].items() if k != "offered_rps"} == params]
    return row["value"]


@needs_engine
@pytest.mark.slow
class TestSmoke:
    def test_every_request_of_every_cell_is_answered(self, done: ServeResult) -> None:
        assert done.marks == ()
        rows = [r for r in read_records(done.folder).rows() if r.get("stage") == "cell" and "ttft_ms" in r]
        assert len(rows) == 2 * 2 * N and {r["excluded"] for r in rows} == {None}
        assert all(r["ttft_ms"] > 0 for r in rows)

    def test_a_line_behind_the_policy_keeps_the_engines_cache_and_a_changed_line_in_it_does_not(
        self, done: ServeResult
    ) -> None:
        assert value(done, "prefix_hit_rate", "erratum") > 0.85
        assert value(done, "prefix_hit_rate", "in_prefix") < 0.3

    def test_the_first_token_comes_sooner(self, done: ServeResult) -> None:
        assert value(done, "p90_ttft_ratio", "erratum", load="below") > 1

    def test_no_process_of_the_engine_is_left(self, done: ServeResult) -> None:
        assert str(done.folder.parent / "model") not in _command_lines()


def _command_lines() -> str:
    """Command lines of all processes, where the system shows them."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return "\n".join(found)
