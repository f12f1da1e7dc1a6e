"""Note maps: what every cached row contributes to a decision, for any prompt with a marked field.

A map measures, for one pair of prompts that differ in a field: the isolated effect of every row (both directions), of every
row in every layer, the smallest set of rows that flips the decision, and what the same rows do when they are *recomputed* in
the stale cache instead of transplanted. All of it comes from the batched patch engine; a position map costs about one
prefill of the prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.context import Context, prefill
from notelens.intervene.attribution import attribution_effects
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.intervene.recompute import recompute_effects
from notelens.models.base import NoteModel
from notelens.prompt import Pair
from notelens.readout import exclusion

DIRECTIONS = ("denoising", "noising")
UNDEFINED = float("nan")
FALSE_NEGATIVE_AT = 0.1
"""A row whose exact recovery is at least this and whose estimate is below a tenth of it counts as missed by attribution."""


@dataclass(frozen=True)
class MinimalSet:
    """Rows found by greedy search, each step adding the row with the largest joint effect, then dropping needless ones.

    Attributes:
        rows: the set, ascending.
        path: recovery after each addition.
        recovery: of the final set, transplanted.
        recomputed: recovery when field and the same rows are run again in the stale cache.
        flips: the transplanted set flips the decision; ``False`` where the search gave up.
        recomputed_flips: running the same rows again flips it too.
    """

    rows: tuple[int, ...]
    path: tuple[float, ...]
    recovery: float
    recomputed: float
    flips: bool
    recomputed_flips: bool


@dataclass(frozen=True)
class NoteMap:
    """A map of one pair. Recoveries are NaN where they are not defined (``excluded`` says why); shifts always are.

    Attributes:
        pair: the prompts; ``pair.old`` is the stale one.
        margins: unpatched margins (recipient, donor) by direction, towards the donor's answer.
        excluded: why recoveries are not defined, by direction, where they are not.
        shifts: change of the margin in logits when one row is the donor's, ``[pos]`` by direction; rows before the field are
            the same in both prompts, are not run, and are exactly 0.
        positions: the same as recovery.
        field_only: recovery of all field rows together, by direction.
        notes: recovery of all rows behind the field together, by direction.
        layers: recovery ``[layer, pos]`` of one row in one layer, denoising, or ``None``.
        in_place: denoising recovery when only the field rows are run again in the stale cache.
        recompute: denoising recovery ``[pos]`` when field and one further row are run again in the stale cache.
        attribution: estimated denoising recovery ``[pos]`` (named an estimate), or ``None``.
        rank_correlation: Spearman correlation of estimate and exact effect over rows behind the field.
        false_negatives: rows with a real effect that the estimate misses.
        minimal: greedy minimal set (denoising), or ``None`` when not asked for or not defined.
        swap: ``isolated``.
        facts: of the model.
    """

    pair: Pair
    margins: dict[str, tuple[float, float]]
    excluded: dict[str, str]
    shifts: dict[str, Float[Tensor, " pos"]]
    positions: dict[str, Float[Tensor, " pos"]]
    field_only: dict[str, float]
    notes: dict[str, float]
    layers: Float[Tensor, "layer pos"] | None
    in_place: float
    recompute: Float[Tensor, " pos"]
    attribution: Float[Tensor, " pos"] | None
    rank_correlation: float | None
    false_negatives: tuple[int, ...]
    minimal: MinimalSet | None
    swap: str = "isolated"
    facts: dict[str, Any] = field(default_factory=dict)

    def ranking(self, direction: str = "denoising") -> list[int]:
        """Rows behind the field by descending effect; ties by position."""
        effects = self.shifts[direction]
        return sorted(self.pair.old.after(self.pair.axis), key=lambda p: (-float(effects[p]), p))

    def flipping(self, direction: str = "denoising") -> tuple[int, ...]:
        """Rows that flip the decision on their own; none where recoveries are not defined."""
        if direction in self.excluded:
            return ()
        low = self.margins[direction][0]
        return tuple(p for p, shift in enumerate(self.shifts[direction].tolist()) if low + shift > 0)


@dataclass(frozen=True)
class _Ends:
    """Unpatched margins of a direction, towards the donor's answer."""

    low: float
    high: float

    @property
    def reason(self) -> str | None:
        return exclusion(self.low, self.high)

    def shift(self, logits: Tensor) -> Tensor:
        """Change of the margin behind every row of ``[row, answer]`` logits."""
        return logits[:, 1] - logits[:, 0] - self.low

    def recovery(self, shift: Tensor) -> Tensor:
        """Shifts as recoveries; NaN where they are not defined."""
        return torch.full_like(shift, UNDEFINED) if self.reason is not None else shift / (self.high - self.low)


