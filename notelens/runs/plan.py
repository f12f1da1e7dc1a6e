"""From a configuration to constructed tasks and probes; what cannot be constructed is a configuration error."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from notelens.errors import ConfigError
from notelens.probes import PROBES
from notelens.probes.base import Probe
from notelens.registry import nearest
from notelens.runs.config import RunConfig, TaskConfig, dotted
from notelens.runs.yamlfile import Document, kind
from notelens.tasks import TASKS, Task

Place = Callable[[Sequence[str | int]], str]


@dataclass(frozen=True)
class Planned:
    """One probe, ready to measure.

    Attributes:
        probe: constructed with its parameters.
        task: constructed with its parameters.
        n, seed: of the instances.
    """

    probe: Probe
    task: Task
    n: int
    seed: int


def plan(config: RunConfig, document: Document | None = None) -> tuple[Planned, ...]:
    """Construct every task and probe of a configuration, in its order.

    Args:
        config: validated.
        document: where it came from, for the lines in messages.

    Raises:
        ConfigError: a class does not take a parameter, or refuses its value.
        MissingPackageError: a class needs a package that is not installed.
    """
    place: Place = document.place if document is not None else dotted
    tasks: dict[str, Task] = {}
    out: list[Planned] = []
    for i, entry in enumerate(config.probes):
        own = entry.task is not None and (entry.task.params or entry.task.name)
        path: tuple[str | int, ...] = ("probes", i, "task", "params") if own else ("task", "params")
        task = config.task_for(entry)
        key = json.dumps([task.name, task.params], sort_keys=True)
        if (
            key not in tasks
        ):  # probes on the same task share one: tasks are values, and reading their data takes a moment
            tasks[key] = cast(Task, construct(TASKS.get(task.name), f"task {task.name!r}", task.params, path, place))
        what = f"probe {entry.name!r}"
        probe = cast(Probe, construct(PROBES.get(entry.name), what, entry.params, ("probes", i, "params"), place))
        out.append(Planned(probe, tasks[key], task.n, _seed(task)))
    return tuple(out)


def construct(cls: type, what: str, params: Mapping[str, Any], path: Sequence[str | int], place: Place) -> object:
    """``cls(**params)``, checked against its signature and annotations first.

    Raises:
        ConfigError: an unknown or missing parameter, a value of another type, or one that the class refuses.
    """
    signature = inspect.signature(cls)
    known = {n: p for n, p in signature.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    open_ended = len(known) < len(signature.parameters)
    for name in params:
        if name not in known and not open_ended:
            where = place((*path, name))
            raise ConfigError(f"{where}: {what} has no parameter {name!r}; {nearest(name, sorted(known))}")
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in params:
            raise ConfigError(f"{place(path)}: {what} needs the parameter {name!r}")
    hints = get_type_hints(cls.__init__)
    values = {
        name: _typed(value, hints[name], f"{place((*path, name))}: parameter {name!r} of {what}")
        if name in hints
        else value
        for name, value in params.items()
    }
    try:
        return cls(**values)
    except (TypeError, ValueError) as e:  # every InputError is a ValueError
        named = [n for n in params if n in str(e)]
        raise ConfigError(f"{place((*path, *named[:1]))}: {what}: {e}") from e


def _typed(value: Any, hint: Any, what: str) -> Any:
    """``value`` as the annotation asks for it: a list becomes a tuple where one is expected, text never a number."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(strict=True))
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value  # a type that JSON does not know; the class checks it
    try:
        return adapter.validate_json(json.dumps(value))
    except ValidationError as e:
        reason = e.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
        raise ConfigError(f"{what} is {kind(value)}, but should be {reason}") from None


def _seed(task: TaskConfig) -> int:
    if task.seed is None:
        raise ConfigError("a task without a seed reached the plan; use RunConfig.task_for")
    return task.seed
