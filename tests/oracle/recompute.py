"""Rows run again in a stale cache, one token at a time, with nothing but transformers.

The repair that a serving engine could make: for every row in order, the token of the new prompt runs on the rows in front of
it as they are now, and its keys and values overwrite the row. No code is shared with the library.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tests.oracle.swap import Rows, read


@torch.no_grad()
def run_row(hf: Any, rows: Rows, token: int, row: int) -> Rows:
    """A copy of ``rows`` in which ``row`` is what ``token`` writes there, computed on the rows in front of it."""
    store = DynamicCache()
    for layer, (k, v) in enumerate(rows):
        if row:
            store.update(k[None, :, :row].clone(), v[None, :, :row].clone(), layer)
    hf(
        input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[row]]), past_key_values=store, use_cache=True
    )  # fmt: skip
    found = [(k.clone(), v.clone()) for k, v in rows]
    for (k, v), layer in zip(found, store.layers, strict=True):
        k[:, row], v[:, row] = layer.keys[0][:, row], layer.values[0][:, row]
    return found


def loop_recompute(hf: Any, stale: Rows, ids: Sequence[int], rows: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
    """Answer logits of the last token of ``ids`` after ``rows`` of the stale cache have been run again, in order."""
    last = len(ids) - 1
    for row in sorted(set(rows)):
        stale = run_row(hf, stale, ids[row], row)
    return read(hf, [(k[:, :last], v[:, :last]) for k, v in stale], ids[last:], answer_ids)


def loop_in_forward(
    hf: Any, recipient: Rows, donor: Rows, ids: Sequence[int], positions: Sequence[int], answer_ids: Sequence[int]
) -> Tensor:
    """The in-forward swap token by token: from the first patched row on, each row is the donor's or is run again."""
    last, held = len(ids) - 1, set(positions)
    rows = [(k.clone(), v.clone()) for k, v in recipient]
    for row in range(min(held), last):
        if row in held:
            for (k, v), (other_k, other_v) in zip(rows, donor, strict=True):
                k[:, row], v[:, row] = other_k[:, row], other_v[:, row]
        else:
            rows = run_row(hf, rows, ids[row], row)
    return read(hf, [(k[:, :last], v[:, :last]) for k, v in rows], ids[last:], answer_ids)
