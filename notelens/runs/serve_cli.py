"""``notelens serve-bench``: what it does between its arguments and its output."""

from collections.abc import Sequence
from pathlib import Path

from notelens.runs.progress import Progress
from notelens.runs.serve import execute_serve
from notelens.runs.serve_config import load_serve_config
from notelens.runs.serve_tables import benchmark_rows, merge_results, summary


def run_benchmark(
    config: Path, overrides: tuple[str, ...], out: Path | None, results: Path | None, device: str, progress: Progress
) -> tuple[list[str], Sequence[str]]:
    """Run a configuration file.

    Returns:
        Lines to print, and why the benchmark is partial (empty where it is whole). Rows go into ``results`` only when it is.

    Raises:
        ConfigError, ServingError, RecordError: as :func:`notelens.runs.serve.execute_serve`.
    """
    loaded = load_serve_config(config, overrides)
    folder = out if out is not None else Path("runs") / loaded.name
    done = execute_serve(loaded, folder, progress=progress)
    lines = [
        summary(done.table),
        f"{done.n_measured} cells measured, {done.n_read} on record; records, tables, figure: {folder}",
    ]
    if results is not None and not done.marks:
        rows = benchmark_rows(folder, device)
        merge_results(results, rows)
        lines.append(f"{len(rows)} rows put into {results}")
    return lines, done.marks
