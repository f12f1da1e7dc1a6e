"""Timing: written at index 1, committed at index 2 on the tiny decoder; confound, null and exclusions."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from notelens.context import ContextStore
from notelens.errors import InputError, SpanError, TaskError
from notelens.probes.base import ProbeResult, Row
from notelens.probes.timing import ANCHORS, HELD_OUT, LEAVE_OUT, Timing
from notelens.probes.timing_labels import agreement, make_labels, repeats_field, settled
from notelens.probes.timing_lines import stays_above, timing_lines
from notelens.tasks.base import Instance
from tests.oracle import timing as oracle
from tests.probe_cases import CASES, FORMS, assert_rows_make_the_table, case, grid, run, through_json
from tests.tiny import COMMIT_INDEX, FAMILIES, N_LAYERS, WRITE_INDEX, broken_blind, broken_direct, tiny_instance

FEW: dict[str, Any] = {"n_shuffles": 4}


@pytest.fixture(scope="module")
def instances() -> list[Instance]:
    return grid(36, FORMS)  # 4 families x 3 forms x 3 groups


@pytest.fixture(scope="module")
def result(instances: list[Instance]) -> ProbeResult:
    return run(Timing(), instances=instances)


def value(result: ProbeResult, metric: str, **params: Any) -> float | None:
    return result.get(metric, **params).estimate.value


@pytest.mark.parametrize("grouping", [HELD_OUT, LEAVE_OUT])
@pytest.mark.parametrize("form", ["swapped", "polarity", "polarity+negated"])
def test_written_in_layer_0_and_committed_in_layer_1(result: ProbeResult, form: str, grouping: str) -> None:
    for anchor in ANCHORS:
        written = COMMIT_INDEX if anchor == "decision" else WRITE_INDEX
        if anchor == "request_end":
            written = WRITE_INDEX  # the request ends in a delimiter
        where = {"anchor": anchor, "form": form, "grouping": grouping}
        assert value(result, "write_depth", **where) == written / N_LAYERS
        assert value(result, "conclusion_accuracy", **where, layer=written) == 1.0
        assert value(result, "commit_minus_write", **where) == pytest.approx((COMMIT_INDEX - written) / N_LAYERS)
    assert value(result, "commit_depth", form=form) == 1.0
    assert value(result, "commit_depth") == 1.0


def test_the_default_line_comes_first(result: ProbeResult) -> None:
    first = result.aggregates[0]
    assert (first.metric, dict(first.params)) == (
        "write_depth",
        {"anchor": "before_decision", "form": "swapped", "grouping": HELD_OUT},
    )
    assert first.swap == "none" and first.control == "shuffled_accuracy" and first.method == "both"
    assert {a.method for a in result.aggregates} == {"both"}


def test_the_field_is_copied_to_delimiters_and_not_to_the_decision(result: ProbeResult) -> None:
    where = {"form": "swapped", "grouping": HELD_OUT}
    assert value(result, "field_depth", anchor="before_decision", **where) == 0.5
    assert value(result, "field_depth", anchor="decision", **where) is None
    assert value(result, "field_accuracy", anchor="decision", **where) == 0.5
    assert not any(a.metric == "field_depth" and a.params["grouping"] == LEAVE_OUT for a in result.aggregates)


def test_shuffled_labels_are_at_chance_although_the_real_ones_are_perfect(result: ProbeResult) -> None:
    for form in ("swapped", "polarity", "polarity+negated"):
        for grouping in (HELD_OUT, LEAVE_OUT):
            where = {"anchor": "before_decision", "form": form, "grouping": grouping}
            at = result.get("shuffled_accuracy", **where, at="write_layer").estimate
            assert at.value == pytest.approx(0.5, abs=0.1)
            most = value(result, "shuffled_accuracy", **where, at="max_over_layers")
            assert most is not None and at.value is not None and at.value <= most + 1e-9 < 0.75


def test_a_leak_between_folds_shows_in_the_shuffled_control() -> None:
    """If groups were split, a label that is random between groups could be read from what they share."""
    rng = np.random.default_rng(0)
    chosen = [tiny_instance("polarity", index=i) for i in range(8)]
    samples = [(i, cell, i.cells[cell]) for i in chosen for cell in sorted(i.cells)]
    labels = make_labels(samples, "key", n_shuffles=8, with_field=False)
    groups = [i.group for i, _, _ in samples]
    code = {g: rng.normal(size=24) for g in sorted(set(groups))}
    signs = np.array([2 * i.conclusion[cell] - 1 for i, cell, _ in samples])
    x = np.array([s * code[g] for s, g in zip(signs, groups, strict=True)])
    from notelens.probes.linear import ReadOut, group_folds

    def mean(groups: list[str]) -> float:
        tallies = ReadOut(labels, groups, group_folds(groups, 4), alpha=0.1).score(x)
        return float(np.mean([t.correct / t.total for n, t in tallies.items() if n.startswith("shuffled")]))

    assert abs(mean(groups) - 0.5) < 0.15
    assert mean([f"s{i}" for i in range(len(groups))]) > 0.95


@pytest.mark.parametrize("name", CASES)
def test_residuals_and_commit_equal_the_oracle(name: str) -> None:
    model, hf, instances = case(name)
    probe, store = Timing(form_sets=("polarity", "swapped"), groupings=(HELD_OUT,), n_folds=2), ContextStore(model)
    for item in probe.items(instances, "commit", []):
        _, pair = item.payload
        (row,) = probe.measure(store, item)
        sides = []
        for prompt, key in ((pair.old, "old_margins"), (pair.new, "new_margins")):
            residuals = oracle.residuals(hf, prompt.token_ids, [prompt.decision])[:, 0]
            lens = oracle.lens_margins(hf, residuals, pair.answer_ids)
            assert row.values[key] == pytest.approx(lens, abs=2e-3, rel=1e-4)
            sides.append(lens)
            read = probe._residuals(store, prompt, ["decision"])
            assert np.abs(read[0] - residuals.numpy()).max() < 1e-4
        if row.excluded is None:
            assert row.values["commit_layer"] == oracle.commit_index(*sides)
            assert row.values["commit_depth"] == row.values["commit_layer"] / model.geometry.n_layers


def test_write_equals_the_oracle(result: ProbeResult, instances: list[Instance]) -> None:
    _, hf, _ = case("tiny")
    own = [i for i in instances if i.form == "swapped" and i.family == "visit"]
    cells = [(i, cell) for i in own for cell in sorted(i.cells)]
    for anchor in ("before_decision", "decision"):
        found = oracle.timing(
            hf,
            [i.cells[c].token_ids for i, c in cells],
            [i.cells[c].anchors[anchor] for i, c in cells],
            [i.conclusion[c] for i, c in cells],
            [i.group for i, _ in cells],
            3,
        )
        (row,) = [r for r in result.rows if r.item == f"swapped/{HELD_OUT}/visit" and r.meta.get("anchor") == anchor]
        ours = [c / row.values["conclusion_total"] for c in row.values["conclusion_correct"]]
        assert ours == found["accuracies"]
        assert stays_above(np.array([ours]), 0.95)[0] == found["write_index"]


def test_prompts_of_other_length_are_read_at_their_own_positions() -> None:
    model, hf, _ = case("llama")
    short, long = (tiny_instance("polarity", family, i).cells[0, 0] for family, i in (("parcel", 0), ("visit", 5)))
    assert len(short) != len(long)
    store = ContextStore(model)
    for prompt in (short, long):
        read = Timing()._residuals(store, prompt, ANCHORS)
        expected = oracle.residuals(hf, prompt.token_ids, [prompt.anchors[a] for a in ANCHORS])
        assert np.abs(read - expected.numpy().transpose(1, 0, 2)).max() < 1e-4
        assert prompt.anchors["decision"] == len(prompt) - 1


def test_only_residuals_are_kept_not_caches() -> None:
    model = case("tiny")[0]
    store, probe = ContextStore(model, budget_bytes=1), Timing()
    prompts = [i.cells[0, 0] for i in grid(6)]
    for prompt in (*prompts, *prompts):
        probe._residuals(store, prompt, ["decision"])
    assert store.n_prefills == len(prompts)


# --- labels -----------------------------------------------------------------------------------------------------------


def named(form: str, trigger_word: dict[int, str]) -> Instance:
    """An instance whose triggers are spelled like field values."""
    instance = tiny_instance(form)

    def spelled(prompt: Any, rule: int) -> Any:
        tokens = list(prompt.tokens)
        for position in prompt.positions("trigger"):
            tokens[position] = trigger_word[rule]
        return replace(prompt, tokens=tuple(tokens))

    return replace(instance, cells={cell: spelled(p, cell[1]) for cell, p in instance.cells.items()})


def test_repetition_is_the_conclusion_in_the_published_design_and_not_when_forms_are_pooled() -> None:
    polarity = named("polarity", {0: " F0", 1: "f1 "})
    negated = named("negated", {0: "f0", 1: "f1"})
    assert [repeats_field(polarity.cells[c]) for c in ((0, 0), (0, 1), (1, 0), (1, 1))] == [True, False, False, True]

    def share(*chosen: Instance) -> float:
        samples = [(i, c, i.cells[c]) for i in chosen for c in sorted(i.cells)]
        same = agreement(make_labels(samples, "key", n_shuffles=1, with_field=False))
        assert same is not None
        return same / len(samples)

    opposite = replace(negated, conclusion={c: 1 - v for c, v in polarity.conclusion.items()})
    assert share(polarity) == 1.0
    assert share(polarity, opposite) == 0.5


def test_repetition_is_no_label_where_nothing_is_repeated() -> None:
    instance = tiny_instance("swapped")
    labels = make_labels([(instance, c, p) for c, p in instance.cells.items()], "k", n_shuffles=1, with_field=True)
    assert set(labels) == {"conclusion", "field", "shuffled0"} and agreement(labels) is None


def test_shuffles_flip_whole_groups_and_do_not_depend_on_the_process() -> None:
    chosen = [tiny_instance("polarity", index=i) for i in range(6)]
    samples = [(i, c, i.cells[c]) for i in chosen for c in sorted(i.cells)]
    labels = make_labels(samples, "key", n_shuffles=10, with_field=False)
    flips = []
    for n in range(10):
        same = [a == b for a, b in zip(labels[f"shuffled{n}"].truth, labels["conclusion"].truth, strict=True)]
        by_group = [same[4 * g : 4 * g + 4] for g in range(6)]
        assert all(len(set(group)) == 1 for group in by_group)
        flips.append(tuple(group[0] for group in by_group))
    assert len(set(flips)) > 5
    assert labels == make_labels(samples, "key", n_shuffles=10, with_field=False)


@pytest.mark.parametrize(
    ("margins", "index"),
    [([1, 2, 3], 0), ([1, -1, 3], 2), ([-1, -1, 1], 2), ([1, 1, -1, -1], 2), ([5], 0), ([0, 1], 1)],
)
def test_settled(margins: list[float], index: int) -> None:
    assert settled(margins) == index == oracle.commit_index(margins, margins)


def test_stays_above_wants_all_later_layers() -> None:
    found = stays_above(np.array([[0.5, 1, 0.9, 1, 0.95], [1, 1, 1, 1, 0.9], [1, 1, 1, 1, 1]]), 0.95)
    assert found[0] == 3 and np.isnan(found[1]) and found[2] == 0


# --- tables -----------------------------------------------------------------------------------------------------------


def read_out_row(family: str, correct: list[float], total: int = 10, excluded: str | None = None) -> Row:
    values = {
        "n_layers": len(correct) - 1,
        "n_prompts": total,
        "conclusion_correct": correct,
        "conclusion_total": total if excluded is None else 0,
        "shuffled_correct": [[total / 2] * len(correct)] * 2,
        "shuffled_total": [total, total],
        "repetition_agreement": None,
    }
    meta = {"form": "swapped", "grouping": HELD_OUT, "anchor": "decision"}
    return Row(f"swapped/{family}", "read_out", family, "", excluded, values, meta)


def commit_row(family: str, depth: float | None) -> Row:
    values: dict[str, Any] = {"competent": depth is not None, "flipped": True, "margin_gap": 2.0}
    if depth is not None:
        values["commit_depth"] = depth
    return Row(
        f"{family}/field0",
        "commit",
        family,
        "",
        None if depth is not None else "donor wrong",
        values,
        {"form": "swapped"},
    )


def test_families_are_pooled_by_their_counts_and_undefined_ones_are_counted() -> None:
    rows = [
        read_out_row("a", [5, 10, 10, 10, 10]),
        read_out_row("b", [5, 9, 10, 10, 10]),
        read_out_row("c", [5, 5, 9, 10, 10]),
        read_out_row("d", [0, 0, 0, 0, 0], excluded="undefined: training fold has 1 class"),
        *(commit_row(f, d) for f, d in (("a", 0.75), ("b", 1.0), ("c", 0.75), ("d", None))),
    ]
    lines = timing_lines("timing", rows, 0.95, seed=0)
    write = lines[0]
    assert (write.metric, write.estimate.value, write.estimate.n) == ("write_depth", 0.5, 30)  # 29 of 30 at index 2
    assert (write.estimate.lo, write.estimate.hi) == (0.25, 0.75)
    assert write.n_excluded == 1 and dict(write.reasons) == {"undefined: training fold has 1 class": 1}
    named = {a.metric: a for a in lines if not a.params or set(a.params) == {"anchor", "form", "grouping"}}
    assert named["commit_depth"].estimate.value == pytest.approx(2.5 / 3)
    assert dict(named["commit_depth"].reasons) == {"donor wrong": 1}
    assert named["commit_minus_write"].estimate.value == pytest.approx(2.5 / 3 - 0.5)
    assert named["competence"].estimate.value == 0.75
    shares = {a.params["depth"]: a.estimate.value for a in lines if a.metric == "committed_share"}
    assert shares == {0.25: 0.0, 0.5: 0.0, 0.75: pytest.approx(2 / 3), 1.0: 1.0}


def test_a_depth_that_is_never_reached_is_undefined_and_says_where_it_was_closest() -> None:
    rows = [read_out_row(f, [5, 8, 9, 8]) for f in "abcdef"]
    lines = timing_lines("timing", rows, 0.95, seed=0)
    assert lines[0].estimate.value is None and "undefined" in lines[0].estimate.flags
    (shuffled,) = [a for a in lines if a.params.get("at") == "best_layer"]
    assert shuffled.params["layer"] == 2 and shuffled.estimate.value == 0.5
    (accuracy,) = [a for a in lines if a.metric == "conclusion_accuracy"]
    assert accuracy.params["layer"] == 2 and accuracy.estimate.value == pytest.approx(0.9)


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(Timing(), result)
    read = [r for r in through_json(result.rows) if r.stage == "read_out"]
    assert all(r.values["converged"] is True and len(r.values["conclusion_correct"]) == N_LAYERS + 1 for r in read)
    json.dumps([r.as_json() for r in read], allow_nan=False)


def test_families_whose_words_vary_say_so(result: ProbeResult) -> None:
    assert value(result, "answer_pairs", form="swapped") == 1.0
    groups = [tiny_instance("swapped", index=i) for i in range(3)]
    varied = [groups[0], *(replace(i, answers=i.answers[::-1]) for i in groups[1:])]
    probe = Timing(form_sets=("swapped",), groupings=(HELD_OUT,), **FEW)
    found = run(probe, instances=varied)
    assert value(found, "answer_pairs", form="swapped") == 2.0


# --- other models, refusals -------------------------------------------------------------------------------------------


def test_a_model_that_concludes_at_the_decision_commits_when_it_writes() -> None:
    found = Timing(form_sets=("polarity",), groupings=(HELD_OUT,), **FEW).run(
        ContextStore(broken_direct()), grid(12, ("polarity",))
    )
    assert value(found, "commit_depth") == 0.5
    assert value(found, "commit_minus_write", anchor="decision") == 0.0


def test_wrong_pairs_are_excluded_from_commit_and_counted() -> None:
    found = Timing(form_sets=("polarity",), groupings=(HELD_OUT,), **FEW).run(
        ContextStore(broken_blind()), grid(12, ("polarity",))
    )
    line = found.get("commit_depth")
    assert line.estimate.value is None and line.n_excluded == 24
    assert set(line.reasons) <= {"recipient wrong", "donor wrong"}
    assert value(found, "competence") == 0.0 and value(found, "flip_rate") == 0.0
    assert value(found, "write_depth", anchor="before_decision") == 0.5  # written, and nobody reads it


def test_too_few_groups_or_families() -> None:
    with pytest.raises(InputError, match=r"family 'claim' has 2 groups of form swapped, but n_folds is 3"):
        Timing().items(grid(8, ("swapped",)), "read_out", [])
    one = [tiny_instance("swapped", index=i) for i in range(3)]
    with pytest.raises(InputError, match=r"1 family \(parcel\)"):
        Timing().items(one, "read_out", [])
    assert len(Timing(groupings=(HELD_OUT,)).items(one, "read_out", [])) == 1


def test_form_sets_that_are_not_covered_are_left_out_or_refused() -> None:
    items = Timing().items(grid(12, ("polarity",)), "read_out", [])
    assert {i.payload[0] for i in items} == {"polarity"}
    for stage in Timing.stages:
        with pytest.raises(TaskError, match="two_clause"):
            Timing().items([tiny_instance("two_clause")], stage, [])


def test_an_anchor_that_a_prompt_lacks() -> None:
    with pytest.raises(SpanError, match="'nowhere'"):
        Timing(anchors=["nowhere"]).items(grid(12, ("polarity",)), "read_out", [])
    (item, *_) = Timing(anchors=["decision"]).items(grid(12, ("polarity",)), "read_out", [])
    assert item.payload[4] == ("decision",)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"n_folds": 1}, "n_folds 1"),
        ({"n_shuffles": 0}, "n_shuffles 0"),
        ({"alpha": 0.0}, "alpha 0"),
        ({"threshold": 0.5}, "threshold 0.5"),
        ({"groupings": ["random"]}, "random"),
        ({"form_sets": "swapped"}, "list"),
        ({"anchors": ["decision", "decision"]}, "distinct"),
    ],
)
def test_parameters_are_checked(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Timing(**bad)


def test_families_are_the_clusters(result: ProbeResult) -> None:
    assert result.get("write_depth", anchor="decision", form="swapped", grouping=HELD_OUT).estimate.n_clusters == 4
    assert {r.cluster for r in result.rows} == set(FAMILIES[:4])
