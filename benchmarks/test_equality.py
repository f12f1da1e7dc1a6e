"""The engine against the one-token loop at every position of twenty prompts."""

from typing import Any

import torch

from benchmarks.conftest import Workbench
from benchmarks.methods import METHODS, set_up
from benchmarks.workbench import prepare, text_case
from notelens.intervene.engine import Site

N_PROMPTS, LENGTHS = 20, range(120, 137)
TOLERANCE = 1e-4


def test_equality_with_the_loop(workbench: Workbench, benchmark: Any) -> None:
    """Margins differ by no more than the tolerance, and by how much is reported."""
    largest: list[float] = []
    spans: list[float] = []
    n_sites = 0

    def compare() -> None:
        nonlocal n_sites
        for seed in range(N_PROMPTS):
            case = text_case(workbench.model.tokenizer, LENGTHS[seed % len(LENGTHS)], seed=1000 + seed)
            prepared = prepare(workbench.model, case)
            set_up("loop", prepared)
            sites = [Site((p,)) for p in case.positions]
            found, expected = METHODS["engine"](prepared, sites), METHODS["loop"](prepared, sites)
            largest.append(float((found - expected).abs().max()))
            spans.append(float(expected.max() - expected.min()))
            n_sites += len(sites)

    with torch.no_grad():
        benchmark.pedantic(compare, rounds=1, iterations=1)
    benchmark.extra_info.update(
        benchmark="equality", n=128, prompts=N_PROMPTS, sites=n_sites, errors=largest, margin_spans=spans
    )
    assert max(largest) <= TOLERANCE
