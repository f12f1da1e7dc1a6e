"""A serving benchmark from configuration to records, table and figure: resumable, bounded in time, marked where partial."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from notelens.errors import ConfigError, InputError, RequestTimeoutError, ServingError
from notelens.runs import manifest as m
from notelens.runs.config import config_hash
from notelens.runs.files import LOCK, held, reason
from notelens.runs.progress import Progress, Silent
from notelens.runs.records import FILE, RecordWriter, read_records
from notelens.runs.serve_config import LoadConfig, ServeConfig
from notelens.runs.serve_record import (
    CAPACITY,
    ENGINE_LOG,
    capacity_of,
    fixed_facts,
    group,
    item_of,
    mark_of,
    on_record,
)
from notelens.runs.serve_tables import aggregates, serve_table, write_serve_tables
from notelens.runs.tables import Table
from notelens.serving.bench import Bench, Cell, Facts, Options
from notelens.serving.client import EngineClient
from notelens.serving.engine import Engine, EngineCommand, running
from notelens.serving.workload import BASELINE, Workload

KIND = "serve"


@dataclass(frozen=True)
class ServeResult:
    """What a benchmark came to.

    Attributes:
        folder: where it is.
        table: aggregates with their header.
        n_measured, n_read: cells measured by this call, and cells that were on record.
        marks: why it is partial; empty where it is whole.
    """

    folder: Path
    table: Table
    n_measured: int
    n_read: int
    marks: tuple[str, ...]


@dataclass
class _Run:
    """What one call works with."""

    config: ServeConfig
    out: Path
    writer: RecordWriter
    progress: Progress
    manifest: m.Manifest
    marks: list[str]
    n_measured: int = 0
    n_read: int = 0


def execute_serve(config: ServeConfig, out_dir: str | Path, *, progress: Progress | None = None) -> ServeResult:
    """Run a serving benchmark, or continue it: cells on record are not measured again, marked ones are.

    Args:
        config: what to measure, and on which engine.
        out_dir: folder of the run; created, and held while this runs. ``engine.log`` in it is what a started engine wrote.
        progress: who is told about it.

    Raises:
        ConfigError: the folder was begun with another configuration or engine.
        InputError: the folder is in use or holds something else; wrong address, model or port; prefix caching is off.
        ServingError: the engine does not start, or fails before anything is timed.
        RecordError: a file could not be written; what was written before is intact.
    """
    out = Path(out_dir)
    shown = progress if progress is not None else Silent()
    with held(out):
        before = _begun(config, out)
        if before is not None and before["state"] == "finished":
            return ServeResult(out, serve_table(out), 0, len(read_records(out).items), ())
        with running(_engine(config), out / ENGINE_LOG) as engine:
            run = asyncio.run(_session(config, out, shown, before, engine))
        return _report(run)


def _engine(config: ServeConfig) -> EngineCommand | str:
    e = config.engine
    if e.url is not None:
        return e.url
    return EngineCommand(tuple(e.command or ()), e.host, e.port, e.env, e.ready_s, e.stop_s)


def _begun(config: ServeConfig, out: Path) -> m.Manifest | None:
    """The manifest of the benchmark that ``out`` holds.

    Raises:
        InputError: ``out`` holds something else.
        ConfigError: it was begun with another configuration.
    """
    try:
        found = sorted(p.name for p in out.iterdir())
    except OSError as e:
        raise InputError(f"{out}: cannot be read ({reason(e)}); choose another folder with --out") from e
    manifest = m.read_manifest(out) if m.FILE in found else None
    if manifest is None:
        strange = [n for n in found if n not in (LOCK, ENGINE_LOG) and not n.endswith(".part")]
        if strange:
            raise InputError(f"{out}: is not empty and holds no run ({strange[0]!r}); choose another folder with --out")
        return None
    if manifest.get("kind") != KIND:
        raise InputError(f"{out}: holds a run that is no serving benchmark; choose another folder with --out")
    m.check_same_config(out, manifest, config)
    return manifest


async def _session(
    config: ServeConfig, out: Path, progress: Progress, before: m.Manifest | None, engine: Engine
) -> _Run:
    """Check the engine, then measure what is not on record; nothing is written before the engine is found fit."""
    p = config.prompt
    async with EngineClient(engine.url, config.engine.model, timeout_s=config.timeout_s) as client:
        await client.check()
        workload = Workload(
            policies=p.policies, seed=config.seed, split=p.split, form=p.form, conversation=p.conversation,
            prompt_salt=p.salt == "prompt",
        )  # fmt: skip
        options = Options(p.max_tokens, config.timeout_s, p.extra, config.warm_up, config.seed)
        bench = Bench(client, workload, options, engine.alive)
        if before is None:
            progress.note("measuring the length of a policy")
            await bench.calibrate(p.policy_tokens)
        else:
            bench.workload = replace(workload, n_lines=int(before["n_lines"]))
        facts = await bench.facts()
        manifest = _begin(config, out, before, facts, bench.workload)
        with RecordWriter(out / FILE) as writer:
            session, stamp = manifest["sessions"][-1], config_hash(config)
            writer.write([{"kind": "run", **session, "config": stamp, "engine": manifest["engine"]}])
            run = _Run(config, out, writer, progress, manifest, [])
            if not facts.has_metrics:
                run.marks.append("the engine's metrics have no prefix cache counters, so hit rates are unavailable")
            await _measure(run, bench)
        return run


def _begin(config: ServeConfig, out: Path, before: m.Manifest | None, facts: Facts, workload: Workload) -> m.Manifest:
    """Write the manifest of a new benchmark, or note in the old one that it is continued.

    Raises:
        ConfigError: it was begun on another engine.
    """
    known: dict[str, Any] = {**asdict(facts), "notes": list(facts.notes)}
    if before is None:
        manifest: m.Manifest = {
            "manifest_version": m.MANIFEST_VERSION, "kind": KIND, "name": config.name,
            "config": config.model_dump(mode="json"), "config_hash": config_hash(config), "seed": config.seed,
            "engine": known, "n_lines": workload.n_lines, "sessions": [m.session()], "state": "running", "marks": [],
        }  # fmt: skip
    else:
        began, now = fixed_facts(before["engine"]), fixed_facts(known)
        changed = [f"{k} {began[k]} -> {now[k]}" for k in now if began[k] != now[k]]
        if changed:
            raise ConfigError(
                f"{out}: was begun on another engine ({', '.join(changed)}); choose another folder with --out"
            )
        manifest = {**before, "sessions": [*before["sessions"], m.session()], "state": "running"}
    m.write_manifest(out, manifest)
    return manifest


async def _measure(run: _Run, bench: Bench) -> None:
    """All cells that are not on record; stops where the engine has stopped answering."""
    config = run.config
    probe = Cell(BASELINE, CAPACITY, config.capacity.n, None)
    if not await _one(run, bench, probe):
        return
    lines = on_record(run.writer.records, probe)
    if lines is None:
        run.marks.append("the baseline's capacity could not be measured, so no load was offered")
        return
    rate = capacity_of(lines)
    run.progress.note(f"capacity of the baseline: {rate:.3g} requests a second")
    for load in config.loads:
        for arm in config.arms:
            if not await _one(run, bench, Cell(arm, load.name, load.n or config.n, _rate(load, rate))):
                return


def _rate(load: LoadConfig, capacity: float) -> float | None:
    return load.rate if load.multiple is None else load.multiple * capacity


async def _one(run: _Run, bench: Bench, cell: Cell) -> bool:
    """Measure a cell unless it is on record; whether to go on."""
    if on_record(run.writer.records, cell) is not None:
        run.n_read += 1
        return True
    run.progress.stage(cell.load, cell.arm, cell.n, 0)
    try:
        if cell.load == CAPACITY:
            measured = await bench.capacity(cell.n, run.config.capacity.in_flight, run.progress.item)
        else:
            measured = await bench.cell(cell, run.progress.item)
    except ServingError as e:
        what = "its warm-up was not answered in time" if isinstance(e, RequestTimeoutError) else str(e)
        return _stop(run, bench, f"{item_of(cell)}: nothing was timed: {what}")
    stamp: Mapping[str, Any] = {
        "seed": run.config.seed, "config": run.manifest["config_hash"], "model": run.manifest["engine"]["model"],
        "block_size": run.manifest["engine"]["settings"]["block_size"],
    }  # fmt: skip
    run.writer.write(group(run.writer.records, cell, measured, stamp))
    run.n_measured += 1
    mark = mark_of(measured)
    if mark:
        run.marks.append(f"{item_of(cell)}: {mark}")
    if measured.offered.ended or not bench.alive():
        return _stop(run, bench, "")
    if not measured.offered.answered:
        return _stop(run, bench, f"{item_of(cell)}: no request was answered")
    answered = len(measured.offered.answered)
    run.progress.note(f"{item_of(cell)}: {answered} of {cell.n} answered in {measured.offered.elapsed_s:.3g} s, "
                      f"hit rate {measured.window}")  # fmt: skip
    return True


def _stop(run: _Run, bench: Bench, why: str) -> bool:
    """Note why the benchmark ends here."""
    if why:
        run.marks.append(why)
    if not bench.alive():
        run.marks.append(f"the engine ended during the benchmark; what it wrote is in {ENGINE_LOG}")
    return False


def _report(run: _Run) -> ServeResult:
    """Table, figure and state from the records."""
    run.manifest = {**run.manifest, "marks": run.marks}
    m.write_manifest(run.out, {**run.manifest, "state": "partial"})
    if not run.marks and "serve" not in run.writer.records.probes:
        with RecordWriter(run.out / FILE) as writer:
            found = aggregates(writer.records, run.manifest)
            end = {"kind": "probe", "experiment": "serve", "n_lines": len(found)}
            writer.write([*({"kind": "aggregate", **line} for line in found), end])
    table = write_serve_tables(run.out)
    if run.config.figures:
        from notelens.report.figures import FOLDER
        from notelens.report.serving import draw_serving
        from notelens.report.style import save

        for path in save(draw_serving(table.rows, run.config.name), run.out / FOLDER, "ttft"):
            run.progress.note(f"figure: {path.name}")
    if not run.marks:
        m.write_manifest(run.out, {**run.manifest, "state": "finished"})
    with contextlib.suppress(OSError):
        for left in run.out.glob(".*.part"):
            left.unlink()
    return ServeResult(run.out, table, run.n_measured, run.n_read, tuple(run.marks))


__all__ = ["ENGINE_LOG", "KIND", "ServeResult", "execute_serve"]
