"""Specificity: closed-form effects, equality with the oracle, rankings that cannot see what they are evaluated on."""

import json
import subprocess
import sys
from typing import Any

import pytest

from notelens.context import ContextStore
from notelens.errors import InputError, PatchError
from notelens.probes import specificity as module
from notelens.probes.aggregators import repeats, runs, slots, token_class
from notelens.probes.base import DIRECTIONS, Direction, ProbeResult, Row, Swapped
from notelens.probes.ranking import halves, random_draws, ranked, split_rankings
from notelens.probes.specificity import KS, Specificity
from notelens.readout import Recovery
from tests.oracle import probes as oracle
from tests.probe_cases import CASES, TOLERANCE, assert_rows_make_the_table, case, grid, only, run, through_json
from tests.tiny import FAMILIES, broken_direct, tiny_instance, tiny_margin

PARTS = {1: [1.0], 2: [0.5, 0.5]}


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    return run(Specificity(), instances=grid(12, families=FAMILIES[:6]))


def maps(found: ProbeResult) -> list[Row]:
    return [r for r in found.rows if r.stage == "map"]


def test_the_note_carries_everything(result: ProbeResult) -> None:
    for row in maps(result):
        effects = dict(zip(row.values["positions"], row.values["effects"], strict=True))
        tokens = row.values["tokens"]
        assert {tokens[p] for p, e in effects.items() if e != 0.0} == {";"}
        assert sum(effects.values()) == pytest.approx(1.0, abs=1e-5)
        assert row.values["field_effects"] == [0.0]
        assert row.values["all_recovery"] == pytest.approx(1.0, abs=1e-6)
        assert len(tokens) == len(row.values["regions"])
        assert row.values["positions"][-1] == len(tokens) - 2
    for ranking in ("own", "split_half", "cross_direction"):
        assert result.get("topk_recovery", k=1, ranking=ranking).estimate.value == pytest.approx(1.0, abs=1e-5)
    assert result.get("flip_rate").estimate.value == 1.0


def test_random_sets_hit_the_one_note_as_often_as_they_must(result: ProbeResult) -> None:
    sizes = [r.meta["n_positions"] for r in result.rows if r.stage == "topk"]
    for k in (1, 2, 4, 8):
        expected = sum(k / n for n in sizes) / len(sizes)
        n_draws = 20 * len(sizes)
        error = 4 * (expected * (1 - expected) / n_draws) ** 0.5
        assert abs(result.get("randk_recovery", k=k).estimate.value - expected) < error


def test_two_notes_share_the_effect_as_the_margin_says() -> None:
    instance = tiny_instance(n_notes=2)
    found = run(Specificity(ks=(1, 2)), instances=[instance])
    row = only(maps(found), instance.pair("field").id, "denoising")
    low, high = (tiny_margin(-1.0), tiny_margin(1.0))
    start, end = (low, high) if instance.conclusion[0, 0] == 0 else (-high, -low)
    middle = tiny_margin(0.0) if instance.conclusion[0, 0] == 0 else -tiny_margin(0.0)
    expected = (middle - start) / (end - start)
    assert sorted(row.values["effects"])[-2:] == pytest.approx([expected, expected], abs=1e-5)
    top = only([r for r in found.rows if r.stage == "topk"], f"{row.item}/topk", "denoising")
    assert top.values["own_recovery"] == pytest.approx([expected, 1.0], abs=1e-5)


