"""Sessions as files: the saved context (safetensors, no pickle), the session's own facts, and a digest of both."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from notelens.agents.accounts import Turn
from notelens.agents.anchor import EveryTurns, Never, OnDrift, Policy
from notelens.compose.tag import model_tag
from notelens.edits import storage as contexts
from notelens.edits.context import EditableContext
from notelens.errors import AgentError, ArtefactError, CacheError
from notelens.models.base import NoteModel

SCHEMA = 1
HEADER = "notelens_session"
POLICIES: dict[str, type[Policy]] = {"Never": Never, "EveryTurns": EveryTurns, "OnDrift": OnDrift}


@dataclass(frozen=True)
class Facts:
    """What a session is beside its context.

    Attributes:
        request: asked last.
        closing: end of the prompt behind it.
        method, options: of editing.
        updates: since the last fresh prefill.
        turns: so far.
        reanchor: the policy.
    """

    request: str
    closing: str
    method: str
    options: Mapping[str, Any]
    updates: int
    turns: tuple[Turn, ...]
    reanchor: Policy


def write(model: NoteModel, context: EditableContext, facts: Facts, path: Path) -> Path:
    """Write a session, whole or not at all.

    Raises:
        CacheError: the folder does not exist.
        AgentError: the policy or an option of the method cannot be written as JSON.
    """
    policy = type(facts.reanchor).__name__
    if policy not in POLICIES:
        raise AgentError(
            f"re-anchoring policy {policy!r} is not one of {', '.join(POLICIES)} and cannot be saved; resume needs to know it"
        )
    tag = model_tag(model)
    plain = {
        "schema": SCHEMA,
        "request": facts.request,
        "closing": facts.closing,
        "method": facts.method,
        "options": dict(facts.options),
        "updates": facts.updates,
        "turns": [asdict(t) for t in facts.turns],
        "reanchor": [policy, vars(facts.reanchor)],
        "model": {
            "name": model.name,
            "weights": tag.weights_sha256,
            "tokenizer": tag.tokenizer_sha256,
            "dtype": tag.dtype,
        },
        "rows": _digest(context),
    }
    try:
        body = json.dumps(plain)
    except TypeError as e:
        raise AgentError(f"an option of method {facts.method!r} cannot be saved ({e}); use plain values") from e
    text = json.dumps({"body": body, "sha256": hashlib.sha256(body.encode()).hexdigest()})
    return contexts.save(context, path, more={HEADER: text})


def read(model: NoteModel, path: Path) -> tuple[EditableContext, Facts]:
    """Read a session that this very model made.

    Raises:
        ArtefactError: no such file, no session, damaged, or made by another model.
    """
    if not path.is_file():
        raise ArtefactError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
    except SafetensorError as e:
        raise ArtefactError(f"{path} cannot be read: {e}") from e
    if HEADER not in metadata:
        raise ArtefactError(f"{path} is no saved session")
    try:
        outer = json.loads(metadata[HEADER])
        if hashlib.sha256(outer["body"].encode()).hexdigest() != outer["sha256"]:
            raise ArtefactError(f"{path}: the session's facts do not fit their digest; the file was changed")
        plain = json.loads(outer["body"])
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
        raise ArtefactError(f"{path}: the session's facts cannot be read ({e})") from e
    if plain["schema"] != SCHEMA:
        raise ArtefactError(f"{path} has session schema {plain['schema']!r}; this version reads {SCHEMA}")
    tag, theirs = model_tag(model), plain["model"]
    for what, ours in (("weights", tag.weights_sha256), ("tokenizer", tag.tokenizer_sha256), ("dtype", tag.dtype)):
        if theirs[what] != ours:
            raise ArtefactError(
                f"{path} was made by {theirs['name']} with {what} {theirs[what][:12]}, this is {model.name} with {ours[:12]}; "
                "rows only fit the model that made them. Load that model, or begin a new session"
            )
    try:
        context = contexts.load(model, path)
    except CacheError as e:
        raise ArtefactError(str(e)) from e
    if _digest(context) != plain["rows"]:
        raise ArtefactError(f"{path}: rows do not fit their digest; the file was changed or damaged")
    name, options = plain["reanchor"]
    turns = tuple(Turn(**{**t, "history": tuple(t["history"])}) for t in plain["turns"])
    return context, Facts(
        plain["request"], plain["closing"], plain["method"], plain["options"], plain["updates"], turns,
        POLICIES[name](**options),
    )  # fmt: skip


def _digest(context: EditableContext) -> str:
    """SHA-256 over rows and last output."""
    last = context.hidden.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(context.rows.join().digest().encode() + last).hexdigest()


__all__ = ["Facts", "read", "write"]
