"""Which layers write the note: attention and MLP outputs at aggregator rows are replaced by the donor's during prefill.

These are *in-forward* swaps: everything behind the patched component is computed anew. For each aggregator row the suffix
runs once per component, as a batch over all layers.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from notelens.cache.ops import check_aligned
from notelens.context import Context
from notelens.errors import CompetenceError, PatchError, UnsupportedModelError
from notelens.intervene.engine import DEFAULT_BUDGET_BYTES
from notelens.intervene.kernel import Batch, engine_attention, run_readers
from notelens.models.base import NoteModel
from notelens.readout import exclusion

COMPONENTS = ("attention", "mlp")


@dataclass(frozen=True)
class WriteEffects:
    """Recoveries of single components.

    Attributes:
        recovery: ``[row, component, layer]``; components are attention and MLP.
        rows: the aggregator rows.
        mode: always ``in_forward``.
    """

    recovery: Float[Tensor, "row component layer"]
    rows: tuple[int, ...]
    mode: str = "in_forward"


def _writers(model: NoteModel) -> list[tuple[nn.Module, nn.Module]]:
    return [model.family.writers(layer) for layer in model.family.layers(model.hf)]


def _tensor(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple) else output
    if not isinstance(found, torch.Tensor) or found.ndim != 3:
        raise UnsupportedModelError("a layer component's output is not a [batch, length, width] tensor")
    return found


@contextlib.contextmanager
def _hooked(modules: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles: list[Any] = []
    try:
        handles.extend(module.register_forward_hook(hook) for module, hook in modules)
        yield
    finally:
        for handle in handles:
            handle.remove()


def component_outputs(model: NoteModel, token_ids: Sequence[int], rows: Sequence[int]) -> Tensor:
    """What attention and MLP add to the residual stream at ``rows``: ``[component, layer, row, d_model]``.

    Cost: one prefill.
    """
    found: dict[tuple[int, int], Tensor] = {}

    def keep(component: int, layer: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            found[component, layer] = _tensor(output)[0, list(rows)].detach().clone()

        return hook

    pairs = _writers(model)
    with _hooked([(m, keep(c, i)) for i, pair in enumerate(pairs) for c, m in enumerate(pair)]):
        model.prefill(token_ids)
    return torch.stack([torch.stack([found[c, i] for i in range(len(pairs))]) for c in range(2)])


def write_effects(
    model: NoteModel,
    recipient: Context,
    donor: Context,
    rows: Sequence[int],
    answer_ids: tuple[int, int],
    *,
    prefix: int = 1,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> WriteEffects:
    """Recovery when one component's output at one aggregator row is the donor's, for every layer.

    Args:
        model: runs the suffixes.
        recipient, donor: prefilled prompts of equal length.
        rows: aggregator rows in front of the decision.
        answer_ids: recipient's and donor's answer.
        prefix: how many leading tokens the two must share, as for ``swap_effects``.
        budget_bytes: bound on attention scores and activations of one chunk of layers.

    Raises:
        PatchError: a row is the decision or does not exist, or the prompts differ in length or begin differently.
        CompetenceError: a recovery is not defined between the two margins; the message says why.

    Cost: one prefill of the donor, and per row ``2 * n_layers`` runs of the suffix behind it.
    """
    n, n_layers = len(recipient.cache), model.geometry.n_layers
    check_aligned(recipient.cache, donor.cache, prefix=prefix)
    bad = [r for r in rows if not 0 < r < n - 1]
    if bad or not rows:
        raise PatchError(
            f"row {bad[0] if bad else '(none)'} is not between the first row and the decision (1..{n - 2})"
        )
    low, high = (
        float(logits[1] - logits[0])
        for logits in (model.answer_logits(c.hidden, answer_ids) for c in (recipient, donor))
    )
    reason = exclusion(low, high)
    if reason is not None:
        raise CompetenceError(f"write effects are not defined: {reason} (margins {low:.2f} and {high:.2f})")
    source = component_outputs(model, donor.prompt.token_ids, rows)
    out = torch.empty(len(rows), 2, n_layers)
    pairs = _writers(model)
    with torch.no_grad(), engine_attention(model):
        for index, row in enumerate(rows):
            ids = torch.tensor([recipient.cache.token_ids[row:]], device=recipient.cache.device)
            positions = torch.arange(row, n, device=recipient.cache.device)[None]
            limit = _readers(model, n - row, n, budget_bytes)
            for component, first in itertools.product(range(2), range(0, n_layers, limit)):
                chunk = range(first, min(first + limit, n_layers))  # reader i patches layer chunk[i]
                hooks = [
                    (pairs[layer][component], _put(reader, source[component, layer, index]))
                    for reader, layer in enumerate(chunk)
                ]
                batch = Batch(recipient.cache, row, positions)
                with _hooked(hooks):
                    hidden = run_readers(model, batch, ids, n_readers=len(chunk), first_layer=first)
                logits = model.answer_logits(hidden, answer_ids).float().cpu()
                out[index, component, list(chunk)] = (logits[:, 1] - logits[:, 0] - low) / (high - low)
    return WriteEffects(out, tuple(rows))


def _put(reader: int, output: Tensor) -> Any:
    """A hook that replaces what one reader's component adds at its first token."""

    def hook(_: nn.Module, __: Any, found: Any) -> Any:
        changed = _tensor(found).clone()
        changed[reader, 0] = output
        return (changed, *found[1:]) if isinstance(found, tuple) else changed

    return hook


def _readers(model: NoteModel, n_query: int, n: int, budget_bytes: int) -> int:
    """How many suffixes of ``n_query`` tokens fit the budget, at least one."""
    scores = 2 * 4 * model.geometry.layers[0].n_heads * n_query * n
    return max(1, budget_bytes // (scores + 4 * 4 * n_query * model.geometry.d_model))
