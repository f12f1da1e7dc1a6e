"""Fixtures shared by all tests: fixed seeds, shape checks, read-only models."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

from tests.contracts import typecheck

# Shapes in annotations are checked under pytest only. The cache, its bridge to transformers and the sites of a swap are
# left out: they check what they are given, and their tests want to see those errors.
install_import_hook(
    [
        "notelens.cache.ops",
        "notelens.context",
        "notelens.intervene.kernel",
        "notelens.intervene.patch",
        "notelens.models.model",
        "notelens.readout",
        "notelens.rope",
    ],
    f"{typecheck.__name__}.check",
)

torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Every test starts from the same state of every generator."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries draw from the global generator
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The hand-set decoder; read-only."""
    from tests.tiny import tiny_model

    return tiny_model()


_RANDOM = ("llama", "llama3", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss")


@pytest.fixture(scope="session", params=("tiny", *_RANDOM))
def any_model(request: pytest.FixtureRequest) -> Any:
    """The tiny decoder and small random models of every family; read-only. ``any_model.name`` says which."""
    from tests.contracts.models import note_model

    return note_model(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The embedded real model with its competence adapter; loaded on first use; read-only."""
    import notelens

    return notelens.load("smollm2")


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """The tokenizer of the embedded model, with its chat template."""
    from notelens.models.load import default_cache_dir
    from notelens.zoo.embedded import embedded_tokenizer

    return embedded_tokenizer("smollm2", cache_dir=default_cache_dir())
