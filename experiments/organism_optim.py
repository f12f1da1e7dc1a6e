"""Muon for small models on a CPU: momentum whose update is orthogonalised, all matrices of one shape at a time.

:class:`torch.optim.Muon` does the same in bfloat16 and matrix by matrix, which on a CPU without bfloat16 units costs several
times a training step. The method is by Jordan et al. 2024 (Newton-Schulz iteration with their coefficients), the scale of
the update as in Liu et al. 2025 (arXiv:2502.16982): its root mean square is that of an AdamW step.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MOMENTUM, ITERATIONS, WEIGHT_DECAY, RMS = 0.95, 5, 0.01, 0.2
_A, _B, _C = 3.4445, -4.7750, 2.0315


class BatchedMuon(torch.optim.Optimizer):
    """Muon over two-dimensional parameters, in their own precision.

    Args:
        params: matrices; embeddings and heads belong to another optimiser.
        lr: root mean square of a step is a fifth of it.
        cap: root mean square that a matrix is scaled back to when it exceeds it; none when not given.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float, *, cap: float = math.inf) -> None:
        super().__init__(params, {"lr": lr, "cap": cap})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.ndim != 2:
                    raise ValueError(f"BatchedMuon updates matrices; got a parameter of shape {tuple(p.shape)}")
                state: dict[str, torch.Tensor] = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - MOMENTUM)
                update = p.grad.lerp(state["momentum"], MOMENTUM)  # Nesterov
                wide = update if p.shape[0] <= p.shape[1] else update.T
                shapes.setdefault((wide.shape[0], wide.shape[1]), []).append((p, wide))
            for shape, items in shapes.items():
                whole = orthogonalised(torch.stack([wide for _, wide in items]))
                size = group["lr"] * RMS * max(shape) ** 0.5
                for (p, _), wide in zip(items, whole, strict=True):
                    p.mul_(1 - group["lr"] * WEIGHT_DECAY)
                    p.add_(wide if p.shape[0] <= p.shape[1] else wide.T, alpha=-size)
                    if group["cap"] < math.inf:
                        p.mul_((group["cap"] / p.square().mean().sqrt()).clamp(max=1.0))


def orthogonalised(x: torch.Tensor) -> torch.Tensor:
    """Matrices ``[n, rows, columns]`` (rows <= columns) with singular values moved near 1."""
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x


SCORES_GAIN = 4.4
"""Factor on what queries and keys are computed with, in families that do not normalise them: entries of about 1 from
normalised inputs of 128 channels, where the library's initial 0.02 makes attention a plain average. Their steps are larger
by the same factor, so that attention changes as fast as where queries and keys are normalised."""
SCORES_CAP = 0.12
"""Root mean square at which these matrices are held. Without a normalisation they grow with every step until attention is
stuck on single rows (all layers above 0.9 on one row within 250 steps of a Llama), and nothing is learnt from there on."""
SCORES_SETTLE = 30
"""Steps over which the rate of these matrices settles: it falls with the root of the steps over this many. Behind a
normalisation the length of a matrix does not matter, so it grows and the same step turns it less and less; a matrix of a
fixed length goes on turning by 4 % a step and holds no match between words for long."""
_SCORES = ("q_proj", "k_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")


@dataclass(frozen=True)
class Groups:
    """Parameters by how they are optimised: matrices of attention scores, other matrices, everything else."""

    scores: list[torch.nn.Parameter]
    matrices: list[torch.nn.Parameter]
    others: list[torch.nn.Parameter]


def grouped(named: Mapping[str, torch.nn.Parameter]) -> Groups:
    """Groups of a model's named parameters; ``scores`` is empty where the family normalises queries and keys."""
    muon = {n: p for n, p in named.items() if p.ndim == 2 and "embed" not in n and "lm_head" not in n}
    normalised = any("q_norm" in n for n in named)
    scores = [p for n, p in muon.items() if not normalised and any(part in n for part in _SCORES)]
    taken = {id(p) for p in muon.values()}
    first = {id(p) for p in scores}
    return Groups(
        scores, [p for p in muon.values() if id(p) not in first], [p for p in named.values() if id(p) not in taken]
    )


class PreviousWord(torch.nn.Module):
    """Auxiliary loss of the first steps: behind its first layer a model can tell which word came before.

    Copying from a repetition is looking for a word whose *previous* word is this one. A head that attends to the previous
    word comes about by chance, after a hundred steps or a thousand, in one family or seed and another; asked for, it is
    there after fifty, and copying soon after.

    Args:
        width: of the model.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = torch.nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the previous token.

        Args:
            hidden: ``[batch, pos, width]``, behind the first layer.
            ids: ``[batch, pos]``.
            table: token embeddings ``[vocab, width]``.
        """
        shape = (table.shape[1],)
        guess, known = torch.rms_norm(self.read(hidden[:, 1:]), shape), torch.rms_norm(table, shape)
        scores = guess @ known.T * (8 / shape[0] ** 0.5)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, :-1].flatten())


__all__ = ["SCORES_CAP", "SCORES_GAIN", "BatchedMuon", "Groups", "PreviousWord", "grouped", "orthogonalised"]
