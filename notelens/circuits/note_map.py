"""Note maps: what every cached row contributes to a decision, for any prompt with a marked field.

A map measures, for one pair of prompts that differ in a field: the isolated effect of every row (both directions), of every
row in every layer, the smallest set of rows that flips the decision, and what the same rows do when they are *recomputed* in
the stale cache instead of transplanted. All of it comes from the batched patch engine; a position map costs about one
prefill of the prompt.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.context import Context, prefill
from notelens.errors import AnswerError, SpanError
from notelens.intervene.attribution import attribution_effects
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.intervene.recompute import recompute_effects
from notelens.models.base import NoteModel
from notelens.prompt import Pair
from notelens.readout import exclusion
from notelens.spans import Piece, Rendering, make_prompt

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][\w-]*)\s*\}\}")
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
        flips: the transplanted set flips the decision.
    """

    rows: tuple[int, ...]
    path: tuple[float, ...]
    recovery: float
    recomputed: float
    flips: bool


@dataclass(frozen=True)
class NoteMap:
    """A map of one pair.

    Attributes:
        pair: the prompts; ``pair.old`` is the stale one.
        margins: unpatched margins (recipient, donor) by direction, towards the donor's answer.
        excluded: why recoveries are not defined, by direction, where they are not.
        positions: isolated recovery of every row ``[pos]`` by direction; rows before the field are exactly 0.
        layers: isolated recovery ``[layer, pos]`` of the denoising direction, or ``None``.
        in_place: recovery when only the field rows are run again in the stale cache.
        recompute: recovery ``[pos]`` when field and one further row are run again in the stale cache.
        attribution: estimated recovery ``[pos]`` (named an estimate), or ``None``.
        rank_correlation: Spearman correlation of estimate and exact effect over rows behind the field.
        false_negatives: rows with a real effect that the estimate misses.
        minimal: greedy minimal set, or ``None`` when not asked for.
        swap: ``isolated``.
        facts: of the model.
    """

    pair: Pair
    margins: dict[str, tuple[float, float]]
    excluded: dict[str, str]
    positions: dict[str, Float[Tensor, " pos"]]
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
        effects = self.positions[direction]
        return sorted(self.pair.old.after(self.pair.axis), key=lambda p: (-float(effects[p]), p))


def pair_from_text(
    model: NoteModel,
    text: str,
    field_name: str,
    old: str,
    new: str,
    *,
    answers: tuple[str, str] | None = None,
    rendering: Rendering = "chat",
    system: str | None = None,
) -> Pair:
    """A pair from a prompt with a marked field, ``{{name}}``.

    Args:
        model: its tokenizer is used, and its own decisions where no answers are given.
        text: the user message; the field may occur several times.
        field_name: name of the placeholder.
        old, new: the two values.
        answers: right answers for old and new; the model's own next tokens when ``None``.
        rendering: ``chat``, ``plain`` or ``raw``.
        system: system text.

    Raises:
        SpanError: the field is not in the text, or another placeholder is.
        PairError: the values have different token lengths.
        AnswerError: the answers share a first token, or the model decides the same for both values.
    """
    found = PLACEHOLDER.findall(text)
    if field_name not in found:
        names = ", ".join(sorted(set(found))) or "none"
        raise SpanError(f"the prompt has no field {{{{{field_name}}}}}; fields it has: {names}")
    other = sorted(set(found) - {field_name})
    if other:
        raise SpanError(f"the prompt has further fields: {', '.join(other)}; fill them in, only one may stay open")

    def build(value: str, answer: str) -> Any:
        if not value.strip():
            raise SpanError(f"the value of field {field_name!r} is empty")
        pieces: list[Piece] = []
        at = 0
        for match in PLACEHOLDER.finditer(text):
            if match.start() > at:
                pieces.append(Piece("prompt", text[at : match.start()]))
            pieces.append(Piece("field", value, "field"))
            at = match.end()
        if at < len(text):
            pieces.append(Piece("prompt", text[at:]))
        return make_prompt(
            model.tokenizer, pieces, id=f"{field_name}={value}", answer=answer, rendering=rendering, system=system
        )

    prompts = [build(v, a) for v, a in zip((old, new), answers or ("", ""), strict=True)]
    if answers is None:
        ids = [int(model.next_logits(prefill(model, p).hidden).argmax()) for p in prompts]
        if ids[0] == ids[1]:
            raise AnswerError(
                f"the model continues both prompts with {model.tokenizer.decode([ids[0]])!r}, so this decision does not "
                "depend on the field; name the two answers yourself"
            )
        prompts = [build(v, model.tokenizer.decode([i])) for v, i in zip((old, new), ids, strict=True)]
    else:
        ids = [int(model.tokenizer.encode(a, add_special_tokens=False)[0]) for a in answers]
    return Pair(f"{field_name}:{old}->{new}", "custom", "custom", prompts[0], prompts[1], "field", (ids[0], ids[1]))


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
        pair: prompts that differ in one field, e.g. from :func:`pair_from_text` or a task.
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
    singles = [Site((p,)) for p in rows]
    margins: dict[str, tuple[float, float]] = {}
    excluded: dict[str, str] = {}
    positions: dict[str, Tensor] = {}
    say("position map")
    for direction, recipient, donor, ids in (
        ("denoising", old, new, pair.answer_ids),
        ("noising", new, old, pair.answer_ids[::-1]),
    ):
        reader = Reader.last(recipient.cache, ids)
        found = swap_effects(model, recipient.cache, [donor.cache], singles, reader)
        low = float(found.baseline[1] - found.baseline[0])
        high = _margin(swap_effects(model, donor.cache, [], [], reader).baselines)[0]
        margins[direction] = (low, high)
        reason = exclusion(low, high)
        if reason is not None:
            excluded[direction] = reason
        positions[direction] = (torch.tensor(_margin(found.logits)) - low) / (high - low)
    low, high = margins["denoising"]
    reader = Reader.last(old.cache, pair.answer_ids)

    def recovery(logits: Tensor) -> Tensor:
        return (torch.tensor(_margin(logits)) - low) / (high - low)

    edited = pair.differing
    say("recomputed rows")
    later = [p for p in rows if p > edited[0] and p not in edited]
    again = recompute_effects(
        model, old.cache, pair.new.token_ids, [(), *((p,) for p in later)], pair.answer_ids, edited=edited
    )
    in_place = float(recovery(again)[0])
    recomputed = torch.full((len(rows),), in_place)
    recomputed[later] = recovery(again)[1:]
    recomputed[: edited[0]] = in_place
    by_layer: Tensor | None = None
    if layers:
        say("layer x position map")
        by_layer = _layer_map(model, old, new, reader, edited[0], recovery)
    estimate, correlation, missed = None, None, ()
    if attribution:
        say("attribution estimate")
        estimate = attribution_effects(model, old.cache, new.cache, reader).positions / (high - low)
        correlation, missed = _compare(estimate, positions["denoising"], later)
    smallest = None
    if minimal:
        say("greedy minimal set")
        candidates = [p for p in rows if p >= edited[0]]
        smallest = _minimal(model, old, new, reader, candidates, low, high, max_rows, edited, pair)
    return NoteMap(
        pair, margins, excluded, positions, by_layer, in_place, recomputed, estimate, correlation, missed, smallest,
        facts=model.facts(),
    )  # fmt: skip


