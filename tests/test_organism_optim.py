"""How organisms are optimised: Muon against torch's, its cap, which parameters it gets, and the previous word."""

import random

import pytest
import torch

from experiments.organism_data import recognised
from experiments.organism_models import ARCHITECTURES, build
from experiments.organism_optim import SCORES_CAP, BatchedMuon, PreviousWord, grouped, orthogonalised


def test_singular_values_move_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(3, 16, 40)))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    """torch computes the iteration in bfloat16, hence the tolerance; a step of the other sign or scale is far outside it."""
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = BatchedMuon([ours], lr=0.1)
    other = torch.optim.Muon([theirs], lr=0.1, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(shape)
        for p, o in ((ours, mine), (theirs, other)):
            p.grad = gradient.clone()
            o.step()
    mine_at, theirs_at = ours.detach(), theirs.detach()
    moved = float((theirs_at - start).norm())
    assert moved > 0.1 and float((mine_at - theirs_at).norm()) / moved < 0.03


def test_matrices_are_updated_each_by_its_own_gradient() -> None:
    torch.manual_seed(0)
    together = [torch.nn.Parameter(torch.randn(8, 12)) for _ in range(3)]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in together]
    for p, q in zip(together, alone, strict=True):
        p.grad = torch.randn(8, 12)
        q.grad = p.grad.clone()
        BatchedMuon([q], lr=0.1).step()
    BatchedMuon(together, lr=0.1).step()
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(together, alone, strict=True))


def test_a_capped_matrix_stays_at_its_size() -> None:
    torch.manual_seed(0)
    free, capped = torch.nn.Parameter(0.02 * torch.randn(16, 16)), torch.nn.Parameter(torch.zeros(16, 16))
    optimisers = BatchedMuon([free], lr=0.5), BatchedMuon([capped], lr=0.5, cap=SCORES_CAP)
    direction = torch.randn(16, 16)
    for _ in range(10):
        free.grad, capped.grad = direction.clone(), direction.clone()
        for optimiser in optimisers:
            optimiser.step()
    sizes = [float(p.detach().square().mean().sqrt()) for p in (free, capped)]
    assert sizes[0] > 2 * SCORES_CAP and sizes[1] == pytest.approx(SCORES_CAP, rel=1e-4)


def test_vectors_are_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="updates matrices"):
        BatchedMuon([p], lr=0.1).step()


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_every_parameter_is_in_one_group(family: str) -> None:
    architecture = ARCHITECTURES[family]
    named = dict(build(architecture.config(50), architecture.attention).named_parameters())
    groups = grouped(named)
    every = [*groups.scores, *groups.matrices, *groups.others]
    assert len(every) == len(named) and {id(p) for p in every} == {id(p) for p in named.values()}
    assert all(p.ndim == 2 for p in (*groups.scores, *groups.matrices))
    assert bool(groups.scores) == (not any("q_norm" in name for name in named))
    table = named["model.embed_tokens.weight"]
    assert any(p is table for p in groups.others)


def test_the_previous_word_is_what_is_asked_for() -> None:
    """Hidden states that hold the previous word's embedding cost little, those that hold the current word's cost much."""
    torch.manual_seed(0)
    table, ids = torch.randn(30, 64), torch.randint(0, 30, (4, 20))
    auxiliary = PreviousWord(64)
    torch.nn.init.eye_(auxiliary.read.weight)
    shifted = table[torch.cat([ids[:, :1], ids[:, :-1]], 1)]
    assert auxiliary(shifted, ids, table).item() < 0.1 < 2.0 < auxiliary(table[ids], ids, table).item()


def test_words_are_labelled_by_whether_they_were_there() -> None:
    rng, seen = random.Random(0), set[int]()
    for _ in range(20):
        sample = recognised(rng, range(10, 200), 1, (2, 3), 40)
        assert len(sample.ids) <= 40 and sum(sample.weights) >= 8
        first = sample.ids[1 : sample.weights.index(1.0) - 1]
        for at, weight in enumerate(sample.weights):
            if weight:
                assert sample.ids[at] == (2 if sample.ids[at - 1] in first else 3)
                seen.add(sample.ids[at])
    assert seen == {2, 3}
