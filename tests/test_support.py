"""The README's support table is what the registries say, and every proof that it names exists."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from notelens.attention import ADAPTERS
from notelens.cache.hf import CONVERSIONS
from notelens.models import FAMILIES
from notelens.models.refused import REFUSED
from notelens.models.support import BEGIN, END, support_lines, support_table
from notelens.runs.cli import main
from tests.contracts import models as contract

ROOT = Path(__file__).parent.parent
PROOFS = sorted({*(ADAPTERS.get(n).proof for n in ADAPTERS), *(proof for *_, proof in CONVERSIONS)})


def test_the_readme_says_what_the_registries_say() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == 1
    found = text.split(BEGIN)[1].split(END)[0].strip()
    assert found == support_table().strip(), "write support_table() between the markers of README.md"


def test_nothing_is_missing_from_the_table() -> None:
    table = support_table()
    for name in (*ADAPTERS, *FAMILIES):
        assert f"| `{name}` |" in table
    for name in REFUSED:
        assert re.search(rf"\b{name}\b", table)


@pytest.mark.parametrize("proof", PROOFS)
def test_every_proof_exists(proof: str) -> None:
    file, name = proof.split("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("llama", ["layers 0-2: gqa: adapter; a move changes rotary channels of keys"]),
        ("smollm3", ["layers 0-2: gqa: adapter", "layers 3: no_rope: free; a move changes nothing"]),
        (
            "gemma2",
            [
                "layers 0, 2: sliding, window 8: adapter",
                "layers 1, 3: gqa",
                "attention kernel: eager only, because of soft",
            ],
        ),
        (
            "falcon_h1",
            ["layers 0-2: hybrid: partial", "  limit: the state of a changed prefix", "hooks: on whole prompts only"],
        ),
        ("longrope", ["layers 0-2: one_table: partial", "positions: up to 250, because from 250 on"]),
        ("deepseek_v3", ["layers 0-2: mla: adapter; a move changes the rotary slice"]),
    ],
)
def test_support_of_one_model(name: str, lines: list[str]) -> None:
    found = support_lines(contract.note_model(name))
    for line in lines:
        assert any(f.startswith(line) for f in found), (line, found)


def test_the_command_line_says_what_is_supported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "falcon_h1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "ok   moved rows = rows computed in place, far" in out and "note hooks run on whole prompts only" in out
    assert "hybrid: partial; a move changes" in out and out.strip().endswith("falcon_h1 passed its gate")


def test_the_command_line_says_why_not(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["gate", str(tmp_path)]) == 2
    assert "learned positions: the position is added to the embedding" in capsys.readouterr().err
