"""The editing experiments in the organisms' language: cases say what was asked for, every arm runs on an organism's shape."""

from pathlib import Path
from typing import Any

import pytest
import torch

import notelens
from experiments.coherence import HISTORIES, Coherence, CoherenceConfig, double_cases, steps
from experiments.cot_split import ChainConfig, ChainSplit, read_chain, responsible_rows
from experiments.distance import Distance, DistanceConfig
from experiments.edit_arms import Arm, Bench
from experiments.edit_cases import Case
from experiments.edit_harness import Stage, cases_of, run
from experiments.editing_frontier import Frontier, FrontierConfig
from experiments.k_sweep import KSweep, SweepConfig
from experiments.organism_cases import organism_cases
from experiments.organism_models import ARCHITECTURES, build
from experiments.wording import WORDINGS, Wording, WordingConfig, template
from notelens.edits.context import EditableContext
from notelens.errors import BudgetError, SpanError, TaskError
from notelens.models.load import wrap
from notelens.spans import encode
from notelens.tasks.organism import organism_families
from notelens.zoo.organisms import organism_tokenizer
from tests.test_organism_task import read

CONFIGS = Path(__file__).parents[1] / "experiments" / "configs"
KINDS = {
    "frontier-organisms": FrontierConfig, "frontier-organisms-updates": FrontierConfig, "distance-organisms": DistanceConfig,
    "ksweep-organisms": SweepConfig, "cot-organisms": ChainConfig, "wording-organisms": WordingConfig,
    "coherence-organisms": CoherenceConfig,
}  # fmt: skip
FORMS = ("two_clause", "polarity", "swapped", "negated")


@pytest.fixture(scope="module")
def organism() -> Any:
    """An untrained model of an organism's shape."""
    torch.manual_seed(0)
    tokenizer = organism_tokenizer()
    hf = build(ARCHITECTURES["qwen3"].config(len(tokenizer)), "sdpa").eval().requires_grad_(False)
    return wrap(hf, tokenizer, name="organism-untrained", gate=False)


def cases(n: int = 8, **more: Any) -> list[Case]:
    return organism_cases(organism_tokenizer(), n, 0, **{"forms": FORMS, **more})


@pytest.mark.parametrize("length", [150, 600, 2000])
def test_prompts_have_the_length_that_was_asked_for(length: int) -> None:
    for case in cases(6, length=length):
        assert abs(len(case.old) - length) <= 4 and len(case.old) == len(case.new) <= 2048 - 16
        lines = [x for x in case.old.text.split("\n") if x.startswith("- ")]
        assert len(lines) == len(set(lines)), "no line twice"


@pytest.mark.parametrize("distance", [0, 50, 250, 1000])
def test_rules_stand_as_far_behind_the_field_as_was_asked_for(distance: int) -> None:
    for case in cases(6, distance=distance):
        others = case.old.text.split("\n- ")[1:3]  # further attributes of the record also stand between them
        assert distance - 4 <= case.distance <= distance + 4 + 6 * len(others)


@pytest.mark.parametrize("kind", ["gated", "update", "multi_hop", "two_fact", "lookup"])
def test_answers_are_what_the_prompts_say(kind: str) -> None:
    found = cases(12, kinds=[kind])
    assert len({c.family for c in found}) >= 6 and len({c.id for c in found}) == 12
    for case in found:
        label = case.name.replace("_", " ")
        assert label in {f.label for f in organism_families()}
        for prompt, value, answer in zip((case.old, case.new), case.values, case.answers, strict=True):
            said = prompt.text.split("<user>")[1].split("<end>")[0]
            assert read(f"{said}\n") == answer == prompt.answer
            assert [organism_tokenizer().decode([prompt.token_ids[p]]) for p in prompt.positions("field")] == [value]
        assert case.answers[0] != case.answers[1]
    assert len({c.values[0] < c.values[1] for c in found}) == 2


