"""Skill files: cached rows of a piece of text as safetensors with a JSON header, checked down to the last byte.

A file holds two tensors per layer, ``layer.<i>.keys`` ``[kv_head, pos, d_key]`` and ``layer.<i>.values``
``[kv_head, pos, d_value]``, and nothing else. Its header (the ``notelens`` entry of the metadata) says what the rows are,
which model computed them and how, and carries a SHA-256 over the *whole file* with the digest's own 64 characters
set to zero: a change of any byte, in the header, in the rows or in the padding, is refused. The digest shows damage, not
intent: whoever can write the file can also write a digest, so take files from where you would take weights from.

This module needs torch and safetensors only, no transformers: a serving engine's plug-in reads skills with it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

import notelens
from notelens._files import reason, write_atomic
from notelens.errors import ArtefactError

SCHEMA = 1
METADATA_KEY = "notelens"
FORMAT = "notelens skill"
ENDING = ".skill"
MAX_HEADER_BYTES = 64 * 2**20
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SCHEMES = ("rotated", "unrotated")
CONDITIONS = ("isolated", "neutral", "prefix")
_ZEROS = "0" * 64
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ModelTag:
    """What cached rows depend on; rows made under one tag mean nothing under another.

    Attributes:
        name: what people call the model; not compared.
        weights_sha256: hash over all parameters.
        tokenizer_sha256: hash over the tokenizer.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        shapes: (stored heads, key width, value width) of every layer.
        frequencies: distinct tables of inverse frequencies that rotate keys.
        tables: index into ``frequencies`` of every layer; ``None`` for a layer without RoPE.
    """

    name: str
    weights_sha256: str
    tokenizer_sha256: str
    dtype: str
    shapes: tuple[tuple[int, int, int], ...]
    frequencies: tuple[tuple[float, ...], ...]
    tables: tuple[int | None, ...]

    def difference(self, other: "ModelTag") -> str | None:
        """What stands between rows made under ``self`` and a model tagged ``other``; ``None`` when nothing does."""
        if self.weights_sha256 != other.weights_sha256:
            return (
                f"it was made by model {self.name!r} (weights {self.weights_sha256[:12]}), this is {other.name!r} "
                f"({other.weights_sha256[:12]}); compile the text again with this model"
            )
        if self.tokenizer_sha256 != other.tokenizer_sha256:
            return (
                f"it was made with another tokenizer ({self.tokenizer_sha256[:12]}, not {other.tokenizer_sha256[:12]}); "
                "token ids may mean other words"
            )
        if self.dtype != other.dtype:
            return f"its rows are {self.dtype}, the model computes in {other.dtype}; compile it in that type"
        if self.shapes != other.shapes:
            return (
                f"its layers store {self.shapes[:2]}.. (heads, key width, value width), the model {other.shapes[:2]}.."
            )
        for layer, (mine, theirs) in enumerate(zip(self.tables, other.tables, strict=True)):
            a = None if mine is None else self.frequencies[mine]
            b = None if theirs is None else other.frequencies[theirs]
            if a != b:
                return (
                    f"layer {layer} was rotated with another RoPE table (base or scaling differ); keys cannot be moved with "
                    "this model's table"
                )
        return None


@dataclass(frozen=True)
class SkillHeader:
    """Everything a skill file says about its rows.

    Attributes:
        name: letters, digits, dot, dash and underscore.
        token_ids: id of every row's token.
        text_sha256: of the text in UTF-8.
        start: absolute position of the first row when it was computed; the rows are contiguous.
        scheme: ``rotated`` keys stand at those positions, ``unrotated`` ones carry no rotation yet.
        condition: what the rows attended to: nothing (``isolated``), a ``neutral`` prefix, or a real ``prefix``.
        prefix_ids: ids of that prefix; empty where isolated.
        exact, history: mark of the rows (DESIGN section 2).
        gate: the admission gate's report of the model, or ``None`` where it was not run.
        ungated: whether the model was used although it did not pass.
        model: what the rows depend on.
        notelens: version that wrote the file.
        schema: of this header.
    """

    name: str
    token_ids: tuple[int, ...]
    text_sha256: str
    start: int
    scheme: str
    condition: str
    prefix_ids: tuple[int, ...]
    exact: bool
    history: tuple[str, ...]
    gate: Mapping[str, Any] | None
    ungated: bool
    model: ModelTag
    notelens: str = notelens.__version__
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem is not None:
            raise ArtefactError(f"skill header: {problem}")


@dataclass(frozen=True)
class SkillFile:
    """Header and rows: keys and values of every layer."""

    header: SkillHeader
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        h = self.header
        if not len(self.keys) == len(self.values) == len(h.model.shapes):
            raise ArtefactError(f"{len(self.keys)} layers of rows, the header speaks of {len(h.model.shapes)}")
        for layer, (k, v, (heads, d_key, d_value)) in enumerate(
            zip(self.keys, self.values, h.model.shapes, strict=True)
        ):
            for what, tensor, width in (("keys", k, d_key), ("values", v, d_value)):
                wanted = (heads, len(h.token_ids), width)
                if tuple(tensor.shape) != wanted or tensor.dtype != DTYPES[h.model.dtype]:
                    raise ArtefactError(
                        f"layer {layer}: {what} are {tuple(tensor.shape)} {tensor.dtype}, the header says {wanted} "
                        f"{h.model.dtype}"
                    )
                if not bool(torch.isfinite(tensor).all()):
                    raise ArtefactError(f"layer {layer}: {what} hold NaN or infinity")

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def check_name(name: str) -> str:
    """Return a skill's name.

    Raises:
        ArtefactError: it could not be the name of a file everywhere.
    """
    if not _NAME.fullmatch(name):
        raise ArtefactError(
            f"skill name {name!r}: use 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit"
        )
    return name


def dump(skill: SkillFile) -> bytes:
    """The bytes of a skill file; equal skills give equal bytes."""
    header = {"format": FORMAT, **asdict(skill.header), "digest": _ZEROS}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    tensors: dict[str, Tensor] = {}
    for layer, (k, v) in enumerate(zip(skill.keys, skill.values, strict=True)):
        tensors[f"layer.{layer}.keys"] = k.detach().cpu().contiguous()
        tensors[f"layer.{layer}.values"] = v.detach().cpu().contiguous()
    raw = safetensors.torch.save(tensors, metadata={METADATA_KEY: text})
    marker = f'digest\\":\\"{_ZEROS}'.encode()
    if raw.count(marker, 0, _data_start(raw)) != 1:
        raise ArtefactError("the header holds a second digest; nothing was written")
    at = raw.index(marker) + len(marker) - 64
    return b"".join((raw[:at], hashlib.sha256(raw).hexdigest().encode(), raw[at + 64 :]))


def parse(raw: bytes, source: str) -> SkillFile:
    """Read the bytes of a skill file.

    Args:
        raw: the whole file.
        source: what messages call it.

    Raises:
        ArtefactError: not a skill file, changed in any byte, of another schema, or its rows do not fit its header.
    """
    header, rest = _header(raw, source)
    try:
        tensors = safetensors.torch.load(raw)
    except (SafetensorError, ValueError, KeyError) as e:
        raise ArtefactError(f"{source}: its tensors cannot be read ({e})") from e
    n = len(header.model.shapes)
    wanted = {f"layer.{i}.{part}" for i in range(n) for part in ("keys", "values")}
    if set(tensors) != wanted or rest:
        extra = sorted(set(tensors) ^ wanted)[:3]
        raise ArtefactError(
            f"{source}: holds other tensors or entries than its {n} layers ({', '.join(extra) or rest})"
        )
    try:
        return SkillFile(
            header,
            tuple(tensors[f"layer.{i}.keys"] for i in range(n)),
            tuple(tensors[f"layer.{i}.values"] for i in range(n)),
        )
    except ArtefactError as e:
        raise ArtefactError(f"{source}: {e}") from e


def write_skill(skill: SkillFile, path: Path) -> int:
    """Write a skill file, whole or not at all; returns its size in bytes.

    Raises:
        RecordError: it could not be written; what was there before is intact.
    """
    raw = dump(skill)
    write_atomic(path, raw)
    return len(raw)


def read_skill(path: Path) -> SkillFile:
    """Read and check a skill file. Cost: one pass over its bytes for the digest, one for the tensors.

    Raises:
        ArtefactError: no such file, or as :func:`parse`.
    """
    return parse(_read(path), path.name)


def read_header(path: Path) -> SkillHeader:
    """The header of a skill file, after a check of the whole file.

    Raises:
        ArtefactError: as :func:`parse`, except that tensors are not looked at beyond their digest.
    """
    return _header(_read(path), path.name)[0]


def check_model(header: SkillHeader, tag: ModelTag) -> None:
    """Check that a model may use the rows.

    Raises:
        ArtefactError: weights, tokenizer, type, shapes or RoPE tables differ; the message says which.
    """
    difference = header.model.difference(tag)
    if difference is not None:
        raise ArtefactError(f"skill {header.name!r} cannot be used here: {difference}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise ArtefactError(f"{path}: cannot be read ({reason(e)})") from e


def _data_start(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def _header(raw: bytes, source: str) -> tuple[SkillHeader, list[str]]:
    """The checked header, and names of other metadata."""
    size = _data_start(raw) if len(raw) > 8 else 0
    if not 8 < size <= min(len(raw), MAX_HEADER_BYTES):
        raise ArtefactError(f"{source}: is not a safetensors file, or is cut short; nothing else is ever loaded")
    try:
        outer = json.loads(raw[8:size].decode("utf-8"))
        metadata = outer["__metadata__"]
        plain = json.loads(metadata[METADATA_KEY])
        digest = plain.pop("digest")
        if plain.pop("format") != FORMAT or not _HASH.fullmatch(digest):
            raise KeyError("format")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ArtefactError(f"{source}: has no readable notelens header; it is no skill file, or was damaged") from e
    if raw.count(digest.encode(), 0, size) != 1:
        raise ArtefactError(f"{source}: its header names its digest more than once; it was changed")
    at = raw.index(digest.encode())
    found = hashlib.sha256(raw[:at] + _ZEROS.encode())
    found.update(memoryview(raw)[at + 64 :])
    if found.hexdigest() != digest:
        raise ArtefactError(
            f"{source}: its bytes do not match its digest; it was changed or damaged. Compile the skill again"
        )
    if plain.get("schema") != SCHEMA:
        raise ArtefactError(f"{source}: has header schema {plain.get('schema')!r}, this version reads {SCHEMA}")
    return _from_plain(plain, source), [name for name in metadata if name != METADATA_KEY]


def _from_plain(plain: dict[str, Any], source: str) -> SkillHeader:
    try:
        model = dict(plain["model"])
        for data, kind in ((model, ModelTag), (plain, SkillHeader)):
            wanted = {f.name for f in fields(kind)}
            if set(data) != wanted:
                raise ArtefactError(f"{source}: header entries {sorted(set(data) ^ wanted)} are missing or unknown")
        model["shapes"] = tuple(tuple(s) for s in model["shapes"])
        model["frequencies"] = tuple(tuple(float(x) for x in f) for f in model["frequencies"])
        model["tables"] = tuple(model["tables"])
        lists = {k: tuple(plain[k]) for k in ("token_ids", "prefix_ids", "history")}
        return SkillHeader(**{**plain, **lists, "model": ModelTag(**model)})
    except (KeyError, TypeError, ValueError) as e:
        raise ArtefactError(
            f"{source}: {e}" if isinstance(e, ArtefactError) else f"{source}: its header is malformed ({e})"
        ) from e


def _ints(values: Any, low: int = 0) -> bool:
    return isinstance(values, tuple) and all(type(v) is int and v >= low for v in values)


def _problem(h: SkillHeader) -> str | None:
    """What is wrong with a header, ``None`` when nothing is."""
    m = h.model
    checks = {
        f"name {h.name!r} is not allowed": isinstance(h.name, str) and bool(_NAME.fullmatch(h.name)),
        "token_ids are no list of ids, or empty": _ints(h.token_ids) and len(h.token_ids) > 0,
        "prefix_ids are no list of ids": _ints(h.prefix_ids),
        "text_sha256 is no SHA-256": isinstance(h.text_sha256, str) and bool(_HASH.fullmatch(h.text_sha256)),
        f"start {h.start!r} is not the number of prefix ids ({len(h.prefix_ids)})": h.start == len(h.prefix_ids),
        f"scheme {h.scheme!r} is not one of {SCHEMES}": h.scheme in SCHEMES,
        f"condition {h.condition!r} is not one of {CONDITIONS}": h.condition in CONDITIONS,
        "condition and prefix contradict each other": (h.condition == "isolated") == (not h.prefix_ids),
        "exact rows have no history, others have one": h.exact is (not h.history),
        "history is no list of texts": all(isinstance(t, str) for t in h.history),
        "gate is no report": h.gate is None or isinstance(h.gate, Mapping),
        "ungated is no truth value": isinstance(h.ungated, bool),
        "notelens is no version": isinstance(h.notelens, str),
        "model: name is no text": isinstance(m.name, str),
        "model: weights_sha256 is no SHA-256": bool(_HASH.fullmatch(str(m.weights_sha256))),
        "model: tokenizer_sha256 is no SHA-256": bool(_HASH.fullmatch(str(m.tokenizer_sha256))),
        f"model: dtype {m.dtype!r} is not one of {', '.join(DTYPES)}": m.dtype in DTYPES,
        "model: shapes are not three sizes per layer": len(m.shapes) > 0
        and all(len(s) == 3 and _ints(s, 1) for s in m.shapes),
        "model: tables do not name a frequency table per layer": len(m.tables) == len(m.shapes)
        and all(t is None or (type(t) is int and 0 <= t < len(m.frequencies)) for t in m.tables),
    }
    return next((text for text, fine in checks.items() if not fine), None)


def renamed(skill: SkillFile, name: str) -> SkillFile:
    """The same rows under another name."""
    return SkillFile(replace(skill.header, name=check_name(name)), skill.keys, skill.values)


__all__ = [
    "ENDING",
    "ModelTag",
    "SkillFile",
    "SkillHeader",
    "check_model",
    "check_name",
    "dump",
    "parse",
    "read_header",
    "read_skill",
    "renamed",
    "write_skill",
]