def _margin(logits: Tensor) -> list[float]:
    return (logits[:, 1] - logits[:, 0]).tolist()


def _layer_map(
    model: NoteModel, old: Context, new: Context, reader: Reader, first: int, recovery: Callable[[Tensor], Tensor]
) -> Tensor:
    n_layers, n = model.geometry.n_layers, reader.start
    sites = [Site((p,), layers=(layer, layer + 1)) for layer in range(n_layers) for p in range(first, n)]
    found = swap_effects(model, old.cache, [new.cache], sites, reader)
    out = torch.zeros(n_layers, n)
    out[:, first:] = recovery(found.logits).view(n_layers, n - first)
    return out


def _compare(estimate: Tensor, exact: Tensor, rows: Sequence[int]) -> tuple[float | None, tuple[int, ...]]:
    """Spearman correlation over ``rows`` and the rows with a real effect that the estimate misses."""
    from scipy.stats import spearmanr

    a, b = estimate[list(rows)], exact[list(rows)]
    constant = len(rows) < 3 or float(a.std()) == 0 or float(b.std()) == 0
    correlation = None if constant else float(spearmanr(a.numpy(), b.numpy()).statistic)
    missed = [p for p, x, y in zip(rows, a.tolist(), b.tolist(), strict=True) if y >= FALSE_NEGATIVE_AT and x < y / 10]
    return correlation, tuple(missed)


def _minimal(
    model: NoteModel,
    old: Context,
    new: Context,
    reader: Reader,
    candidates: Sequence[int],
    low: float,
    high: float,
    max_rows: int,
    edited: Sequence[int],
    pair: Pair,
) -> MinimalSet:
    """Greedy forward search until the margin changes sign, then backward removal."""

    def best(sets: Sequence[Sequence[int]]) -> list[float]:
        return _margin(swap_effects(model, old.cache, [new.cache], [Site(tuple(s)) for s in sets], reader).logits)

    chosen: list[int] = []
    path: list[float] = []
    margin = low
    while margin <= 0 and len(chosen) < min(max_rows, len(candidates)):
        left = [p for p in candidates if p not in chosen]
        margins = best([[*chosen, p] for p in left])
        top = max(range(len(left)), key=lambda i: (margins[i], -left[i]))
        chosen.append(left[top])
        margin = margins[top]
        path.append((margin - low) / (high - low))
    needless = True
    while margin > 0 and needless and len(chosen) > 1:
        margins = best([[p for p in chosen if p != drop] for drop in chosen])
        top = max(range(len(chosen)), key=lambda i: margins[i])
        needless = margins[top] > 0
        if needless:
            chosen.pop(top)
            margin = margins[top]
    rows = tuple(sorted(chosen))
    again = recompute_effects(model, old.cache, pair.new.token_ids, [rows], reader.answer_ids, edited=edited)
    return MinimalSet(
        rows, tuple(path), (margin - low) / (high - low), (_margin(again)[0] - low) / (high - low), margin > 0
    )
