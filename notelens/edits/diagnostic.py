"""Does a field need more than an in-place refresh? Told before the repair is paid for.

Refreshing a field's own rows is enough where the decision reads the field; it does nothing where the decision reads notes that
were written behind it (arXiv:2606.17107, section "editable"). Which of the two holds can be seen beforehand, from the prompt
with its old value and at most one *other* value (the reference), never from the value that will be set:

* ``chain_share``: strength of the best chain of reads from the field over other rows to the last one, against the strongest
  direct read. From the record kept at prefill; no token.
* ``reader_attention``: the largest share of attention, over heads and layers, that the last row pays to the field's rows. One
  token.
* ``note_mass``: share of the reference's effect on the decision that comes with the rows *behind* the field alone. From the
  note map of the reference.
* ``transplant_gap``: what the :data:`TOP` strongest of these rows bring when copied, less what they bring when run again.

A :class:`Diagnostic` turns them into an expected recovery of ``in_place``. It is fitted on calibration prompts and reused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from notelens.edits.dependencies import required
from notelens.edits.edit import Edit
from notelens.edits.ranking import top
from notelens.errors import AnswerError, EditError
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.intervene.run_rows import run_rows

if TYPE_CHECKING:
    from notelens.edits.context import EditableContext

TOP = 8
MIN_SHIFT = 1.0
"""Smallest distance, in logits, between the decisions under old value and reference over which shares are defined."""
N_LOGITS = 8
"""Tokens compared: so many of the likeliest under either value."""
RECORDED = ("chain_share",)
ONE_TOKEN = ("chain_share", "reader_attention")
MAPPED = ("chain_share", "reader_attention", "note_mass", "transplant_gap")
"""Features by what they cost: nothing, one token, a note map."""
RIDGE = 1e-2
"""Penalty on standardised weights; keeps them finite where calibration data can be separated."""
_STEPS, _CLIP = 50, 1e-3


@dataclass(frozen=True)
class Signs:
    """What can be seen of a field before it is edited.

    Attributes:
        chain_share, reader_attention, note_mass, transplant_gap: see the module; the last two are ``None`` without a reference.
        reference: the other value that was tried, or empty.
        tokens: tokens run to see it.
    """

    chain_share: float
    reader_attention: float
    note_mass: float | None
    transplant_gap: float | None
    reference: str
    tokens: int

    def vector(self, names: Sequence[str]) -> list[float]:
        """The named features.

        Raises:
            EditError: one of them was not measured.
        """
        found = {name: getattr(self, name) for name in names}
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise EditError(f"feature {missing[0]!r} needs a reference value; give one, or use {', '.join(ONE_TOKEN)}")
        return list(found.values())


def signs(context: "EditableContext", field: str, reference: str | None = None) -> Signs:
    """What can be seen of a field, on an exact context that keeps a record of reads.

    Args:
        context: with the old value.
        field: its name.
        reference: another value of as many tokens, for ``note_mass`` and ``transplant_gap``. Take one that will *not* be set:
            the answer for the reference itself is known once it has been tried.

    Raises:
        EditError: the context is approximate or has no record of reads, or the field stands at the very end.
        LengthChangeError: the reference has another number of tokens.
        AnswerError: the reference changes the decision by less than :data:`MIN_SHIFT` logits.

    Cost: one token; with a reference also a prefill, one token for every row behind the field, and :data:`TOP` rows.
    """
    if not context.exact:
        raise EditError("signs are read from an exact context; this one is approximate, so prefill it anew")
    context.text.check_field(field)
    own = context.tokens.positions(field)
    last = len(context) - 1
    behind = [p for p in range(own[0] + 1, last) if p not in set(own)]
    if not behind:
        raise EditError(f"no row stands between field {field!r} and the last one; an in-place edit is all there is")
    record = required(context.dependencies)
    chain = float(record.chain(own, [last])[behind].max())
    direct = float(
        torch.where(torch.isin(record.source[:, last].long(), torch.tensor(own)), record.weight[:, last], 0.0).max()
    )
    share = chain / (chain + direct) if chain + direct > 0 else 0.0
    attention, tokens = _attention(context, own)
    if reference is None:
        return Signs(share, attention, None, None, "", tokens)
    edit = Edit(context, field, reference, "diagnostic")
    edit.require_equal_length()
    mass, gap = _mapped(edit)
    return Signs(share, attention, mass, gap, edit.value, tokens + edit.meter.planning)


def _attention(context: "EditableContext", own: Sequence[int]) -> tuple[float, int]:
    """Largest attention of the last row to the field's rows, over layers and heads."""
    seen = [0.0]

    def watch(layer: int, query: Tensor, probs: Tensor, columns: Tensor) -> None:
        mine = torch.isin(columns, torch.tensor(own, device=columns.device))
        seen.append(float(probs[:, -1][:, mine].sum(-1).max()))

    last = len(context) - 1
    done = run_rows(context.model, context.rows, context.tokens.ids[last:], [last], watch=watch)
    return max(seen), done.n_tokens


