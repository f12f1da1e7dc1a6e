"""Orders in which rows behind a field are worth repairing; each is a function of an edit."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.edits.dependencies import required
from notelens.edits.edit import Edit, deviation
from notelens.errors import AnswerError, EditError
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.intervene.run_rows import run_rows
from notelens.registry import nearest

Score = Callable[[Edit, Sequence[str] | None, int], Tensor]


def repaired_in_place(edit: Edit) -> tuple[KVCache, Tensor]:
    """The stale cache with the field's rows run again, aligned with the new prompt. Cost: field and last row."""
    outcome = edit.run((), planning=True)
    return outcome.rows.join(), outcome.hidden


def answer_ids(edit: Edit, answers: Sequence[str] | None, old: Tensor, new: Tensor) -> tuple[int, int]:
    """First tokens of the answers for the old and the new value; the model's own next tokens where none are given.

    Raises:
        AnswerError: they are the same.
    """
    if answers is not None:
        ids = [edit.context.answer_id(word) for word in answers]
    else:
        ids = [int(edit.model.next_logits(h).argmax()) for h in (old, new)]
    if len(ids) != 2 or ids[0] == ids[1]:
        raise AnswerError(
            f"{edit.method}: the answers for old and new value have the same first token {ids[:1]}, so no row can be said to "
            "matter for the decision; name two answers, or rank by 'attention', 'structure' or 'chain'"
        )
    return ids[0], ids[1]


def effect(edit: Edit, answers: Sequence[str] | None, seed: int) -> Tensor:
    """Isolated effect of every row: how far the margin moves when the row is a fresh prefill's (the note map).

    Cost: a prefill of the new prompt, and one token for every row behind the field.
    """
    donor = edit.donor()
    recipient, _ = repaired_in_place(edit)
    ids = answer_ids(edit, answers, edit.context.hidden, donor.hidden)
    sites = [Site((p,)) for p in edit.behind]
    found = swap_effects(edit.model, recipient, [donor.rows], sites, Reader.last(recipient, ids), prefix=edit.first)
    edit.meter.planning += found.n_tokens
    score = torch.full((edit.n,), float("-inf"))
    margins = found.logits[:, 1] - found.logits[:, 0]
    score[list(edit.behind)] = margins - (found.baseline[1] - found.baseline[0])
    return score


def attention(edit: Edit, answers: Sequence[str] | None, seed: int) -> Tensor:
    """Attention of the last row to every row, summed over layers and heads. Cost: one token."""
    read = torch.zeros(len(edit.old))

    def watch(layer: int, query: Tensor, probs: Tensor, columns: Tensor) -> None:
        read[columns.cpu()] += probs[:, -1].sum(0).float().cpu()

    last = len(edit.old) - 1
    done = run_rows(edit.model, edit.context.rows, [edit.old.ids[last]], [last], watch=watch)
    edit.meter.planning += done.n_tokens
    total = torch.zeros(edit.n)
    for old, new in edit.new_row.items():
        total[new] = read[old]
    return total


def kv_deviation(edit: Edit, answers: Sequence[str] | None, seed: int) -> Tensor:
    """Difference of keys and values between the stale rows and a fresh prefill (CacheBlend). Cost: a prefill."""
    donor = edit.donor()
    recipient, _ = repaired_in_place(edit)
    return deviation(recipient, donor.rows)


def chain(edit: Edit, answers: Sequence[str] | None, seed: int) -> Tensor:
    """Strength of the best chain of reads from the field through the row to the last one. Cost: no token."""
    return required(edit.dependencies).chain(edit.edited, [edit.last])


def structure(edit: Edit, answers: Sequence[str] | None, seed: int) -> Tensor:
    """Template and delimiter tokens first, those nearest to the end before others; then the rest. Cost: no token."""
    decode = edit.model.tokenizer.decode
    score = torch.zeros(edit.n)
    for p in range(edit.n):
        plain = any(c.isalnum() for c in str(decode([edit.new.ids[p]])))
        score[p] = p + (0 if plain and p < edit.new.tail else edit.n)
    return score


def at_random(edit: Edit, answers: Sequence[str] | None, seed: int) -> Tensor:
    """Any rows. Cost: no token."""
    rng = random.Random(f"{seed}/{edit.name}/{edit.n}")
    return torch.tensor([rng.random() for _ in range(edit.n)])


RANKINGS: dict[str, Score] = {
    "effect": effect,
    "attention": attention,
    "deviation": kv_deviation,
    "chain": chain,
    "structure": structure,
    "random": at_random,
}


def scores(edit: Edit, ranking: str, answers: Sequence[str] | None, seed: int) -> Tensor:
    """Score of every row, ``[pos]``.

    Raises:
        EditError: no such ranking.
    """
    check_ranking(ranking)
    return RANKINGS[ranking](edit, answers, seed)


def check_ranking(ranking: str) -> None:
    """Check that a ranking exists.

    Raises:
        EditError: it does not.
    """
    if ranking not in RANKINGS:
        raise EditError(f"unknown ranking {ranking!r}; {nearest(ranking, sorted(RANKINGS))}")


def top(score: Tensor, rows: Sequence[int], k: int) -> list[int]:
    """The ``k`` rows with the highest score; ties by position."""
    return sorted(rows, key=lambda p: (-float(score[p]), p))[:k]


def window(score: Tensor, rows: Sequence[int], k: int, *, at_random: bool = False) -> list[int]:
    """The ``k`` neighbours among ``rows`` with the largest sum of positive scores.

    Args:
        score: of every row of the prompt.
        rows: candidates, ascending.
        k: how many, at most ``len(rows)``.
        at_random: the first score is a uniform draw and says where the window lies (independent scores would draw windows
            towards their mean).
    """
    own = score[list(rows)].clamp(min=0.0)
    if at_random:
        start = int(float(own[0]) * (len(rows) - k + 1))
    else:
        sums = torch.cat([torch.zeros(1), own.cumsum(0)])
        start = int((sums[k:] - sums[:-k]).argmax())
    return list(rows[start : start + k])
