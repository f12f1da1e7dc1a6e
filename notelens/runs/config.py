"""What a run is: frozen, closed, hashed.

A configuration is data. Parameters of tasks and probes are open here and checked against the classes that take them
(:mod:`notelens.runs.plan`), so no list of all options exists.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from notelens.errors import ConfigError
from notelens.registry import Registry, nearest
from notelens.runs.yamlfile import Document, Keys, Plain, kind, parse_value, read_document

Params = dict[str, JsonValue]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Count = Annotated[int, Field(ge=1, le=100_000)]
NAME, MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", r"^[^\s\x00-\x1f][^\x00-\x1f]{0,499}$"
DEVICE = r"^(cpu|cuda(:[0-9]{1,2})?)$"
Name = Annotated[str, Field(pattern=NAME)]
ModelName = Annotated[str, Field(pattern=MODEL_NAME)]

UNHASHED = frozenset({"name", "description", "figures"})
"""Top-level keys that do not change any measured number."""


class Closed(BaseModel):
    """Frozen, strict, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(Closed):
    """Which model, and how it is run; the arguments of :func:`notelens.load`.

    Attributes:
        name: an embedded model (``smollm2``), a Hugging Face id, or a local folder.
        revision: commit of a hub model; its newest one when absent.
        dtype: parameter type.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        attention: kernel of the plain model; what the family allows when absent.
        quant: quantise the weights of linear layers (extra ``quant``); as they are when absent.
        competence: merge the shipped competence adapter into an embedded model.
        allow_ungated: measure a model that fails its gate; every record then says so.
    """

    name: ModelName
    revision: Name | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Annotated[str, Field(pattern=DEVICE)] = "cpu"
    attention: Literal["sdpa", "eager"] | None = None
    quant: Literal["int8", "int4", "fp8"] | None = None
    competence: bool = True
    allow_ungated: bool = False

    @model_validator(mode="after")
    def _possible(self) -> "ModelConfig":
        from notelens.zoo.embedded import EMBEDDED
        from notelens.zoo.organisms import organism_specs

        if (self.name in EMBEDDED or self.name in organism_specs()) and self.revision is not None:
            raise ValueError(f"model {self.name!r} comes with its package and has one revision only; remove 'revision'")
        if self.dtype == "float16" and self.device == "cpu":
            raise ValueError("dtype float16 overflows and is slow on a CPU; use float32 or bfloat16, or device 'cuda'")
        return self


class TaskConfig(Closed):
    """Where instances come from.

    Attributes:
        name: of the task.
        n: instances.
        seed: of the instances; the run's seed when absent.
        params: arguments of the task's class.
    """

    name: Name
    n: Count
    seed: Seed | None = None
    params: Params = Field(default_factory=dict[str, JsonValue])


class TaskOverride(Closed):
    """What one probe changes in the run's task; absent keys are taken from it, ``params`` key by key.

    With another ``name`` the run's ``params`` do not apply.
    """

    name: Name | None = None
    n: Count | None = None
    seed: Seed | None = None
    params: Params = Field(default_factory=dict[str, JsonValue])

    def of(self, task: TaskConfig) -> TaskConfig:
        """The run's task with these changes."""
        same = self.name in (None, task.name)
        return TaskConfig(
            name=self.name or task.name,
            n=self.n if self.n is not None else task.n,
            seed=self.seed if self.seed is not None else task.seed,
            params={**task.params, **self.params} if same else self.params,
        )


class ProbeConfig(Closed):
    """One probe of a run.

    Attributes:
        name: of the probe, which is also the experiment of its records.
        params: arguments of the probe's class.
        task: changes to the run's task for this probe.
    """

    name: Name
    params: Params = Field(default_factory=dict[str, JsonValue])
    task: TaskOverride | None = None


