"""Serving benchmarks of several engines from one file: engines x seeds. Every cell is an ordinary serving benchmark.

The file is that of a serving benchmark whose engines stand in a section ``sweep``; everything else is shared by all cells::

    sweep:
      engines:
        - {label: small, command: [vllm, serve, Qwen/Qwen3-4B, "--port={port}"], gpus: 1}
        - {label: other, url: "http://10.0.0.7:8000"}
      seeds: [0, 1]

A cell's folder is ``cells/LABEL/serve/seed-N``. An engine's ``command`` is started on the node that runs its cell and ended
with it, so programs and folders must be found there; a ``url`` is looked up from there too. Cells of one ``url`` never run at
once. Cells that run beside each other on one machine share its processors and GPUs, which their times show.
"""

import json
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, JsonValue, ValidationError, model_validator

from notelens.errors import ConfigError
from notelens.runs.config import Closed, Name, Seed, sentence
from notelens.runs.serve_config import EngineConfig, Offered, ServeConfig
from notelens.runs.sweep_config import MAX_CELLS, Cell, Sweep, refuse_doubles, refuse_same, shared_part
from notelens.runs.yamlfile import Document

TASK = "serve"
"""Stands where the cells of other sweeps have the label of their task."""


class SweepEngine(EngineConfig):
    """One engine of the grid: the keys of ``engine``, its label, and what a node needs to run it.

    Attributes:
        label: its name in folders and tables.
        gpus: that a Ray cluster keeps for its cell; the engine sees these and no others. Elsewhere an engine sees what the
            machine has. Worker processes set ``OMP_NUM_THREADS`` to their share of the processors, Ray's to 1; an engine that
            computes on processors names another number in ``env``.
    """

    label: Name
    gpus: Annotated[int, Field(ge=0, le=64)] = 0

    @model_validator(mode="after")
    def _here(self) -> "SweepEngine":
        if self.url is not None and self.gpus:
            raise ValueError(f"engine {self.label!r} runs already ('url'), so its cell needs no 'gpus'; remove them")
        return self


class ServeGrid(Closed):
    """The axes. Seeds that are not listed are the one of the rest of the file."""

    engines: Annotated[tuple[SweepEngine, ...], Field(min_length=1)]
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _possible(self) -> "ServeGrid":
        refuse_doubles("engine", [engine.label for engine in self.engines])
        refuse_doubles("seed", self.seeds or ())
        n = len(self.engines) * len(self.seeds or "1")
        if n > MAX_CELLS:
            raise ValueError(f"the grid has {n} cells, above the limit of {MAX_CELLS}; split it and merge the results")
        return self


class ServeSweepConfig(Offered):
    """A sweep's file: that of a serving benchmark, with a grid instead of an engine."""

    sweep: ServeGrid
    engine: JsonValue = None
    seed: Seed | None = None

    @model_validator(mode="after")
    def _once(self) -> "ServeSweepConfig":
        if self.engine is not None:
            raise ValueError("the engine is given twice; write either 'engine' or 'sweep.engines'")
        if self.seed is not None and self.sweep.seeds is not None:
            raise ValueError("the seed is given twice; write either 'seed' or 'sweep.seeds'")
        return self


def load_serve_sweep(document: Document) -> Sweep:
    """Validate a sweep of serving benchmarks down to every cell.

    Raises:
        ConfigError: with file and line, one sentence, and the nearest known name.
    """
    try:
        config = ServeSweepConfig.model_validate_json(json.dumps(document.data))
    except ValidationError as e:
        raise ConfigError(sentence(e, document, ServeSweepConfig)) from None
    cells = tuple(_cells(config, document))
    refuse_same(cells, document)
    return Sweep(config.name, config.description, shared_part(config), cells, "serve")


def _cells(config: ServeSweepConfig, document: Document) -> Iterator[Cell]:
    shared = config.model_dump(mode="json", include=set(Offered.model_fields))
    for engine in config.sweep.engines:
        own = engine.model_dump(mode="json", include=set(EngineConfig.model_fields))
        for seed in config.sweep.seeds or (config.seed or 0,):
            name = f"{config.name}-{engine.label}-seed-{seed}"[:100]
            data = json.dumps({**shared, "name": name, "engine": own, "seed": seed})
            one = ServeConfig.model_validate_json(data)
            alone = (engine.url or "").rstrip("/")
            yield Cell(engine.label, TASK, seed, one, document, engine.gpus, alone)


__all__ = ["ServeSweepConfig", "SweepEngine", "load_serve_sweep"]
