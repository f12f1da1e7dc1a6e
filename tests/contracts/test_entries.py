"""Every entry of every registry is complete; incomplete ones are noticed."""

from typing import Any, ClassVar

import pytest
from transformers import AutoConfig

from notelens.models import FAMILIES
from notelens.probes import PROBES
from notelens.probes.base import Probe
from notelens.registry import Registry
from notelens.tasks import TASKS
from tests.contracts.entries import family_problems, probe_problems, task_problems


@pytest.mark.parametrize("name", PROBES.names())
def test_probe(name: str) -> None:
    probe = PROBES.get(name)
    assert issubclass(probe, Probe)
    assert probe_problems(name, probe) == []


@pytest.mark.parametrize("name", TASKS.names())
def test_task(name: str) -> None:
    assert task_problems(name, TASKS.get(name)) == []


@pytest.mark.parametrize("name", FAMILIES.names())
def test_family(name: str) -> None:
    family = FAMILIES.get(name)
    assert family_problems(name, family) == []
    config = AutoConfig.for_model(name)
    geometry = family().geometry(config)
    assert geometry.n_layers == family().text_config(config).num_hidden_layers
    assert all(layer.n_heads % layer.n_kv_heads == 0 for layer in geometry.layers)
    assert any(layer.rope_theta for layer in geometry.layers)  # SmolLM3 leaves every fourth layer unrotated


@pytest.mark.parametrize("registry", [PROBES, TASKS, FAMILIES], ids=lambda r: r.kind)
def test_entries_are_distinct_classes(registry: Registry[type]) -> None:
    classes = [registry.get(name) for name in registry]
    assert len(set(classes)) == len(classes) and all(isinstance(c, type) for c in classes)


class _Complete(Probe):
    """Measures nothing."""

    name = "complete"
    paper_ref = "section 3"
    claim = "The decision reads the notes."
    falsifier = "Patching the notes changes nothing."

    def items(self, instances: Any, stage: str, earlier: Any) -> list[Any]:
        return []

    def measure(self, store: Any, item: Any) -> list[Any]:
        return []

    def aggregate(self, rows: Any, *, seed: int = 0) -> list[Any]:
        return []


def test_the_probe_contract_passes_a_complete_probe() -> None:
    assert probe_problems("complete", _Complete) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"__doc__": None}, "docstring's first line is ''"),
        ({"name": "other"}, "registered as 'complete' but is called 'other'"),
        ({"claim": ""}, "claim is not a sentence"),
        ({"falsifier": "no"}, "falsifier is not a sentence"),
        ({"falsifier": _Complete.claim}, "claim and falsifier are the same text"),
        ({"paper_ref": "somewhere"}, "paper_ref names no place"),
        ({"swap": "both"}, "swap is 'both'"),
        ({"stages": ()}, "stages () are empty"),
        ({"stages": ("a", "a")}, "stages ('a', 'a') are empty or repeat"),
        ({"measure": None}, "measure is not implemented"),
    ],
)
def test_the_probe_contract_notices(change: dict[str, Any], problem: str) -> None:
    entry = type("Broken", (_Complete,), {"__doc__": "Measures nothing.", "__module__": __name__, **change})
    found = probe_problems("complete", entry)
    assert len(found) == 1 and problem in found[0], found


def test_the_probe_contract_notices_a_missing_method() -> None:
    class Half(Probe):
        """Has no measure."""

        name, paper_ref, claim, falsifier = "complete", "section 3", _Complete.claim, _Complete.falsifier

    assert probe_problems("complete", Half) == [f"{m} is not implemented" for m in ("items", "measure", "aggregate")]


class _Silent:
    name = "silent"

    def instances(self, n: int) -> list[Any]:
        return []


class _WrongFamily:
    """Handles something else."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt2",)


def test_the_task_and_family_contracts_notice() -> None:
    assert task_problems("loud", _Silent) == [
        "docstring's first line is ''",
        "registered as 'loud' but is called 'silent'",
        "instances takes ['self', 'n']",
    ]
    assert task_problems("int", int)[-1] == "instances is missing"
    assert family_problems("llama", _WrongFamily) == ["registered as 'llama' but handles ('gpt2',)"]
