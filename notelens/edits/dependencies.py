"""Which rows read which: recorded while the prompt is prefilled, so that planning a repair costs no further tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from notelens.errors import EditError

SOURCES = 16
"""Rows kept per row and layer: those it reads most."""


@dataclass(frozen=True)
class Dependencies:
    """Strongest reads of every row in every layer; the weight is the largest over heads.

    Attributes:
        source: row that is read, ``[layer, pos, SOURCES]`` int32.
        weight: attention weight, 0 where there are fewer sources, ``[layer, pos, SOURCES]`` float32.
    """

    source: Int[Tensor, "layer pos source"]
    weight: Float[Tensor, "layer pos source"]

    def __len__(self) -> int:
        return self.source.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return sum(t.numel() * t.element_size() for t in (self.source, self.weight))

    def chain(self, edited: Sequence[int], readers: Sequence[int]) -> Float[Tensor, " pos"]:
        """How strongly each row lies on a chain of reads from the edited rows to the readers.

        A path starts at an edited row, moves up through the layers (each step stays in its row or goes to a row that reads it)
        and ends at a reader; its strength is the product of the weights, a row's score that of the strongest path through
        it. Edited rows and readers that are linked at all score 1 or the strength of their best path.

        Returns:
            ``[pos]``; 0 for rows in front of the first edited one.
        """
        n_layers, n, _ = self.source.shape
        index = self.source.long()
        reach = torch.zeros(n)
        reach[list(edited)] = 1.0
        forward = [reach]
        for layer in range(n_layers):
            seen = (self.weight[layer] * reach[index[layer]]).amax(-1)
            reach = torch.maximum(reach, seen)
            forward.append(reach)
        need = torch.zeros(n)
        need[list(readers)] = 1.0
        score = forward[n_layers] * need
        for layer in reversed(range(n_layers)):
            pull = (self.weight[layer] * need[:, None]).flatten()
            need = need.scatter_reduce(0, index[layer].flatten(), pull, "amax")
            score = torch.maximum(score, forward[layer] * need)
        return score

    def moved(self, new_row: Sequence[int], n: int) -> "Dependencies":
        """The record after rows have moved: old row ``i`` is now ``new_row[i]`` (-1: gone), out of ``n``."""
        where = torch.tensor(list(new_row))
        source = where[self.source.long()]
        weight = torch.where(source < 0, 0.0, self.weight)
        k = self.source.shape[2]
        out_source = torch.zeros(self.source.shape[0], n, k, dtype=torch.int32)
        out_weight = torch.zeros(self.source.shape[0], n, k)
        stay = (where >= 0).nonzero()[:, 0]
        out_source[:, where[stay]] = source[:, stay].clamp(min=0).to(torch.int32)
        out_weight[:, where[stay]] = weight[:, stay]
        return Dependencies(out_source, out_weight)


class Recorder:
    """Watches a pass of :func:`~notelens.intervene.run_rows.run_rows` and keeps the strongest reads.

    Args:
        n_layers: of the model.
        n: rows of the prompt.
        base: record of the same prompt, whose rows are kept where they are not seen.
    """

    def __init__(self, n_layers: int, n: int, base: Dependencies | None = None) -> None:
        self.source = torch.zeros(n_layers, n, SOURCES, dtype=torch.int32)
        self.weight = torch.zeros(n_layers, n, SOURCES)
        if base is not None:
            kept = min(n, len(base))
            self.source[:, :kept], self.weight[:, :kept] = base.source[:, :kept], base.weight[:, :kept]

    def __call__(self, layer: int, query: Tensor, probs: Tensor, columns: Tensor) -> None:
        """Keep the strongest reads of a block of queries, a row's read of itself left out."""
        top = probs.amax(0)
        top = top.masked_fill(query[:, None] == columns[None, :], 0.0)
        k = min(SOURCES, top.shape[1])
        weight, at = top.topk(k, dim=-1)
        rows = query.cpu()
        self.source[layer, rows] = 0
        self.weight[layer, rows] = 0.0
        self.source[layer, rows, :k] = columns[at].to(torch.int32).cpu()
        self.weight[layer, rows, :k] = weight.float().cpu()

    def done(self) -> Dependencies:
        """What was seen."""
        return Dependencies(self.source, self.weight)


def required(dependencies: Dependencies | None) -> Dependencies:
    """The record, which planning needs.

    Raises:
        EditError: the context was made without one.
    """
    if dependencies is None:
        raise EditError(
            "this context holds no record of which rows read which; build it with record=True, or call "
            "context.recorded(), which runs the prompt once more"
        )
    return dependencies


__all__ = ["SOURCES", "Dependencies", "Recorder", "required"]