def note_map(
    model: NoteModel,
    pair: Pair,
    *,
    layers: bool = True,
    attribution: bool = True,
    minimal: bool = True,
    max_rows: int = 32,
    on_step: Callable[[str], None] | None = None,
) -> NoteMap:
    """Map one pair.

    Args:
        model: an admitted model.
        pair: prompts that differ in one field, e.g. from :func:`notelens.pair_from_text` or a task.
        layers: also every row in every layer.
        attribution: also the gradient estimate, compared with the exact map.
        minimal: also the greedy minimal set.
        max_rows: where the greedy search gives up.
        on_step: called with the name of each part before it runs.

    Cost: two prefills; about two more for both position maps and one for the recomputed rows; ``n_layers / 2`` for the layer
    map; one per greedy step.
    """
    say = on_step or (lambda _: None)
    say("prefill")
    old, new = prefill(model, pair.old), prefill(model, pair.new)
    rows = list(range(pair.old.decision))
    edited = pair.differing
    say("position map")
    ends: dict[str, _Ends] = {}
    shifts: dict[str, Tensor] = {}
    joint: dict[str, list[float]] = {}
    behind = rows[edited[0] :]
    sites = [*(Site((p,)) for p in behind), Site(edited), Site(pair.old.after(pair.axis))]
    for direction, recipient, donor, answers in (
        ("denoising", old, new, pair.answer_ids),
        ("noising", new, old, pair.answer_ids[::-1]),
    ):
        reader = Reader.last(recipient.cache, answers)
        found = swap_effects(model, recipient.cache, [donor.cache], sites, reader, prefix=edited[0])
        high = swap_effects(model, donor.cache, [], [], reader).baseline
        ends[direction] = end = _Ends(_margin(found.baseline), _margin(high))
        moved = end.shift(found.logits)
        shifts[direction] = torch.cat([torch.zeros(edited[0]), moved[: len(behind)]])
        joint[direction] = end.recovery(moved[len(behind) :]).tolist()
    end, reader = ends["denoising"], Reader.last(old.cache, pair.answer_ids)

    say("recomputed rows")
    later = [p for p in rows if p > edited[0] and p not in edited]
    again = recompute_effects(
        model, old.cache, pair.new.token_ids, [(), *((p,) for p in later)], pair.answer_ids, edited=edited
    )
    repaired = end.recovery(end.shift(again))
    recomputed = repaired[:1].repeat(len(rows))
    recomputed[later] = repaired[1:]
    by_layer: Tensor | None = None
    if layers:
        say("layer x position map")
        by_layer = _layer_map(model, old, new, reader, edited[0], end)
    estimate, correlation, missed = None, None, ()
    if attribution:
        say("attribution estimate")
        raw = attribution_effects(model, old.cache, new.cache, reader, prefix=edited[0]).positions
        estimate = end.recovery(raw)
        correlation, missed = compare(raw, shifts["denoising"], later, FALSE_NEGATIVE_AT * (end.high - end.low))
    smallest = None
    if minimal and end.reason is None:
        say("greedy minimal set")
        smallest = _minimal(model, old, new, reader, behind, end, max_rows, pair)
    return NoteMap(
        pair=pair,
        margins={d: (e.low, e.high) for d, e in ends.items()},
        excluded={d: e.reason for d, e in ends.items() if e.reason is not None},
        shifts=shifts,
        positions={d: e.recovery(shifts[d]) for d, e in ends.items()},
        field_only={d: both[0] for d, both in joint.items()},
        notes={d: both[1] for d, both in joint.items()},
        layers=by_layer,
        in_place=float(repaired[0]),
        recompute=recomputed,
        attribution=estimate,
        rank_correlation=correlation,
        false_negatives=missed if end.reason is None else (),
        minimal=smallest,
        facts=model.facts(),
    )


