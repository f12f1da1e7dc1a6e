"""The hash of a model's weights from its folder, as the library computes it from the loaded model; torch-only."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from notelens._files import reason
from notelens.errors import ArtefactError

_TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""A head that is not in the files is the embedding; the loaded model has it under both names."""


def weights_hash(folder: Path, dtype: torch.dtype) -> str:
    """SHA-256 over the names and bytes of all parameters of a Hugging Face folder, loaded as ``dtype``.

    Equal to the hash in a skill's tag where the folder's names are those of the loaded model (plain decoders; not, for
    example, mixtures whose experts transformers fuses while loading).

    Raises:
        ArtefactError: no safetensors, or a file that cannot be read.

    Cost: one pass over the weights (about 1 s per GB), one tensor in memory at a time.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ArtefactError(
            f"{folder}: holds no model*.safetensors whose weights could be compared with those of a skill"
        )
    where: dict[str, tuple[Any, str]] = {}
    try:
        for file in files:
            handle = safe_open(file, framework="pt")
            where |= {name: (handle, name) for name in handle.keys()}  # noqa: SIM118 - it has no __iter__
        if _TIED[0] not in where and _TIED[1] in where:
            where[_TIED[0]] = where[_TIED[1]]
        h = hashlib.sha256()
        for name in sorted(where):
            handle, stored = where[name]
            tensor: Tensor = handle.get_tensor(stored)
            if tensor.is_floating_point():
                tensor = tensor.to(dtype)
            h.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            h.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    except OSError as e:
        raise ArtefactError(f"{folder}: its weights cannot be read ({reason(e)})") from e
    except SafetensorError as e:
        raise ArtefactError(f"{folder}: its weights are damaged ({e})") from e
    return h.hexdigest()


__all__ = ["weights_hash"]
