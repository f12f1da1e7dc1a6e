"""The benchmarks measure what they say: equal margins from every method, ratios and quartiles right from known timings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import SITES, measure
from benchmarks.methods import IN_FORWARD, ISOLATED, METHODS, available, set_up
from benchmarks.report import FIELDS, all_rows, best_batch, main, markdown, quartiles
from benchmarks.workbench import Case, Prepared, Step, prepare, steps, text_case
from notelens.intervene.engine import Site, swap_effects
from tests.contracts import models as contract

TOLERANCE = 1e-4
N = 24


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    """A small random Llama and two prompts that differ in token 2."""
    case = Case(contract.random_ids(N), contract.random_ids(N, changed=[2]), 2, (5, 17))
    found = prepare(contract.note_model("llama"), case)
    for name in filter(available, METHODS):
        set_up(name, found)
    return found


@pytest.fixture(scope="module")
def sites(prepared: Prepared) -> list[Site]:
    """Every position, in all layers and in single ones."""
    every = [Site((p,)) for p in prepared.case.positions]
    return every + [Site((p,), layers=(low, low + 1)) for low in range(3) for p in prepared.case.positions]


# --- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [m for m in ISOLATED if m != "engine"])
def test_copied_caches_give_the_engines_margins(prepared: Prepared, sites: list[Site], name: str) -> None:
    expected = METHODS["engine"](prepared, sites)
    assert float((expected - expected[0]).abs().max()) > 0.1, "nothing depends on the sites"
    torch.testing.assert_close(METHODS[name](prepared, sites), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [m for m in IN_FORWARD if available(m)])
def test_full_forwards_give_the_engines_in_forward_margins(prepared: Prepared, sites: list[Site], name: str) -> None:
    few = sites[::7]
    logits = swap_effects(
        prepared.model, prepared.recipient, [prepared.donor], few, prepared.reader, mode="in_forward"
    ).logits
    torch.testing.assert_close(METHODS[name](prepared, few), logits[:, 1] - logits[:, 0], atol=TOLERANCE, rtol=0)


def test_attribution_estimates_small_changes(prepared: Prepared) -> None:
    """A donor that differs by a thousandth: the first-order estimate is the change, up to second order."""
    near = prepared.recipient.replace_tensors(
        [a + 1e-3 * (b - a) for a, b in zip(prepared.recipient.keys, prepared.donor.keys, strict=True)],
        [a + 1e-3 * (b - a) for a, b in zip(prepared.recipient.values, prepared.donor.values, strict=True)],
        history=("a thousandth of the way to the donor",),
    )
    close = Prepared(prepared.model, prepared.case, prepared.recipient, near)
    every = [Site((p,)) for p in prepared.case.positions] + [Site((7,), layers=(1, 2))]
    margins = METHODS["engine"](close, [Site(()), *every])
    estimate = METHODS["attribution"](close, every)
    torch.testing.assert_close(estimate.float(), margins[1:] - margins[0], atol=2e-5, rtol=0)


def test_prefill_reads_the_baseline(prepared: Prepared) -> None:
    baseline = METHODS["engine"](prepared, [Site(())])
    torch.testing.assert_close(METHODS["prefill"](prepared, [])[None], baseline, atol=TOLERANCE, rtol=0)


def test_methods_leave_what_was_prepared_alone(prepared: Prepared, sites: list[Site]) -> None:
    before = prepared.recipient.digest(), prepared.donor.digest()
    first = METHODS["loop"](prepared, sites[:3])
    for name in filter(available, METHODS):
        METHODS[name](prepared, sites[:3])
    assert torch.equal(METHODS["loop"](prepared, sites[:3]), first)
    assert (prepared.recipient.digest(), prepared.donor.digest()) == before


# --- the plan ---------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer that gives every word and mark an id of its own."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in text.split()]}


@pytest.mark.parametrize("n", [40, 129])
def test_a_case_has_the_length_asked_for_and_one_difference(n: int) -> None:
    case = text_case(Words(), n)
    assert len(case.recipient_ids) == len(case.donor_ids) == case.n == n
    assert [i for i in range(n) if case.recipient_ids[i] != case.donor_ids[i]] == [case.field]
    assert case.positions == range(case.field + 1, n - 1)
    assert text_case(Words(), n) == case != text_case(Words(), n, seed=1)


def test_a_case_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="12 tokens leave no room"):
        text_case(Words(), 12)


def test_methods_alternate_and_the_first_prefills_lead() -> None:
    plan = [(s.round, s.method) for s in steps("position_map", 64, 3, {"engine": None, "loop": 2})]
    rounds = [[(r, "engine"), (r, "loop")] for r in range(3)]
    assert plan == [(0, "prefill"), (1, "prefill"), *rounds[0], *rounds[1], *rounds[2], (2, "prefill")]
    two = steps("position_map", 64, 3, {"engine": None}, prefills=2)
    assert [s.round for s in two if s.method == "prefill"] == [0, 1]


def test_samples_are_fixed_by_the_round(prepared: Prepared) -> None:
    first, second = (Step("position_map", N, "loop", r, 5).choose(prepared.case, 3) for r in range(2))
    assert first == Step("position_map", N, "loop", 0, 5).choose(prepared.case, 3) != second
    assert len(set(first)) == 5 and {p for s in first for p in s.positions} <= set(prepared.case.positions)
    spread = Step("position_map", N, "engine", 0, 5, spread=True).choose(prepared.case, 3)
    assert [s.positions[0] for s in spread] == [3, 7, 11, 15, 19]
    full = Step("layer_position_map", N, "engine", 0, None).choose(prepared.case, 3)
    assert len(set(full)) == 3 * (N - 4)


# --- the report -------------------------------------------------------------------------------------------------------


def entry(seconds: float, **info: Any) -> dict[str, Any]:
    return {"stats": {"total": seconds}, "extra_info": {"benchmark": "position_map", "n": 512, "load": 0.5, **info}}


@pytest.fixture
def timings() -> dict[str, Any]:
    """Five rounds. Per patch the engine takes 1, 2, 1, 1, 1 ms; the loop always 60 times as long, native 64 ten times."""
    engine = [1, 2, 1, 1, 1]
    found = [entry(0.5 * e, method="engine", round=r, patches=500) for r, e in enumerate(engine)]
    found += [
        entry(10 * 0.060 * e, method="loop", round=r, patches=10, errors=[1e-5, r * 1e-5]) for r, e in enumerate(engine)
    ]
    found += [entry(64 * 0.010 * e, method="native_64", round=r, patches=64) for r, e in enumerate(engine)]
    found += [entry(8 * 0.012, method="native_8", round=r, patches=8) for r in range(5)]
    found += [entry(0.3 + 0.1 * r, method="hook_loop", round=r, patches=1) for r in (2, 3, 4)]
    found += [entry(0.8 * 512e-3, method="prefill", round=r, patches=512) for r in range(2)]
    found += [entry(0.25, method="attribution", round=0, patches=500, rank_correlation=0.7, compared=500)]
    found.append(
        entry(9.0, benchmark="equality", n=128, prompts=3, sites=360, errors=[1e-5, 3e-5, 2e-5], margin_spans=[1, 2, 3])
    )
    machine = {"cpu": "a processor", "cores": 2, "threads": 2, "capability": "AVX2", "model": "m", "dtype": "float32"}
    return {
        "benchmarks": found,
        "machine_info": {**machine, "versions": {"torch": "2"}},
        "datetime": "2026-11-29T20:00:00",
    }


MEMORY = [
    {"method": "engine", "n": 2048, "sites": 2000, "model_mib": 500.0, "cache_mib": 90.0, "over_model_mib": 300.0},
    {"method": "loop", "n": 2048, "sites": 2, "model_mib": 500.0, "cache_mib": 90.0, "over_model_mib": 400.0},
]


def figures(rows: list[dict[str, Any]], metric: str, n: int = 512) -> tuple[float, ...]:
    (row,) = [r for r in rows if r["metric"] == metric and r["case"]["n"] == n and r["benchmark"] != "equality"]
    return row["value"], row["q1"], row["q3"], row["n"]


def test_ratios_and_quartiles_from_known_timings(timings: Mapping[str, Any]) -> None:
    rows = all_rows(timings, MEMORY)
    assert figures(rows, "ratio_to_loop") == pytest.approx((60, 60, 60, 5))
    assert figures(rows, "ratio_to_native_batch") == pytest.approx((10, 10, 10, 5)), "64 copies are the best batch"
    assert figures(rows, "best_native_batch")[0] == 64
    assert figures(rows, "ratio_to_hook_loop") == pytest.approx((600, 550, 650, 3)), "only the rounds that both have"
    assert figures(rows, "cost_in_prefills") == pytest.approx((1.875, 1.5625, 2.1875, 2)), "1 / 0.8 and 2 / 0.8"
    assert figures(rows, "ratio_to_attribution") == pytest.approx((0.5, 0.5, 0.5, 1))
    assert figures(rows, "ms_per_patch_engine") == pytest.approx((1, 1, 1, 5))
    assert figures(rows, "max_abs_error") == pytest.approx((4e-5, 1e-5, 3e-5, 10))
    assert figures(rows, "attribution_rank_correlation") == (0.7, 0.7, 0.7, 500)
    assert figures(rows, "peak_mib", 2048) == (800, 800, 800, 1)
    assert figures(rows, "peak_mib_loop", 2048)[0] == 900
    (equality,) = [r for r in rows if r["benchmark"] == "equality" and r["metric"] == "max_abs_error"]
    assert (equality["case"], equality["value"], equality["n"]) == ({"n": 128, "prompts": 3}, 3e-5, 360)


def test_quartiles_lie_between_neighbours() -> None:
    assert quartiles([4, 1, 2, 3]) == {"value": 2.5, "q1": 1.75, "q3": 3.25, "n": 4}


def test_without_native_batches_there_is_no_best(timings: dict[str, Any]) -> None:
    timings["benchmarks"] = [e for e in timings["benchmarks"] if "native" not in e["extra_info"].get("method", "")]
    assert best_batch({"engine": {0: 1.0}}) is None
    assert "ratio_to_native_batch" not in {r["metric"] for r in all_rows(timings, [])}


def test_results_have_the_fields_of_the_design_and_keep_other_benchmarks(
    timings: dict[str, Any], tmp_path: Path
) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    out.mkdir()
    other = {
        "benchmark": "ttft",
        "case": {"n": 512},
        "metric": "ttft_ratio",
        "value": 2,
        "q1": 1,
        "q3": 3,
        "n": 9,
        "device": "x",
    }
    stale = {**other, "benchmark": "position_map"}
    (out / "results.json").write_text(json.dumps([other, stale]))
    (raw / "timings.json").write_text(json.dumps(timings))
    (raw / "memory.jsonl").write_text("\n".join(map(json.dumps, MEMORY)))
    main([str(raw), "--out", str(out)])
    rows = json.loads((out / "results.json").read_text())
    assert rows[0] == other and stale not in rows
    assert all(tuple(row) == FIELDS and row["device"].startswith(("cpu", "x")) for row in rows)
    assert all(row["q1"] <= row["q3"] and row["n"] >= 1 and isinstance(row["case"]["n"], int) for row in rows)
    names = {row["metric"] for row in rows if row["benchmark"] == "position_map"}
    assert names >= {
        "ratio_to_loop", "ratio_to_native_batch", "ratio_to_hook_loop", "cost_in_prefills", "max_abs_error", "peak_mib",
    }  # fmt: skip


def test_bars_say_whether_they_are_met(timings: Mapping[str, Any]) -> None:
    rows = all_rows(timings, MEMORY)
    lines = [line for line in markdown(rows, timings).splitlines() if line.startswith("| position_map, ")]
    verdicts = {line.split(" | ")[0].split()[-1]: line.split(" | ")[-1].rstrip(" |") for line in lines}
    assert verdicts == {
        "ratio_to_loop": "met",
        "ratio_to_native_batch": "met",
        "ratio_to_hook_loop": "met",
        "cost_in_prefills": "**missed**",
        "peak_mib": "met",
    }


def test_peak_memory_counts_what_a_method_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that fills 200 MiB shows (less what was free before), and the model's weights are counted exactly."""
    model = contract.note_model("llama")
    held = 200 * 2**20

    def greedy(*_: Any) -> torch.Tensor:
        return torch.ones(held // 4)

    monkeypatch.setitem(METHODS, "engine", greedy)
    monkeypatch.setattr(
        "benchmarks.workbench.text_case", lambda *_: Case(contract.random_ids(N), contract.random_ids(N), 2, (5, 17))
    )
    found = measure(model, "engine", N)
    assert 190 <= found["over_model_mib"] < 300
    assert found["sites"] == N - 4 and found["cache_mib"] == 3 * 2 * 2 * N * 8 * 4 / 2**20
    assert found["model_mib"] == sum(p.numel() for p in model.hf.parameters()) * 4 / 2**20
    assert set(SITES) <= set(METHODS)
