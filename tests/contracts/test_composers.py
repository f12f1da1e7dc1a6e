"""Every composer keeps its contracts; each contract notices a composer that breaks it."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from notelens.cache.kv import KVCache
from notelens.compose import COMPOSERS, Composed, Composer, composer
from notelens.compose.base import Chunk, Placed
from notelens.compose.full_prefill import FullPrefill
from notelens.compose.no_shift import NoShift
from notelens.compose.seam import Seam
from notelens.compose.shift import Shift
from notelens.errors import ComposeError
from notelens.registry import Registry
from tests.contracts import composers as contract
from tests.contracts.models import note_model

MODELS = ("llama", "llama3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "mixtral")


@cache
def case(name: str, model_name: str) -> tuple[Any, Composer, Any]:
    model = note_model(model_name)
    skills = contract.skills_of(model)
    return model, contract.built(name, model, skills), skills


@pytest.mark.parametrize("name", COMPOSERS.names())
def test_entry(name: str) -> None:
    entry = COMPOSERS.get(name)
    assert issubclass(entry, Composer)
    assert contract.entry_problems(name, entry) == []
    assert composer(name).method.partition("@")[0] == name


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", COMPOSERS.names())
def test_contracts(name: str, model_name: str) -> None:
    model, method, skills = case(name, model_name)
    problems = [f"identity: {p}" for p in contract.identity_problems(model, method)]
    for label, check in contract.CONTRACTS.items():
        problems += [f"{label}: {p}" for p in check(model, method, skills)]
    assert problems == []


# --- broken members ---------------------------------------------------------------------------------------------------


class _Lies(NoShift):
    """Says that it repositions, and that what it gives is exact."""

    repositions = True

    def splice(self, model: Any, before: KVCache | None, chunk: Chunk) -> Placed:
        placed = super().splice(model, before, chunk)
        return Placed(placed.cache.replace_tensors(placed.cache.keys, placed.cache.values, history=()), 0.0)


class _Honest(Shift):
    """Says that it does not reposition, and does."""

    repositions = False


class _Overwrites(Shift):
    """Changes the rows it is given."""

    def splice(self, model: Any, before: KVCache | None, chunk: Chunk) -> Placed:
        assert chunk.rows is not None
        chunk.rows.values[0].add_(1.0)
        return super().splice(model, before, chunk)


class _Random(Shift):
    """Gives something else every time."""

    def splice(self, model: Any, before: KVCache | None, chunk: Chunk) -> Placed:
        placed = super().splice(model, before, chunk)
        noisy = [v + 1e-3 * torch.randn_like(v) for v in placed.cache.values]
        return Placed(placed.cache.replace_tensors(placed.cache.keys, noisy, history=("noise",)), 0.0)


class _Cheap(Seam):
    """Recomputes rows and does not count them."""

    def splice(self, model: Any, before: KVCache | None, chunk: Chunk) -> Placed:
        return replace(super().splice(model, before, chunk), tokens=0.0)


class _Wasteful(FullPrefill):
    """Recomputes rows that were right."""

    exact_when = "same_prefix"


class _Deaf(Shift):
    """Runs the text as if nothing had been spliced before it."""

    def join(self, model: Any, chunks: Any) -> Composed:
        found = super().join(model, chunks)
        return replace(found, hidden=model.prefill(chunks[-1].token_ids).hidden)


class _Short(Shift):
    """Leaves out the last part."""

    def join(self, model: Any, chunks: Any) -> Composed:
        return super().join(model, chunks[:-1] or chunks)


@pytest.mark.parametrize(
    ("label", "broken", "problem"),
    [
        ("layer 0", _Lies(), "layer 0 is off by"),
        ("layer 0", _Honest(), "says that it does not reposition"),
        ("mark", _Lies(), "marked exact but rows differ"),
        ("layout", _Overwrites(), "a part was changed"),
        ("layout", _Random(), "a second run gives something else"),
        ("cost", _Cheap(2), "0.0 were counted"),
        ("cost", _Wasteful(), "rows that were right"),
        ("reading", _Deaf(), "text behind the splice differs"),
    ],
)  # fmt: skip
def test_each_contract_notices(label: str, broken: Composer, problem: str) -> None:
    model = note_model("llama")
    found = contract.CONTRACTS[label](model, broken, contract.skills_of(model))
    assert any(problem in p for p in found), found


def test_the_identity_contract_notices() -> None:
    found = contract.identity_problems(note_model("llama"), _Random())
    assert found and all("a cache" in p for p in found)


def test_compose_refuses_what_a_broken_composer_gives() -> None:
    model = note_model("llama")
    with pytest.raises(ComposeError, match=r"rows must stand at 0\.\.17 in the order of the parts"):
        contract.compose(model, [contract.BEFORE, contract.SKILL], method=_Short())


class _Nameless(Shift):
    name = "other"
    paper_ref = "nowhere"
    exact_when = "sometimes"

    @classmethod
    def parse(cls, value: str | None) -> Composer:
        return cls()


def test_the_entry_contract_notices() -> None:
    assert contract.entry_problems("shift", _Nameless) == [
        "it has no docstring of its own",
        "registered as 'shift' but is called 'other'",
        "paper_ref names no place: 'nowhere'",
        "exact_when is 'sometimes'",
        "it takes a parameter that is none",
    ]


def test_entries_are_distinct_classes() -> None:
    registry: Registry[type] = COMPOSERS
    classes = [registry.get(name) for name in registry]
    assert len(set(classes)) == len(classes) and all(isinstance(c, type) for c in classes)
