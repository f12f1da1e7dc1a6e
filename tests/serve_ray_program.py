"""Runs sweeps of serving benchmarks over fake engines on a Ray cluster of three nodes; writes what happened as JSON.

Run as ``python -m tests.serve_ray_program FOLDER``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from notelens.runs import sweep as runs
from notelens.runs.launcher import Event
from notelens.runs.ray_launcher import RayWorkers
from notelens.runs.serve_sweep import load_serve_sweep
from notelens.runs.yamlfile import parse_document
from tests import serve_cases as cases
from tests.sweep_ray_program import start_cluster

ENGINES = [cases.entry("one"), cases.entry("two", options={"model": "other", "block": 32})]
SLOW = {"loads": [{"name": "slow", "rate": 0.05}]}


class Stop(runs.Unwatched):
    """Presses Ctrl-C when a load begins."""

    def event(self, event: Event) -> None:
        if event.kind == "stage" and event.text.startswith("slow"):
            raise KeyboardInterrupt


def sweep_on(address: str, out: Path, data: dict[str, Any], watcher: Any = None, **options: Any) -> dict[str, Any]:
    sweep = load_serve_sweep(parse_document(json.dumps(data), "x.yaml"))
    try:
        result = runs.run_sweep(sweep, out, launcher=RayWorkers(address, **options), watcher=watcher)
    except KeyboardInterrupt:
        marks = "stopped"
    else:
        marks = {key: [mark.kind, mark.reason] for key, mark in result.marks.items()}
    children = [pid for log in out.rglob("engine.log") for pid in cases.children_of(log)]
    return {"marks": marks, "n_children": len(children), "gone": cases.gone(children, 20.0)}


def main(folder: Path) -> dict[str, Any]:
    runs.ATTEMPTS = 1
    cluster, _ = start_cluster()
    held = cases.entry("held", options={"child": 1})
    out: dict[str, Any] = {}
    try:
        more = [cases.entry("ends", options={"exit": 1}), {**cases.entry("big", options={"model": "big"}), "gpus": 1}]
        out["plain"] = sweep_on(cluster.address, folder / "plain", cases.sweep([*ENGINES, *more]))
        out["limit"] = sweep_on(cluster.address, folder / "limit", cases.sweep([held], **SLOW), limit_minutes=0.2)
        out["stop"] = sweep_on(cluster.address, folder / "stop", cases.sweep([held], **SLOW), Stop())
    finally:
        cluster.shutdown()
    return out


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    Path(sys.argv[1], "found.json").write_text(json.dumps(found))
