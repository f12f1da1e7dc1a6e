"""Write an embedded model as an ordinary Hugging Face folder that an engine can serve.

python -m experiments.merge_adapter smollm2 runs/models/smollm2 [--dtype bfloat16] [--bare]

Its competence adapter is merged into the weights, as ``notelens.load`` does. The folder holds config, safetensors, tokenizer
and ``notelens.json``, which says what went into it. It is whole or absent. Organisms can be written too.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import notelens
from notelens.errors import InputError, NotelensError
from notelens.models.load import default_cache_dir
from notelens.registry import nearest
from notelens.zoo.embedded import EMBEDDED, load_embedded
from notelens.zoo.organisms import load_organism, organism_specs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FACTS = "notelens.json"


def read(name: str, dtype: str, bare: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer and what they are made of.

    Raises:
        InputError: no such model or type.
        MissingPackageError, UnsupportedModelError: as :func:`notelens.zoo.embedded.load_embedded`.
    """
    known = [*EMBEDDED, *organism_specs()]
    if name not in known:
        raise InputError(f"unknown model {name!r}; {nearest(name, known)}")
    facts: dict[str, Any] = {"model": name, "dtype": dtype, "notelens": notelens.__version__, "adapter_sha256": None}
    if name not in EMBEDDED:
        model, tokenizer = load_organism(name, dtype=DTYPES[dtype])
        return model, tokenizer, facts
    adapter = None if bare else EMBEDDED[name].adapter_path
    model, tokenizer = load_embedded(
        name, competence=adapter is not None, dtype=DTYPES[dtype], cache_dir=default_cache_dir()
    )
    facts["base_sha256"] = EMBEDDED[name].sha256
    if adapter is not None:
        facts["adapter_sha256"] = hashlib.sha256(adapter.read_bytes()).hexdigest()
    return model, tokenizer, facts


def write(model: Any, tokenizer: Any, facts: dict[str, Any], out: Path) -> None:
    """Write the folder.

    Raises:
        InputError: it is there already and not empty, or cannot be made.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: is there already; choose another folder, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    except OSError as e:
        raise InputError(f"{out}: cannot be created ({(e.strerror or str(e)).lower()}); choose another folder") from e
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        part.chmod(0o755)
        part.replace(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="embedded model or organism")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--bare", action="store_true", help="without the competence adapter")
    given = parser.parse_args(arguments)
    try:
        if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
            raise InputError(f"{given.out}: is there already; choose another folder, or remove it")
        model, tokenizer, facts = read(given.model, given.dtype, given.bare)
        write(model, tokenizer, facts, given.out)
    except NotelensError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
