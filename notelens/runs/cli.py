"""The command line: ``notelens run``, ``map``, ``list``, ``gate``, ``table``, ``merge``, ``skill``, ``serve-bench``; no torch.

Exit codes: 0 done, 1 something failed on the way (a full disk, non-finite logits), 2 bad input, 3 the model failed its
gate or is not competent (of a sweep: a cell is marked), 4 a benchmark is partial (of a sweep: its only marks), 130 stopped by
Ctrl-C. Errors are one line on stderr that begins with ``error:``.
"""

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

import notelens
from notelens.errors import (
    CompetenceError,
    GateError,
    InputError,
    MissingPackageError,
    NotelensError,
    PartialRunError,
    UnsupportedModelError,
)
from notelens.registry import nearest
from notelens.runs import skills
from notelens.runs.manifest import is_serve_folder
from notelens.runs.progress import Bars, Progress, Silent
from notelens.runs.sweep_config import Sweep, load_sweep
from notelens.runs.sweep_folder import is_sweep_folder
from notelens.runs.tables import FORMATS, render
from notelens.runs.yamlfile import Document

OK, FAILED, BAD_INPUT, NOT_ADMITTED, PARTIAL, STOPPED = 0, 1, 2, 3, 4, 130
Jobs = Annotated[int | None, typer.Option(help="Of a sweep: so many worker processes.")]
Launcher = Annotated[str, typer.Option(help="Of a sweep: local or ray.")]
Address = Annotated[str | None, typer.Option(help="Of a Ray cluster: auto or HOST:PORT.")]
Limit = Annotated[float | None, typer.Option(help="Of a sweep: minutes after which a cell is stopped.")]

app = typer.Typer(
    name="notelens",
    help="Does a language model take notes at prefill? Causal probes on key-value caches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(skills.app, name="skill")


class Kind(StrEnum):
    """What can be listed."""

    probes = "probes"
    models = "models"
    tasks = "tasks"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"notelens {notelens.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Does a language model take notes at prefill? Causal probes on key-value caches."""


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file, for instance configs/quickstart.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/<name> when not given.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value: task.n=12. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="A few instances per probe on a small random model; nothing is kept.")
    ] = False,
    jobs: Jobs = None,
    launcher: Launcher = "local",
    address: Address = None,
    limit: Limit = None,
) -> None:
    """Measure a configuration or a sweep, or continue it: finished items are never measured twice."""
    from notelens.runs.config import read_config, validate
    from notelens.runs.runner import execute

    document = read_config(config, set_ or ())
    if _ran_as_sweep(document, load_sweep, out, (launcher, jobs, address, limit), dry_run):
        return
    loaded = validate(document)
    folder = out if out is not None else Path("runs") / loaded.name
    try:
        with _progress() as progress:
            result = execute(loaded, folder, progress=progress, dry_run=dry_run, document=document)
    except KeyboardInterrupt:
        kept = (
            "nothing was kept" if dry_run else f"what is measured is kept in {folder}; run the same command to continue"
        )
        _say(f"stopped: {kept}")
        raise typer.Exit(STOPPED) from None
    if dry_run:
        typer.echo(
            f"dry run of {loaded.name}: {len(loaded.probes)} probes on a small random {loaded.model.name}, gate "
            f"{result.gate}, {result.n_measured} items, {len(result.table.rows)} aggregates; nothing was kept"
        )
        return
    typer.echo(render(result.table, "md", summary=True))
    typer.echo(f"records, tables and figures: {folder}")
    for sentence in result.incompetent[1:]:
        _say(sentence)
    for sentence in result.incompetent[:1]:
        raise CompetenceError(sentence)


def _ran_as_sweep(
    document: Document, load: Callable[[Document], Sweep], out: Path | None, options: tuple[Any, ...], dry_run: bool
) -> bool:
    """Run a file with a section ``sweep``; false, and nothing is done, where it has none."""
    from notelens.runs.sweep_cli import run_document

    try:
        marks = run_document(document, load, out, options, dry_run=dry_run, say=_say)
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None
    if marks:
        raise typer.Exit(PARTIAL if {mark.kind for mark in marks} == {"partial"} else NOT_ADMITTED)
    return marks is not None


