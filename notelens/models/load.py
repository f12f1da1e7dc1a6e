"""One door for all models: embedded, local folders and Hugging Face ids, each through the admission gate."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

import notelens
from notelens.errors import GateError, InputError, UnsupportedModelError
from notelens.models import FAMILIES
from notelens.models.base import FamilySpec
from notelens.models.checks import check_config, check_raw
from notelens.models.gate import GateReport, run_gate
from notelens.models.model import HFNoteModel, library_versions
from notelens.models.quant import LARGEST_BYTES, Outputs, drift, in_float32, outputs, quantise_
from notelens.models.refused import refusal
from notelens.registry import nearest
from notelens.zoo.embedded import EMBEDDED, load_embedded
from notelens.zoo.organisms import PREFIX, load_organism, organism_specs

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KERNELS = ("sdpa", "eager")
GATED_SOURCES = (
    "attention/gqa.py",
    "attention/hybrid.py",
    "attention/mla.py",
    "attention/move.py",
    "attention/mrope.py",
    "cache/hf.py",
    "cache/ops.py",
    "intervene/attended.py",
    "intervene/engine.py",
    "intervene/kernel.py",
    "models/base.py",
    "models/gate.py",
    "models/model.py",
    "rope.py",
)


def default_cache_dir() -> Path:
    """Where converted embedded weights and gate reports are kept."""
    return Path.home() / ".cache" / "notelens"


def load(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str | None = None,
    quant: str | None = None,
    competence: bool = True,
    allow_ungated: bool = False,
    cache_dir: str | Path | None = None,
    dry_run: bool = False,
) -> HFNoteModel:
    """Load a model and admit it.

    Args:
        name: an embedded model (``smollm2``, ``gemma3-270m``), an organism (``organism-qwen3``), a local folder, or a
            Hugging Face id.
        revision: commit of a hub model.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``cpu`` or ``cuda``.
        attention: ``sdpa`` or ``eager``; by default what the family allows (soft-capped attention runs eager only).
        quant: ``int8``, ``int4`` or ``fp8``: quantise the weights of linear layers (extra ``quant``).
        competence: merge the competence adapter into an embedded model; without one it is called ``NAME-bare``.
        allow_ungated: return the model although it fails the gate; every record then says so.
        cache_dir: for converted weights and gate reports.
        dry_run: instead of the model, a small random one of the same architecture with the embedded tokenizer.

    Raises:
        InputError: no such model, type, device, kernel or quantisation.
        MissingPackageError: a package that the model needs is not installed.
        UnsupportedModelError: the architecture is not understood.
        GateError: the model failed a check of the gate; the message says which and what to do.

    Cost: loading, a hash over the weights, and a few short forwards the first time. Below float32 the same weights are also run
    in float32 once (twice the memory for that moment, where they are at most 8 GB): the drift stands in every record.
    """
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; {nearest(dtype, list(DTYPES))}")
    if attention is not None and attention not in KERNELS:
        raise InputError(f"unknown attention kernel {attention!r}; {nearest(attention, list(KERNELS))}")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"unknown device {device!r}; known: cpu, cuda")
    if device.startswith("cuda") and not torch.cuda.is_available() and not dry_run:
        raise InputError(
            "device 'cuda' asked for, but torch sees no GPU; use device 'cpu' or install a CUDA build of torch"
        )
    if dry_run:
        from notelens.models.random import random_model

        hf, tokenizer = random_model(name, root)
        label = f"random:{name}"
        return wrap(hf, tokenizer, name=label, quant=quant, allow_ungated=allow_ungated, cache_dir=None)
    if name in EMBEDDED:
        loaded, tokenizer = load_embedded(name, competence=competence, dtype=DTYPES[dtype], cache_dir=root)
        hf: Any = loaded
        hf.to(device)
        label, revision = (name if competence and EMBEDDED[name].adapter else f"{name}-bare"), None
    elif name in organism_specs():
        small, tokenizer = load_organism(name, dtype=DTYPES[dtype])
        hf = small
        hf.to(device)
        label, revision = name, None
    else:
        hf, tokenizer = _from_transformers(name, revision, DTYPES[dtype], device)
        label = name
    return wrap(
        hf,
        tokenizer,
        name=label,
        revision=revision,
        attention=attention,
        quant=quant,
        allow_ungated=allow_ungated,
        cache_dir=root,
    )


def _from_transformers(name: str, revision: str | None, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    import transformers
    from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

    local = Path(name).expanduser()
    if not local.is_dir() and (name.count("/") != 1 or name.startswith(PREFIX)):
        raise InputError(
            f"unknown model {name!r}; {nearest(name, sorted((*EMBEDDED, *organism_specs())))} Otherwise give a local "
            "folder or a Hugging Face id such as 'Qwen/Qwen3-4B'"
        )
    source = str(local) if local.is_dir() else name
    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
        check_raw(PreTrainedConfig.get_config_dict(source, revision=revision)[0], config, config.model_type)
        auto = getattr(transformers, family_for(config).auto_class)
        hf, info = auto.from_pretrained(source, revision=revision, dtype=dtype, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError, RuntimeError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise InputError(f"model {name!r} could not be loaded: {reason}") from e
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info.get(what):
            first = sorted(map(str, info[what]))[0]
            raise UnsupportedModelError(
                f"{name}: config and weights contradict each other: {len(info[what])} {what.replace('_', ' ')}, first {first}. "
                "transformers would go on with random or left-out weights; correct config.json or use the right checkpoint"
            )
    return hf.eval().requires_grad_(False).to(device), tokenizer


def family_for(config: Any) -> FamilySpec:
    """The spec of a config's family.

    Raises:
        UnsupportedModelError: no spec knows this ``model_type``, or the config holds something that the spec does not know;
            nothing is guessed.
    """
    kind = getattr(config, "model_type", None)
    if isinstance(kind, str) and (why := refusal(kind)) is not None:
        raise UnsupportedModelError(f"model type {kind!r} is refused ({why})")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {kind!r} is not supported; supported: {', '.join(FAMILIES.names())}. Positions, windows and caches "
            "are never guessed: add a FamilySpec in notelens/models/families/"
        )
    family = FAMILIES.get(kind)()
    check_config(family, config)
    return family


def wrap(
    hf: Any,
    tokenizer: Any,
    *,
    name: str,
    revision: str | None = None,
    attention: str | None = None,
    quant: str | None = None,
    gate: bool = True,
    bridge: bool = True,
    allow_ungated: bool = False,
    cache_dir: str | Path | None = None,
) -> HFNoteModel:
    """Make a :class:`HFNoteModel` of a transformers model that is already in memory, and admit it.

    Args:
        hf: a causal language model; put into evaluation mode, parameters frozen.
        quant: quantise the weights of linear layers, in place.
        gate: run the gate; without it the model carries ``ungated``. Without it no drift is measured either.
        bridge: let the gate check the TransformerBridge too.
        cache_dir: where gate reports are cached; not cached when ``None``.

    Raises:
        UnsupportedModelError, InputError, GateError: as :func:`load`.
    """
    family = family_for(hf.config)
    hf.eval().requires_grad_(False)
    if family.eager_only is not None and attention == "sdpa":
        raise InputError(f"{name} has {family.eager_only}, which attention 'sdpa' does not compute; use 'eager'")
    kernel = attention or ("sdpa" if family.eager_only is None else "eager")
    if hf.config._attn_implementation != kernel:
        hf.set_attn_implementation(kernel)
    model = HFNoteModel(hf, tokenizer, family, name=name, revision=revision)
    reference = _reference(model) if gate and (quant is not None or model.dtype != torch.float32) else None
    if quant is not None:
        model.quantisation = quantise_(hf, family, quant)
    if not gate:
        model.ungated = True
        return model
    if reference is not None:
        model.drift = reference if isinstance(reference, dict) else drift(reference, outputs(model)).as_json()
    model.gate = _gate(model, bridge, Path(cache_dir) if cache_dir is not None else None)
    if not model.gate.passed:
        if not allow_ungated:
            raise GateError(
                f"{name} failed its gate at {model.gate.failure()}. "
                "To measure it all the same, load it with allow_ungated=True; every record will say so"
            )
        model.ungated = True
        logger.warning("%s is used although it failed its gate: %s", name, model.gate.failure())
    return model


def _reference(model: HFNoteModel) -> Outputs | dict[str, str]:
    """What the weights compute in float32; the reason where they are too large for that."""
    n_bytes = 4 * sum(p.numel() for p in model.hf.parameters())
    if n_bytes > LARGEST_BYTES:
        return {
            "not measured": f"the weights take {n_bytes / 2**30:.0f} GiB in float32, more than {LARGEST_BYTES >> 30}"
        }
    with in_float32(model.hf):
        return outputs(model)


def _gate(model: HFNoteModel, bridge: bool, cache_dir: Path | None) -> GateReport:
    """The gate's report, from the cache where model, versions and the library's own sources are the same."""
    key = gate_key(model, bridge)
    path = cache_dir / "gates" / f"{key}.json" if cache_dir is not None else None
    if path is not None and path.is_file():
        try:
            return GateReport.from_json(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError):
            logger.warning("the cached gate report %s is damaged; running the gate again", path.name)
    found = run_gate(model, bridge=bridge)
    report = GateReport(found.checks, key, found.notes)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(report.as_json()))
        part.replace(path)
    return report


def gate_key(model: HFNoteModel, bridge: bool = True) -> str:
    """Hash of everything that a gate report depends on: weights, type, kernel, device, versions, our own sources."""
    package = Path(notelens.__file__).parent
    sources = [hashlib.sha256((package / s).read_bytes()).hexdigest() for s in GATED_SOURCES]
    config = {
        k: v for k, v in model.hf.config.to_dict().items() if not k.startswith("_") and k != "transformers_version"
    }
    facts = (
        model.weights_hash, json.dumps(config, sort_keys=True, default=str), str(model.dtype), model.attention_kernel,
        model.device.type, bridge, library_versions(), sources,
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
