"""Timed steps: position maps at four prompt lengths, and the layer x position map.

Sample sizes are chosen so that one run takes about ten minutes on two cores. A method that is sampled is scaled by its time
per patch. The full forwards of ``hook_loop`` and ``nnsight_loop`` are left out at 8,192 tokens (a minute and several GB each).
"""

from typing import Any

import pytest

from benchmarks.conftest import Workbench
from benchmarks.methods import ISOLATED, METHODS, available, set_up
from benchmarks.workbench import BATCHES, COPY_LIMIT_BYTES, Step, steps

TOLERANCE = 1e-4
NATIVE: dict[str, int | None] = {f"native_{b}": b for b in BATCHES}
"""One batch of each size per round."""
FULL: dict[str, int | None] = {"engine": None, "attribution": None}
STEPS = [
    *steps("position_map", 128, 5, FULL | NATIVE | {"loop": 16, "hook_loop": 3, "nnsight_loop": 2}),
    *steps("position_map", 512, 5, FULL | NATIVE | {"loop": 12, "hook_loop": 2, "nnsight_loop": 1}),
    *steps("layer_position_map", 512, 3, {"engine": None, "loop": 16, "native_32": 32, "native_64": 64}),
    *steps("position_map", 2048, 3, FULL | NATIVE | {"loop": 12, "hook_loop": 1}),
    *steps("position_map", 8192, 3, FULL | NATIVE | {"engine": 512, "loop": 4}, prefills=2, spread=("engine",)),
]


def _fits(step: Step, workbench: Workbench) -> bool:
    if not step.method.startswith("native"):
        return available(step.method)
    layers = workbench.model.geometry.layers
    row_bytes = 4 * sum(layer.n_kv_heads * (layer.d_key + layer.d_value) for layer in layers)
    return int(step.method.removeprefix("native_")) * step.n * row_bytes <= COPY_LIMIT_BYTES


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_step(step: Step, workbench: Workbench, benchmark: Any) -> None:
    """Time one method once; copied caches must give the engine's margins."""
    if not _fits(step, workbench):
        pytest.skip("not installed, or its copied caches exceed the limit of the benchmark")
    if step.method == "prefill":
        benchmark.pedantic(workbench.timed_prefill, args=(step,), rounds=1, iterations=1)
        benchmark.extra_info.update(workbench.facts(step, n_patches=step.n))
        return
    prepared = workbench.prepared(step.n)
    sites = step.choose(prepared.case, workbench.model.geometry.n_layers)
    set_up(step.method, prepared)
    margins = benchmark.pedantic(METHODS[step.method], args=(prepared, sites), rounds=1, iterations=1)
    benchmark.extra_info.update(workbench.facts(step, n_patches=len(sites)))
    if step.method == "engine":
        workbench.remember(step, sites, margins)
    elif step.method == "attribution":
        benchmark.extra_info.update(workbench.rank_correlation(step, sites, margins))
    elif step.method in ISOLATED:
        errors = workbench.differences(step, prepared, sites, margins)
        benchmark.extra_info.update(errors=errors)
        assert max(errors) <= TOLERANCE
