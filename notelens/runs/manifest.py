"""``manifest.json``: what ran, with what, so that a number can be traced and a run continued only as it began."""

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any, cast

import notelens
from notelens.errors import ConfigError, RecordError
from notelens.runs.config import UNHASHED, Closed, RunConfig, config_hash, differences, hashed
from notelens.runs.files import reason, write_atomic
from notelens.runs.records import plain

FILE = "manifest.json"
MANIFEST_VERSION = 1
PACKAGES = ("torch", "transformers", "transformer-lens", "tokenizers", "numpy", "scikit-learn")
DECIDING = ("notelens", "torch", "transformers", "transformer-lens", "numpy", "scikit-learn")
"""Versions that change numbers: a run is not continued under others."""
FIXED_FACTS = ("name", "revision", "weights_hash", "dtype", "attention_kernel", "device")
"""Facts of the model that must not change within a run."""

Manifest = dict[str, Any]


def versions() -> dict[str, str]:
    """Versions of Python, notelens and the libraries that compute (without importing them)."""
    out = {"python": python_version(), "notelens": notelens.__version__}
    for package in PACKAGES:
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "absent"
    return out


def commit() -> dict[str, Any]:
    """Commit of the source tree this package is tracked in and whether it has changes; both null elsewhere."""
    package = Path(notelens.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed below somebody else's repository
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--", ".")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def session() -> dict[str, Any]:
    """What this process adds to a run's history."""
    return {"started": datetime.now(UTC).isoformat(timespec="seconds"), **commit(), "versions": versions()}


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a run's folder, or ``None`` where it has none.

    Raises:
        RecordError: it cannot be read.
    """
    path = folder / FILE
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as e:
        raise RecordError(f"{path}: could not be read ({reason(e)})") from e
    except ValueError as e:
        raise RecordError(f"{path}: is not JSON ({e}); restore it, or start a new run in another folder") from e
    if not isinstance(data, dict) or cast(Manifest, data).get("manifest_version") != MANIFEST_VERSION:
        raise RecordError(f"{path}: is not a manifest of version {MANIFEST_VERSION}; start a new run in another folder")
    return cast(Manifest, data)


def is_serve_folder(folder: Path) -> bool:
    """Whether a folder holds a serving benchmark."""
    manifest = read_manifest(folder)
    return manifest is not None and manifest.get("kind") == "serve"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step.

    Raises:
        RecordError: it could not be written; the old one is intact.
    """
    write_atomic(folder / FILE, json.dumps(manifest, indent=2) + "\n")


def new_manifest(config: RunConfig, facts: Mapping[str, Any]) -> Manifest:
    """The manifest of a run that begins now.

    Args:
        config: as run, overrides included.
        facts: of the model, its gate report among them.
    """
    return {
        "manifest_version": MANIFEST_VERSION,
        "name": config.name,
        "config": config.model_dump(mode="json"),
        "config_hash": config_hash(config),
        "seed": config.seed,
        "model": plain(facts)[0],
        "sessions": [session()],
        "state": "running",
    }


def check_same_config(folder: Path, manifest: Manifest, config: Closed) -> None:
    """A run is continued only with the configuration it began with.

    Raises:
        ConfigError: something that affects results differs; the message lists it.
    """
    if manifest["config_hash"] == config_hash(config):
        return
    began = {key: value for key, value in manifest["config"].items() if key not in UNHASHED}
    changed = differences(began, hashed(config))
    shown = ", ".join(changed[:6]) + (f" and {len(changed) - 6} more" if len(changed) > 6 else "")
    raise ConfigError(
        f"{folder}: was begun with another configuration ({shown or 'its hash differs'}); choose another folder with "
        "--out, or undo the change"
    )


def check_same_software(folder: Path, manifest: Manifest) -> None:
    """An unfinished run is continued only under the library versions it began with.

    Raises:
        ConfigError: a version that may change numbers differs.
    """
    began, now = manifest["sessions"][0]["versions"], versions()
    changed = [f"{p} {began.get(p)} -> {now[p]}" for p in DECIDING if began.get(p) != now[p]]
    if changed:
        raise ConfigError(
            f"{folder}: was begun with other versions ({', '.join(changed)}), so its numbers would not belong "
            "together; choose another folder with --out"
        )


def check_same_model(folder: Path, manifest: Manifest, facts: Mapping[str, Any]) -> None:
    """An unfinished run is continued only with the weights, type, kernel and device it began with.

    Raises:
        ConfigError: a fact of the model differs.
    """
    began = manifest["model"]
    changed = [f"{k} {began.get(k)} -> {facts.get(k)}" for k in FIXED_FACTS if began.get(k) != facts.get(k)]
    if changed:
        raise ConfigError(
            f"{folder}: was begun with another model ({', '.join(changed)}); choose another folder with --out"
        )