def test_shares_against_base_rates(result: ProbeResult) -> None:
    assert result.get("aggregator_share").estimate.value == pytest.approx(1.0)
    bases = [sum(r.values["aggregator"]) / len(r.values["aggregator"]) for r in maps(result)]
    assert result.get("aggregator_base_rate").estimate.value == pytest.approx(sum(bases) / len(bases))
    for row in maps(result):
        for position, flag in zip(row.values["positions"], row.values["aggregator"], strict=True):
            word, region = row.values["tokens"][position], row.values["regions"][position]
            assert flag == (word in (";", ",", ".", ":") or region == "template")
    assert result.get("region_share", region="filler").estimate.value == pytest.approx(1.0)
    assert result.get("repetition_share").estimate.value == 0.0
    assert result.get("aggregator_share").control == "aggregator_base_rate"


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    _, hf, instances = case(name)
    probe = Specificity(ks=(1, 3))
    found = run(probe, name, instances[:1])
    size = 3
    pair = instances[0].pair("field")
    args = (hf, pair.old.token_ids, pair.new.token_ids, pair.old.positions("field"), pair.answer_ids)
    both = {direction: oracle.position_effects(*args, direction) for direction in DIRECTIONS}
    for direction in DIRECTIONS:
        row = only(maps(found), pair.id, direction)
        effects = both[direction]
        assert row.values["positions"] == list(effects)
        assert row.values["effects"] == pytest.approx(list(effects.values()), abs=TOLERANCE)
        top = only([r for r in found.rows if r.stage == "topk"], f"{pair.id}/topk", direction)
        other = oracle.ranked(both["noising" if direction == "denoising" else "denoising"])
        draws = random_draws(row.values["positions"], size, 20, f"0/{pair.id}/topk/{direction}/{size}")
        own = oracle.ranked(effects)
        expected = oracle.specificity(*args, size, draws, own, direction)
        assert top.values["own_recovery"][1] == pytest.approx(expected["topk_recovery"], abs=TOLERANCE)
        assert top.values["random_recovery"][1] == pytest.approx(expected["randk_recovery"], abs=TOLERANCE)
        crossed = oracle.swap_recovery(*args[:3], other[:size], pair.answer_ids, direction)["recovery"]
        assert top.values["cross_direction_recovery"][1] == pytest.approx(crossed, abs=TOLERANCE)


def test_a_k_beyond_the_positions_is_clipped_noted_and_not_averaged(result: ProbeResult) -> None:
    top = [r for r in result.rows if r.stage == "topk"]
    for row in top:
        n = row.meta["n_positions"]
        assert row.values["k_used"] == [min(k, n) for k in KS]
        assert row.values["own_recovery"][-1] == pytest.approx(1.0, abs=1e-5)
    line = result.get("topk_recovery", k=64, ranking="own")
    assert line.estimate.value is None
    assert dict(line.reasons) == {"fewer positions than k": len(top)}


def test_the_default_line_comes_first(result: ProbeResult) -> None:
    first = result.aggregates[0]
    assert (first.metric, dict(first.params)) == ("topk_recovery", {"k": 8, "ranking": "own"})
    assert first.control == "randk_recovery"


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(Specificity(), result)


def test_the_second_stage_works_from_records(result: ProbeResult) -> None:
    probe, instances = Specificity(), grid(12, families=FAMILIES[:6])
    items = probe.items(instances, "topk", through_json(maps(result)))
    store = ContextStore(case("tiny")[0])
    again = [row for item in items[:2] for row in probe.measure(store, item)]
    assert through_json(again) == through_json([r for r in result.rows if r.stage == "topk"][:4])


def test_the_second_stage_needs_the_first(result: ProbeResult) -> None:
    with pytest.raises(InputError, match="stage 'map' first"):
        Specificity().items(grid(12, families=FAMILIES[:6]), "topk", maps(result)[:-1])


# --- rankings ---------------------------------------------------------------------------------------------------------


def row_of(group: str, effects: dict[int, float], tokens: str = "abc,d;e?", direction: str = "denoising") -> Row:
    positions = list(range(1, len(tokens) - 1))
    values: dict[str, Any] = {
        "tokens": list(tokens),
        "regions": ["field", *["filler"] * (len(tokens) - 2), "template"],
        "positions": positions,
        "effects": [effects.get(p, 0.0) for p in positions],
    }
    return Row(f"item {group}", "map", "f", direction, None, values, {"group": group})


def test_equal_effects_are_ranked_by_position() -> None:
    assert ranked([4, 5, 6, 7], [0.0, 0.5, 0.5, -1.0]) == [5, 6, 4, 7]


def test_the_split_ranking_never_sees_its_own_half() -> None:
    rows = [row_of("a", {3: 1.0}), row_of("b", {5: 1.0}), row_of("c", {3: 1.0}), row_of("d", {5: 1.0})]
    assert halves(["a", "b", "c", "d"]) == {"a": 0, "b": 1, "c": 0, "d": 1}
    found = split_rankings(rows)
    assert found["item a", "denoising"][0] == 5  # what the other half found, not its own 3
    assert found["item b", "denoising"][0] == 3
    changed = split_rankings([row_of("a", {1: 9.0}), *rows[1:]])
    assert changed["item a", "denoising"] == found["item a", "denoising"]