def _margin(logits: Tensor) -> float:
    return float(logits[1] - logits[0])


def _layer_map(model: NoteModel, old: Context, new: Context, reader: Reader, first: int, end: _Ends) -> Tensor:
    n_layers, n = model.geometry.n_layers, reader.start
    sites = [Site((p,), layers=(layer, layer + 1)) for layer in range(n_layers) for p in range(first, n)]
    found = swap_effects(model, old.cache, [new.cache], sites, reader, prefix=first)
    out = torch.zeros(n_layers, n)
    out[:, first:] = end.shift(found.logits).view(n_layers, n - first)
    return end.recovery(out)


def _spearman(a: Tensor, b: Tensor) -> float:
    from scipy.stats import rankdata

    ranks = [torch.as_tensor(rankdata(x.numpy())) for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def compare(
    estimate: Float[Tensor, " pos"], exact: Float[Tensor, " pos"], rows: Sequence[int], threshold: float
) -> tuple[float | None, tuple[int, ...]]:
    """How good an estimate is: Spearman correlation over ``rows``, and rows with a real effect that it misses.

    Args:
        estimate, exact: change of the margin by row.
        rows: rows to compare.
        threshold: smallest exact change that counts as a real effect.

    Returns:
        The correlation (``None`` where it is not defined: fewer than three rows, or one side constant), and the rows whose
        exact change is at least ``threshold`` while the estimate is below a tenth of it.
    """
    a, b = estimate[list(rows)], exact[list(rows)]
    constant = len(rows) < 3 or float(a.std()) == 0 or float(b.std()) == 0
    correlation = None if constant else _spearman(a, b)
    missed = [p for p, x, y in zip(rows, a.tolist(), b.tolist(), strict=True) if y >= threshold and x < y / 10]
    return correlation, tuple(missed)


def _minimal(
    model: NoteModel,
    old: Context,
    new: Context,
    reader: Reader,
    candidates: Sequence[int],
    end: _Ends,
    max_rows: int,
    pair: Pair,
) -> MinimalSet:
    """Greedy forward search until the margin changes sign, then backward removal."""
    edited = pair.differing

    def shifts(sets: Sequence[Sequence[int]]) -> list[float]:
        sites = [Site(tuple(s)) for s in sets]
        return end.shift(swap_effects(model, old.cache, [new.cache], sites, reader, prefix=edited[0]).logits).tolist()

    gap = end.high - end.low
    chosen: list[int] = []
    path: list[float] = []
    shift = 0.0
    while end.low + shift <= 0 and len(chosen) < min(max_rows, len(candidates)):
        left = [p for p in candidates if p not in chosen]
        found = shifts([[*chosen, p] for p in left])
        top = max(range(len(left)), key=lambda i: (found[i], -left[i]))
        chosen.append(left[top])
        shift = found[top]
        path.append(shift / gap)
    while end.low + shift > 0 and len(chosen) > 1:
        found = shifts([[p for p in chosen if p != drop] for drop in chosen])
        top = max(range(len(chosen)), key=lambda i: found[i])
        if end.low + found[top] <= 0:
            break
        chosen.pop(top)
        shift = found[top]
    rows = tuple(sorted(chosen))
    again = recompute_effects(model, old.cache, pair.new.token_ids, [rows], reader.answer_ids, edited=edited)
    repaired = float(end.shift(again)[0])
    return MinimalSet(
        rows=rows,
        path=tuple(path),
        recovery=shift / gap,
        recomputed=repaired / gap,
        flips=end.low + shift > 0,
        recomputed_flips=end.low + repaired > 0,
    )
