"""From a configuration to records, tables and figures: resumable after any death, with the same result."""

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from notelens.errors import InputError, TaskError
from notelens.runs import manifest as m
from notelens.runs.config import RunConfig, config_hash
from notelens.runs.files import LOCK, held, reason
from notelens.runs.progress import Progress, Silent
from notelens.runs.records import FILE, RecordWriter, plain, read_records
from notelens.runs.tables import Table, gate_word, load_table, write_tables
from notelens.runs.yamlfile import Document

if TYPE_CHECKING:
    from notelens.models.base import NoteModel
    from notelens.runs.measure import Measured
    from notelens.runs.plan import Planned

DRY_INSTANCES = 2


class Loader(Protocol):
    """What :func:`notelens.load` is to the runner."""

    def __call__(
        self, name: str, *, revision: str | None, dtype: str, device: str, attention: str | None, competence: bool,
        allow_ungated: bool, dry_run: bool,
    ) -> "NoteModel":  # fmt: skip
        """Load and admit a model."""
        ...


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        folder: where it is; ``None`` for a dry run, whose folder is gone.
        table: aggregates with their header.
        n_measured: items measured by this call; 0 where the run was finished before.
        n_read: items read from the records.
        incompetent: why probes could not measure; not empty means exit code 3.
        gate: ``passed`` or ``ungated``.
    """

    folder: Path | None
    table: Table
    n_measured: int
    n_read: int
    incompetent: tuple[str, ...]
    gate: str


def execute(
    config: RunConfig,
    out_dir: str | Path,
    *,
    progress: Progress | None = None,
    dry_run: bool = False,
    loader: Loader | None = None,
    document: Document | None = None,
) -> RunResult:
    """Run a configuration, or continue it where its folder holds the beginning of it.

    Args:
        config: what to measure.
        out_dir: folder of the run; created, and held while this runs.
        progress: who is told about it.
        dry_run: measure on a small random model of the same architecture, in a temporary folder, with as few instances
            as each probe accepts, :data:`DRY_INSTANCES` or more.
        loader: instead of :func:`notelens.load`.
        document: where the configuration came from, for lines in messages.

    Raises:
        ConfigError: parameters that the classes refuse; a folder begun with another configuration, model or version.
        InputError: the folder is in use or holds something else; no such model.
        GateError: the model failed its gate.
        RecordError: a file could not be written; what was written before is intact.
    """
    shown: Progress = progress if progress is not None else Silent()
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="notelens-dry-") as folder:
            return replace(_run(config, Path(folder), shown, loader, document, dry_run=True), folder=None)
    return _run(config, Path(out_dir), shown, loader, document, dry_run=False)


def _run(
    config: RunConfig, out: Path, progress: Progress, loader: Loader | None, document: Document | None, *, dry_run: bool
) -> RunResult:
    before = _begun(config, out)
    names = [p.name for p in config.probes]
    if before is not None and all(name in read_records(out).probes for name in names):
        with held(out):
            return _report(config, out, before, progress, n_measured=0)
    from notelens.runs.plan import plan

    planned = plan(config, document)
    with held(out):
        before = _begun(config, out)  # another run may have finished while this one waited for its imports
        if before is not None:
            m.check_same_software(out, before)
        model = _load(config, loader, dry_run)
        manifest = _begin(config, out, before, model)
        n_measured = _measure_all(config, out, planned, model, manifest, progress, dry_run)
        return _report(config, out, manifest, progress, n_measured=n_measured)


def _begun(config: RunConfig, out: Path) -> m.Manifest | None:
    """The manifest of the run that ``out`` holds.

    Raises:
        InputError: ``out`` holds something else.
        ConfigError: it was begun with another configuration.
    """
    try:
        found = sorted(p.name for p in out.iterdir()) if out.is_dir() else []
    except OSError as e:
        raise InputError(f"{out}: cannot be read ({reason(e)}); choose another folder with --out") from e
    manifest = m.read_manifest(out) if m.FILE in found else None
    if manifest is not None:
        m.check_same_config(out, manifest, config)
        return manifest
    strange = [name for name in found if name != LOCK and not name.endswith(".part")]
    if strange:
        raise InputError(f"{out}: is not empty and holds no run ({strange[0]!r}); choose another folder with --out")
    return None


def default_loader() -> Loader:
    """:func:`notelens.load`, imported on use."""
    from notelens.models.load import load

    return load


def _load(config: RunConfig, loader: Loader | None, dry_run: bool) -> "NoteModel":
    c = config.model
    return (loader or default_loader())(
        c.name, revision=c.revision, dtype=c.dtype, device=c.device, attention=c.attention, competence=c.competence,
        allow_ungated=c.allow_ungated, dry_run=dry_run, **({"quant": c.quant} if c.quant is not None else {}),
    )  # fmt: skip


def _begin(config: RunConfig, out: Path, before: m.Manifest | None, model: "NoteModel") -> m.Manifest:
    """Write the manifest of a new run, or note in the old one that it is continued."""
    facts: Mapping[str, Any] = plain(model.facts())[0]
    if before is None:
        manifest = m.new_manifest(config, facts)
    else:
        m.check_same_model(out, before, facts)
        manifest = {**before, "sessions": [*before["sessions"], m.session()]}
    m.write_manifest(out, manifest)
    return manifest


def _measure_all(
    config: RunConfig, out: Path, planned: Sequence["Planned"], model: "NoteModel", manifest: m.Manifest,
    progress: Progress, dry_run: bool,
) -> int:  # fmt: skip
    from notelens.context import ContextStore
    from notelens.runs.measure import Stamp, measure

    facts = manifest["model"]
    stamp = Stamp(config_hash(config), config.seed, gate_word(facts), facts)
    store = ContextStore(model)
    with RecordWriter(out / FILE) as writer:
        session, n_before = manifest["sessions"][-1], len(writer.records.items)
        writer.write([{"kind": "run", **session, "config": stamp.config, "seed": config.seed, "facts": facts}])
        for entry in planned:
            if entry.probe.name in writer.records.probes:
                progress.note(f"{entry.probe.name}: on record")
                continue
            n = min(entry.n, DRY_INSTANCES) if dry_run else entry.n
            while True:
                instances = entry.task.instances(model.tokenizer, n, entry.seed)
                if len(instances) < n:
                    raise TaskError(f"task {entry.task.name!r} gave {len(instances)} of {n} instances; ask for fewer")
                try:
                    done = measure(entry, instances, store, writer, stamp, progress)
                    break
                except InputError:  # a dry run began with too few for this probe; in a run, n is what was asked for
                    if n == entry.n:
                        raise
                    n = min(entry.n, 2 * n)
            progress.note(_line(entry.probe.name, n, done))
        return len(writer.records.items) - n_before


def _line(name: str, n_instances: int, done: "Measured") -> str:
    read = f", {done.n_read} of them on record" if done.n_read else ""
    return (
        f"{name}: {n_instances} instances, {done.n_measured + done.n_read} items{read}, {done.n_rows} rows "
        f"({done.n_excluded} excluded), {done.n_aggregates} aggregates"
    )


def _report(config: RunConfig, out: Path, manifest: m.Manifest, progress: Progress, *, n_measured: int) -> RunResult:
    """Tables and figures from the records; a finished run is left as it is."""
    records = read_records(out)
    incompetent = tuple(str(e["incompetent"]) for e in records.probes.values() if e.get("incompetent"))
    if manifest["state"] == "finished":
        table = load_table(out)
    else:
        table = write_tables(out)
        if config.figures:
            from notelens.report.figures import write_figures

            for path in write_figures(out):
                progress.note(f"figure: {path.name}")
        m.write_manifest(out, {**manifest, "state": "finished"})
        with contextlib.suppress(OSError):
            for left in out.glob(".*.part"):
                left.unlink()
    return RunResult(out, table, n_measured, len(records.items) - n_measured, incompetent, gate_word(manifest["model"]))
