"""Skill files: bit-exact between processes, and refused when anything in them was changed or does not fit the model."""

import hashlib
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notelens.cache.artefact import SkillFile, SkillHeader, check_model, dump, parse, read_skill, renamed, write_skill
from notelens.errors import ArtefactError, RecordError
from tests.skill_writers import TAG, toy_skill


def resigned(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with a changed header and a digest that fits again: what only someone who wants to deceive would write."""
    size = 8 + int.from_bytes(raw[:8], "little")
    outer = json.loads(raw[8:size])
    header = json.loads(outer["__metadata__"]["notelens"])
    change(header)
    header["digest"] = "0" * 64
    outer["__metadata__"]["notelens"] = json.dumps(header, sort_keys=True, separators=(",", ":"))
    text = json.dumps(outer, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text + raw[size:]
    at = whole.index(b"0" * 64)
    return whole[:at] + hashlib.sha256(whole).hexdigest().encode() + whole[at + 64 :]


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_bytes_and_values(self, tmp_path: Path, dtype: str) -> None:
        skill = toy_skill("a", tag=replace(TAG, dtype=dtype))
        assert write_skill(skill, tmp_path / "a.skill") == len(dump(skill))
        found = read_skill(tmp_path / "a.skill")
        assert found.header == skill.header and dump(found) == dump(skill) and found.nbytes == skill.nbytes
        for a, b in zip((*found.keys, *found.values), (*skill.keys, *skill.values), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype

    def test_between_processes_without_transformers(self, tmp_path: Path) -> None:
        """The reader imports torch and safetensors only, and gets the same bytes."""
        write_skill(toy_skill("a", n=40), tmp_path / "a.skill")
        code = (
            "import sys; from pathlib import Path; from notelens.cache.artefact import read_skill, dump; "
            "from notelens.cache.library import SkillLibrary; import hashlib; "
            "found = read_skill(Path(sys.argv[1])); print(hashlib.sha256(dump(found)).hexdigest()); "
            "print(sorted({m.split('.')[0] for m in sys.modules} & "
            "{'transformers', 'transformer_lens', 'tokenizers', 'jaxtyping', 'sklearn', 'scipy', 'pydantic'}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "a.skill")], capture_output=True, text=True, check=True
        )
        digest, modules = done.stdout.splitlines()
        assert digest == hashlib.sha256((tmp_path / "a.skill").read_bytes()).hexdigest() and modules == "[]"

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(
        n=st.integers(1, 6),
        seed=st.integers(0, 99),
        dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
        history=st.lists(st.text(max_size=20), max_size=3),
        name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    )
    def test_any_skill(self, n: int, seed: int, dtype: str, history: list[str], name: str) -> None:
        plain = toy_skill(name, n=n, seed=seed, tag=replace(TAG, dtype=dtype))
        header = replace(plain.header, history=tuple(history), exact=not history)
        skill = SkillFile(header, plain.keys, plain.values)
        assert parse(dump(skill), "x").header == header and dump(parse(dump(skill), "x")) == dump(skill)


class TestMutations:
    def mutated(self, raw: bytes, rng: random.Random) -> bytes:
        size = 8 + int.from_bytes(raw[:8], "little")
        low, high = rng.choice([(0, 8), (8, size), (size, len(raw)), (0, len(raw))])
        at = rng.randrange(low, high)
        kind = rng.randrange(8)
        if kind == 0:
            return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
        if kind == 1:
            return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        if kind == 2:
            return raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:]
        if kind == 3:
            return raw[:at] + raw[at + rng.randrange(1, 65) :]
        if kind == 4:
            return raw[:at]
        if kind == 5:
            return raw + rng.randbytes(rng.randrange(1, 9))
        if kind == 6:
            other = rng.randrange(len(raw))
            out = bytearray(raw)
            out[at], out[other] = out[other], out[at]
            return bytes(out)
        start, stop = sorted((at, rng.randrange(len(raw))))
        return raw[:start] + raw[start:stop][::-1] + raw[stop:]

    def test_2000_random_ones_are_all_refused(self) -> None:
        raw, rng, n = dump(toy_skill("a")), random.Random(0), 0
        while n < 2000:
            changed = self.mutated(raw, rng)
            if changed == raw:
                continue
            n += 1
            with pytest.raises(ArtefactError):
                parse(changed, "a.skill")

    def test_every_single_byte_counts(self) -> None:
        raw = dump(toy_skill("a", n=1))
        for at in range(len(raw)):
            with pytest.raises(ArtefactError):
                parse(raw[:at] + bytes([raw[at] ^ 0x20]) + raw[at + 1 :], "a.skill")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda h: h.update(token_ids=[]), "token_ids are no list of ids, or empty"),
            (lambda h: h.update(token_ids=[1, 2, 3, 4]), "layer 0: keys are"),
            (lambda h: h.update(token_ids=[1, 2, True]), "token_ids are no list of ids"),
            (lambda h: h.update(start=5), "is not the number of prefix ids"),
            (lambda h: h.update(scheme="sideways"), "scheme 'sideways' is not one of"),
            (lambda h: h.update(condition="prefix"), "contradict each other"),
            (lambda h: h.update(exact=False), "exact rows have no history"),
            (lambda h: h.update(history=["x"]), "exact rows have no history"),
            (lambda h: h.update(extra=1), r"\['extra'\] are missing or unknown"),
            (lambda h: h.pop("gate"), r"\['gate'\] are missing or unknown"),
            (lambda h: h.update(schema=2), "has header schema 2"),
            (lambda h: h.update(format="other"), "has no readable notelens header"),
            (lambda h: h.update(name="../a"), "is not allowed"),
            (lambda h: h["model"].update(dtype="float64"), "dtype 'float64' is not one of"),
            (lambda h: h["model"].update(dtype="bfloat16"), "the header says"),
            (lambda h: h["model"].update(shapes=[[1, 4, 2]]), "tables do not name a frequency table per layer"),
            (lambda h: h["model"].update(tables=[0, 7]), "tables do not name a frequency table per layer"),
            (lambda h: h["model"].update(weights_sha256="x"), "weights_sha256 is no SHA-256"),
            (lambda h: h["model"].update(frequencies=[["a"]]), "malformed"),
            (lambda h: h.update(model=3), "malformed"),
        ],
    )  # fmt: skip
    def test_a_signed_header_that_makes_no_sense(self, change: Any, message: str) -> None:
        with pytest.raises(ArtefactError, match=message):
            parse(resigned(dump(toy_skill("a")), change), "a.skill")

    def test_the_resigning_of_this_test_is_right(self) -> None:
        raw = dump(toy_skill("a"))
        assert parse(resigned(raw, lambda h: h.update(name="b")), "x").header.name == "b"


class TestForeignFiles:
    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"short",
            pickle.dumps({"a": 1}),
            safetensors.torch.save({"a": torch.zeros(2)}),
            safetensors.torch.save({"a": torch.zeros(2)}, metadata={"notelens": "{}"}),
            safetensors.torch.save({"a": torch.zeros(2)}, metadata={"notelens": "[" * 100_000}),
            (2**63).to_bytes(8, "little") + b"{}",
        ],
        ids=["empty", "short", "pickle", "plain", "no header", "nested", "huge header"],
    )
    def test_are_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.skill").write_bytes(content)
        with pytest.raises(ArtefactError):
            read_skill(tmp_path / "a.skill")

    def test_a_torch_file_is_refused_and_never_unpickled(self, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> Any:
                return (Path.touch, (tmp_path / "boom",))

        torch.save({"a": Bomb()}, tmp_path / "a.skill")
        with pytest.raises(ArtefactError):
            read_skill(tmp_path / "a.skill")
        assert not (tmp_path / "boom").exists()

    def test_missing_and_unwritable(self, tmp_path: Path) -> None:
        with pytest.raises(ArtefactError, match="cannot be read"):
            read_skill(tmp_path / "none.skill")
        with pytest.raises(RecordError, match="could not be written"):
            write_skill(toy_skill("a"), tmp_path / "no" / "a.skill")
        assert list(tmp_path.iterdir()) == []

    def test_rows_that_are_not_finite_are_never_written(self) -> None:
        skill = toy_skill("a")
        skill.values[1][0, 0, 0] = float("nan")
        with pytest.raises(ArtefactError, match="layer 1: values hold NaN"):
            SkillFile(skill.header, skill.keys, skill.values)


class TestAnotherModel:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"weights_sha256": "d" * 64}, "it was made by model 'toy'"),
            ({"tokenizer_sha256": "d" * 64}, "another tokenizer"),
            ({"dtype": "bfloat16"}, "the model computes in bfloat16"),
            ({"shapes": ((1, 4, 2), (2, 4, 2))}, "its layers store"),
            ({"frequencies": ((1.0, 0.02),)}, "layer 0 was rotated with another RoPE table"),
            ({"tables": (0, None)}, "layer 1 was rotated with another RoPE table"),
        ],
    )
    def test_is_refused_by_tag(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ArtefactError, match=message):
            check_model(toy_skill("a").header, replace(TAG, **change))
        check_model(toy_skill("a").header, replace(TAG, name="another name for it"))


def test_names() -> None:
    assert renamed(toy_skill("a"), "b").header.name == "b"
    for bad in ("", ".a", "a/b", "a" * 101, "a\n", "ü"):
        with pytest.raises(ArtefactError, match="skill name"):
            renamed(toy_skill("a"), bad)
    assert isinstance(toy_skill("a").header, SkillHeader)
