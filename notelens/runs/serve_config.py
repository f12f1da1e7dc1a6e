"""Configuration of a serving benchmark: which engine, which requests, which loads. Closed to unknown keys."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from notelens.errors import ConfigError
from notelens.runs.config import Closed, Name, Seed, read_config, sentence
from notelens.runs.yamlfile import Document
from notelens.serving.client import SLOWING
from notelens.serving.workload import ARMS, BASELINE, Arm

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Text = Annotated[str, Field(min_length=1, max_length=2000)]
RATIO_LOADS = ("below", "at", "above", "saturation")


class EngineConfig(Closed):
    """The engine: how to start it (``command``), or where one runs (``url``).

    Attributes:
        command: program and arguments, with ``{port}`` (and ``{host}``) where it is to listen.
        url: of a running engine, ``http://host:port``.
        model: as the engine calls it; the only one that it serves when absent.
        host, port: to listen on; a free port when 0.
        env: variables added to its environment; ``PYTHONHASHSEED`` is always set.
        ready_s, stop_s: seconds it may take to answer first, and to end when asked.
    """

    command: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    url: Text | None = None
    model: Text | None = None
    host: Text = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    env: dict[str, str] = Field(default_factory=dict[str, str])
    ready_s: Seconds = 600.0
    stop_s: Seconds = 15.0

    @model_validator(mode="after")
    def _possible(self) -> "EngineConfig":
        if (self.command is None) == (self.url is None):
            raise ValueError("an engine needs either 'command' (it is started) or 'url' (it runs already)")
        if self.command is not None and not any("{port}" in part for part in self.command):
            raise ValueError("the engine's 'command' must say {port}, so that it listens where it is looked for")
        return self


class PromptConfig(Closed):
    """The requests.

    Attributes:
        policy_tokens: length of a prompt of the baseline, as the engine counts tokens; reached within a few per cent.
        policies: scenario families with one policy each.
        split, form: families to draw from, and the form of their rules.
        conversation: the field of ``erratum_mid`` stands in a turn of its own.
        max_tokens: of an answer.
        extra: further keys of every request's body, such as ``ignore_eos``.
        salt: how arms are kept apart: by the request's cache salt, or by text at the beginning of the prompt.
    """

    policy_tokens: Annotated[int, Field(ge=100, le=1_000_000)] = 2300
    policies: Annotated[int, Field(ge=1, le=100)] = 2
    split: Literal["train", "eval", "all"] = "eval"
    form: Literal["two_clause", "polarity", "swapped", "negated"] = "two_clause"
    conversation: bool = False
    max_tokens: Annotated[int, Field(ge=1, le=100_000)] = 4
    extra: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    salt: Literal["request", "prompt"] = "request"

    @model_validator(mode="after")
    def _possible(self) -> "PromptConfig":
        if slow := sorted(set(self.extra) & set(SLOWING)):
            raise ValueError(
                f"'extra' asks for {slow[0]!r}, which changes how the engine works; timed requests must not"
            )
        return self


class LoadConfig(Closed):
    """One offered load.

    Attributes:
        name: of the load; ``below``, ``at``, ``above`` and ``saturation`` are those of the ratios.
        multiple: of the baseline's measured capacity, or
        rate: requests a second; with neither, all requests are offered at once.
        n: requests; the benchmark's when absent.
    """

    name: Name
    multiple: Annotated[float, Field(gt=0, le=1000)] | None = None
    rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    n: Annotated[int, Field(ge=1, le=100_000)] | None = None

    @model_validator(mode="after")
    def _possible(self) -> "LoadConfig":
        if self.multiple is not None and self.rate is not None:
            raise ValueError(f"load {self.name!r} has both 'multiple' and 'rate'; give one, or neither for all at once")
        return self


class CapacityConfig(Closed):
    """The closed-loop probe of the baseline that comes first.

    Attributes:
        n: requests.
        in_flight: how many the engine always has.
    """

    n: Annotated[int, Field(ge=1, le=100_000)] = 8
    in_flight: Annotated[int, Field(ge=1, le=10_000)] = 2


class Offered(Closed):
    """What is asked of an engine, whichever it is.

    Attributes:
        name: default folder below ``runs/``.
        description: for people; not part of the hash.
        prompt, capacity: see their classes.
        arms: where the field is; the baseline must be among them.
        loads: offered loads, in this order.
        n: timed requests of a cell.
        warm_up: untimed requests per policy at the beginning of a cell.
        timeout_s: after which a request is given up and its cell is marked.
        ttft_objective_ms: requests whose first token came within it count for goodput.
        figures: draw the figure at the end; not part of the hash.
    """

    name: Name
    description: str = ""
    prompt: PromptConfig = PromptConfig()
    capacity: CapacityConfig = CapacityConfig()
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)] = ARMS
    loads: Annotated[tuple[LoadConfig, ...], Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=100_000)] = 16
    warm_up: Annotated[int, Field(ge=0, le=100)] = 1
    timeout_s: Seconds = 60.0
    ttft_objective_ms: Annotated[float, Field(gt=0)]
    figures: bool = True

    @model_validator(mode="after")
    def _possible(self) -> "Offered":
        arms, loads = [str(arm) for arm in self.arms], [load.name for load in self.loads]
        for what, found in (("arm", arms), ("load", loads)):
            twice = sorted({x for x in found if found.count(x) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is listed twice")
        if BASELINE not in self.arms:
            raise ValueError(f"the baseline {BASELINE!r} is not among the arms, so there would be no ratios")
        return self


class ServeConfig(Offered):
    """Everything that decides what a serving benchmark measures.

    Attributes:
        engine: see its class.
        seed: of prompts, arrivals and the bootstrap.
    """

    engine: EngineConfig
    seed: Seed = 0


def validate_serve(document: Document) -> ServeConfig:
    """The configuration in a document.

    Raises:
        ConfigError: with file and line, one sentence.
    """
    try:
        return ServeConfig.model_validate_json(json.dumps(document.data))
    except ValidationError as e:
        raise ConfigError(sentence(e, document, ServeConfig)) from None


def load_serve_config(path: str | Path, overrides: Sequence[str] = ()) -> ServeConfig:
    """Read and validate the file of a serving benchmark; arguments and errors as :func:`notelens.runs.config.load_config`."""
    return validate_serve(read_config(path, overrides))


__all__ = ["RATIO_LOADS", "EngineConfig", "LoadConfig", "Offered", "ServeConfig", "load_serve_config", "validate_serve"]