def _mapped(edit: Edit) -> tuple[float, float]:
    """Note mass and transplant gap of the reference, as shares of its effect on the logits that it moves."""
    model, donor = edit.model, edit.donor()
    stale, fresh = model.next_logits(edit.context.hidden), model.next_logits(donor.hidden)
    ids = sorted({*stale.topk(N_LOGITS).indices.tolist(), *fresh.topk(N_LOGITS).indices.tolist()})
    base = edit.context.cache()
    rows = list(edit.behind)
    sites = [Site(tuple(rows)), *(Site((p,)) for p in rows)]
    found = swap_effects(model, base, [donor.rows], sites, Reader.last(base, ids), prefix=edit.first)
    edit.meter.planning += found.n_tokens
    axis = _centred(fresh[ids].float()) - _centred(found.baseline.to(fresh.device).float())
    shift = float(axis.abs().max())
    if shift < MIN_SHIFT:
        raise AnswerError(
            f"the reference {edit.value!r} of field {edit.name!r} moves the next token's logits by {shift:.2f}, less than "
            f"{MIN_SHIFT}; take a value under which the decision differs"
        )

    def along(logits: Tensor) -> Tensor:
        moved = _centred(logits.to(axis)) - _centred(found.baseline.to(axis))
        return (moved @ axis) / (axis @ axis)

    shares = along(found.logits)
    score = torch.full((edit.n,), float("-inf"))
    score[rows] = shares[1:].cpu()
    best = top(score, rows, min(TOP, len(rows)))
    copied = swap_effects(
        model,
        base,
        [donor.rows],
        [Site(tuple(sorted({*best, *edit.edited})))],
        Reader.last(base, ids),
        prefix=edit.first,
    )
    edit.meter.planning += copied.n_tokens
    again = edit.run(best, planning=True)
    rerun = model.next_logits(again.hidden)[ids]
    return float(shares[0]), float(along(copied.logits)[0] - along(rerun))


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Diagnostic:
    """Expected recovery of an in-place refresh as a logistic function of features.

    Attributes:
        names: features used.
        mean, scale: of the features over the calibration prompts.
        weights, bias: of the standardised features.
        n: calibration prompts.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    n: int

    @classmethod
    def fit(cls, found: Sequence[Signs], recovery: Sequence[float], names: Sequence[str] = MAPPED) -> "Diagnostic":
        """Fit on calibration prompts whose true recovery of ``in_place`` is known.

        Args:
            found: signs of every prompt.
            recovery: true recovery of ``in_place``; clipped to [0, 1].
            names: features.

        Raises:
            EditError: fewer than three prompts, or a feature that was not measured.

        Cost: no token.
        """
        if len(found) != len(recovery) or len(found) < 3:
            raise EditError(f"{len(found)} prompts with {len(recovery)} recoveries; at least three of each are needed")
        x = np.array([s.vector(names) for s in found], dtype=np.float64)
        y = np.clip(np.asarray(recovery, dtype=np.float64), 0.0, 1.0)
        mean, spread = x.mean(0), x.std(0)
        scale = np.where(spread > 1e-9, spread, 1.0)
        z = np.column_stack([(x - mean) / scale, np.ones(len(x))])
        penalty = RIDGE * len(x) * np.diag([1.0] * len(names) + [_CLIP])
        weights = np.zeros(len(names) + 1)
        for _ in range(_STEPS):  # Newton's method on a convex objective
            p = 1.0 / (1.0 + np.exp(-np.clip(z @ weights, -30, 30)))
            slope = z.T @ (p - y) + penalty @ weights
            curve = z.T @ (z * np.maximum(p * (1 - p), _CLIP)[:, None]) + penalty
            step = np.linalg.solve(curve, slope)
            weights = weights - step
            if float(np.abs(step).max()) < 1e-8:
                break
        return cls(
            tuple(names), tuple(mean.tolist()), tuple(scale.tolist()), tuple(weights[:-1].tolist()), float(weights[-1]), len(x)
        )  # fmt: skip

    def predict(self, found: Signs) -> float:
        """Expected recovery of ``in_place``, between 0 and 1.

        Raises:
            EditError: a feature was not measured.
        """
        parts = zip(found.vector(self.names), self.mean, self.scale, self.weights, strict=True)
        total = self.bias + sum(w * (x - m) / s for x, m, s, w in parts)
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, total))))

    def needs_more(self, found: Signs, threshold: float = 0.5) -> bool:
        """Whether refreshing the field alone is expected to fall short of ``threshold``."""
        return self.predict(found) < threshold

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Diagnostic":
        """What :meth:`to_dict` gave."""
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in data.items()}
        return cls(**known)


__all__ = ["MAPPED", "ONE_TOKEN", "RECORDED", "Diagnostic", "Signs", "signs"]