def test_slots_match_the_same_token_in_prompts_of_other_length() -> None:
    rows = [row_of("a", {5: 1.0}), row_of("b", {}, tokens="abcxy,d;efg?")]
    assert split_rankings(rows)["item b", "denoising"][0] == 7  # its own ";"


def test_one_group_has_no_other_half() -> None:
    assert split_rankings([row_of("a", {3: 1.0}), row_of("a", {3: 1.0}, direction="noising")]) == {}
    found = run(Specificity(ks=(1,)), instances=[tiny_instance()])
    line = found.get("topk_recovery", k=1, ranking="split_half")
    assert line.estimate.value is None and line.n_excluded == 2
    assert list(line.reasons) == ["no such ranking for this pair"]


def test_draws_do_not_depend_on_the_process() -> None:
    code = (
        "import json; from notelens.probes.ranking import random_draws; "
        "print(json.dumps(random_draws(range(40), 5, 20, 'item/denoising/5')))"
    )
    outs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert outs[0] == outs[1]
    draws = [tuple(d) for d in json.loads(outs[0])]
    assert draws == random_draws(range(40), 5, 20, "item/denoising/5")
    assert len(draws) == 20 and len(set(draws)) > 15 and all(len(set(d)) == 5 for d in draws)


# --- kinds of tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "region", "kind"),
    [
        (".", "rule", "punctuation"),
        (" -", "filler", "punctuation"),
        ("\n", "filler", "newline"),
        (".\n", "filler", "newline"),
        ("  ", "filler", "space"),
        ("assistant", "template", "template"),
        ("<|im_end|>", "template", "template"),
        (" broken", "field", "content"),
        ("7", "filler", "content"),
        ("\ufffd", "filler", "content"),
        ("don't", "filler", "content"),
    ],
)
def test_token_class(text: str, region: str, kind: str) -> None:
    assert token_class(text, region) == kind


def test_repeats_needs_whole_words_and_finds_words_of_several_tokens() -> None:
    tokens = [" intact", ",", " re", "ject", " Intact", " intactly", " re", "turn", "reject"]
    assert repeats(tokens, ["intact", "reject"]) == [True, False, True, True, True, False, False, False, True]
    assert repeats(tokens, ["", " "]) == [False] * len(tokens)


def test_runs_and_slots_count_from_the_end() -> None:
    regions = ["filler", "filler", "rule", "filler", "template"]
    assert runs(regions) == [("filler", 1, 1), ("filler", 1, 0), ("rule", 0, 0), ("filler", 0, 0), ("template", 0, 0)]
    assert slots([",", ",", "if", "x", "?"], regions)[:2] == [
        ("filler/1/,/1", "filler/1/punctuation#1"),
        ("filler/1/,/0", "filler/1/punctuation#0"),
    ]


def test_a_model_that_reads_the_field_itself_has_no_notes() -> None:
    """No row behind the field moves anything, which is a result and not a patch that failed."""
    found = Specificity(ks=(1, 8)).run(ContextStore(broken_direct()), grid(4))
    assert found.get("competence").estimate.value == 1.0
    for metric, params in (("topk_recovery", {"k": 8, "ranking": "own"}), ("randk_recovery", {"k": 8})):
        assert found.get(metric, **params).estimate.value == pytest.approx(0.0, abs=1e-3)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ks", [(), (0, 1), (2, 1), (1, 1), (1.5,), (True,)])
def test_ks_are_checked(ks: Any) -> None:
    with pytest.raises(InputError, match="rising"):
        Specificity(ks=ks)


def test_few_draws_are_refused() -> None:
    with pytest.raises(InputError, match="19"):
        Specificity(n_draws=19)


def test_a_map_of_zeros_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(store: Any, pair: Any, sites: Any) -> dict[Direction, Swapped]:
        still = Recovery(-1.0, 1.0, -1.0)
        return {d: Swapped(d, -1.0, 1.0, None, (still,) * len(sites)) for d in DIRECTIONS}

    monkeypatch.setattr(module, "swap_pair", idle)
    with pytest.raises(PatchError, match="did not reach"):
        run(Specificity(), instances=[tiny_instance()])
