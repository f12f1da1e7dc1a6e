"""Starts a Ray cluster of three nodes on this machine and runs sweeps on it; prints what happened as JSON.

Run as ``python -m tests.sweep_ray_program FOLDER``. Workers find the fakes through ``tests.sweep_worker``.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from notelens.runs.launcher import Event
from notelens.runs.ray_launcher import RayWorkers
from notelens.runs.sweep import Unwatched, run_sweep
from tests import sweep_cases as cases

WORKER = ("tests.sweep_worker",)


class Watcher(Unwatched):
    """Counts; removes a node when asked to."""

    def __init__(self, remove: Any = None, at: int = 0) -> None:
        self.n_items = 0
        self.again_: list[str] = []
        self.remove, self.at = remove, at

    def event(self, event: Event) -> None:
        self.n_items += event.kind == "item"
        if self.remove is not None and self.n_items >= self.at:
            remove, self.remove = self.remove, None
            remove()

    def again(self, key: str, sentence: str) -> None:
        self.again_.append(sentence)


def sweep_on(
    address: str, out: Path, watcher: Watcher, models: str, params: str = "{}", **options: Any
) -> dict[str, Any]:
    start = time.monotonic()
    launcher = RayWorkers(address, imports=WORKER, **options)
    result = run_sweep(cases.sweep(models, params), out, launcher=launcher, watcher=watcher)
    return {
        "n_cells": result.n_cells,
        "n_measured": result.n_measured,
        "marks": {key: [mark.kind, mark.reason] for key, mark in result.marks.items()},
        "again": watcher.again_,
        "n_items": watcher.n_items,
        "slots": launcher.slots,
        "seconds": time.monotonic() - start,
    }


def start_cluster() -> tuple[Any, Any]:
    """Three nodes, and the second of them. Ray gives a node 30 s to start, which a busy machine may not manage at once."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20}
    for attempt in range(3):
        cluster = Cluster()
        try:
            cluster.add_node(**node, include_dashboard=False)
            second = cluster.add_node(**node)
            cluster.add_node(**node)
            cluster.wait_for_nodes(timeout=60)
        except Exception:  # whatever Ray raises here
            cluster.shutdown()
            if attempt == 2:
                raise
        else:
            return cluster, second
    raise AssertionError("unreachable")


def main(folder: Path) -> dict[str, Any]:
    cases.install()
    (folder / "marks").mkdir()
    os.environ[cases.MARKS] = str(folder / "marks")
    cluster, second = start_cluster()
    out: dict[str, Any] = {"address": cluster.address}
    try:
        models = "[good, ungated, nowhere, better]"
        out["plain"] = sweep_on(cluster.address, folder / "plain", Watcher(), models)
        out["killed"] = sweep_on(
            cluster.address, folder / "killed", Watcher(), "[good, fragile]", "{die: [3, 2], pause_ms: 80}"
        )
        gone = Watcher(lambda: cluster.remove_node(second, allow_graceful=False), at=6)
        out["node"] = sweep_on(cluster.address, folder / "node", gone, "[good, better]", "{pause_ms: 150}")
        text = "[{name: good, device: cuda}]"
        out["gpu"] = sweep_on(cluster.address, folder / "gpu", Watcher(), text)
    finally:
        cluster.shutdown()
    return out


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    Path(sys.argv[1], "found.json").write_text(json.dumps(found))
