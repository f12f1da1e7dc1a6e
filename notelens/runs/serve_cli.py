"""``notelens serve-bench``: what it does between its arguments and its output."""

from collections.abc import Sequence
from pathlib import Path

from notelens.errors import InputError
from notelens.runs.config import read_config
from notelens.runs.progress import Progress
from notelens.runs.serve import execute_serve
from notelens.runs.serve_config import validate_serve
from notelens.runs.serve_sweep import load_serve_sweep
from notelens.runs.serve_tables import benchmark_rows, merge_results, summary
from notelens.runs.sweep_config import is_sweep
from notelens.runs.yamlfile import Document


def read_benchmark(config: Path, overrides: Sequence[str], results: Path | None) -> Document:
    """Read a configuration file of one engine or of several.

    Raises:
        ConfigError: as :func:`~notelens.runs.config.read_config`.
        InputError: rows of several engines are asked for.
    """
    document = read_config(config, overrides)
    if results is not None and is_sweep(document):
        raise InputError(f"{config}: --results takes the rows of one engine, and this file is a sweep of several")
    return document


def run_benchmark(
    document: Document, out: Path | None, results: Path | None, device: str, progress: Progress
) -> tuple[list[str], Sequence[str]]:
    """Run the configuration of one engine.

    Returns:
        Lines to print, and why the benchmark is partial (empty where it is whole). Rows go into ``results`` only when it is.

    Raises:
        ConfigError, ServingError, RecordError: as :func:`notelens.runs.serve.execute_serve`.
    """
    loaded = validate_serve(document)
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


__all__ = ["load_serve_sweep", "read_benchmark", "run_benchmark"]
