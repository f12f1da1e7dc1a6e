"""Edits share unchanged rows: the new context owns what was run, and no whole copy exists while it is made."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.edits import BARS, METHODS, edit_rows, missed
from benchmarks.report import FIELDS
from experiments.edit_cases import instance_case
from notelens.edits import EDITS
from notelens.edits.context import EditableContext
from tests.contracts import edits as contract
from tests.contracts.models import build_config, build_model
from tests.tiny import VOCABULARY, tiny_instance, tiny_model, wrapped

N_LAYERS = 16
WORDS = " , ".join(f"w{i % 12}" for i in range(150))
TEXT = f"start parcel is {{{{a}}}} , w0 if t0 then , ; {WORDS} please decide . : ?"
SHARING = ("in_place", "edit_local", "auto", "selective", "carrier_window", "erratum", "field_erratum", "stale")
"""Methods that keep rows; the others run all or nearly all of them."""


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operations create and that are still alive, and their peak. Sees every operator's result."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: dict[int, int] = {}
        self._known: set[int] = set()

    def known(self, tensors: Any) -> "LiveBytes":
        """Storages that were there before and do not count."""
        self._known = {t.untyped_storage().data_ptr() for t in tensors}
        return self

    def _gone(self, at: int, size: int) -> None:
        self._held[at] -= 1
        if self._held[at] == 0:
            del self._held[at]
            self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor) or t.device.type != "cpu":
                continue
            at, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
            if at in self._known or size == 0:
                continue
            if at not in self._held:
                self.now += size
                self.peak = max(self.peak, self.now)
            self._held[at] = self._held.get(at, 0) + 1
            weakref.finalize(t, self._gone, at, size)
        return out


@pytest.fixture(scope="module")
def deep() -> Any:
    """A narrow decoder of many layers: one layer's rows are a small part of the cache."""
    settings = {
        "vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": N_LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "initializer_range": 0.05, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    return wrapped(build_model(build_config("llama", settings)), "deep", gate=False)


def context(model: Any, record: bool = True) -> EditableContext:
    return EditableContext.from_text(model, TEXT, {"a": "f0"}, rendering="raw", record=record)


def storages(made: EditableContext) -> dict[int, int]:
    """Bytes of every storage that the rows of a context lie in."""
    parts = [t for s in made.rows.segments for t in (*s.source.keys, *s.source.values)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}


def row_bytes(made: EditableContext) -> float:
    return made.cache().nbytes / len(made)


@pytest.mark.parametrize("name", SHARING)
def test_a_new_context_owns_the_rows_that_were_run_and_shares_the_others(name: str, deep: Any) -> None:
    before = context(deep)
    made, report = before.edit("a", "f1", contract.make(EDITS.get(name)))
    old = storages(before)
    new = {at: size for at, size in storages(made).items() if at not in old}
    assert sum(new.values()) == pytest.approx(row_bytes(before) * report.tokens_run, rel=0.01)
    assert set(storages(made)) & set(old) == set(old), "every old storage is still read from"


@pytest.mark.parametrize("name", SHARING)
def test_no_whole_copy_exists_while_an_edit_is_made(name: str, deep: Any) -> None:
    """At most the rows of two layers of sixteen. The record of reads (here half as large as the cache), which planned edits
    need, is no row: its new version is allowed for, and for ``auto`` what walking over it takes, so far up to 2.4 of it. A copy
    of all rows at any time is beyond either."""
    method = contract.make(EDITS.get(name))
    planned = getattr(method, "ranking", "") == "chain" or name == "auto"
    before = context(deep, record=planned)
    before.edit("a", "f1", method)  # buffers that are made once
    held = [
        *deep.hf.parameters(),
        *deep.hf.buffers(),
        *(t for s in before.rows.segments for t in (*s.source.keys, *s.source.values)),
    ]
    record = before.dependencies
    held += [] if record is None else [record.source, record.weight]
    counter = LiveBytes().known(held)
    with counter:
        before.edit("a", "f1", method)
    whole = before.cache().nbytes
    allowed = 0.15 * whole + (0 if record is None else (2.4 if name == "auto" else 1.2) * record.nbytes)
    assert (counter.peak > 0) == (name != "stale") and counter.peak < allowed, (
        f"{counter.peak / whole:.2f} of the cache"
    )


def test_a_method_that_copies_is_noticed(deep: Any) -> None:
    before = context(deep, record=False)
    counter = LiveBytes().known(t for s in before.rows.segments for t in (*s.source.keys, *s.source.values))
    with counter:
        kept = copy.deepcopy([t.clone() for s in before.rows.segments for t in (*s.source.keys, *s.source.values)])
    assert len(kept) == 2 * N_LAYERS and counter.peak >= 0.99 * before.cache().nbytes
    with LiveBytes() as empty:
        pass
    assert empty.peak == 0


def test_moved_rows_share_their_values(deep: Any) -> None:
    """A longer value moves what stands behind it: keys are rotated anew, values are position-free and stay."""
    before = context(deep, record=False)
    made, report = before.edit("a", "f1 w7", "in_place")
    old = storages(before)
    new = sum(size for at, size in storages(made).items() if at not in old)
    assert new < row_bytes(before) * (report.tokens_run + 0.55 * len(made))


def test_the_benchmark_s_ratios_are_those_of_its_times() -> None:
    case = instance_case(tiny_instance())
    methods = tuple(m for m in METHODS if "erratum" not in m and "local" not in m)
    rows = edit_rows(tiny_model(), case, 1, methods)
    found = {(r["case"]["method"], r["metric"]): r["value"] for r in rows}
    assert {r["benchmark"] for r in rows} == {"edit_cost"} and all(set(r) | {"device"} == set(FIELDS) for r in rows)
    assert {r["case"]["n"] for r in rows} == {len(case.old)} and set(BARS) <= set(METHODS)
    assert found["in_place", "tokens"] == 2.0 and found["full_suffix", "tokens"] == len(case.old) - 3
    for method in methods:
        ratio = found["full_prefill", "full_ms"] / found[method, "ms"]
        assert found[method, "ratio_to_full"] == pytest.approx(ratio)


def test_missed_bars_are_named() -> None:
    def row(method: str, n: int, value: float, metric: str = "ratio_to_full") -> dict[str, Any]:
        return {"benchmark": "edit_cost", "case": {"n": n, "method": method}, "metric": metric, "value": value}

    rows = [row("erratum", 2048, 14.0), row("in_place", 2048, 21.0), row("auto", 2048, 1.0), row("in_place", 512, 2.0)]
    assert missed([*rows, row("in_place", 2048, 3.0, "ms")]) == ["erratum at 2048 tokens: 14.0 times faster, bar 15"]
