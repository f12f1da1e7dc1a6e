"""One cell of a sweep, wherever it runs: an ordinary run, or serving benchmark, whose refusals become a sentence."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notelens.errors import (
    CompetenceError,
    FolderInUseError,
    GateError,
    InputError,
    MissingPackageError,
    NotelensError,
    ServingError,
    UnsupportedModelError,
)
from notelens.runs import manifest, runner
from notelens.runs.config import RunConfig
from notelens.runs.progress import Progress
from notelens.runs.sweep_config import SweepKind
from notelens.runs.sweep_folder import Kind, incompetence

if TYPE_CHECKING:
    from notelens.models.base import NoteModel


@dataclass(frozen=True)
class Job:
    """A cell to run.

    Attributes:
        key: of the cell.
        config: its configuration as plain data.
        folder: where it is written.
        dry_run: as for :func:`notelens.runs.runner.execute`.
        versions: library versions of whoever asks; a worker with others refuses.
        kind: what the configuration is one of.
        n_gpus: to keep for it on a Ray cluster.
    """

    key: str
    config: Mapping[str, Any]
    folder: str
    dry_run: bool
    versions: Mapping[str, str]
    kind: SweepKind = "run"
    n_gpus: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        kind: why it is marked, or ``None``.
        reason: one sentence, empty without a mark.
        n_measured, n_read: items measured now, and items that were on record.
    """

    kind: Kind | None = None
    reason: str = ""
    n_measured: int = 0
    n_read: int = 0


class OneModel:
    """A loader that keeps the last model, so that the cells of one model load it once.

    Memory holds one model: the old one is dropped before the next is loaded.
    """

    def __init__(self) -> None:
        self._asked: dict[str, Any] | None = None
        self._model: NoteModel | None = None

    def __call__(self, name: str, **options: Any) -> "NoteModel":
        """The arguments of :func:`notelens.load`."""
        asked = {"name": name, **options}
        if self._model is None or self._asked != asked:
            self._model = self._asked = None
            self._model = runner.default_loader()(name, **options)
            self._asked = asked
        return self._model


def run_cell(job: Job, progress: Progress, loader: runner.Loader) -> Outcome:
    """Run one cell, or continue it.

    Returns:
        What became of it. Everything that the library refuses is an outcome, so that a sweep goes on; so is a lack of memory
        and whatever torch raises.

    Raises:
        OSError and others: faults that no record explains; a worker dies of them.
    """
    mine = manifest.versions()
    other = [f"{p} {job.versions[p]} -> {mine[p]}" for p in manifest.DECIDING if job.versions[p] != mine[p]]
    if other:
        sentence = f"the worker has other versions ({', '.join(other)}), so its numbers would not belong to this sweep"
        return Outcome("worker", sentence)
    try:
        return _serve(job, progress) if job.kind == "serve" else _run(job, progress, loader)
    except NotelensError as e:
        return Outcome(_kind(e, job.kind), refusal(e, job))
    except (RuntimeError, MemoryError) as e:  # torch: out of memory, an operation that a device does not have
        return Outcome("failed", one_line(f"{type(e).__name__}: {e}"))


def _serve(job: Job, progress: Progress) -> Outcome:
    """A serving benchmark; a partial one is marked, what it measured is kept."""
    from notelens.runs.serve import execute_serve
    from notelens.runs.serve_config import ServeConfig

    config = ServeConfig.model_validate_json(json.dumps(job.config))
    done = execute_serve(config, Path(job.folder), progress=progress)
    reason = one_line(f"the benchmark is partial: {'; '.join(done.marks)}") if done.marks else ""
    return Outcome("partial" if done.marks else None, reason, done.n_measured, done.n_read)


def _run(job: Job, progress: Progress, loader: runner.Loader) -> Outcome:
    config = RunConfig.model_validate_json(json.dumps(job.config))
    done = runner.execute(config, Path(job.folder), progress=progress, dry_run=job.dry_run, loader=loader)
    if done.incompetent and not job.dry_run:
        mark = incompetence(Path(job.folder))
        reason = mark.reason if mark is not None else done.incompetent[0]
        return Outcome("incompetent", one_line(reason), done.n_measured, done.n_read)
    return Outcome(None, "", done.n_measured, done.n_read)


def refusal(error: NotelensError, job: Job) -> str:
    """An error's sentence without the place of the cell on this machine."""
    return one_line(str(error).replace(job.folder, job.key))


def one_line(text: str, limit: int = 600) -> str:
    """Text as one printable line of bounded length."""
    flat = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."


def _kind(error: NotelensError, of: SweepKind) -> Kind:
    if isinstance(error, FolderInUseError):
        return "failed"
    if isinstance(error, GateError):
        return "gate"
    if isinstance(error, MissingPackageError):
        return "package"
    if isinstance(error, CompetenceError):
        return "incompetent"
    if of == "serve" and isinstance(error, InputError | ServingError):
        return "engine"
    return "model" if isinstance(error, InputError | UnsupportedModelError) else "failed"