def test_the_update_line_of_the_language_is_the_erratum(organism: Any) -> None:
    """The erratum appended to a record says it as the organisms were trained to read it, and every word is known."""
    unknown = organism_tokenizer().unk_token_id
    for case in cases(4):
        made, report = case.context(organism, record=False).edit(case.name, case.values[1], "erratum")
        assert f"Update: the {case.name} is now {case.values[1]}.\n" in made.tokens.text and report.exact
        assert unknown not in made.tokens.ids
        said = made.tokens.text.split("<user>")[1].split("<end>")[0]
        assert read(f"{said}\n") == case.answers[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"length": 150, "distance": 0}, "not both"),
        ({"change": "longer"}, "one token each"),
        ({"mode": "call"}, "unknown mode"),
        ({"length": 20}, "cannot be had"),
        ({"length": 150, "between": 2.0}, "not a share"),
        ({"split": "half"}, "unknown split"),
    ],
)
def test_what_cannot_be_had_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        cases(1, **more)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_shipped_configurations_are_read_and_their_cases_fit_an_organism(name: str, organism: Any) -> None:
    config = KINDS[name].read(CONFIGS / f"{name}.yaml", n=1)
    assert config.name == name and config.task == "organism" and config.model.startswith("organism-")
    assert KINDS[name].read(CONFIGS / f"{name}.yaml").n >= 48, "a cell of fewer cases says little"
    experiment: Any = {
        FrontierConfig: Frontier, DistanceConfig: Distance, SweepConfig: KSweep, ChainConfig: ChainSplit,
        WordingConfig: Wording, CoherenceConfig: Coherence,
    }[KINDS[name]]()  # fmt: skip
    for stage in experiment.stages(config):
        source = double_cases if name == "coherence-organisms" else cases_of
        (case,) = source(organism, config, stage)
        if isinstance(case, Case):
            assert len(case.old) <= organism.geometry.max_positions - 16
    for text in getattr(config, "arms", ()):
        Arm.parse(text)


@pytest.mark.parametrize("kind", ["gated", "update"])
def test_every_arm_of_the_frontier_runs_on_an_organism(kind: str, organism: Any) -> None:
    """Untrained weights decide nothing, but ends and bookkeeping are known: stale is old, full suffix is new."""
    config = FrontierConfig.read(CONFIGS / "frontier-organisms.yaml")
    bench = Bench(organism, cases(1, kinds=[kind], forms=("polarity",), length=150)[0])
    n = len(bench.case.old)
    for text in config.arms:
        try:
            made, report = bench.run(Arm.parse(text))
        except BudgetError:
            assert kind == "update", text  # close to the end there are not so many rows behind the field
            continue
        assert report.prompt_tokens == len(made) and report.tokens_run <= n, text
        decided = bench.decide(made)
        if text == "stale":
            assert decided.margin == pytest.approx(bench.before.margin, abs=1e-4)
        if text == "full_suffix":
            assert decided.margin == pytest.approx(bench.after.margin, abs=1e-4)


def test_a_run_on_an_organism_excludes_what_it_cannot_do(organism: Any, tmp_path: Path) -> None:
    config = FrontierConfig(name="o", model="m", task="organism", n=4, lengths=(150,), arms=("stale", "in_place"))
    found = {(r["metric"], r["method"]): r for r in run(Frontier(), config, tmp_path, organism)}
    competence = found["competence", "full_prefill"]
    assert competence["n"] == 4 and competence["params"] == {"length": 150}
    lost = sum(competence["reasons"].values())
    stale = found.get(("p_correct", "stale"))
    assert (stale is None and lost == 4) or (stale is not None and stale["n"] == 4 - lost and not stale["value"])


def test_wordings_of_unknown_words_are_refused(organism: Any) -> None:
    case = cases(1)[0]
    context = case.context(organism, record=False)

    def say(name: str) -> Any:
        line = template(WORDINGS[name], case, organism_families())
        return context.edit(case.name, case.values[1], "erratum", template=line)

    for name in WordingConfig.read(CONFIGS / "wording-organisms.yaml").wordings:
        assert say(name).report.appended_only
    with pytest.raises(SpanError, match=r"'Ignore', 'given'.*not in the vocabulary"):
        say("override")


