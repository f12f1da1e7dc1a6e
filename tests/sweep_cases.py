"""A probe, a task and models that cost nothing, for sweeps; worker processes get them by importing ``tests.sweep_worker``."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from notelens.errors import GateError, InputError, MissingPackageError
from notelens.probes import PROBES
from notelens.probes.base import Aggregate, Item, Probe, Row, mean_lines, rate_lines
from notelens.runs import runner
from notelens.runs.sweep_config import Sweep, load_sweep
from notelens.runs.yamlfile import parse_document
from notelens.tasks import TASKS

ROOT = Path(__file__).parents[1]
MARKS = "NOTELENS_TEST_MARKS"
"""Environment variable with a folder: how a probe in another process knows that it died before."""
REFUSALS = {
    "ungated": GateError("ungated failed its gate at cached decode"),
    "unpacked": MissingPackageError("model 'unpacked' needs a package; install it with: pip install x"),
    "nowhere": InputError("unknown model 'nowhere'; known names: good"),
    "toolarge": RuntimeError("CUDA out of memory.\nTried to allocate 3 TiB"),
}


class CountTask:
    name = "count_task"

    def __init__(self, *, shift: float = 0.0) -> None:
        self.shift = shift

    def instances(self, tokenizer: Any, n: int, seed: int) -> list[Any]:
        return [SimpleNamespace(id=f"i{seed}-{k:03d}", family=f"f{k % 6}", shift=self.shift) for k in range(n)]


class CountProbe(Probe):
    """Numbers drawn from the item's name. ``die`` says after how many items of its first attempts the process is killed."""

    name = "count"
    stages = ("measure",)

    def __init__(self, *, die: Sequence[int] = (), pause_ms: float = 0.0) -> None:
        self.die, self.pause_ms, self.n = tuple(die), pause_ms, 0

    def items(self, instances: Sequence[Any], stage: str, earlier: Sequence[Row]) -> list[Item]:
        return [Item(i.id, stage, i) for i in instances]

    def measure(self, store: Any, item: Item) -> list[Row]:
        time.sleep(self.pause_ms / 1000)
        self._perhaps_die(store.model.facts()["name"])
        self.n += 1
        rng = random.Random(item.id)
        wrong = store.model.facts()["name"] == "fool"
        rows = []
        for direction in ("denoising", "noising"):
            value = item.payload.shift + rng.gauss(0.9, 0.1)
            values = {"recovery": value, "flipped": value > 0.8, "competent": not wrong}
            excluded = "recipient wrong" if wrong else None
            rows.append(Row(item.id, item.stage, item.payload.family, direction, excluded, values, {}))
        return rows

    def _perhaps_die(self, model: str) -> None:
        if not self.die or model != "fragile":
            return
        folder = Path(os.environ[MARKS])
        deaths = len(list(folder.glob("death-*")))
        if deaths < len(self.die) and self.n >= self.die[deaths]:
            with contextlib.suppress(FileExistsError):  # another process dies this death
                (folder / f"death-{deaths}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    def aggregate(self, rows: Sequence[Row], *, seed: int = 0) -> list[Aggregate]:
        lines = mean_lines(self.name, rows, {"recovery": "recovery"}, seed=seed)
        return lines + rate_lines(self.name, rows, {"competent": "competence"}, include_excluded=True)


class CountModel:
    tokenizer = None

    def __init__(self, name: str) -> None:
        self.name = name

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name, "revision": "r1", "weights_hash": f"hash-of-{self.name}", "dtype": "float32", "device": "cpu",
            "attention_kernel": "sdpa", "versions": {}, "gate": {"passed": True, "checks": []}, "ungated": False,
        }  # fmt: skip


LOADED: list[str] = []


def loader(name: str, **_: Any) -> Any:
    LOADED.append(name)
    if name in REFUSALS:
        raise REFUSALS[name]
    return CountModel(name)


def install() -> None:
    """Put the probe, the task and the models where the library looks for them."""
    if "count" not in PROBES:
        PROBES.add("count", "tests.sweep_cases:CountProbe")
        TASKS.add("count_task", "tests.sweep_cases:CountTask")
    runner.default_loader = lambda: loader


TEXT = """\
name: demo
task: {{name: count_task, n: 8}}
sweep:
  models: {models}
  tasks:
    - {{label: low, params: {{shift: 0.0}}}}
    - label: high
      params: {{shift: 0.05}}
  seeds: [0, 1]
probes:
  - name: count
    params: {params}
figures: false
"""


def text(models: str = "[good, better]", params: str = "{}") -> str:
    return TEXT.format(models=models, params=params)


def sweep(models: str = "[good, better]", params: str = "{}") -> Sweep:
    return load_sweep(parse_document(text(models, params), "x.yaml"))
