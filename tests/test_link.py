"""A link is exact where the change of a skill is a linear function of its link rows, and refuses what it was not fitted for."""

from typing import Any

import pytest
import torch

from notelens.cache.ops import max_difference
from notelens.compose import Calibration, Linked, compile_skill, compose, fit_link
from notelens.compose.fidelity import compare
from notelens.errors import ComposeError
from tests.contracts.models import note_model, random_ids

SKILL, AFTER = list(random_ids(9, seed=2)), list(random_ids(4, seed=3))


def context(value: int, filler: int = 0) -> list[int]:
    """Six tokens, the third of which is the value."""
    ids = list(random_ids(6, seed=70 + filler))
    ids[2] = 5 + value
    return ids


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def fitted(request: pytest.FixtureRequest) -> Any:
    """A link fitted on two values in front of the skill, always the same other tokens."""
    model = note_model(request.param)
    skill = compile_skill(model, SKILL, name="skill")
    calibrations = [Calibration([context(i % 2)], AFTER) for i in range(8)]
    return model, skill, fit_link(model, skill, calibrations, k=2, rank=4)


@pytest.mark.parametrize("value", [0, 1])
def test_two_contexts_are_learnt_by_heart(fitted: Any, value: int) -> None:
    """Two points lie on a line: whatever the model does, the link must place the rows that a prefill would write."""
    model, skill, link = fitted
    parts = [context(value), skill, AFTER]
    full = compose(model, parts, method="full_prefill").cache
    linked, plain = (compose(model, parts, method=m) for m in (Linked([link]), "shift"))
    assert max_difference(linked.cache, full) < 0.02 * max_difference(plain.cache, full)
    assert not linked.exact and "rank-4 link on 2 rows" in " ".join(linked.cache.history)
    assert linked.cost.tokens_recomputed == 2


def test_it_brings_unseen_contexts_closer() -> None:
    """Pairs of value and filler that the fit never saw: readers come closer than with as many seam rows."""
    model = note_model("llama")
    skill = compile_skill(model, SKILL, name="skill")
    every = [(value, filler) for value in range(4) for filler in range(5)]
    held_out = [(value, filler) for value, filler in every if (value + filler) % 4 == 0]
    calibrations = [Calibration([context(*pair)], AFTER) for pair in every if pair not in held_out]
    link = fit_link(model, skill, calibrations, k=3, rank=8)
    kl = {"linked": 0.0, "seam@3": 0.0, "shift": 0.0}
    for pair in held_out:
        found = compare(model, [context(*pair), skill, AFTER], (5, 17), ["shift", "seam@3", Linked([link])])
        for name, decision in found.decisions.items():
            kl[name] += decision.distance.kl
        assert found.floor.kl < 1e-9
    assert kl["linked"] < kl["shift"] and kl["linked"] < kl["seam@3"], kl
    assert link.reader_kl[f"{link.ridge:g}"] == min(v for k, v in link.reader_kl.items() if k != "uncorrected")
    assert link.reader_kl[f"{link.ridge:g}"] < link.reader_kl["uncorrected"]


def test_the_place_of_the_skill_does_not_matter(fitted: Any) -> None:
    """The link lives in the skill's own frame: rows of a context shifted by three more tokens are corrected alike."""
    model, skill, link = fitted
    observed = torch.randn_like(link.observed_mean)
    assert torch.equal(link.change(link.observed_mean), link.mean)
    far, near = link.change(observed), link.change(link.observed_mean)
    assert far.shape == near.shape and not torch.allclose(far, near)
    behind = compile_skill(model, SKILL, name="skill", scheme="unrotated")
    parts = [context(0), skill, AFTER]
    same = [context(0), behind, AFTER]
    a, b = (compose(model, p, method=Linked([link])).cache for p in (parts, same))
    assert max_difference(a, b) <= 1e-5


def test_what_it_refuses(fitted: Any) -> None:
    model, skill, link = fitted
    other = compile_skill(model, AFTER, name="other")
    with pytest.raises(ComposeError, match="needs a link fitted"):
        compose(model, [context(0), other, AFTER], method=Linked([link]))
    with pytest.raises(ComposeError, match="needs a link fitted"):
        compose(model, [context(0), skill, AFTER], method="linked")
    with pytest.raises(ComposeError, match="two links for skill 'skill'"):
        Linked([link, link])
    with pytest.raises(ComposeError, match="at least 4 calibration contexts"):
        fit_link(model, skill, [Calibration([context(0)], AFTER)] * 3)
    for options in ({"k": 0}, {"rank": 0}):
        with pytest.raises(ComposeError, match="one link row and one direction"):
            fit_link(model, skill, [Calibration([context(0)], AFTER)] * 4, **options)
    with pytest.raises(ComposeError, match="is empty"):
        fit_link(model, skill, [Calibration([context(0)], [])] * 4)


def test_nothing_is_run_where_the_past_is_right(fitted: Any) -> None:
    model, skill, link = fitted
    found = compose(model, [skill, AFTER], method=Linked([link]))
    assert found.exact and found.cost.tokens_recomputed == 0
