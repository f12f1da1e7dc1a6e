"""The isolated swap, one at a time, with nothing but transformers (DESIGN section 2).

Both prompts are prefilled, the recipient's rows in front of the reader are copied, the chosen rows are overwritten with
the donor's, and the reader (the last token, or the last few) is run on the copy. All other rows stay as they are. No
code is shared with the library.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

Rows = list[tuple[Tensor, Tensor]]
"""Per layer the keys and values, ``[kv_head, pos, width]``."""
Direction = Literal["denoising", "noising"]


def is_hybrid(hf: Any) -> bool:
    """Whether layers keep a recurrent state beside their rows."""
    return "hybrid" in (getattr(hf.config, "layer_types", None) or ())


def new_store(hf: Any) -> DynamicCache:
    """An empty cache. Made without a config it keeps all rows, also in sliding layers; hybrids need the config."""
    return DynamicCache(config=hf.config) if is_hybrid(hf) else DynamicCache()


@torch.no_grad()
def prefill_rows(hf: Any, ids: Sequence[int]) -> Rows:
    """Rows of all tokens in all layers, from one forward pass."""
    store = new_store(hf)
    hf(input_ids=torch.tensor([list(ids)]), past_key_values=store, use_cache=True)
    return [(layer.keys[0].clone(), layer.values[0].clone()) for layer in store.layers]


@torch.no_grad()
def read(
    hf: Any, rows: Rows, reader_ids: Sequence[int], answer_ids: Sequence[int], prefix_ids: Sequence[int] = ()
) -> Tensor:
    """Answer logits (float32) behind the last reader token, run on a copy of ``rows``.

    A hybrid's recurrent state is that of a run over ``prefix_ids``, whose rows are then replaced.
    """
    store = new_store(hf)
    if is_hybrid(hf):
        hf(input_ids=torch.tensor([list(prefix_ids)]), past_key_values=store, use_cache=True)
        for layer, (k, v) in zip(store.layers, rows, strict=True):
            layer.keys, layer.values = k.clone()[None], v.clone()[None]
    else:
        for layer, (k, v) in enumerate(rows):
            store.update(k.clone()[None], v.clone()[None], layer)
    start = rows[0][0].shape[1]
    positions = torch.arange(start, start + len(reader_ids))[None]
    out = hf(input_ids=torch.tensor([list(reader_ids)]), position_ids=positions, past_key_values=store, use_cache=True)
    return out.logits[0, -1, list(answer_ids)].float()


def swapped_rows(
    recipient: Rows,
    donor: Rows,
    positions: Sequence[int],
    layers: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
    parts: str = "kv",
) -> Rows:
    """A copy of ``recipient`` with rows of ``donor`` at ``positions``, in a band of layers and some stored heads."""
    low, high = layers if layers is not None else (0, len(recipient))
    rows = [(k.clone(), v.clone()) for k, v in recipient]
    for layer in range(low, high):
        for head in range(rows[layer][0].shape[0]) if heads is None else heads:
            for pos in positions:
                if "k" in parts:
                    rows[layer][0][head, pos] = donor[layer][0][head, pos]
                if "v" in parts:
                    rows[layer][1][head, pos] = donor[layer][1][head, pos]
    return rows


def loop_isolated_swap(
    hf: Any,
    recipient_ids: Sequence[int],
    donor_ids: Sequence[int],
    positions: Sequence[int],
    answer_ids: Sequence[int],
    layers: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
    parts: str = "kv",
    n_reader: int = 1,
) -> Tensor:
    """Answer logits of the recipient with the donor's rows at ``positions``.

    Args:
        hf: a transformers causal language model.
        recipient_ids, donor_ids: whole prompts of equal length; the last ``n_reader`` tokens of the recipient are run.
        positions: rows to overwrite, all in front of the reader; none gives the unpatched recipient.
        answer_ids: ids whose logits are returned, in this order.
        layers: half-open band of layers, all when ``None``.
        heads: stored heads, all when ``None``.
        parts: ``"kv"``, ``"k"`` or ``"v"``.
    """
    if len(recipient_ids) != len(donor_ids):
        raise ValueError(f"prompts of {len(recipient_ids)} and {len(donor_ids)} tokens")
    start = len(recipient_ids) - n_reader
    if any(not 0 <= pos < start for pos in positions):
        raise ValueError(f"positions {list(positions)} are not all in front of the reader at {start}")
    recipient, donor = (
        [(k[:, :start], v[:, :start]) for k, v in prefill_rows(hf, i)] for i in (recipient_ids, donor_ids)
    )
    rows = swapped_rows(recipient, donor, positions, layers, heads, parts)
    return read(hf, rows, recipient_ids[start:], answer_ids, recipient_ids[:start])


class _Patching(DynamicCache):
    """Takes rows from a donor whenever a layer stores the keys and values it has just computed."""

    def __init__(self, hf: Any, donor: Rows, positions: Sequence[int], layers: tuple[int, int]) -> None:
        super().__init__(config=hf.config if is_hybrid(hf) else None)
        self.donor, self.rows, self.band = donor, list(positions), layers

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.band[0] <= layer_idx < self.band[1]:
            key_states, value_states = key_states.clone(), value_states.clone()
            key_states[0][:, self.rows] = self.donor[layer_idx][0][:, self.rows]
            value_states[0][:, self.rows] = self.donor[layer_idx][1][:, self.rows]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def loop_in_forward_swap(
    hf: Any,
    recipient_ids: Sequence[int],
    donor_ids: Sequence[int],
    positions: Sequence[int],
    answer_ids: Sequence[int],
    layers: tuple[int, int] | None = None,
) -> Tensor:
    """Answer logits of the recipient run as a whole, the donor's rows put in place as every layer computes its own.

    Later positions and layers see the replaced rows, so they change too: the other kind of swap (DESIGN section 2).
    """
    donor = prefill_rows(hf, donor_ids)
    store = _Patching(hf, donor, positions, layers if layers is not None else (0, len(donor)))
    out = hf(input_ids=torch.tensor([list(recipient_ids)]), past_key_values=store, use_cache=True)
    return out.logits[0, -1, list(answer_ids)].float()


def full_logits(hf: Any, ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
    """Answer logits (float32) behind the prompt from one plain forward pass without a cache."""
    with torch.no_grad():
        return hf(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1, list(answer_ids)].float()


def margin(logits: Tensor) -> float:
    """Second minus first answer logit."""
    return float(logits[1] - logits[0])


def oriented(
    old_ids: Sequence[int], new_ids: Sequence[int], answer_ids: tuple[int, int], direction: Direction
) -> tuple[Sequence[int], Sequence[int], tuple[int, int]]:
    """(recipient, donor, (recipient's answer, donor's answer)); ``answer_ids`` are right for old and for new."""
    if direction == "denoising":
        return old_ids, new_ids, answer_ids
    return new_ids, old_ids, answer_ids[::-1]


@torch.no_grad()
def loop_hidden(
    hf: Any,
    recipient_ids: Sequence[int],
    donor_ids: Sequence[int],
    positions: Sequence[int],
    hidden: Sequence[int],
    answer_ids: Sequence[int],
    hidden_layers: tuple[int, int] | None = None,
) -> Tensor:
    """Answer logits of the last token of the recipient, with rows of the donor and without the hidden rows.

    A row that a layer must not see is taken out of that layer's cache; the reader keeps its position. Only for layers that
    attend to everything (a window would count the missing rows).
    """
    start = len(recipient_ids) - 1
    recipient, donor = (
        [(k[:, :start], v[:, :start]) for k, v in prefill_rows(hf, i)] for i in (recipient_ids, donor_ids)
    )
    low, high = hidden_layers if hidden_layers is not None else (0, len(recipient))
    keep = [p for p in range(start) if p not in set(hidden)]
    store = DynamicCache()
    for layer, (k, v) in enumerate(swapped_rows(recipient, donor, positions, None, None, "kv")):
        rows = keep if low <= layer < high else list(range(start))
        store.update(k[None, :, rows], v[None, :, rows], layer)
    out = hf(
        input_ids=torch.tensor([[recipient_ids[-1]]]),
        position_ids=torch.tensor([[start]]),
        past_key_values=store,
        use_cache=True,
    )
    return out.logits[0, -1, list(answer_ids)].float()