@app.command("map")
def map_(
    model: Annotated[str, typer.Argument(help="Embedded model, Hugging Face id or local folder.")],
    prompt: Annotated[Path, typer.Option(help="Text file with one marked field, for instance {{status}}.")],
    field: Annotated[str, typer.Option(help="Name of the field.")],
    old: Annotated[str, typer.Option(help="Its old value.")],
    new: Annotated[str, typer.Option(help="Its new value, of the same token length.")],
    answers: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="OLD NEW", help="Right answers for both values; the model's own when not given."),
    ] = None,
    rendering: Annotated[str, typer.Option(help="chat, plain or raw.")] = "chat",
    out: Annotated[Path | None, typer.Option(help="Folder; maps/<field>-<old>-<new> when not given.")] = None,
    layers: Annotated[bool, typer.Option("--layers/--no-layers", help="Also every row in every layer.")] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    attention: Annotated[str | None, typer.Option(help="sdpa or eager; what the family allows when not given.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit of a hub model.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="On a small random model; nothing is kept unless --out is given.")
    ] = False,
) -> None:
    """Map which cached rows carry a decision, for any prompt with a marked field."""
    from notelens.runs.maps import check_folder, default_folder, make_map, summary, write_map

    folder = out if out is not None else default_folder(field, old, new)
    check_folder(folder)
    options = {"dtype": dtype, "device": device, "attention": attention, "revision": revision, "dry_run": dry_run}
    with _steps() as on_step:
        found = make_map(
            model,
            prompt,
            field,
            old,
            new,
            answers=answers,
            rendering=rendering,
            layers=layers,
            on_step=on_step,
            **options,
        )
        written = write_map(found, folder) if out is not None or not dry_run else []
    for line in summary(found):
        typer.echo("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line))
    typer.echo(f"written: {', '.join(map(str, written))}" if written else "dry run: nothing was kept")
    if found.excluded and not dry_run:
        why = "; ".join(f"{direction}: {reason}" for direction, reason in found.excluded.items())
        raise CompetenceError(f"{model} does not decide this prompt well enough for recoveries ({why})")


@app.command("list")
def list_(what: Annotated[Kind, typer.Argument(help="probes, models or tasks.")]) -> None:
    """Say what there is."""
    if what is Kind.models:
        from notelens.models import FAMILIES
        from notelens.zoo.embedded import EMBEDDED
        from notelens.zoo.organisms import organism_specs

        lines = [(name, spec.source) for name, spec in sorted(EMBEDDED.items())]
        lines += [(name, f"trained from scratch; {spec.card['why']}") for name, spec in organism_specs().items()]
        others = f"any Hugging Face id or local folder of type {', '.join(FAMILIES.names())}"
        lines.append(("<hub id or folder>", others))
    else:
        from notelens.probes import PROBES
        from notelens.tasks import TASKS

        package, registry = ("notelens.probes", PROBES) if what is Kind.probes else ("notelens.tasks", TASKS)
        lines = [(name, _first_line(f"{package}.{name}")) for name in registry]
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        typer.echo(f"{name.ljust(width)}  {text}")


@app.command()
def gate(
    model: Annotated[str, typer.Argument(help="Embedded model, Hugging Face id or local folder.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    attention: Annotated[str | None, typer.Option(help="sdpa or eager; what the family allows when not given.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit of a hub model.")] = None,
    quant: Annotated[str | None, typer.Option(help="int8, int4 or fp8 weights (extra quant).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="On a small random model of the architecture.")] = False,
) -> None:
    """Run the admission gate, show every check, and say what is supported for the model and why not."""
    from notelens.models.load import load
    from notelens.models.support import support_lines

    options = {"dtype": dtype, "device": device, "attention": attention, "revision": revision, "dry_run": dry_run}
    loaded = load(model, quant=quant, allow_ungated=True, **options)
    if loaded.gate is None:
        raise GateError(f"{model}: the gate was not run")
    for line in loaded.gate.lines():
        typer.echo(line)
    for note in loaded.gate.notes:
        typer.echo(f"note {note}")
    for line in support_lines(loaded):
        typer.echo(line)
    if not loaded.gate.passed:
        raise GateError(f"{model} failed its gate")
    typer.echo(f"{model} passed its gate")


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, for instance runs/quickstart.")],
    format: Annotated[str, typer.Option(help="md, csv, tex or json.")] = "md",
    layout: Annotated[str, typer.Option(help="Of a sweep: long, or wide (one row per model).")] = "long",
) -> None:
    """Print the aggregates of a run, of a sweep or of a serving benchmark."""
    if is_sweep_folder(folder):
        from notelens.runs.sweep_tables import render_sweep

        typer.echo(render_sweep(folder, format, layout), nl=False)
        return
    if layout != "long":
        raise InputError(f"{folder}: --layout {layout} is for the folder of a sweep, and this holds none")
    if format not in FORMATS:
        raise InputError(f"unknown format {format!r}; {nearest(format, list(FORMATS))}")
    if is_serve_folder(folder):
        from notelens.runs.serve_tables import serve_table as read
    else:
        from notelens.runs.tables import load_table as read
    typer.echo(render(read(folder), format), nl=False)


@app.command("serve-bench")
def serve_bench(
    config: Annotated[Path, typer.Argument(help="YAML file, for instance configs/bench/serve_smollm2.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/<name> when not given.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one value: engine.port=8000. Repeatable."),
    ] = None,
    results: Annotated[Path | None, typer.Option(help="Also put rows into this file of benchmark results.")] = None,
    device: Annotated[str, typer.Option(help="What the engine runs on, for those rows.")] = "unknown",
    jobs: Jobs = None,
    launcher: Launcher = "local",
    address: Address = None,
    limit: Limit = None,
) -> None:
    """Time engines with a field in the prefix, hoisted, or corrected behind it, below and above their capacity."""
    from notelens.runs.serve_cli import load_serve_sweep, read_benchmark, run_benchmark

    document = read_benchmark(config, set_ or (), results)
    if _ran_as_sweep(document, load_serve_sweep, out, (launcher, jobs, address, limit), False):
        return
    try:
        with _progress() as progress:
            lines, marks = run_benchmark(document, out, results, device, progress)
    except KeyboardInterrupt:
        _say("stopped: whole cells are kept; run the same command to continue")
        raise typer.Exit(STOPPED) from None
    for line in lines:
        typer.echo(line)
    if marks:
        raise PartialRunError(f"the benchmark is partial: {'; '.join(marks)}")


@app.command()
def merge(
    out: Annotated[Path, typer.Argument(help="New folder, or that of a sweep to add to.")],
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of sweeps.")],
) -> None:
    """Join sweeps made in parts, for instance on several machines; the parts are not changed."""
    from notelens.runs.sweep_cli import merge_folders

    typer.echo(merge_folders(out, folders))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: instead of those of the process.

    Returns:
        The exit code.
    """
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except NotelensError as e:
        _say(f"error: {e}")
        return _code(e)
    except TyperException as e:
        _say(f"error: {e.format_message()} (see notelens --help)")
        return e.exit_code
    except (Abort, KeyboardInterrupt):
        _say("stopped")
        return STOPPED
    except BrokenPipeError:  # the reader of our output went away, which is its right
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return OK
    return code if isinstance(code, int) else OK


def _code(error: NotelensError) -> int:
    if isinstance(error, GateError | CompetenceError):
        return NOT_ADMITTED
    if isinstance(error, PartialRunError):
        return PARTIAL
    if isinstance(error, InputError | UnsupportedModelError | MissingPackageError):
        return BAD_INPUT
    return FAILED


def _say(text: str) -> None:
    """One line on stderr, whatever the text holds."""
    line = " ".join(text.split())
    typer.echo("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line), err=True)


def _first_line(module: str) -> str:
    """First line of a module's docstring, read without importing it; empty where there is no such module."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return ""
    text = ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8")))
    return text.splitlines()[0] if text else ""


class _Lines(Silent):
    """One line per finished probe, for logs."""

    def note(self, text: str) -> None:
        _say(text)


@contextlib.contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """Say what is being computed, on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda step: status.update(step)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Bars where stderr is a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Display

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Display(*columns, console=Console(stderr=True), transient=True) as bars:
        yield Bars(bars)


if __name__ == "__main__":
    sys.exit(main())
