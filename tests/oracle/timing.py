"""When the conclusion is written and when the decision commits, read with plain hooks and scikit-learn.

Residual index 0 is what enters layer 0, index ``l + 1`` what leaves layer ``l``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor


@torch.no_grad()
def residuals(hf: Any, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
    """``[n_layers + 1, n_positions, d_model]`` float32, from what each layer and the final norm are given."""
    seen: list[Tensor] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        seen.append(given[0, list(positions)].float().clone())

    modules = [*hf.model.layers, hf.model.norm]
    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
    try:
        hf(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(seen)


@torch.no_grad()
def lens_margins(hf: Any, residual: Tensor, answer_ids: tuple[int, int]) -> list[float]:
    """logit(second) - logit(first) per row of ``residual`` ``[n, d_model]``: final norm, head, output cap."""
    logits = hf.lm_head(hf.model.norm(residual.to(hf.lm_head.weight.dtype)))
    cap = getattr(hf.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return (logits[:, answer_ids[1]] - logits[:, answer_ids[0]]).float().tolist()


def commit_index(old_margins: Sequence[float], new_margins: Sequence[float]) -> int:
    """First residual index from which the margins of both members of a pair keep the sign they end with."""

    def settled(margins: Sequence[float]) -> int:
        at = len(margins) - 1
        while at > 0 and np.sign(margins[at - 1]) == np.sign(margins[-1]):
            at -= 1
        return at

    return max(settled(old_margins), settled(new_margins))


def probe_accuracy(features: Any, labels: Sequence[int], groups: Sequence[str], n_folds: int) -> float:
    """Accuracy on held-out groups of a logistic regression on standardised features; scaling is fitted in the fold."""
    x, y = np.asarray(features, dtype=np.float64), np.asarray(labels)
    right = np.zeros(len(y), dtype=bool)
    for train, test in GroupKFold(n_splits=n_folds).split(x, y, groups):
        if set(np.asarray(groups)[train]) & set(np.asarray(groups)[test]):
            raise AssertionError("a group is on both sides of a fold")
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
        right[test] = model.fit(x[train], y[train]).predict(x[test]) == y[test]
    return float(right.mean())


def write_index(accuracies: Sequence[float], threshold: float = 0.95) -> int | None:
    """First residual index from which accuracy stays at or above the threshold; ``None`` where it never does."""
    at = len(accuracies)
    while at > 0 and accuracies[at - 1] >= threshold:
        at -= 1
    return at if at < len(accuracies) else None


def timing(
    hf: Any,
    prompts: Sequence[Sequence[int]],
    positions: Sequence[int],
    labels: Sequence[int],
    groups: Sequence[str],
    n_folds: int,
) -> dict[str, Any]:
    """Accuracy of the label per residual index at one position of every prompt, and the write index."""
    rows = torch.stack([residuals(hf, ids, [pos])[:, 0] for ids, pos in zip(prompts, positions, strict=True)])
    accuracies = [probe_accuracy(rows[:, i].numpy(), labels, groups, n_folds) for i in range(rows.shape[1])]
    return {"accuracies": accuracies, "write_index": write_index(accuracies)}
