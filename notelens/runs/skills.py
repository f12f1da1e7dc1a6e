"""``notelens skill``: compile texts into a library of skill files, list, verify and remove them."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from notelens.errors import InputError, RecordError

if TYPE_CHECKING:
    from notelens.cache.library import SkillLibrary

app = typer.Typer(help="Skills: texts prefilled once, kept as checked files, spliced anywhere.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option("--library", help="Folder of the library.")]
DEFAULT = Path("skills")


class Condition(StrEnum):
    """What a skill attends to while it is compiled."""

    isolated = "isolated"
    neutral = "neutral"
    prefix = "prefix"


class Scheme(StrEnum):
    """How keys are stored."""

    rotated = "rotated"
    unrotated = "unrotated"


@app.command("compile")
def compile_(
    model: Annotated[str, typer.Argument(help="Embedded model, Hugging Face id or local folder.")],
    text: Annotated[Path, typer.Argument(help="Text file with a policy, a tool specification or a document.")],
    name: Annotated[str | None, typer.Option(help="Name of the skill; that of the file when not given.")] = None,
    library: Folder = DEFAULT,
    condition: Annotated[Condition, typer.Option(help="What it attends to.")] = Condition.isolated,
    prefix: Annotated[Path | None, typer.Option(help="Text file of the prefix, for 'prefix' (or 'neutral').")] = None,
    scheme: Annotated[Scheme, typer.Option(help="How keys are stored.")] = Scheme.rotated,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite another skill of that name.")] = False,
    budget_bytes: Annotated[int | None, typer.Option(help="Remove the least recently used files beyond this.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    attention: Annotated[str | None, typer.Option(help="sdpa or eager; what the family allows when not given.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit of a hub model.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="On a small random model of the architecture; nothing is kept.")
    ] = False,
) -> None:
    """Prefill a text once and keep its rows."""
    content = _read(text)
    before = _read(prefix) if prefix is not None else None
    from notelens.cache.artefact import check_name
    from notelens.cache.library import SkillLibrary
    from notelens.runs.maps import check_folder

    label = check_name(name if name is not None else text.stem)
    if not dry_run:
        check_folder(library)
    from notelens.compose import compile_skill
    from notelens.models.load import load

    loaded = load(model, dtype=dtype, device=device, attention=attention, revision=revision, dry_run=dry_run)
    skill = compile_skill(loaded, content, name=label, condition=condition.value, prefix=before, scheme=scheme.value)
    if dry_run:
        typer.echo(f"dry run: {skill!r}; nothing was kept")
        return
    kept = SkillLibrary(library, budget_bytes)
    entry = kept.put(skill.to_file(), replace=replace)
    typer.echo(f"{entry.name}: {entry.n_tokens} tokens, {entry.n_bytes / 2**20:.1f} MiB, in {kept.path(entry.name)}")


@app.command("list")
def list_(library: Folder = DEFAULT) -> None:
    """Show all skills of a library."""
    entries = _open(library).entries()
    width = max((len(e.name) for e in entries), default=0)
    for e in entries:
        mark = "exact" if e.exact else "approximate"
        typer.echo(
            f"{e.name.ljust(width)}  {e.n_tokens} tokens  {e.n_bytes / 2**20:.1f} MiB  {e.model} "
            f"({e.weights_sha256[:12]})  {e.dtype}  {e.condition}, {e.scheme}, {mark}"
        )
    if not entries:
        typer.echo(f"no skills in {library}")


@app.command()
def verify(
    library: Folder = DEFAULT,
    model: Annotated[str | None, typer.Option(help="Also check that this model may use them.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Read every file and check every byte; fails when one is damaged, or not for the model."""
    kept = _open(library)
    found = kept.verify()
    if model is not None:
        from notelens.compose.tag import model_tag
        from notelens.errors import ArtefactError
        from notelens.models.load import load

        tag = model_tag(load(model, dtype=dtype))
        for name in [n for n, wrong in found.items() if wrong is None]:
            try:
                kept.get(name, tag)
            except ArtefactError as e:
                found[name] = str(e)
    for name, wrong in found.items():
        typer.echo(f"ok    {name}" if wrong is None else f"FAIL  {name}: {wrong}")
    damaged = [name for name, wrong in found.items() if wrong is not None]
    if damaged:
        raise RecordError(f"{len(damaged)} of {len(found)} skills cannot be used: {', '.join(damaged[:5])}")
    typer.echo(f"{len(found)} skills, all whole")


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(help="Names of skills.")],
    library: Folder = DEFAULT,
) -> None:
    """Remove skills."""
    kept = _open(library)
    for name in names:
        kept.remove(name)
        typer.echo(f"removed {name}")


def _open(folder: Path) -> "SkillLibrary":
    """A library that exists.

    Raises:
        InputError: it does not.
    """
    from notelens.cache.library import SkillLibrary

    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such library; 'notelens skill compile' makes one")
    return SkillLibrary(folder)


def _read(path: Path) -> str:
    from notelens.runs.maps import read_prompt

    return read_prompt(path)
