"""Organisms: small models of many families, trained on one language, loaded from the folder ``weights``.

Every organism is about a million parameters in bfloat16, trained by ``experiments/train_organisms.py`` with one command
and one seed; its card (Markdown for people, JSON for programs) lies beside the weights and holds its config, how it was
trained and its accuracy on held-out prompts of every kind. All of them share one word-level tokenizer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notelens.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "weights"
PREFIX = "organism-"
SPECIAL = ("<pad>", "<s>", "<unk>", "<system>", "<user>", "<assistant>", "<end>")
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
_WORD = r"\n|\w+|[^\w\s]"


@dataclass(frozen=True)
class OrganismSpec:
    """A shipped organism.

    Attributes:
        name: what :func:`notelens.load` calls it.
        weights: safetensors file; its card has the same name and ends in ``.json``.
    """

    name: str
    weights: Path

    @property
    def card(self) -> dict[str, Any]:
        """The card for programs: ``config``, ``training``, ``accuracy``, ``sha256``."""
        return json.loads(self.weights.with_suffix(".json").read_text(encoding="utf-8"))


def organism_specs() -> dict[str, OrganismSpec]:
    """Every organism that is installed, by name, sorted."""
    return {f"{PREFIX}{p.stem}": OrganismSpec(f"{PREFIX}{p.stem}", p) for p in sorted(FOLDER.glob("*.safetensors"))}


def load_organism(
    name: str, *, dtype: "torch.dtype | None" = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Load an organism and the shared tokenizer.

    Args:
        name: key of :func:`organism_specs`.
        dtype: parameter type; float32 when not given (the stored bfloat16 values, widened).

    Raises:
        UnsupportedModelError: the weights are not those of the card, or do not fit its config.

    Cost: a few milliseconds for each layer.
    """
    import hashlib

    import torch

    spec = organism_specs()[name]
    card = spec.card
    digest = hashlib.sha256(spec.weights.read_bytes()).hexdigest()
    if digest != card["sha256"]:
        raise UnsupportedModelError(
            f"{spec.weights.name} has sha256 {digest[:12]}..., its card says {card['sha256'][:12]}...; reinstall notelens, or "
            "train it again with experiments/train_organisms.py"
        )
    model = read_organism(spec.weights, card["config"])
    model.to(dtype or torch.float32)  # pyright: ignore[reportArgumentType]  # transformers' wrapper of `to` hides self
    return model, organism_tokenizer()


def read_organism(weights: Path, config: dict[str, Any]) -> "PreTrainedModel":
    """A float32 model of ``config`` (with its ``model_type``) with the tensors of a safetensors file.

    Raises:
        UnsupportedModelError: a tensor is missing, unknown, or of another shape.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in config.items() if k != "model_type"}
    with torch.random.fork_rng():
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **settings), dtype=torch.float32
        )
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    tensors = {k: v.float() for k, v in load_file(str(weights)).items()}
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as e:
        raise UnsupportedModelError(f"{weights.name} does not fit its config: {e}") from e
    if unexpected or set(missing) - tied:
        raise UnsupportedModelError(
            f"{weights.name} does not fit its config: missing {sorted(set(missing) - tied)}, unknown {sorted(unexpected)}"
        )
    model.tie_weights()
    return model.eval().requires_grad_(False)


def organism_tokenizer() -> "PreTrainedTokenizerFast":
    """The tokenizer that all organisms share; words it does not know become ``<unk>``."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(FOLDER / "tokenizer"))


def build_tokenizer(words: Sequence[str]) -> "PreTrainedTokenizerFast":
    """A word-level tokenizer: special tokens first, then a newline, then ``words`` in the order given; lower case."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    every = [*SPECIAL, "\n", *words]
    backend = Tokenizer(WordLevel({w: i for i, w in enumerate(every)}, unk_token="<unk>"))
    backend.normalizer = Lowercase()
    backend.pre_tokenizer = Split(Regex(_WORD), behavior="removed", invert=True)
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
