"""An embedded model written for an engine is the model that the library loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from experiments import merge_adapter
from notelens.zoo.embedded import EMBEDDED
from notelens.zoo.organisms import build_tokenizer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A small random model in place of the embedded one; how it was asked for."""
    calls: list[dict[str, Any]] = []

    def load(name: str, **options: Any) -> tuple[Any, Any]:
        calls.append({"name": name, **options})
        torch.manual_seed(0)
        tokenizer = build_tokenizer(["if", "then", "wait"])
        config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
        model: Any = LlamaForCausalLM(config)
        return model.to(options["dtype"]).eval(), tokenizer

    monkeypatch.setattr(merge_adapter, "load_embedded", load)
    return calls


def test_the_folder_is_the_model(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "models" / "smollm2"
    assert merge_adapter.main(["smollm2", str(out), "--dtype", "float32"]) == 0
    assert asked[0]["name"] == "smollm2" and asked[0]["competence"] is True and asked[0]["dtype"] == torch.float32
    made: Any = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32)
    wanted, tokenizer = merge_adapter.load_embedded("smollm2", dtype=torch.float32)
    ids = torch.tensor([tokenizer("if wait then")["input_ids"]])
    assert AutoTokenizer.from_pretrained(str(out))("if wait then")["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        assert torch.equal(made(ids).logits, wanted(ids).logits)
    facts = json.loads((out / "notelens.json").read_text())
    assert facts["base_sha256"] == EMBEDDED["smollm2"].sha256 and len(facts["adapter_sha256"]) == 64
    assert {p.name for p in out.parent.iterdir()} == {"smollm2"}, "nothing half-written is left"


def test_bare_and_refusals(asked: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge_adapter.main(["smollm2", str(tmp_path / "bare"), "--bare"]) == 0
    assert asked[-1]["competence"] is False and asked[-1]["dtype"] == torch.bfloat16
    assert json.loads((tmp_path / "bare" / "notelens.json").read_text())["adapter_sha256"] is None
    n = len(asked)
    assert merge_adapter.main(["smollm2", str(tmp_path / "bare")]) == 2
    assert "is there already" in capsys.readouterr().err and len(asked) == n, "said before anything is loaded"
    assert merge_adapter.main(["smolm2", str(tmp_path / "x")]) == 2
    assert "unknown model 'smolm2'; did you mean 'smollm2'" in capsys.readouterr().err
