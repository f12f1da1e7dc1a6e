"""The model under measurement, its prompts, and the facts of the machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

import notelens
from benchmarks.methods import METHODS, available, engine, set_up
from benchmarks.workbench import Prepared, Step, prepare, text_case
from notelens.cache.kv import KVCache
from notelens.intervene.engine import Site
from notelens.models.model import library_versions

MODEL = "smollm2"
WARM_UP_TOKENS = 64


class Workbench:
    """Holds one prompt length at a time, so that memory does not depend on the order of the plan."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._prefilled: dict[int, list[KVCache]] = {}
        self._current: Prepared | None = None
        self._known: dict[tuple[str, Site], float] = {}

    def timed_prefill(self, step: Step) -> Tensor:
        """An ordinary prefill, head on the last row: of the recipient in even rounds, of the donor in odd ones."""
        case = text_case(self.model.tokenizer, step.n)
        found = self.model.prefill(case.donor_ids if step.round % 2 else case.recipient_ids)
        if step.n not in self._prefilled:
            self._current, self._prefilled = None, {step.n: []}
            self._known.clear()
        if len(self._prefilled[step.n]) < 2:
            self._prefilled[step.n].append(found.cache)
        return self.model.answer_logits(found.hidden, case.answer_ids)

    def prepared(self, n: int) -> Prepared:
        """Case and caches of a prompt length; the caches are those of the timed prefills where there are two."""
        if self._current is None or self._current.case.n != n:
            case, caches = text_case(self.model.tokenizer, n), self._prefilled.get(n, [])
            if len(caches) == 2:
                self._current = Prepared(self.model, case, caches[0], caches[1])
            else:
                self._current = prepare(self.model, case)
        return self._current

    def facts(self, step: Step, n_patches: int) -> dict[str, Any]:
        """What the report needs to know about a step."""
        return {
            "benchmark": step.benchmark,
            "n": step.n,
            "round": step.round,
            "method": step.method,
            "patches": n_patches,
            "load": os.getloadavg()[0],
        }

    def remember(self, step: Step, sites: list[Site], margins: Tensor) -> None:
        """Keep the engine's margins; later steps are compared with them."""
        self._known |= {(step.benchmark, s): m for s, m in zip(sites, margins.tolist(), strict=True)}

    def differences(self, step: Step, prepared: Prepared, sites: list[Site], margins: Tensor) -> list[float]:
        """Absolute differences to the engine at the same sites; sites that the engine has not seen are run now."""
        new = [s for s in sites if (step.benchmark, s) not in self._known]
        if new:
            self.remember(step, new, engine(prepared, new))
        found = zip(sites, margins.tolist(), strict=True)
        return [abs(m - self._known[step.benchmark, s]) for s, m in found]

    def rank_correlation(self, step: Step, sites: list[Site], estimates: Tensor) -> dict[str, Any]:
        """Spearman correlation of estimated changes with the engine's margins, over the sites that both have."""
        known = [self._known.get((step.benchmark, s)) for s in sites]
        pairs = [(e, m) for e, m in zip(estimates.tolist(), known, strict=True) if m is not None]
        return {"rank_correlation": float(spearmanr(*zip(*pairs, strict=True)).statistic), "compared": len(pairs)}


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--dry-run``: a small random model of the same architecture; right code paths, meaningless numbers."""
    parser.addoption("--dry-run", action="store_true", help="measure a small random model")


@pytest.fixture(scope="session")
def workbench(request: pytest.FixtureRequest) -> Iterator[Workbench]:
    """The model, with every method run once on a short prompt so that no step pays for a first call."""
    bench = Workbench(notelens.load(MODEL, competence=False, dry_run=bool(request.config.getoption("--dry-run"))))
    warm = bench.prepared(WARM_UP_TOKENS)
    for name in filter(available, METHODS):
        set_up(name, warm)
        METHODS[name](warm, [Site((p,)) for p in warm.case.positions[:2]])
    yield bench


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Replace what pytest-benchmark found by what the report prints; no host name, no path."""
    brand = machine_info.get("cpu", {}).get("brand_raw", "unknown")
    machine_info.clear()
    machine_info.update(
        cpu=f"{brand}{_model_numbers()}",
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
        model=f"{MODEL} (small, random)" if config.getoption("--dry-run") else f"{MODEL} without adapter",
        dtype="float32",
        versions=library_versions(),
    )


def _model_numbers() -> str:
    """Family and model of an x86 CPU, for brands that say too little (virtual machines)."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return ""
    fields = dict(line.split(":", 1) for line in path.read_text().split("\n\n")[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    return f" (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else ""