class RunConfig(Closed):
    """Everything that decides what a run measures.

    Attributes:
        name: default folder below ``runs/``.
        description: for people; not part of the hash.
        model, task, probes: what is measured, on which instances, by which probes in this order.
        seed: of the bootstrap and, unless the task has its own, of the instances.
        figures: draw figures at the end; not part of the hash.
    """

    name: Name
    description: str = ""
    model: ModelConfig
    task: TaskConfig
    probes: Annotated[tuple[ProbeConfig, ...], Field(min_length=1)]
    seed: Seed = 0
    figures: bool = True

    @model_validator(mode="after")
    def _possible(self) -> "RunConfig":
        names = [p.name for p in self.probes]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(
                f"probe {twice[0]!r} is listed twice; records are kept by probe, so write a second configuration for it"
            )
        return self

    def task_for(self, probe: ProbeConfig) -> TaskConfig:
        """The task that ``probe`` measures on, its seed filled in."""
        task = probe.task.of(self.task) if probe.task is not None else self.task
        return task if task.seed is not None else task.model_copy(update={"seed": self.seed})


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Document]:
    """Read and validate the configuration file of one run.

    Args:
        path: YAML file.
        overrides: ``a.b=value`` texts; ``probes.0.params.k=[1, 2]`` reaches into a list.

    Returns:
        The configuration, and the document it came from, which knows the line of every value.

    Raises:
        ConfigError: with file and line (or the override), one sentence, and the nearest known name.
    """
    document = read_config(path, overrides)
    return validate(document), document


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Read a configuration file with overrides, without validating it; of one run or of a sweep.

    Raises:
        ConfigError: it is no YAML mapping, or an override leads nowhere.
    """
    document = read_document(path)
    for text in overrides:
        document = override(document, text)
    return document


def validate(document: Document) -> RunConfig:
    """The configuration in a document; names of tasks and probes must be known.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    from notelens.probes import PROBES
    from notelens.tasks import TASKS

    try:
        config = RunConfig.model_validate_json(json.dumps(document.data))
    except ValidationError as e:
        raise ConfigError(sentence(e, document, RunConfig)) from None
    check_name(TASKS, config.task.name, ("task", "name"), document)
    for i, probe in enumerate(config.probes):
        check_name(PROBES, probe.name, ("probes", i, "name"), document)
        if probe.task is not None and probe.task.name is not None:
            check_name(TASKS, probe.task.name, ("probes", i, "task", "name"), document)
    return config


def override(document: Document, text: str) -> Document:
    """The document with one value replaced or added.

    Raises:
        ConfigError: ``text`` is not ``key=value``, or leads through something that has no such part.
    """
    name, equals, value = text.partition("=")
    source = f"--set {text}"
    parts = [part.strip() for part in name.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"{source}: write it as --set key=value, with dots between keys, for instance task.n=12")
    data: dict[str, Any] = json.loads(json.dumps(document.data))
    at = cast(Any, data)
    path: Keys = ()
    for part in parts[:-1]:
        key = _key(at, part, path, source)
        if isinstance(key, str) and at.get(key) is None:
            at[key] = {}
        at = at[key]
        path = (*path, key)
    key = _key(at, parts[-1], path, source)
    at[key] = parse_value(value, source)
    path = (*path, key)
    places = {k: v for k, v in document.places.items() if k[: len(path)] != path}
    return Document(document.source, data, {**places, path: source})


def _key(at: Any, part: str, path: Keys, source: str) -> str | int:
    here = f"'{dotted(path)}'" if path else "the configuration"
    if isinstance(at, dict):
        return part
    if not isinstance(at, list):
        raise ConfigError(f"{source}: {here} is {kind(at)} and has no part {part!r}")
    length = len(cast(list[Any], at))
    if not (part.isascii() and part.isdigit() and len(part) < 7 and int(part) < length):
        raise ConfigError(f"{source}: {here} is a list of {length}; {part!r} is not a number from 0 to {length - 1}")
    return int(part)


