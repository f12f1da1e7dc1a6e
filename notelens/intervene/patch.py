"""Isolated swaps through TransformerBridge hooks: the same result as the patch engine, reached another way.

A full forward over the recipient runs with donor keys and values hooked in at the patched rows. That alone would be an
*in-forward* swap, because later rows would be computed from the patched ones. Holding the residual stream of every row but
the last at its clean value after every layer leaves the last row as the only reader, which is the isolated swap. It costs
a full forward per patch and serves as an independent check and as a template for hook-based work.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.errors import PatchError, UnsupportedModelError
from notelens.models.base import NoteModel

KEY_HOOK = "blocks.{layer}.attn.hook_k"
VALUE_HOOK = "blocks.{layer}.attn.hook_v"
RESIDUAL_HOOK = "blocks.{layer}.hook_resid_post"


def hook_isolated_swap(
    model: NoteModel,
    recipient_ids: Sequence[int],
    donor_ids: Sequence[int],
    positions: Sequence[int],
    answer_ids: Sequence[int],
    *,
    layers: tuple[int, int] | None = None,
) -> Float[Tensor, " answer"]:
    """Answer logits of the recipient's last token with rows taken from the donor, through hooks.

    Args:
        model: its ``bridge`` is used.
        recipient_ids, donor_ids: whole prompts of equal length.
        positions: rows to take from the donor; not the last one, which is the reader.
        answer_ids: ids whose logits are returned.
        layers: half-open band of layers; all when ``None``.

    Raises:
        PatchError: lengths differ, or a position is out of range.
        UnsupportedModelError: the bridge has no key or value hooks at a layer, or the hooks did not fire.

    Cost: three full forwards.
    """
    n = len(recipient_ids)
    if len(donor_ids) != n:
        raise PatchError(f"recipient has {n} tokens, donor {len(donor_ids)}; an isolated swap needs equal lengths")
    bad = [p for p in positions if not 0 <= p < n - 1]
    if bad or not positions:
        raise PatchError(
            f"position {bad[0] if bad else '(none)'} is outside the rows that the reader sees (0..{n - 2})"
        )
    low, high = layers or (0, model.geometry.n_layers)
    if not 0 <= low < high <= model.geometry.n_layers:
        raise PatchError(f"layer band [{low}, {high}) of {model.geometry.n_layers} layers is empty or out of range")
    bridge = model.bridge
    ids = torch.tensor([list(recipient_ids)], device=model.device)
    other = torch.tensor([list(donor_ids)], device=model.device)
    every = range(model.geometry.n_layers)
    residuals = {RESIDUAL_HOOK.format(layer=i) for i in every}
    rows = {name.format(layer=i) for i in range(low, high) for name in (KEY_HOOK, VALUE_HOOK)}
    with torch.no_grad():
        _, clean = bridge.run_with_cache(ids, names_filter=lambda name: name in residuals)
        _, donor = bridge.run_with_cache(other, names_filter=lambda name: name in rows)
        missing = [name for name in sorted(residuals) if name not in clean] + [
            n for n in sorted(rows) if n not in donor
        ]
        if missing:
            raise UnsupportedModelError(
                f"the bridge of {model.name} has no hook {missing[0]!r}; keys cannot be patched here"
            )
        index = torch.tensor(sorted(set(positions)), device=model.device)
        fired: set[str] = set()

        def swap(name: str) -> Callable[[Tensor, Any], Tensor]:
            def run(tensor: Tensor, hook: Any) -> Tensor:
                fired.add(name)
                out = tensor.clone()
                out[:, index] = donor[name][:, index]
                return out

            return run

        def hold(name: str) -> Callable[[Tensor, Any], Tensor]:
            def run(tensor: Tensor, hook: Any) -> Tensor:
                fired.add(name)
                return torch.cat([clean[name][:, :-1], tensor[:, -1:]], dim=1)

            return run

        hooks = [(name, swap(name)) for name in sorted(rows)] + [(name, hold(name)) for name in sorted(residuals)]
        logits = bridge.run_with_hooks(ids, fwd_hooks=hooks)
    if fired != rows | residuals:
        raise UnsupportedModelError(f"hooks did not fire at {sorted((rows | residuals) - fired)[:3]} of {model.name}")
    return logits[0, -1, list(answer_ids)].float().cpu()
