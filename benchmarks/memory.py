"""Peak memory of one method in a process of its own: ``python -m benchmarks.memory METHOD N``; ``--out FILE`` runs them all.

The model is loaded and run once, then the peak is reset; prefilling both prompts and the method itself come after that.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

N = 2048
SITES = {"engine": None, "loop": 2, "native_32": 32, "hook_loop": 1, "attribution": None}
"""Methods measured by ``--out`` and how many sites each runs (all positions where ``None``); more would not add to the peak."""


def current_mib() -> float:
    """Resident memory now."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 2**20


def peak_mib() -> float:
    """Largest resident memory since :func:`reset_peak`."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # ru_maxrss is in KiB on Linux


def reset_peak() -> None:
    """Forget the peak of loading the model (converting weights takes more than running it)."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(model: Any, method: str, n: int) -> dict[str, Any]:
    """Prefill both prompts, run a method, and say what it took at most.

    Args:
        model: loaded, and run at least once so that its weights are resident.
        method: key of :data:`benchmarks.methods.METHODS`.
        n: tokens of the prompt.
    """
    from benchmarks.methods import METHODS, set_up
    from benchmarks.workbench import prepare, text_case
    from notelens.intervene.engine import Site

    reset_peak()
    before = current_mib()
    prepared = prepare(model, text_case(model.tokenizer, n))
    set_up(method, prepared)
    positions = prepared.case.positions
    n_sites = SITES.get(method) or len(positions)
    METHODS[method](prepared, [Site((p,)) for p in positions[:n_sites]])
    weights = sum(p.numel() * p.element_size() for p in model.hf.parameters()) / 2**20
    return {
        "method": method,
        "n": n,
        "sites": n_sites,
        "model_mib": weights,
        "cache_mib": prepared.recipient.nbytes / 2**20,
        "over_model_mib": peak_mib() - before,
    }


def run(method: str, n: int) -> dict[str, Any]:
    """Load the model of the benchmark and measure."""
    import notelens
    from benchmarks.conftest import MODEL

    model = notelens.load(MODEL, competence=False)
    model.prefill([1] * 8)
    return measure(model, method, n)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", nargs="?")
    parser.add_argument("n", nargs="?", type=int, default=N)
    parser.add_argument("--out", type=Path, help="measure every method, one process each, and write JSON lines")
    given = parser.parse_args(arguments)
    if given.out is None:
        if given.method is None:
            parser.error("give a method, or --out FILE for all")
        sys.stdout.write(json.dumps(run(given.method, given.n)) + "\n")
        return
    lines = [
        subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", method, str(given.n)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.splitlines()[-1]
        for method in ([given.method] if given.method else SITES)
    ]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