def config_hash(config: Closed) -> str:
    """sha256 of everything that affects results, independent of key order, spelling of defaults and process."""
    return hashlib.sha256(json.dumps(hashed(config), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hashed(config: Closed) -> dict[str, Any]:
    """The part of a configuration that :func:`config_hash` covers, as plain data."""
    return config.model_dump(mode="json", exclude=set(UNHASHED))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``"task.n: 24 -> 48"`` for every value that differs between two plain configurations."""
    a, b = _leaves(old, ()), _leaves(new, ())
    parents = {path[:i] for path in (*a, *b) for i in range(len(path))}  # {} on one side, keys on the other
    shown = {p: (_shown(a, p), _shown(b, p)) for p in sorted({*a, *b} - parents, key=lambda p: [str(k) for k in p])}
    return [f"{dotted(path)}: {before} -> {after}" for path, (before, after) in shown.items() if before != after]


def dotted(path: Sequence[str | int]) -> str:
    """``probes.0.params`` for a path of keys."""
    return ".".join(str(k) for k in path)


def _shown(leaves: Mapping[Keys, Plain], path: Keys) -> str:
    return json.dumps(leaves[path]) if path in leaves else "(absent)"


def _leaves(value: Any, path: Keys) -> dict[Keys, Plain]:
    children: list[tuple[str | int, Any]] = []
    if isinstance(value, Mapping):
        children = list(cast(Mapping[str, Any], value).items())
    elif isinstance(value, list):
        children = list(enumerate(cast(list[Any], value)))
    if not children:
        return {path: cast(Plain, value)}
    return {p: leaf for key, child in children for p, leaf in _leaves(child, (*path, key)).items()}


def check_name(registry: Registry[type], name: str, path: Keys, document: Document) -> None:
    """Refuse an unknown task or probe with its line and the nearest known name."""
    if name not in registry:
        where = document.place(path)
        raise ConfigError(f"{where}: unknown {registry.kind} {name!r}; {nearest(name, registry.names())}")


_WORDS = {
    "missing": "is missing",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}
_PATTERNS = {
    NAME: "must be at most 100 letters, digits, dots, dashes and underscores",
    MODEL_NAME: "must be the name of an embedded model, a Hugging Face id or a folder",
    DEVICE: "must be cpu, cuda or cuda:<number>",
}


def sentence(error: ValidationError, document: Document, root: type[BaseModel]) -> str:
    """The most telling of pydantic's complaints as one line: unknown keys first, since they explain missing ones."""
    found = error.errors(include_url=False)
    first = min(found, key=lambda e: (e["type"] != "extra_forbidden", e["type"] == "missing"))
    path: Keys = first["loc"]
    where, context = document.place(path), first.get("ctx", {})
    more = f" ({len(found) - 1} more problem{'s' * (len(found) > 2)})" if len(found) > 1 else ""
    if first["type"] == "extra_forbidden":
        known: set[str] = {*_model_at(path[:-1], root).model_fields, *(["sweep"] if len(path) == 1 else [])}
        return f"{where}: unknown key {str(path[-1])!r}; {nearest(str(path[-1]), sorted(known))}{more}"
    if first["type"] == "value_error":
        return f"{where}: {context.get('error', first['msg'])}{more}"
    if first["type"] == "literal_error":
        options = _options(path, root)
        return f"{where}: '{dotted(path)}' is {kind(first['input'])}; {nearest(str(first['input']), options)}{more}"
    if first["type"] == "string_pattern_mismatch":
        words = _PATTERNS[context["pattern"]]
    else:
        words = _WORDS[first["type"]].format(**context) if first["type"] in _WORDS else f"is wrong: {first['msg']}"
    shown = "" if first["type"] in ("missing", "too_short") else f", not {kind(first['input'])}"
    return f"{where}: '{dotted(path)}' {words}{shown}{more}"


def _model_at(path: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel]:
    model = root
    for key in path:
        if isinstance(key, str):
            model = next(t for t in _types(model.model_fields[key].annotation) if issubclass(t, BaseModel))
    return model


def _options(path: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    """What a literal field accepts."""
    annotation: Any = _model_at(path[:-1], root).model_fields[str(path[-1])].annotation
    literals = [annotation, *get_args(annotation)]
    return [option for literal in literals for option in get_args(literal) if isinstance(option, str)]


def _types(annotation: Any) -> list[type]:
    """All classes inside a type expression."""
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation]
    return [t for argument in get_args(annotation) for t in _types(argument)]


__all__ = [
    "Closed",
    "ModelConfig",
    "ProbeConfig",
    "RunConfig",
    "TaskConfig",
    "TaskOverride",
    "check_name",
    "config_hash",
    "differences",
    "dotted",
    "hashed",
    "load_config",
    "override",
    "read_config",
    "sentence",
    "validate",
]
