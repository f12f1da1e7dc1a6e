"""The admission gate: what must hold of a model before any number measured on it means something."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from notelens.cache.ops import replace_rows, slice_rows
from notelens.errors import NotelensError
from notelens.rope import rotate

if TYPE_CHECKING:
    from notelens.models.model import HFNoteModel

LOGIT_TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest logit difference, relative to the largest logit, that another order of summation may cause. Kernels differ by
2e-6 to 1e-5 in float32 (seen on random models and SmolLM2), by a few steps of the type in half precision."""

ROW_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The same for cached rows, relative to the largest entry of the layer's rows."""

N_TOKENS = 24
SHIFT = 37


@dataclass(frozen=True)
class Check:
    """One check: what was compared, how far apart it was, and what to do when it fails."""

    name: str
    passed: bool
    difference: float | None
    tolerance: float
    detail: str


@dataclass(frozen=True)
class GateReport:
    """All checks of one model under one set of library versions."""

    checks: tuple[Check, ...]
    key: str

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(c.passed for c in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Plain data for records and for the cached report."""
        return {"passed": self.passed, "key": self.key, "checks": [asdict(c) for c in self.checks]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "GateReport":
        """Inverse of :meth:`as_json`."""
        return cls(tuple(Check(**c) for c in data["checks"]), data["key"])

    def lines(self) -> list[str]:
        """One line per check, for people."""
        out: list[str] = []
        for c in self.checks:
            size = "" if c.difference is None else f" (difference {c.difference:.2g}, allowed {c.tolerance:.2g})"
            out.append(f"{'ok  ' if c.passed else 'FAIL'} {c.name}{size}{'' if c.passed else ': ' + c.detail}")
        return out

    def failure(self) -> str:
        """One sentence on what failed first."""
        failed = [c for c in self.checks if not c.passed]
        more = f" ({len(failed) - 1} more checks failed)" if len(failed) > 1 else ""
        return f"{failed[0].name}: {failed[0].detail}{more}" if failed else "all checks passed"


def run_gate(model: "HFNoteModel", *, bridge: bool = True) -> GateReport:
    """Run every check (a few forwards over 24 to 48 tokens; seconds on a CPU for small models).

    Args:
        model: the model.
        bridge: also check the TransformerBridge that hooks use.
    """
    probe = _Probe(model)
    checks: list[tuple[str, Callable[[], tuple[float, float, str]]]] = [
        ("cached decode = full forward", probe.cached_decode),
        ("prefill in two parts = in one", probe.recompute),
        ("identity patch changes nothing, bit for bit", probe.identity_patch),
        ("patch engine = copied cache", probe.engine),
        ("shifted keys = keys computed in place", probe.shift),
    ]
    if bridge:
        checks += [
            ("bridge without hooks = plain forward", probe.bridge_forward),
            ("bridge decodes from the cache it is given", probe.bridge_cache),
        ]
    done: list[Check] = []
    for name, check in checks:
        try:
            difference, tolerance, detail = check()
            passed = difference <= tolerance  # NaN fails
        except NotelensError as e:
            difference, tolerance, detail, passed = None, 0.0, str(e), False
        done.append(Check(name, passed, difference, tolerance, detail))
    return GateReport(tuple(done), "")


class _Probe:
    """Shared forwards of the checks."""

    def __init__(self, model: "HFNoteModel") -> None:
        self.model = model
        generator = torch.Generator().manual_seed(0)
        ids = torch.randperm(model.geometry.vocab_size, generator=generator)[:N_TOKENS]
        self.ids = [int(i) for i in ids]
        self.full = model.prefill(self.ids)
        self.logits = model.next_logits(self.full.hidden)
        self.logit_tolerance = LOGIT_TOLERANCE[model.dtype] * float(self.logits.abs().max())

    def _row_gap(self, a: Any, b: Any) -> float:
        gaps = [
            float((x.float() - y.float()).abs().max() / y.float().abs().max().clamp_min(1e-30))
            for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
        ]
        return max(gaps)

    def cached_decode(self) -> tuple[float, float, str]:
        past = self.model.prefill(self.ids[:-1]).cache
        logits = self.model.next_logits(self.model.prefill(self.ids[-1:], past).hidden)
        gap = float((logits - self.logits).abs().max())
        return gap, self.logit_tolerance, "decoding from a cache differs from running the whole prompt; do not use it"

    def recompute(self) -> tuple[float, float, str]:
        half = self.model.prefill(self.ids[: N_TOKENS // 2]).cache
        rest = self.model.prefill(self.ids[N_TOKENS // 2 :], half).cache
        gap = self._row_gap(rest, self.full.cache)
        return (
            gap,
            ROW_TOLERANCE[self.model.dtype],
            "rows depend on how the prompt is cut; chunked repairs would be wrong",
        )

    def identity_patch(self) -> tuple[float, float, str]:
        past = slice_rows(self.full.cache, 0, N_TOKENS - 1)
        before = past.digest()
        plain = self.model.prefill(self.ids[-1:], past).hidden
        same = replace_rows(past, past, range(len(past)))
        patched = self.model.prefill(self.ids[-1:], same).hidden
        changed = before != past.digest()
        gap = float((plain - patched).abs().max()) if not changed else float("inf")
        return gap, 0.0, "a patch of rows with themselves changes the output, or the run changed its own cache"

    def engine(self) -> tuple[float, float, str]:
        from notelens.intervene.engine import Reader, Site, swap_effects

        n = N_TOKENS
        other = self.model.prefill([*self.ids[:3], self.ids[4], *self.ids[4:]]).cache
        answers = tuple(self.ids[:8])
        reader = Reader.last(self.full.cache, answers)
        rows = [(3,), (n - 2,), tuple(range(4, n - 1))]
        fast = swap_effects(self.model, self.full.cache, [other], [Site(r) for r in rows], reader)
        slow = [
            self.model.answer_logits(
                self.model.prefill(
                    self.ids[-1:],
                    replace_rows(slice_rows(self.full.cache, 0, n - 1), slice_rows(other, 0, n - 1), r),
                ).hidden,
                answers,
            )
            for r in rows
        ]
        gap = float((fast.logits - torch.stack(slow).cpu()).abs().max())
        fired = float((fast.logits - fast.baseline).abs().max())
        if fired == 0.0:
            return float("inf"), 0.0, "patching rows had no effect at all: the model does not read its cache"
        return gap, self.logit_tolerance, "the patch engine differs from patched copies of the cache"

    def shift(self) -> tuple[float, float, str]:
        """Run the same span at two places; moved keys must match in every layer, values must not change."""
        model = self.model
        span = self.ids[:12]
        near, far = (model.prefill(span, start=at).cache for at in (3, 3 + SHIFT))
        worst = 0.0
        for layer, (a, b) in enumerate(zip(near.keys, far.keys, strict=True)):
            inv_freq = model.family.inv_freq(model.hf, layer)
            moved = a if inv_freq is None else rotate(a, SHIFT, inv_freq)
            scale = float(b.float().abs().max())
            worst = max(worst, float((moved.float() - b.float()).abs().max()) / scale)
            scale = float(far.values[layer].float().abs().max())
            worst = max(worst, float((near.values[layer].float() - far.values[layer].float()).abs().max()) / scale)
        return worst, ROW_TOLERANCE[model.dtype], (
            "keys moved by the position difference do not match; pairing, base or scaling of this model's RoPE is not "
            "understood, so rows cannot be moved"
        )  # fmt: skip

    def bridge_forward(self) -> tuple[float, float, str]:
        ids = torch.tensor([self.ids], device=self.model.device)
        with torch.no_grad():
            logits = self.model.bridge(ids)[0, -1].float()
        gap = float((logits - self.logits).abs().max())
        return gap, self.logit_tolerance, "hooks would run another computation than the plain model"

    def bridge_cache(self) -> tuple[float, float, str]:
        from notelens.cache.hf import to_transformers

        past = slice_rows(self.full.cache, 0, N_TOKENS - 1)
        store = to_transformers(past)
        ids = torch.tensor([self.ids[-1:]], device=self.model.device)
        with torch.no_grad():
            logits, after = self.model.bridge(ids, past_key_values=store, return_type="logits_and_cache")
        gap = float((logits[0, -1].float() - self.logits).abs().max())
        length = after.get_seq_length() if after is not None and hasattr(after, "get_seq_length") else 0
        if length != N_TOKENS:
            gap = float("inf")
        return gap, self.logit_tolerance, (
            "the bridge ignored the cache it was given and decoded from an empty one; transformer-lens 4.3.0 does this "
            "with newer transformers (seen with 5.24.0). Install 'transformers>=5.16.1,<5.20'"
        )  # fmt: skip


__all__ = ["Check", "GateReport", "run_gate"]
