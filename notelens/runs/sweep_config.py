"""A grid of runs from one file: models x tasks x seeds. Every cell is the configuration of an ordinary run.

A sweep is a configuration with a section ``sweep`` beside ``task`` and ``probes``::

    sweep:
      models: [smollm2, {name: Qwen/Qwen3-4B, label: qwen, dtype: bfloat16, device: cuda}]
      tasks: [{label: short, params: {length: 100}}, {label: long, params: {length: 400}}]
      seeds: [0, 1, 2]

What is not listed comes from ``model``, ``task`` and ``seed``, as in a run.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError, model_validator

from notelens.errors import ConfigError
from notelens.runs.config import (
    UNHASHED,
    Closed,
    ModelConfig,
    Name,
    ProbeConfig,
    Seed,
    TaskConfig,
    TaskOverride,
    check_name,
    config_hash,
    sentence,
    validate,
)
from notelens.runs.yamlfile import Document, Keys, Plain

SECTION = "sweep"
MAX_CELLS = 10_000
SweepKind = Literal["run", "serve"]
"""What a cell is: a run, or a serving benchmark (:mod:`notelens.runs.serve_sweep`)."""


class SweepModel(ModelConfig):
    """One model of the grid: the keys of ``model``, and what this model alone needs otherwise.

    Attributes:
        label: its name in folders and tables; made from ``name`` when absent.
        task: changes to the sweep's task for this model (another language, another length).
        probes: instead of the sweep's probes.
    """

    label: Name | None = None
    task: TaskOverride | None = None
    probes: Annotated[tuple[ProbeConfig, ...], Field(min_length=1)] | None = None


class SweepTask(TaskOverride):
    """One task of the grid, as changes to the sweep's task under a short label."""

    label: Name


class Grid(Closed):
    """The axes. An axis that is not listed has the one value that the rest of the file gives."""

    models: Annotated[tuple[SweepModel, ...], Field(min_length=1)] | None = None
    tasks: Annotated[tuple[SweepTask, ...], Field(min_length=1)] | None = None
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _possible(self) -> "Grid":
        if self.models is None and self.tasks is None and self.seeds is None:
            raise ValueError("'sweep' lists nothing to vary; give models, tasks or seeds")
        refuse_doubles("model", [label_of(m) for m in self.models or ()])
        refuse_doubles("task", [t.label for t in self.tasks or ()])
        refuse_doubles("seed", self.seeds or ())
        return self


class SweepConfig(Closed):
    """A sweep's file: that of a run, with a grid."""

    name: Name
    description: str = ""
    sweep: Grid
    model: ModelConfig | None = None
    task: TaskConfig
    probes: Annotated[tuple[ProbeConfig, ...], Field(min_length=1)]
    seed: Seed | None = None
    figures: bool = True

    @model_validator(mode="after")
    def _possible(self) -> "SweepConfig":
        if (self.model is None) == (self.sweep.models is None):
            how = "is given twice" if self.model is not None else "is missing"
            raise ValueError(f"the model {how}; write either 'model' or 'sweep.models'")
        if self.seed is not None and self.sweep.seeds is not None:
            raise ValueError("the seed is given twice; write either 'seed' or 'sweep.seeds'")
        fixed = [self.task.seed, *(m.task.seed for m in self.sweep.models or () if m.task is not None)]
        fixed += [t.seed for t in self.sweep.tasks or ()]
        if len(self.sweep.seeds or ()) > 1 and any(seed is not None for seed in fixed):
            raise ValueError(
                "the task has a seed of its own, so every cell would measure the same instances; remove 'task.seed' or "
                "'sweep.seeds'"
            )
        n = len(self.sweep.models or "1") * len(self.sweep.tasks or "1") * len(self.sweep.seeds or "1")
        if n > MAX_CELLS:
            raise ValueError(f"the grid has {n} cells, above the limit of {MAX_CELLS}; split it and merge the results")
        return self


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        model, task, seed: its place in the grid, by label; the task of a serving benchmark is ``serve``.
        config: of the run, a :class:`~notelens.runs.config.RunConfig`, or of the serving benchmark.
        document: the file as if it had been written for this cell alone; it knows the lines of the sweep's file.
        n_gpus: of a Ray cluster, kept for the cell while it runs.
        alone: what no two cells may use at once, such as an engine's address; empty where there is nothing.
    """

    model: str
    task: str
    seed: int
    config: Closed
    document: Document
    n_gpus: int = 0
    alone: str = ""

    @property
    def key(self) -> str:
        """``model/task/seed-0``; also its folder below :data:`~notelens.runs.sweep_folder.CELLS`."""
        return f"{self.model}/{self.task}/seed-{self.seed}"


@dataclass(frozen=True)
class Sweep:
    """A validated sweep.

    Attributes:
        name: default folder below ``runs/``.
        description: for people.
        shared: what all cells have in common, as plain data: two sweeps belong together when it is equal.
        cells: in the order of the grid: models outermost, so that one loaded model serves its cells.
        kind: what a cell is.
    """

    name: str
    description: str
    shared: Mapping[str, Any]
    cells: tuple[Cell, ...]
    kind: SweepKind = "run"


def is_sweep(document: Document) -> bool:
    """Whether a configuration is one of a sweep."""
    return SECTION in document.data


def label_of(model: ModelConfig) -> str:
    """A model's label, or one made from its name."""
    own = model.label if isinstance(model, SweepModel) else None
    return own or re.sub(r"[^A-Za-z0-9._-]+", "_", model.name).strip("._-")[:100] or "model"