def test_rows_behind_a_stale_conclusion_are_found_where_rows_correspond() -> None:
    """A refreshed field is stated by the chain; the conclusion comes from rows behind it, unless the edit added rows."""
    model = notelens.load("organism-gemma3")
    case = cases(4, mode="chain", kinds=["gated"], forms=("polarity",), length=150)[0]
    bench = Bench(model, case)
    found = responsible_rows(bench, bench.run(Arm.parse("in_place")).context, 24)
    assert found is not None and sum(row["share"] for row in found) > 0.5
    field = case.new.positions("field")[-1]
    assert all(row["row"] > field for row in found)
    assert responsible_rows(bench, bench.run(Arm.parse("erratum")).context, 24) is None


def test_chains_of_the_language_are_read() -> None:
    case = cases(4, mode="chain", kinds=["gated"], forms=("polarity",))[0]
    label, (old, new), (a, b) = case.name, case.values, case.answers
    assert case.old.text.split("<end>")[-2].endswith(" think")
    read_new = read_chain(f"{label} is {new} . match . answer : {b}", (old, new), (a, b))
    assert read_new["right"] and read_new["states_new"] and not read_new["stale"]
    read_old = read_chain(f"{label} is {new} . match . answer : {a}", (old, new), (a, b))
    assert read_old["stale"] and read_old["states_new"] and not read_old["right"]


@pytest.mark.parametrize("history", HISTORIES)
def test_consequences_ask_for_everything_a_record_decides(history: str, organism: Any) -> None:
    config = CoherenceConfig(name="c", model="m", task="organism", n=6, arms=("in_place",))
    for case in double_cases(organism, config, Stage(history, {}, {})):
        for question in case.questions:
            changed = [False, False]
            context = case.context(organism, question, record=False)
            for which, state in [(0, False), *steps(history, case)]:
                if changed[which] != state:
                    context, _ = context.edit(case.names[which], case.value(which, state), "full_suffix")
                    changed[which] = state
                said = context.tokens.text.split("<user>")[1].split("<end>")[0]
                if case.poisoned:
                    note = f"- note: the {case.names[0]} is {case.value(0, False)}\n"
                    assert note in said
                    said = said.replace(note, "")
                if question != "other":  # the reader of the language's tests looks up the first label it is asked for
                    assert read(f"{said}\n") == case.expected(question, changed)
                elif f"which {case.names[1]}?" in said:
                    assert f"- {case.names[1]}: {case.expected(question, changed)}\n" in f"{said}\n"
            assert organism_tokenizer().unk_token_id not in context.tokens.ids


def test_coherence_runs_on_an_organism(organism: Any, tmp_path: Path) -> None:
    config = CoherenceConfig(
        name="c", model="m", task="organism", n=2, histories=("both",), arms=("full_suffix", "in_place")
    )
    lines = run(Coherence(), config, tmp_path, organism, source=double_cases)
    found = {(r["metric"], r["method"]): r for r in lines}
    for question in ("field", "rephrased", "lookup", "other"):
        same = found[f"p_{question}", "full_suffix"]
        assert same["value"] == found[f"p_{question}", "full_prefill"]["value"] and same["n"] == 2


def test_a_context_of_the_language_needs_no_seam(organism: Any) -> None:
    """Word-level tokens never merge, so any word of the language can stand in any field."""
    context = EditableContext.from_text(
        organism, "shipment\n- seal: {{seal}}\n", {"seal": "open"}, request="which seal? act", record=False
    )
    for value in ("shut", "north.", "deny"):
        assert value.rstrip(".") in context.edit("seal", value, "in_place")[0].tokens.text
    assert len(encode(organism.tokenizer, "seal is shut.", templated=True)) == 4
