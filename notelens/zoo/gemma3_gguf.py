"""Gemma-3 text models from a GGUF file, in one pass.

``transformers`` reads such a file too, but takes minutes for a vocabulary of 262k tokens. What a GGUF file stores otherwise
than a checkpoint: tensor names, norm weights with one added (the model adds it itself), and no chat template.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notelens.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% set head = namespace(text='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set head.text = message['content'] + '\\n\\n' %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' + head.text"
    " + message['content'] | trim + '<end_of_turn>\\n' }}{% set head.text = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
"""Turns as Gemma's instruction models have them: a system text stands at the head of the user turn."""

_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _F32 = 8, 9, 0
_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}
_SAME = {"attention.value_length": "head_dim"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
THETAS = {"sliding_attention": 1e4, "full_attention": 1e6}
"""Of sliding layers the file says nothing: 1e4 in every published Gemma-3. Of full layers it does; another is refused."""


def read_gemma3(path: Path) -> "tuple[Any, dict[str, torch.Tensor]]":
    """Configuration and float32 tensors, under the names of ``Gemma3ForCausalLM``.

    Raises:
        UnsupportedModelError: not a GGUF file of this architecture, or one that holds something this reader does not know.
    """
    import numpy as np
    import torch
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize
    from transformers import Gemma3TextConfig

    blob = np.memmap(path, mode="r", dtype=np.uint8)
    head, table, start = _header(blob, path.name)
    settings = _settings(head, path.name)
    if any(name == "output.weight" for name, *_ in table):
        raise UnsupportedModelError(f"{path.name}: has an output head of its own; Gemma-3 shares it with the embedding")
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, kind, offset in table:
        stored = GGMLQuantizationType(kind)
        per_block, n_bytes = GGML_QUANT_SIZES[stored]
        size = int(np.prod(shape)) // per_block * n_bytes
        raw = blob[start + offset : start + offset + size]
        rows = raw.view(np.float32) if kind == _F32 else raw.reshape(*shape[:-1], -1)
        values = torch.from_numpy(np.array(dequantize(rows, stored), dtype=np.float32)).reshape(shape)
        tensors[_renamed(name, path.name)] = values - 1 if "norm" in name else values
    settings["vocab_size"] = int(tensors["model.embed_tokens.weight"].shape[0])
    return Gemma3TextConfig(**settings), tensors


def gemma3_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of the file, with one ``<bos>`` before ordinary text and :data:`CHAT_TEMPLATE`."""
    from transformers import GemmaTokenizer

    found: Any = GemmaTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, add_bos_token=True)
    found.chat_template = CHAT_TEMPLATE
    return found


def _settings(head: dict[str, Any], what: str) -> dict[str, Any]:
    if head.get("general.architecture") != "gemma3":
        raise UnsupportedModelError(
            f"{what}: architecture {head.get('general.architecture')!r}; this reads gemma3 only"
        )
    own = {k.removeprefix("gemma3."): v for k, v in head.items() if k.startswith("gemma3.")}
    settings = {new: own.pop(old) for old, new in _SETTINGS.items() if old in own}
    theta = own.pop("rope.freq_base", None)
    odd = {k: v for k, v in own.items() if settings.get(_SAME.get(k, "")) != v}
    if odd or theta != THETAS["full_attention"] or len(settings) < len(_SETTINGS):
        missing = [k for k, new in _SETTINGS.items() if new not in settings]
        raise UnsupportedModelError(
            f"{what}: settings {odd}, rope.freq_base {theta}, without {missing}; not a Gemma-3 that this reader knows"
        )
    settings["query_pre_attn_scalar"] = settings["head_dim"]
    settings["rope_parameters"] = {k: {"rope_type": "default", "rope_theta": v} for k, v in THETAS.items()}
    for special in ("bos", "eos", "padding"):
        if (found := head.get(f"tokenizer.ggml.{special}_token_id")) is not None:
            settings[f"{'pad' if special == 'padding' else special}_token_id"] = found
    return settings


def _renamed(name: str, what: str) -> str:
    stem, _, rest = name.removesuffix(".weight").partition(".")
    number, _, inner = rest.partition(".")
    if stem == "blk" and inner in _LAYER:
        return f"model.layers.{number}.{_LAYER[inner]}.weight"
    if name.removesuffix(".weight") in _OUTER:
        return f"{_OUTER[name.removesuffix('.weight')]}.weight"
    raise UnsupportedModelError(f"{what}: tensor {name!r} has no place in a Gemma-3 text model")


def _header(blob: Any, what: str) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
    """Scalars and strings of the head (arrays are passed over), the tensor table, and where the data begin."""
    if bytes(blob[:4]) != b"GGUF" or (version := struct.unpack_from("<I", blob, 4)[0]) not in (2, 3):
        raise UnsupportedModelError(f"{what}: not a GGUF file of version 2 or 3")
    n_tensors, n_entries = struct.unpack_from("<QQ", blob, 8)
    cursor = _Cursor(blob, 24)
    head: dict[str, Any] = {"version": version}
    for _ in range(n_entries):
        key = cursor.text()
        head[key] = cursor.value(cursor.fixed("I"))
    table: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(n_tensors):
        name = cursor.text()
        shape = tuple(reversed([cursor.fixed("Q") for _ in range(cursor.fixed("I"))]))  # stored innermost first
        table.append((name, shape, cursor.fixed("I"), cursor.fixed("Q")))
    align = int(head.get("general.alignment", 32))
    return head, table, -(-cursor.at // align) * align


class _Cursor:
    """Reads values one behind the other."""

    def __init__(self, blob: Any, at: int) -> None:
        self.blob, self.at = blob, at

    def fixed(self, form: str) -> Any:
        found = struct.unpack_from(f"<{form}", self.blob, self.at)[0]
        self.at += struct.calcsize(f"<{form}")
        return found

    def text(self) -> str:
        n = self.fixed("Q")
        self.at += n
        return bytes(self.blob[self.at - n : self.at]).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _FIXED:
            return self.fixed(_FIXED[kind])
        if kind != _ARRAY:
            raise UnsupportedModelError(f"a GGUF value of type {kind} is not known")
        inner, n = self.fixed("I"), self.fixed("Q")
        if inner in _FIXED:
            self.at += n * struct.calcsize(f"<{_FIXED[inner]}")
        else:
            for _ in range(n):
                if inner == _STRING:
                    length = self.fixed("Q")
                    self.at += length
                else:
                    self.value(inner)
        return None