def shared_part(config: Closed) -> dict[str, Any]:
    """What the cells of a sweep's file have in common, as plain data: all but the grid and what it varies."""
    return config.model_dump(mode="json", exclude={*UNHASHED, SECTION, "model", "engine", "seed"})


def refuse_doubles(axis: str, labels: Sequence[object]) -> None:
    """Refuse an axis with two equal labels; case does not make a difference, since folders may not tell it.

    Raises:
        ValueError: with the way out.
    """
    lower = [str(label).lower() for label in labels]
    twice = sorted(str(label) for label in labels if lower.count(str(label).lower()) > 1)
    if twice:
        way_out = "remove one" if axis == "seed" else "give each its own 'label'"
        raise ValueError(f"{axis} {twice[0]!r} is listed twice in 'sweep'; {way_out}")


def refuse_same(cells: Sequence[Cell], document: Document) -> None:
    """Refuse two cells with the same configuration.

    Raises:
        ConfigError: with the line of the grid.
    """
    seen: dict[str, Cell] = {}
    for cell in cells:
        same = seen.setdefault(config_hash(cell.config), cell)
        if same is not cell:
            where = document.place((SECTION,))
            raise ConfigError(f"{where}: {same.key} and {cell.key} are the same configuration; remove one of them")


def load_sweep(document: Document) -> Sweep:
    """Validate a sweep down to every cell.

    Raises:
        ConfigError: with file and line, one sentence, and the nearest known name.
    """
    from notelens.probes import PROBES
    from notelens.tasks import TASKS

    document = _names_as_mappings(document)
    try:
        config = SweepConfig.model_validate_json(json.dumps(document.data))
    except ValidationError as e:
        raise ConfigError(sentence(e, document, SweepConfig)) from None
    for axis in ("models", "tasks"):
        for i, entry in enumerate(cast(Sequence[Any], getattr(config.sweep, axis) or ())):
            override, path = (entry.task, ("task", "name")) if axis == "models" else (entry, ("name",))
            if override is not None and override.name is not None:
                check_name(TASKS, override.name, (SECTION, axis, i, *path), document)
            for k, probe in enumerate((entry.probes or ()) if axis == "models" else ()):
                check_name(PROBES, probe.name, (SECTION, axis, i, "probes", k, "name"), document)
    cells = tuple(_cells(config, document))
    refuse_same(cells, document)
    return Sweep(config.name, config.description, shared_part(config), cells)


def _names_as_mappings(document: Document) -> Document:
    """``models: [smollm2]`` as ``models: [{name: smollm2}]``.

    Raises:
        ConfigError: the grid is one of engines.
    """
    data: dict[str, Any] = json.loads(json.dumps(document.data))
    grid = data.get(SECTION)
    if isinstance(grid, dict) and "engines" in grid:
        where = document.place((SECTION, "engines"))
        raise ConfigError(f"{where}: 'sweep' lists engines to be timed; run this file with notelens serve-bench")
    models = cast(dict[str, Any], grid).get("models") if isinstance(grid, dict) else None
    if isinstance(models, list):
        entries = cast(list[Any], models)
        cast(dict[str, Any], grid)["models"] = [{"name": m} if isinstance(m, str) else m for m in entries]
    return Document(document.source, data, document.places)


def _cells(config: SweepConfig, document: Document) -> Iterator[Cell]:
    grid = config.sweep
    for i, model in enumerate(grid.models or (cast(ModelConfig, config.model),)):
        listed = isinstance(model, SweepModel)
        own = model.task if listed else None
        base = own.of(config.task) if own is not None else config.task
        moved: list[tuple[Keys, Keys]] = [(("model",), (SECTION, "models", i))] if listed else []
        probes = config.probes
        if own is not None:
            moved.append((("task",), (SECTION, "models", i, "task")))
        if isinstance(model, SweepModel) and model.probes is not None:
            probes = model.probes
            moved.append((("probes",), (SECTION, "models", i, "probes")))
        for j, change in enumerate(grid.tasks or (None,)):
            task = change.of(base) if change is not None else base
            where = [*moved, (("task",), (SECTION, "tasks", j))] if change is not None else moved
            for seed in grid.seeds or (config.seed or 0,):
                label = change.label if change is not None else task.name
                key = f"{label_of(model)}-{label}-seed-{seed}"
                data = _data(config, model, task, probes, seed, f"{config.name}-{key}"[:100])
                cell_document = Document(document.source, data, _places(document, where))
                n_gpus = 1 if model.device.startswith("cuda") else 0
                yield Cell(label_of(model), label, seed, validate(cell_document), cell_document, n_gpus)


def _data(
    config: SweepConfig, model: ModelConfig, task: TaskConfig, probes: Sequence[ProbeConfig], seed: int, name: str
) -> dict[str, Plain]:
    fields = set(ModelConfig.model_fields)
    return {
        "name": name,
        "description": config.description,
        "model": model.model_dump(mode="json", include=fields),
        "task": task.model_dump(mode="json"),
        "probes": [p.model_dump(mode="json") for p in probes],
        "seed": seed,
        "figures": config.figures,
    }


def _places(document: Document, moved: Sequence[tuple[Keys, Keys]]) -> Mapping[Keys, str]:
    """Lines of the sweep's file under the paths of the cell; later moves win, so that an override's line is shown."""
    places = dict(document.places)
    for target, source in moved:
        found = {k[len(source) :]: line for k, line in document.places.items() if k[: len(source)] == source}
        if target == ("probes",):
            places = {k: line for k, line in places.items() if k[:1] != target}
        places |= {(*target, *rest): line for rest, line in found.items()}
    return places
