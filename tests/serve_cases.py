"""Fake engines and small configurations for the tests of serving."""

import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notelens.runs.records import FILE, read_records
from notelens.runs.serve_config import ServeConfig
from notelens.serving.engine import Engine, EngineCommand, running

FAKE = Path(__file__).with_name("fake_engine.py")


def command(**options: Any) -> tuple[str, ...]:
    """How to start a fake engine."""
    return (sys.executable, "-S", str(FAKE), "{port}", *(f"{k}={v}" for k, v in options.items()))


@contextlib.contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Engine]:
    """A running fake engine."""
    with running(EngineCommand(command(**options), ready_s=20.0, stop_s=3.0), folder / "engine.log") as found:
        yield found


def asked(url: str) -> dict[str, Any]:
    """What a fake engine was asked."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/asked", timeout=5) as response:
        return json.loads(response.read())


def config(*, url: str | None = None, options: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A small benchmark as plain data."""
    start = {"command": list(command(**(options or {}))), "ready_s": 20, "stop_s": 3}
    data: dict[str, Any] = {
        "name": "small", "engine": start if url is None else {"url": url}, "prompt": {"policy_tokens": 1000, "policies": 2},
        "capacity": {"n": 4, "in_flight": 2}, "loads": [{"name": "below", "multiple": 0.8}, {"name": "saturation"}], "n": 6,
        "arms": ["in_prefix", "erratum"], "timeout_s": 5, "ttft_objective_ms": 40, "figures": False,
    }  # fmt: skip
    return {**data, **changes}


def parsed(**changes: Any) -> ServeConfig:
    """A small benchmark."""
    return ServeConfig.model_validate_json(json.dumps(config(**changes)))


def entry(label: str, *, url: str | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """An engine of a sweep."""
    engine: dict[str, Any] = config(url=url, options={"us": 30, **(options or {})})["engine"]
    return {"label": label, **engine}


def sweep(engines: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A small sweep as plain data."""
    less = {"prompt": {"policy_tokens": 600, "policies": 1}, "capacity": {"n": 2, "in_flight": 1}, "n": 3}
    data = config(**{**less, **changes})
    return {**{k: v for k, v in data.items() if k != "engine"}, "sweep": {"engines": engines}}


def exists(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def children_of(log: Path) -> list[int]:
    """Processes that a fake engine said it started."""
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("child ")]


def contents(folder: Path) -> list[tuple[Any, ...]]:
    """What does not depend on the clock in the records of every cell."""
    found = []
    for path in sorted(folder.rglob(FILE)):
        records = read_records(path)
        found += [
            (str(path.parent.relative_to(folder)), key, r["request"], r.get("family"), r.get("wanted"), r.get("right"))
            for key, rows in records.items.items()
            for r in rows
        ]
    return found


def row_keys(folder: Path) -> list[tuple[Any, ...]]:
    """Rows of the long table without values, rates and how many requests were fast, which depend on the clock."""
    rows = json.loads((folder / "table.json").read_text())
    fields = ("label", "task", "seed", "cell", "experiment", "metric", "method", "model", "unit", "n_excluded")
    clocked = ("goodput_rps",)
    return [
        (
            *(r[f] for f in fields),
            None if r["metric"] in clocked else r["n"],
            {k: v for k, v in r["params"].items() if k != "offered_rps"},
        )
        for r in rows
    ]


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether all processes end in time."""
    deadline = time.monotonic() + seconds
    while any(map(exists, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def interruptible() -> None:
    """Run in a child before it begins: Ctrl-C reaches it also where the tests were started in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def pythonpath() -> dict[str, str]:
    """Environment of a child that is to find this package."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
