"""Skills that do not belong here are refused by every composer before anything is run, and a failure leaves nothing behind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from notelens.cache.kv import KVCache
from notelens.cache.library import SkillLibrary
from notelens.compose import Skill, compile_skill, compose
from notelens.compose import base as composing
from notelens.errors import ArtefactError, ComposeError, NonFiniteError
from notelens.models.load import wrap
from tests.contracts.models import note_model, random_hf, random_ids
from tests.tiny import new_tokenizer, wrapped

BEFORE, SKILL, AFTER = (list(random_ids(n, seed=s)) for n, s in ((7, 1), (11, 2), (4, 3)))
METHODS = (
    "full_prefill",
    "no_shift",
    "shift",
    "seam@2",
    "epic@2",
    "cacheblend@0.5",
    "prefix_conditioned",
    "linked",
    "references",
)


def other_table(scheme: str) -> tuple[Any, Skill, str]:
    rope = {"rope_type": "default", "rope_theta": 5e4}
    model = wrapped(random_hf("llama", rope_parameters=rope), "x", gate=False)
    return model, compile_skill(note_model("llama"), SKILL, name="s", scheme=scheme), "another RoPE table"


def other_tokenizer(scheme: str) -> tuple[Any, Skill, str]:
    tokenizer = new_tokenizer()
    tokenizer.add_tokens(["more"])
    model = wrap(random_hf("llama"), tokenizer, name="x", gate=False)
    return model, compile_skill(note_model("llama"), SKILL, name="s", scheme=scheme), "another tokenizer"


def other_type(scheme: str) -> tuple[Any, Skill, str]:
    """The same weights by their hash, rows of another type."""
    skill = compile_skill(note_model("llama"), SKILL, name="s", scheme=scheme)
    half = [t.to(torch.bfloat16) for t in skill.cache.keys], [t.to(torch.bfloat16) for t in skill.cache.values]
    cache = skill.cache.replace_tensors(*half, history=())
    return (
        note_model("llama"),
        replace(skill, cache=cache, tag=replace(skill.tag, dtype="bfloat16")),
        "computes in float32",
    )


def other_weights(scheme: str) -> tuple[Any, Skill, str]:
    skill = compile_skill(note_model("llama3"), SKILL, name="s", scheme=scheme)
    return note_model("llama"), skill, "made by model 'llama3'"


@pytest.mark.parametrize("scheme", ["rotated", "unrotated"])
@pytest.mark.parametrize("case", [other_table, other_tokenizer, other_type, other_weights])
def test_a_skill_of_another_model_is_refused_before_anything_runs(
    case: Any, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, skill, message = case(scheme)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was run")

    monkeypatch.setattr(type(model), "prefill", never)
    monkeypatch.setattr(composing, "extend", never)
    for method in METHODS:
        with pytest.raises(ArtefactError, match=message):
            compose(model, [BEFORE, skill, AFTER], method=method)


def test_an_empty_skill_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    model = note_model("llama")
    skill = compile_skill(model, SKILL, name="s")
    none = KVCache(
        tuple(k[:, :0] for k in skill.cache.keys), tuple(v[:, :0] for v in skill.cache.values),
        torch.empty(0, dtype=torch.int64), (),
    )  # fmt: skip
    for method in METHODS:
        with pytest.raises(ComposeError, match="skill 's' has no rows"):
            compose(model, [BEFORE, replace(skill, cache=none), AFTER], method=method)
    library = SkillLibrary(tmp_path / "library")
    for text in ("", []):
        with pytest.raises(ComposeError, match="is empty"):
            library.put(compile_skill(model, text, name="s").to_file())
    assert len(library) == 0 and not list((tmp_path / "library").glob("*.skill"))


def test_a_failure_on_the_way_leaves_parts_and_later_compositions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = note_model("llama")
    skill = compile_skill(model, SKILL, name="s")
    parts = [BEFORE, skill, AFTER, skill, AFTER]
    first = compose(model, parts)
    digests = skill.cache.digest(), first.cache.digest()
    real, calls = composing.extend, [0]

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise NonFiniteError("the output of 4 rows is not finite")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(composing, "extend", failing)
        with pytest.raises(NonFiniteError):
            compose(model, parts)
    assert calls[0] == 2 and (skill.cache.digest(), first.cache.digest()) == digests
    assert compose(model, parts).cache.digest() == digests[1]


@pytest.mark.parametrize("scheme", ["rotated", "unrotated"])
def test_a_window_warns_and_keeps_every_row(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("mistral", "gemma2", "gemma3_text", "gpt_oss"):
        model = note_model(name)
        skill = compile_skill(model, SKILL, name="policy", scheme=scheme)
        caplog.clear()
        found = compose(model, [BEFORE, skill, AFTER])
        assert "policy has 11 rows, more than the window of 8" in caplog.text, name
        assert {k.shape[1] for k in found.cache.keys} == {22}
        full = model.prefill(found.token_ids).cache
        assert float((found.cache.keys[0] - full.keys[0]).abs().max()) <= 1e-5
