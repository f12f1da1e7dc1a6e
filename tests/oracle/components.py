"""Single heads and layer components replaced in a full forward pass with plain module hooks; no code of the library."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def _forward(hf: Any, ids: Sequence[int], hooks: Sequence[tuple[nn.Module, str, Callable[..., Any]]]) -> Tensor:
    handles = [m.register_forward_pre_hook(f) if kind == "pre" else m.register_forward_hook(f) for m, kind, f in hooks]
    try:
        return hf(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1].float()
    finally:
        for handle in handles:
            handle.remove()


def head_outputs(hf: Any, ids: Sequence[int]) -> list[Tensor]:
    """What every layer's heads hand to the output projection at the last token, ``[head * d]`` per layer."""
    found: list[Tensor] = []
    hooks = [
        (layer.self_attn.o_proj, "pre", lambda _, args: found.append(args[0][0, -1].clone()))
        for layer in hf.model.layers
    ]
    _forward(hf, ids, hooks)
    return found


def swap_heads(
    hf: Any, ids: Sequence[int], source: Sequence[Tensor], heads: Sequence[tuple[int, int]], width: int
) -> Tensor:
    """Logits of the last token with the given (layer, head) outputs taken from ``source`` at the last token only."""

    def put(layer: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            changed = args[0].clone()
            for at, head in heads:
                if at == layer:
                    part = slice(head * width, (head + 1) * width)
                    changed[0, -1, part] = source[layer][part]
            return (changed, *args[1:])

        return hook

    layers = sorted({layer for layer, _ in heads})
    return _forward(hf, ids, [(hf.model.layers[i].self_attn.o_proj, "pre", put(i)) for i in layers])


def writer(hf: Any, layer: int, component: int) -> nn.Module:
    """The module whose output joins the residual stream: attention (0) or MLP (1), behind its norm where it has one."""
    block = hf.model.layers[layer]
    if hf.config.model_type.startswith("gemma"):
        return (block.post_attention_layernorm, block.post_feedforward_layernorm)[component]
    return (block.self_attn, block.mlp)[component]


def swap_component(
    hf: Any, ids: Sequence[int], donor_ids: Sequence[int], layer: int, component: int, row: int
) -> Tensor:
    """Logits of the last token when one component's output at one row is that of the donor prompt."""
    module = writer(hf, layer, component)
    found: list[Tensor] = []

    def first(output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else output

    def put(_: nn.Module, __: Any, output: Any) -> Any:
        changed = first(output).clone()
        changed[0, row] = found[0]
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    _forward(hf, donor_ids, [(module, "post", lambda _, __, output: found.append(first(output)[0, row].clone()))])
    return _forward(hf, ids, [(module, "post", put)])
