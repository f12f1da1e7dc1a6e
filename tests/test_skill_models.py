"""Skills of real models as files: bit-exact, and refused by any other model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from notelens.compose import Skill, compile_skill
from notelens.compose.tag import model_tag
from notelens.errors import ArtefactError
from notelens.models.load import wrap
from tests.contracts.models import note_model, random_hf, random_ids
from tests.tiny import new_tokenizer, wrapped

IDS = list(random_ids(9, seed=2))


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "tiny"])
@pytest.mark.parametrize("scheme", ["rotated", "unrotated"])
def test_a_file_is_the_skill(tmp_path: Path, name: str, scheme: str) -> None:
    model = note_model(name)
    for condition, prefix in (("isolated", None), ("neutral", IDS[:2]), ("prefix", IDS[:4])):
        skill = compile_skill(model, IDS, name="a", condition=condition, prefix=prefix, scheme=scheme)
        skill.save(tmp_path / "a.skill")
        found = Skill.load(tmp_path / "a.skill", model)
        assert found == replace(skill, cache=found.cache) and found.key == skill.key
        assert found.cache.digest() == skill.cache.digest() and found.cache.history == skill.cache.history


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = note_model("llama")
    skill = compile_skill(model, IDS, name="a")
    skill.save(tmp_path / "a.skill")
    theta = wrapped(random_hf("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e4}), "x", gate=False)
    assert model_tag(theta).weights_sha256 == skill.tag.weights_sha256  # the same weights, another table
    half = wrapped(random_hf("llama", dtype=torch.bfloat16), "x", gate=False)
    other = new_tokenizer()
    other.add_tokens(["more"])
    vocabulary = wrap(random_hf("llama"), other, name="x", gate=False)
    for wrong, message in (
        (note_model("qwen3"), "made by model 'llama'"),
        (theta, "another RoPE table"),
        (half, "made by model 'llama'"),
        (vocabulary, "another tokenizer"),
    ):
        with pytest.raises(ArtefactError, match=message):
            Skill.load(tmp_path / "a.skill", wrong)
        with pytest.raises(ArtefactError, match=message):
            skill.at(wrong, 0)
