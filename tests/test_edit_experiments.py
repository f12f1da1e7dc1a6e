"""The harness of the editing experiments on the hand-set decoder, whose margins are known on paper."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.coherence import HISTORIES, CoherenceConfig, ask, double_cases, steps
from experiments.cot_split import read_chain
from experiments.distance import Distance, DistanceConfig
from experiments.edit_arms import Arm, Bench
from experiments.edit_cases import Case, Change, gated_cases, instance_case, instance_cases
from experiments.edit_harness import Stage, run
from experiments.edit_harness import main as harness_main
from experiments.editing_frontier import Frontier, FrontierConfig
from experiments.k_sweep import KSweep, SweepConfig, k_star
from experiments.wording import WORDINGS, Wording, WordingConfig
from experiments.wording import template as wording_template
from notelens.edits.context import EditableContext
from notelens.errors import ConfigError, TaskError
from notelens.runs.records import read_records
from notelens.runs.tables import load_table
from notelens.tasks.scenarios import load_families
from tests.tiny import FORMS, broken_blind, broken_direct, tiny_instance, tiny_instances, tiny_margin

CONFIG = FrontierConfig(
    name="t", model="tiny", task="tiny", n=6, lengths=(None,),
    arms=(
        "stale", "in_place", "full_suffix", "auto", "selective@1 ranking=effect", "selective@1 ranking=chain",
        "edit_local@2", "carrier_window@1 ranking=random", "selective@999",
    ),
)  # fmt: skip


def tiny_source(model: Any, config: Any, stage: Stage) -> list[Case]:
    return instance_cases(tiny_instances(config.n, FORMS, seed=config.seed), config.seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backwards", [False, True])
def test_margins_point_to_the_new_answer(tiny: Any, form: str, backwards: bool) -> None:
    case = instance_case(tiny_instance(form), backwards=backwards)
    bench = Bench(tiny, case)
    sign = 1.0 if case.answers[1] == "approve" else -1.0
    old, new = sign * tiny_margin(-sign), sign * tiny_margin(sign)
    assert bench.before.margin == pytest.approx(old, abs=1e-3) and old < 0
    assert bench.after.margin == pytest.approx(new, abs=1e-3) and new > 0
    assert bench.excluded is None
    for arm, expected in {
        "stale": old,
        "in_place": old,
        "full_suffix": new,
        "selective@1": new,
        "edit_local@1": old,
    }.items():
        row = bench.row(Arm.parse(arm))
        assert row["margin"] == pytest.approx(expected, abs=1e-3), arm
        assert row["flipped"] == (expected > 0) == row["right"] and row["stale"] == (expected < 0)
    assert bench.row(Arm.parse("selective@1"))["transplant_margin"] == pytest.approx(new, abs=1e-3)
    assert bench.row(Arm.parse("edit_local@1"))["transplant_margin"] == pytest.approx(old, abs=1e-3)


def test_cost_counts_planning_and_matches_the_planner_s_budget(tiny: Any) -> None:
    bench = Bench(tiny, instance_case(tiny_instance()))
    n = len(bench.case.old)
    row = bench.row(Arm.parse("selective@1 ranking=effect"))
    assert row["tokens_run"] == 3  # field, note, decision
    behind = len(bench._edit.behind)  # pyright: ignore[reportPrivateUsage]
    # donor, field and last row, the unpatched reader, and one for every row that differs at all
    assert n + 3 < row["planning_tokens"] <= n + 3 + behind
    planner = bench.row(Arm.parse("auto"))
    assert planner["planning_tokens"] == 0
    for arm in (
        "selective@auto ranking=attention",
        "edit_local@auto",
        "carrier_window@auto ranking=random",
        "wrong_edit",
    ):
        assert bench.row(Arm.parse(arm))["tokens_run"] <= planner["tokens_run"], arm
    assert bench.row(Arm.parse("selective@auto ranking=structure"))["tokens_run"] == planner["tokens_run"]


@pytest.mark.parametrize("model", [broken_blind, broken_direct])
def test_incompetent_and_direct_models_are_seen(model: Any) -> None:
    """A model that reads nothing is excluded; one that reads the field itself is repaired in place."""
    bench = Bench(model(), instance_case(tiny_instance()))
    if model is broken_blind:
        assert bench.excluded is not None and set(bench.row(Arm.parse("stale"))) == {*bench.facts(), "method"}
    else:
        assert bench.row(Arm.parse("in_place"))["right"] and not bench.row(Arm.parse("stale"))["right"]


def test_a_run_is_continued_and_summed_up(tiny: Any, tmp_path: Path) -> None:
    assert run(Frontier(), CONFIG, tmp_path, tiny, seconds=-1.0, source=tiny_source) == []
    raw = (tmp_path / "records.jsonl").read_bytes()
    lines = run(Frontier(), CONFIG, tmp_path, tiny, source=tiny_source)
    assert (tmp_path / "records.jsonl").read_bytes().startswith(raw)
    found = {(r["metric"], r["method"]): r for r in lines}
    assert found["competence", "full_prefill"]["value"] == 1.0 and found["competence", "full_prefill"]["n"] == 6
    for method, value in {
        "full_prefill": 1.0, "stale": 0.0, "in_place": 0.0, "full_suffix": 1.0, "auto": 1.0,
        "selective@1 ranking=effect": 1.0, "selective@1 ranking=chain": 1.0, "edit_local@2": 0.0,
    }.items():  # fmt: skip
        assert found["p_correct", method]["value"] == value and found["p_correct", method]["n"] == 6, method
    refused = found["p_correct", "selective@999"]
    assert refused["n"] == 0 and refused["value"] is None and refused["reasons"] == {"refused (BudgetError)": 6}
    assert found["p_correct_transplant", "edit_local@2"]["value"] == 0.0
    assert found["recovery", "in_place"]["value"] == pytest.approx(0.0, abs=1e-4)
    assert found["recompute_share", "full_prefill"]["value"] == 1.0 and found["cost_ms", "full_prefill"]["value"] == 1.0
    items = len(read_records(tmp_path).items)
    again = run(Frontier(), CONFIG, tmp_path, tiny, source=tiny_source)
    assert items == len(read_records(tmp_path).items) == 6
    assert json.dumps(again, sort_keys=True) == json.dumps(lines, sort_keys=True)
    assert len(load_table(tmp_path).rows) == len(lines)
    with pytest.raises(ConfigError, match="another configuration"):
        run(Frontier(), CONFIG.model_copy(update={"seed": 1}), tmp_path, tiny, source=tiny_source)


@pytest.mark.parametrize("text", ["nothing", "selective@8 ranking", "wrong"])
def test_an_arm_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Arm.parse(text)


def test_gated_cases_hold_what_was_asked(smollm2_tokenizer: Any) -> None:
    found = gated_cases(smollm2_tokenizer, 8, 0, forms=["polarity", "negated"], distance=50)
    assert all(abs(c.distance - 50) <= 12 for c in found) and len({c.family for c in found}) == 8
    assert {c.values for c in found} and all(c.old.answer != c.new.answer for c in found)
    near = gated_cases(smollm2_tokenizer, 2, 0, forms=["polarity"], distance=0)
    assert all(c.distance < 12 for c in near)
    changes: tuple[tuple[Change, int], ...] = (("longer", 1), ("shorter", -1))
    for change, sign in changes:
        for c in gated_cases(smollm2_tokenizer, 4, 0, forms=["polarity", "negated"], change=change):
            assert sign * (len(c.new) - len(c.old)) > 0 and c.old.answer != c.new.answer
    with pytest.raises(TaskError, match="names both values"):
        gated_cases(smollm2_tokenizer, 1, 0, forms=["swapped"], change="longer")
    with pytest.raises(TaskError, match="not both"):
        gated_cases(smollm2_tokenizer, 1, 0, forms=["swapped"], length=200, distance=0)


# --- the other experiments --------------------------------------------------------------------------------------------


def test_k_sweep_finds_the_single_row_that_matters(tiny: Any, tmp_path: Path) -> None:
    config = SweepConfig(
        name="k",
        model="tiny",
        task="tiny",
        n=4,
        lengths=(None,),
        ks=(1, 2, 4),
        rankings=("effect", "structure", "local"),
    )
    found = {(r["metric"], r["method"]): r["value"] for r in run(KSweep(), config, tmp_path, tiny, source=tiny_source)}
    assert found["k_star", "effect"] == 1.0 == found["k_star_transplant", "effect"]
    assert found["k_star", "local"] is None  # the note is farther away than four rows
    assert found["p_correct", "selective@2 ranking=effect"] == 1.0


@pytest.mark.parametrize(
    ("rates", "expected"),
    [([0.0, 0.96, 1.0], 2.0), ([1.0, 0.5, 1.0], 4.0), ([1.0, 1.0, 0.9], None), ([None] * 3, None)],
)
def test_k_star_is_where_the_target_is_reached_for_good(rates: list[float | None], expected: float | None) -> None:
    assert k_star((1, 2, 4), rates) == expected


def test_distance_counts_arms_like_the_frontier(tiny: Any, tmp_path: Path) -> None:
    config = DistanceConfig(name="d", model="tiny", task="tiny", n=4, distances=(0,), arms=("edit_local@2", "auto"))
    found = {
        (r["metric"], r["method"]): r["value"] for r in run(Distance(), config, tmp_path, tiny, source=tiny_source)
    }
    assert found["p_correct", "auto"] == 1.0 and found["p_correct", "edit_local@2"] == 0.0
    cases = tiny_source(tiny, config, Distance().stages(config)[0])
    assert found["distance", "full_prefill"] == sum(c.distance for c in cases) / 4


def test_wordings_are_filled_in() -> None:
    case = instance_case(tiny_instance())
    said = wording_template(WORDINGS["answer"], case, load_families())
    assert said == f"Update: the field is now {{value}}, so the answer is {case.answers[1]}.\n"
    upper = wording_template(WORDINGS["upper"], case, load_families())
    assert "{value}" in upper and "FIELD" in upper
    assert "field" not in wording_template(WORDINGS["other_label"], case, load_families())
    with pytest.raises(ConfigError, match="no wording"):
        Wording().stages(WordingConfig(name="w", model="m", n=1, length=None, wordings=("loud",), fillers=(0,)))


@pytest.mark.parametrize(
    ("text", "right", "states_new"),
    [
        ("The seal is broken. By the rule that means deny. Answer: deny", True, True),
        ("The seal is broken. By the rule that means ship. Answer: ship", False, True),
        ("The seal is intact. By the rule that means deny. Answer: deny", True, False),
        ("The seal was intact and is broken. Answer: deny", True, False),
        ("The seal is unbroken. Answer: hold", False, False),
        ("Answer: deny. The seal is broken", True, False),
        ("broken", False, True),
    ],
)
def test_chains_are_read(text: str, right: bool, states_new: bool) -> None:
    read = read_chain(text, ("intact", "broken"), ("ship", "deny"))
    assert (read["right"], read["states_new"]) == (right, states_new)


def test_every_question_is_asked_of_the_repaired_rows(tiny: Any) -> None:
    """The tiny model with another request behind the same rows decides as a fresh prefill of it, and stale rows stay stale."""

    def context(a: str, request: str) -> EditableContext:
        text = "start parcel is {{a}} , w0 w1 , if t0 then , ; w2 w3 ,"
        return EditableContext.from_text(tiny, text, {"a": a}, request=request, rendering="raw", record=False)

    first, other = " please decide . : ?", " decide . please w4 : ?"
    asked = context("f0", other)
    old, new = (int(context(a, other).next_logits().argmax()) for a in ("f0", "f1"))
    assert old != new
    for method, expected in (("in_place", old), ("full_suffix", new), ("selective@1", new)):
        made, _ = context("f0", first).edit("a", "f1", method)
        top, run_tokens = ask(made, asked)
        assert top == expected and run_tokens == 6, method


def test_two_decisions_in_one_prompt_keep_their_answers_apart(smollm2_tokenizer: Any) -> None:
    config = CoherenceConfig(name="c", model="m", n=6, arms=("in_place",))
    for history in HISTORIES:
        model = SimpleNamespace(tokenizer=smollm2_tokenizer)
        for case in double_cases(model, config, Stage(history, {}, {})):  # pyright: ignore[reportArgumentType]
            one, two = case.draws
            assert one.family.label != two.family.label and not set(one.actions) & set(two.actions)
            assert all(case.answer(i, False) != case.answer(i, True) for i in (0, 1))
            assert case.value(0, True) in one.values and case.poisoned == (history == "poisoned")
            assert steps("there_and_back", case)[-1] == (0, False) and len(steps("both", case)) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nmodel: nobody\ntask: tiny\nn: 1\nseed: 0\nlengths: [null]\narms: [stale]\n", "nobody"),
        ("name: x\nmodel: tiny\ntask: tiny\nn: 1\nseed: 0\nlengths: [null]\narms: [stale]\nwhat: 1\n", "what"),
    ],
    ids=["model", "key"],
)
def test_the_command_says_what_is_wrong(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        harness_main(Frontier(), FrontierConfig, ("p_correct",), [str(path), "--out", str(tmp_path / "run")])
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert shown.startswith("error: ") and said in shown and "Traceback" not in shown
    assert not (tmp_path / "run").exists()
