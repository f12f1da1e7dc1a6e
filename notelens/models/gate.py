"""The admission gate: what must hold of a model before any number measured on it means something."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from notelens.attention.move import adapters, move_rows
from notelens.cache.hf import empty_cache, from_transformers, to_transformers
from notelens.cache.kv import KVCache
from notelens.cache.ops import replace_rows, slice_rows
from notelens.errors import NotelensError

if TYPE_CHECKING:
    from notelens.models.model import HFNoteModel

LOGIT_TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest logit difference, relative to the largest logit, that another order of summation may cause. Kernels differ by
2e-6 to 1e-5 in float32 (seen on random models and SmolLM2), by a few steps of the type in half precision."""

ROW_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The same for cached rows, relative to the largest entry of the layer's rows."""

N_TOKENS = 24
N_SPAN, START, NEAR, FAR = 12, 3, 37, 211
"""Rows that are moved, where they begin, and how far they go. A wrong pairing or base can pass at a few positions: frequencies
of later channels are low, and only a long way turns them visibly."""
LONGEST_WINDOW = 512
"""Sliding windows up to this length are exceeded by the gate; longer ones would take a long prompt."""


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
    """All checks of one model under one set of library versions.

    Attributes:
        checks: what was checked.
        key: hash of everything the report depends on.
        notes: what was not checked, or does not work with this model, and why.
    """

    checks: tuple[Check, ...]
    key: str
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(c.passed for c in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Plain data for records and for the cached report."""
        checks = [asdict(c) for c in self.checks]
        return {"passed": self.passed, "key": self.key, "checks": checks, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "GateReport":
        """Inverse of :meth:`as_json`."""
        return cls(tuple(Check(**c) for c in data["checks"]), data["key"], tuple(data["notes"]))

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
    notes: list[str] = []
    checks: list[tuple[str, Callable[[], tuple[float, float, str]]]] = [
        ("stored rows have the declared shape", probe.shape),
        ("cached decode = full forward", probe.cached_decode),
        ("prefill in two parts = in one", probe.recompute),
        ("one prompt alone = the same among others", probe.batched),
        ("identity patch changes nothing, bit for bit", probe.identity_patch),
        ("patch engine = copied cache", probe.engine),
    ]
    windows = sorted(_windows(model))
    short = [w for w in windows if w <= LONGEST_WINDOW and w + N_TOKENS <= model.geometry.max_positions]
    if short:
        checks.append(("patch engine = copied cache, beyond the window", lambda: probe.engine(short[-1] + N_TOKENS)))
    for window in sorted(set(windows) - set(short)):
        notes.append(
            f"the window of {window} positions was taken from the config, not measured: it needs a prompt that long"
        )
    checks.append(("moved rows = rows computed in place, near", lambda: probe.shift(NEAR)))
    reach = model.geometry.max_positions - START - N_SPAN
    if reach >= 2 * NEAR:
        far = min(FAR, reach)
        checks.append(("moved rows = rows computed in place, far", lambda: probe.shift(far)))
        if far < FAR:
            notes.append(f"rows were moved by {far} positions at most; the model has {model.geometry.max_positions}")
    if any(adapter.facts.axes is not None for adapter in adapters(model)):
        checks.append(("rows moved along one axis = rows computed there", probe.axes))
    if model.geometry.limit is not None:
        notes.append(f"prompts end at position {model.geometry.max_positions}: {model.geometry.limit}")
    notes += sorted({f"{type(a).__name__.lower()} rows: {a.limits}" for a in adapters(model) if a.support == "partial"})
    if bridge:
        checks.append(("bridge without hooks = plain forward", probe.bridge_forward))
        if model.family.bridge_caches:
            checks.append(("bridge decodes from the cache it is given", probe.bridge_cache))
        else:
            notes.append("hooks run on whole prompts only: the bridge cannot decode from caches of this family")
    done: list[Check] = []
    for name, check in checks:
        try:
            difference, tolerance, detail = check()
            passed = difference <= tolerance  # NaN fails
        except NotelensError as e:
            difference, tolerance, detail, passed = None, 0.0, str(e), False
        done.append(Check(name, passed, difference, tolerance, detail))
    return GateReport(tuple(done), "", tuple(notes))


def _windows(model: "HFNoteModel") -> set[int]:
    """Windows that the family names, and the one in the config, which a family may have overlooked."""
    config = model.family.text_config(model.hf.config)
    named = {g.window for g in model.geometry.layers if g.window is not None}
    written = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    return named | ({written} if isinstance(written, int) and used else set())


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

    def _prefix(self, ids: Sequence[int], cache: KVCache) -> KVCache:
        """All rows but the last; a hybrid runs them anew, because its state cannot be cut."""
        if self.model.family.recurrent:
            return self.model.prefill(ids[:-1]).cache
        return slice_rows(cache, 0, len(ids) - 1)

    def shape(self) -> tuple[float, float, str]:
        self.model.geometry.check(self.full.cache, self.model.name)
        same = self.full.cache.dtype == self.model.dtype
        return (0.0 if same else float("inf")), 0.0, "rows are stored in another type than the model's"

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

    def batched(self) -> tuple[float, float, str]:
        """The noise floor of batching: kernels and routers may sum in another order for four prompts than for one."""
        rows = [self.ids[i:] + self.ids[:i] for i in range(4)]
        ids = torch.tensor(rows, device=self.model.device)
        with torch.no_grad():
            hidden = self.model.family.decoder(self.model.hf)(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
        gap = float((self.model.next_logits(hidden) - self.logits).abs().max())
        return gap, self.logit_tolerance, (
            "a prompt's logits depend on what runs beside it by more than rounding; batched probes would measure that"
        )  # fmt: skip

    def identity_patch(self) -> tuple[float, float, str]:
        past = self._prefix(self.ids, self.full.cache)
        before = past.digest()
        plain = self.model.prefill(self.ids[-1:], past).hidden
        same = replace_rows(past, past, range(len(past)))
        patched = self.model.prefill(self.ids[-1:], same).hidden
        changed = before != past.digest()
        gap = float((plain - patched).abs().max()) if not changed else float("inf")
        return gap, 0.0, "a patch of rows with themselves changes the output, or the run changed its own cache"

    def engine(self, n: int = N_TOKENS) -> tuple[float, float, str]:
        from notelens.intervene.engine import Reader, Site, swap_effects

        ids = [self.ids[i % N_TOKENS] for i in range(n)]
        other_ids = [*ids[:3], ids[4], *ids[4:-5], ids[-6], *ids[-4:]]
        base, other = self.model.prefill(ids).cache, self.model.prefill(other_ids).cache
        answers = tuple(self.ids[:8])
        rows = [(3,), (n - 2,), tuple(range(4, n - 1))]
        fast = swap_effects(self.model, base, [other], [Site(r) for r in rows], Reader.last(base, answers))
        past, donor = self._prefix(ids, base), self._prefix(other_ids, other)
        slow = [
            self.model.answer_logits(self.model.prefill(ids[-1:], replace_rows(past, donor, r)).hidden, answers)
            for r in rows
        ]
        gap = float((fast.logits - torch.stack(slow).cpu()).abs().max())
        fired = float((fast.logits - fast.baseline).abs().max())
        if fired == 0.0:
            return float("inf"), 0.0, "patching rows had no effect at all: the model does not read its cache"
        return gap, self.logit_tolerance, "the patch engine differs from patched copies of the cache"

    def shift(self, delta: int) -> tuple[float, float, str]:
        """Run the same span at two places; moved rows must match in every layer, there and back."""
        near, far = (self.model.prefill(self.ids[:N_SPAN], start=at).cache for at in (START, START + delta))
        there, back = move_rows(self.model, near, delta), move_rows(self.model, far, -delta)
        worst = max(self._row_gap(there, far), self._row_gap(back, near))
        return worst, ROW_TOLERANCE[self.model.dtype], (
            f"rows moved by {delta} positions do not match rows computed there; pairing, base or scaling of this model's RoPE "
            "is not understood, so rows cannot be moved"
        )  # fmt: skip

    def axes(self) -> tuple[float, float, str]:
        """Run a span whose axes differ, and move it along each axis alone."""
        model, n = self.model, N_SPAN
        ids = torch.tensor([self.ids[:n]], device=model.device)
        steps = torch.arange(n)
        start = torch.stack([torch.full((n,), 5), 5 + steps // 4, 5 + steps % 4])

        def rows(axes: torch.Tensor) -> KVCache:
            store = empty_cache()
            with torch.no_grad():
                model.family.decoder(model.hf)(
                    input_ids=ids, position_ids=axes[:, None].to(model.device), past_key_values=store, use_cache=True
                )
            return from_transformers(store, self.ids[:n])

        base, worst = rows(start), 0.0
        for axis in range(3):
            delta = torch.zeros(3, n, dtype=torch.int64)
            delta[axis] = FAR
            pairs = [a.move(k, v, delta) for a, k, v in zip(adapters(model), base.keys, base.values, strict=True)]
            moved = base.replace_tensors([k for k, _ in pairs], [v for _, v in pairs], history=("moved",))
            worst = max(worst, self._row_gap(moved, rows(start + delta)))
        return worst, ROW_TOLERANCE[model.dtype], (
            "rows moved along one axis do not match rows computed there; the axes of this model's channels are not understood"
        )  # fmt: skip

    def bridge_forward(self) -> tuple[float, float, str]:
        ids = torch.tensor([self.ids], device=self.model.device)
        with torch.no_grad():
            logits = self.model.bridge(ids)[0, -1].float()
        gap = float((logits - self.logits).abs().max())
        return gap, self.logit_tolerance, "hooks would run another computation than the plain model"

    def bridge_cache(self) -> tuple[float, float, str]:
        past = slice_rows(self.full.cache, 0, N_TOKENS - 1)
        store = to_transformers(past, share=True)
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
