"""Gated decisions: truth tables checked by reading the rule's text, splits, determinism, lengths, scenario files."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from notelens.errors import PairError, TaskError
from notelens.models.load import default_cache_dir
from notelens.prompt import Prompt
from notelens.tasks import TASKS, Task
from notelens.tasks.gated import LENGTH_TOLERANCE, GatedDecisions
from notelens.tasks.render import Draw, chain_text
from notelens.tasks.scenarios import BUILTIN, FORMS, load_families
from notelens.zoo.embedded import embedded_tokenizer

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = load_families()
EVAL = [f for f in FAMILIES if f.split == "eval"]
TRAIN = [f for f in FAMILIES if f.split == "train"]
MINIMAL: dict[str, Any] = {
    "name": "door",
    "label": "door state",
    "values": ["ajar", "shut"],
    "restrictive": ["wait"],
    "permissive": ["enter"],
    "requests": ["What now?"],
    "filler": ["Note {number} is by {name}."],
}


def whole_words(*more: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows every word of the built-in families (and more) as one token."""
    split = pre_tokenizers.Whitespace()
    text = BUILTIN.read_text(encoding="utf-8") + " ".join(more)
    text += (
        " You are a careful assistant. Follow the rule exactly. Rule: Answer with one word. Update now State value end"
    )
    text += " ; , . : ? -"
    words = sorted(
        {w for w, _ in split.pre_tokenize_str(text + " " + text.title())} | {str(i) for i in range(100, 1000)}
    )
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    core.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return whole_words()


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    """The real tokenizer; converted from the package that carries the weights on first use, then about a second."""
    return embedded_tokenizer("smollm2", cache_dir=default_cache_dir())


@pytest.fixture
def scenario(tmp_path: Path) -> Any:
    """Writes a scenario file with the minimal family, changed as asked for."""

    def write(content: Any = None, **changes: Any) -> Path:
        path = tmp_path / "mine.json"
        if content is None:
            content = {"families": [{k: v for k, v in {**MINIMAL, **changes}.items() if v is not None}]}
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


def read_rule(prompt: Prompt) -> str:
    """The right action, worked out from the prompt's text alone: its own reading of the rule, not the library's."""
    field = prompt.text.split("\n- ")
    label = next(f.label for f in FAMILIES if f"{f.label[0].upper()}{f.label[1:]}: " in prompt.text)
    value = next(line.split(": ")[1].split("\n")[0] for line in field if line.lower().startswith(f"{label}: "))
    rule = next(line for line in prompt.text.split("\n") if line.startswith("Rule: ")).removeprefix("Rule: ")
    clauses = [
        rf"If the {label} is (\w+) then (\w+); if it is (\w+) then (\w+)\.",
        rf"When the {label} is (\w+), (\w+)\. When it is (\w+), (\w+)\.",
    ]
    for pattern in clauses:
        if m := re.fullmatch(pattern, rule):
            return {m[1]: m[2], m[3]: m[4]}[value]
    if m := re.fullmatch(rf"Choose (\w+) if the {label} is (\w+), and choose (\w+) if it is (\w+)\.", rule):
        return {m[2]: m[1], m[4]: m[3]}[value]
    for pattern, named, then, otherwise in (
        (rf"If the {label} is (not )?(\w+) then (\w+), otherwise (\w+)\.", 2, 3, 4),
        (rf"When the {label} is (not )?(\w+), (\w+); in any other case (\w+)\.", 2, 3, 4),
        (rf"Choose (\w+) if the {label} is (not )?(\w+), else choose (\w+)\.", 3, 1, 4),
    ):
        if m := re.fullmatch(pattern, rule):
            return m[then] if (m[named] == value) != ("is not " in rule) else m[otherwise]
    raise AssertionError(f"no reading of {rule!r}")


def test_registered_under_its_name_and_meets_the_protocol() -> None:
    assert TASKS.get("gated") is GatedDecisions
    assert isinstance(GatedDecisions(), Task) and GatedDecisions.name == "gated"


@pytest.mark.parametrize("order", ["value_first", "rule_first"])
def test_conclusions_equal_an_independent_reading_of_the_text(words: Any, order: str) -> None:
    instances = GatedDecisions(split="all", rendering="plain", order=order).instances(words, 2 * 4 * len(FAMILIES), 3)
    wordings = set()
    for instance in instances:
        wordings.add((instance.form, instance.meta["template"]))
        for cell, prompt in instance.cells.items():
            assert prompt.answer == read_rule(prompt) == instance.answers[instance.conclusion[cell]]
    assert len(wordings) == 3 * len(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_truth_table(words: Any, form: str) -> None:
    task = GatedDecisions(rendering="plain", forms=[form])
    for instance in task.instances(words, 16, 0):
        table = instance.conclusion
        p = instance.answers.index(str(instance.meta["p"]))
        first = (table[0, 0], table[1, 0])
        assert first == ((1 - p, p) if form == "negated" else (p, 1 - p))
        if form == "two_clause":
            assert set(instance.cells) == {(0, 0), (1, 0)}
            with pytest.raises(TaskError, match="has no trigger pair"):
                instance.pair("trigger", 0)
        else:
            assert (table[0, 1], table[1, 1]) == first[::-1]  # orthogonal: each axis flips with the other fixed
            old, new = instance.pair("trigger", 1).old, instance.pair("trigger", 1).new
            assert [old.token_ids[i] for i in old.positions("field")] == [
                new.token_ids[i] for i in new.positions("field")
            ]
        prompt = instance.cells[0, 0]
        if form == "swapped":
            assert [prompt.tokens[i] for i in prompt.positions("trigger")] == [instance.meta["p"], instance.meta["q"]]
            other = instance.cells[0, 1]
            assert [other.tokens[i] for i in other.positions("trigger")] == [instance.meta["q"], instance.meta["p"]]
        elif form != "two_clause":
            assert [prompt.tokens[i] for i in prompt.positions("trigger")] == [instance.meta["v0"]]


def test_answers_are_restrictive_then_permissive_and_either_may_come_first(words: Any) -> None:
    by_name = {f.name: f for f in FAMILIES}
    instances = GatedDecisions(rendering="plain").instances(words, 96, 0)
    for instance in instances:
        assert instance.answers[0] in by_name[instance.family].restrictive
        assert instance.answers[1] in by_name[instance.family].permissive
    share = sum(i.meta["p"] == i.answers[0] for i in instances) / 96
    assert 0.3 < share < 0.7
    share = sum(i.conclusion[0, 0] for i in instances) / 96
    assert 0.3 < share < 0.7


def test_train_and_eval_share_no_label_value_action_or_name() -> None:
    assert len(FAMILIES) >= 18 and len(EVAL) >= 6

    def of(families: Any, *keys: str) -> set[str]:
        found: set[str] = set()
        for f, key in product(families, keys):
            value = getattr(f, key)
            found |= {value} if isinstance(value, str) else set(value)
        return found

    for keys in (("name",), ("label",), ("values",), ("restrictive", "permissive"), ("record",), ("requests",)):
        assert not of(EVAL, *keys) & of(TRAIN, *keys)
    assert {d.family.name for d in GatedDecisions(split="eval").draws(Letters(), 50, 0)} == of(EVAL, "name")


def test_built_in_families_are_rich_enough() -> None:
    for family in FAMILIES:
        assert 4 <= len(family.values) <= 6
        assert min(len(family.restrictive), len(family.permissive)) >= 3
        assert all(len(family.rules[form]) >= 3 for form in FORMS)


def test_first_n_spread_evenly_over_families_and_forms(words: Any) -> None:
    draws = GatedDecisions(rendering="plain").draws(words, 8 * 4 * 2 + 8, 0)
    assert set(Counter((d.family.name, d.form) for d in draws[:64]).values()) == {2}
    assert set(Counter(d.family.name for d in draws).values()) == {9}
    assert set(Counter(d.form for d in draws).values()) == {18}
    assert len({d.id for d in draws}) == len(draws)


def test_a_group_shares_its_filler_across_cells_and_forms(words: Any) -> None:
    task = GatedDecisions(rendering="plain", families=["lab_sample"])
    instances = task.instances(words, 8, 5)
    lines: dict[str, set[str]] = {}
    for instance in instances:
        for prompt in instance.cells.values():
            filler = "".join(t for t, r in zip(prompt.tokens, prompt.regions, strict=True) if r == "filler")
            lines.setdefault(instance.group, set()).add(filler)
    assert [len(v) for v in lines.values()] == [1, 1]
    assert len(set.union(*lines.values())) == 2


def test_filler_stands_between_field_and_rule_and_after_both(words: Any) -> None:
    for order in ("value_first", "rule_first"):
        for instance in GatedDecisions(rendering="plain", order=order).instances(words, 32, 0):
            runs = [
                r
                for i, r in enumerate(instance.cells[0, 0].regions)
                if i == 0 or r != instance.cells[0, 0].regions[i - 1]
            ]
            runs = [r for r in runs if r not in ("template", "system", "trigger")]
            merged = [r for i, r in enumerate(runs) if i == 0 or r != runs[i - 1]]
            value, rule = ["record", "field"], ["rule"]
            first, second = (value, rule) if order == "value_first" else (rule, value)
            assert merged == [*first, "filler", *second, "filler", "request"]


class Letters:
    """Stand-in tokenizer for draws: one id per character code sum; imports nothing."""

    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [sum(map(ord, text))]


def fingerprint() -> str:
    """Every drawn fact of the first instances."""
    draws = GatedDecisions(split="all").draws(Letters(), 150, 7)
    return json.dumps(
        [[d.id, d.values, d.actions, d.template, d.request, d.filler, d.between, d.distractor] for d in draws]
    )


def test_draws_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from notelens.tasks.gated import GatedDecisions\nimport json\n"
        "class Letters:\n bos_token_id = None\n"
        " def encode(self, text, add_special_tokens=False): return [sum(map(ord, text))]\n"
        "draws = GatedDecisions(split='all').draws(Letters(), 150, 7)\n"
        "print(json.dumps([[d.id, d.values, d.actions, d.template, d.request, d.filler, d.between, d.distractor]"
        " for d in draws]))"
    )
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == fingerprint()


def test_seed_changes_instances_and_repeats_them(words: Any) -> None:
    task = GatedDecisions(rendering="plain")
    a, b, c = (task.instances(words, 16, seed) for seed in (0, 0, 1))
    assert [i.cells[0, 0].token_ids for i in a] == [i.cells[0, 0].token_ids for i in b]
    assert all(x.cells[0, 0].token_ids != y.cells[0, 0].token_ids for x, y in zip(a, c, strict=True))
    assert [i.id for i in task.instances(words, 40, 0)][:16] == [i.id for i in a]


def test_real_tokenizer_aligns_every_pair(smollm2_tokenizer: Any) -> None:
    for order, rendering in product(("value_first", "rule_first"), ("chat", "plain")):
        task = GatedDecisions(split="all", order=order, rendering=rendering)
        instances = task.instances(smollm2_tokenizer, 2 * len(FAMILIES), 0)
        lengths = [len(i.cells[0, 0]) for i in instances]
        assert (85 if rendering == "chat" else 70) <= min(lengths) and max(lengths) <= 140
        for instance in instances:
            first = instance.cells[0, 0]
            assert [first.tokens[i].strip() for i in first.positions("field")] == [instance.meta["v0"]]
            assert first.tokens[first.anchors["rule_end"]] == "."
            assert first.tokens[first.anchors["before_request"]] == "\n"
            assert first.tokens[first.anchors["request_end"]] == "."
            assert first.tokens[first.decision] == ("\n" if rendering == "chat" else ":")
            pair = instance.pair("field", 0)
            assert set(pair.differing) == set(first.positions("field"))
            for word, token in zip(instance.answers, instance.answer_ids, strict=True):
                assert (" " * (rendering == "plain") + word).startswith(smollm2_tokenizer.decode([token]))
        assert first.token_ids.count(smollm2_tokenizer.bos_token_id) == (3 if rendering == "chat" else 0)


@pytest.mark.parametrize("length", [100, 250, 1000, 4000])
def test_length_is_reached_by_distinct_filler(smollm2_tokenizer: Any, length: int) -> None:
    task = GatedDecisions(split="all", length=length)
    for instance in task.instances(smollm2_tokenizer, len(FAMILIES) if length < 1000 else 4, 2):
        prompt = instance.cells[0, 0]
        assert abs(len(prompt) - length) <= LENGTH_TOLERANCE
        lines = [line for line in prompt.text.split("\n") if line.startswith("- ")]
        assert len(set(lines)) == len(lines)


def test_length_out_of_reach_says_what_is_there(scenario: Any) -> None:
    path = scenario(requests=["What now, " + "and what then, " * 30 + "please?"])
    task = GatedDecisions(rendering="plain", length=100, scenario_file=path)
    with pytest.raises(TaskError, match=r"door/two_clause/000' has \d+ tokens, not 100 \+- 20"):
        task.instances(whole_words("door state ajar shut what please"), 1, 0)


def test_filler_that_runs_out_is_refused(scenario: Any) -> None:
    task = GatedDecisions(rendering="plain", scenario_file=scenario(filler=["Dust."]))
    with pytest.raises(TaskError, match="family 'door': only 1 distinct filler lines"):
        task.instances(whole_words("door state ajar shut what please"), 1, 0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"split": "test"}, "unknown split 'test'"),
        ({"order": "value_frist"}, "did you mean 'value_first'"),
        ({"rendering": "raw"}, "unknown rendering 'raw'"),
        ({"forms": ["polarty"]}, "did you mean 'polarity'"),
        ({"forms": []}, "distinct rule forms"),
        ({"forms": "polarity"}, "must be a list"),
        ({"forms": ["polarity", "polarity"]}, "distinct"),
        ({"families": ["lab_samples"]}, "did you mean 'lab_sample'"),
        ({"families": ["order_status"]}, "no family 'order_status' in split 'eval'"),
        ({"families": []}, "no families are left"),
        ({"length": 99}, "from 100 to 4000"),
        ({"length": 4001}, "from 100 to 4000"),
        ({"length": True}, "not a whole number"),
    ],
)
def test_bad_parameters_are_refused_with_the_reason(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        GatedDecisions(**parameters)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("{", r"is not JSON: .* \(line 1\)"),
        ([], "top level must be an object"),
        ({}, "'families' is missing or empty"),
        ({"families": []}, "'families' is missing or empty"),
        ({"families": [3]}, "family 0 is not an object"),
        ({"families": [MINIMAL, MINIMAL]}, "'door' is used twice"),
        ({"families": [MINIMAL], "slots": {"number": {"from": 9, "to": 1}, "name": ["Al"]}}, "from <= to"),
        ({"families": [MINIMAL], "slots": []}, "'slots' must be an object"),
        ({"families": [MINIMAL], "rules": []}, "'rules' must map"),
    ],
)
def test_bad_scenario_file_is_one_clear_error(scenario: Any, content: Any, message: str) -> None:
    with pytest.raises(TaskError, match=f"mine.json.*{message}"):
        GatedDecisions(scenario_file=scenario(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": None}, "family 0 has no 'label'"),
        ({"label": 3}, "'label' must be a non-empty string"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"split": "test"}, "split 'test' is neither"),
        ({"values": ["ajar"]}, "at least 2 distinct entries"),
        ({"values": ["ajar", "ajar"]}, "distinct"),
        ({"values": "ajar"}, "list of non-empty strings"),
        ({"requests": []}, "at least 1"),
        ({"permissive": ["wait"]}, "both kinds of action"),
        ({"filler": ["The door is ajar, {name}."]}, "contains 'ajar'"),
        ({"requests": ["Should they wait?"]}, "contains 'wait'"),
        ({"filler": ["Seen by {who}."]}, "unknown slot 'who'"),
        ({"rules": {"polarity": ["If {label} is {t} then {p}."]}}, "must use each of"),
        ({"rules": {"polarity": ["{label} {t} {t} {p} {q}"]}}, "must use each of"),
        ({"rules": {"unless": ["x"]}}, "unknown rule form 'unless'"),
    ],
)
def test_bad_family_is_one_clear_error(scenario: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=f"mine.json.*{message}"):
        GatedDecisions(scenario_file=scenario(**changes))


def test_missing_scenario_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere\.json cannot be read"):
        GatedDecisions(scenario_file=tmp_path / "nowhere.json")


def test_minimal_scenario_file_works(scenario: Any) -> None:
    task = GatedDecisions(rendering="plain", scenario_file=scenario())
    instances = task.instances(whole_words("door Door state ajar shut Record"), 8, 0)
    assert Counter(i.form for i in instances) == dict.fromkeys(FORMS, 2)
    assert {w for i in instances for w in (i.meta["v0"], i.meta["v1"])} == {"ajar", "shut"}


def test_values_that_never_align_are_refused_with_their_lengths(scenario: Any) -> None:
    task = GatedDecisions(rendering="plain", scenario_file=scenario(values=["ajar", "wide open"]))
    with pytest.raises(TaskError, match=r"no two values have equal token length .*ajar 1, wide open 2"):
        task.instances(whole_words("ajar wide open"), 1, 0)


def test_actions_that_share_their_first_token_are_refused(scenario: Any) -> None:
    path = scenario(restrictive=["keep out"], permissive=["keep going"])
    task = GatedDecisions(rendering="plain", scenario_file=path)
    with pytest.raises(TaskError, match=r"shares its first token with this tokenizer .keep out/keep going"):
        task.instances(whole_words("ajar shut keep out going"), 1, 0)


def test_actions_of_other_length_are_refused(scenario: Any) -> None:
    task = GatedDecisions(rendering="plain", scenario_file=scenario(restrictive=["keep out"]))
    with pytest.raises(TaskError, match=r"equal token length \(keep out 2, enter 1\)"):
        task.instances(whole_words("ajar shut keep out"), 1, 0)


def test_contract_of_pairs_reaches_the_task(words: Any) -> None:
    instance = GatedDecisions(rendering="plain", forms=["polarity"]).instances(words, 1, 0)[0]
    broken = type(instance)(**{**vars(instance), "cells": {**instance.cells, (1, 0): instance.cells[1, 1]}})
    with pytest.raises(PairError, match="outside the field span, at position"):
        broken.pair("field", 0)
    same = type(instance)(
        **{**vars(instance), "conclusion": {**instance.conclusion, (1, 0): instance.conclusion[0, 0]}}
    )
    with pytest.raises(TaskError, match="does not flip along the field"):
        same.pair("field", 0)
    with pytest.raises(TaskError, match=r"cells .* but conclusions"):
        type(instance)(**{**vars(instance), "conclusion": {}})


def one_draw(tokenizer: Any, form: str) -> tuple[GatedDecisions, Draw]:
    task = GatedDecisions(rendering="plain", forms=[form], families=["badge_color"])
    return task, task.draws(tokenizer, 1, 0)[0]


@pytest.mark.parametrize("form", FORMS)
def test_update_line_makes_the_newer_value_count(words: Any, form: str) -> None:
    task, draw = one_draw(words, form)
    for cell in draw.cells:
        newer = draw.values[1 - cell[0]]
        plain = task.render(words, draw, cell)
        updated = task.render(words, draw, cell, update=newer)
        assert updated.target == task.render(words, draw, (1 - cell[0], cell[1])).target != plain.target
        extra = f"Update: the badge color is now {newer}.\n"
        assert updated.prompt.text.replace(extra, "") == plain.prompt.text
        assert [updated.prompt.tokens[i] for i in updated.prompt.positions("update")] == [newer]
        assert updated.prompt.positions("update")[0] < updated.prompt.anchors["before_request"]


def test_update_about_something_else_changes_nothing(words: Any) -> None:
    task, draw = one_draw(words, "negated")
    other = task.render(words, draw, (0, 0), distractor=True)
    assert other.target == task.render(words, draw, (0, 0)).target
    assert f"Update: {draw.distractor}." in other.prompt.text


def test_update_to_a_value_the_rule_does_not_name(words: Any) -> None:
    task, draw = one_draw(words, "two_clause")
    third = next(v for v in draw.family.values if v not in draw.values)
    with pytest.raises(TaskError, match=f"says nothing about '{third}'"):
        task.render(words, draw, (0, 0), update=third)
    with pytest.raises(TaskError, match="has no cell"):
        task.render(words, draw, (0, 1))
    task, draw = one_draw(words, "polarity")
    third = next(v for v in draw.family.values if v not in draw.values)
    assert task.render(words, draw, (0, 0), update=third).target == draw.actions[1]
    task, draw = one_draw(words, "negated")
    third = next(v for v in draw.family.values if v not in draw.values)
    assert task.render(words, draw, (0, 0), update=third).target == draw.actions[0]


@pytest.mark.parametrize("form", FORMS)
def test_chain_states_value_and_clause_then_answers(words: Any, form: str) -> None:
    task, draw = one_draw(words, form)
    for cell in draw.cells:
        chain = task.render(words, draw, cell, mode="chain")
        direct = task.render(words, draw, cell)
        value = draw.values[cell[0]]
        assert chain.target.startswith(f"The badge color is {value}. ")
        assert chain.target.endswith(f" Answer: {direct.target}")
        assert chain.target[chain.action_at :] == direct.target == chain.prompt.answer
        assert chain.target.count(draw.actions[1 - draw.actions.index(direct.target)]) == 0
        assert "then end with Answer:" in chain.prompt.text and "Answer with one word" not in chain.prompt.text


def test_chain_of_a_negated_rule_word_for_word(words: Any) -> None:
    _, draw = one_draw(words, "negated")
    (v0, v1), (p, q) = draw.values, draw.actions
    assert chain_text(draw, v0, 0) == f"The badge color is {v0}. By the rule that means {q}. Answer: {q}"
    assert chain_text(draw, v1, 0) == f"The badge color is {v1}. By the rule that means {p}. Answer: {p}"


@pytest.mark.parametrize("order", ["value_first", "rule_first"])
def test_filler_stands_where_it_is_asked_for(words: Any, order: str) -> None:
    for share, expected in ((0.0, 0), (1.0, 1)):
        task = GatedDecisions(families=["badge_color"], order=order, between=share, rendering="plain")
        for draw in task.draws(words, 4, 0):
            assert draw.between == expected * len(draw.filler)
        for instance in task.instances(words, 4, 0):
            prompt = instance.cells[0, 0]
            field, rule = prompt.positions("field")[-1], prompt.positions("rule")
            inside = range(field, rule[0]) if order == "value_first" else range(rule[-1], prompt.positions("field")[0])
            assert any(prompt.regions[p] == "filler" and prompt.tokens[p].strip() == "-" for p in inside) == bool(
                expected
            )
    with pytest.raises(TaskError, match="share from 0 to 1"):
        GatedDecisions(between=1.5)


def test_a_field_can_be_said(smollm2_tokenizer: Any) -> None:
    task = GatedDecisions(families=["badge_color"], forms=["polarity"], phrasing="conversation")
    (instance,) = task.instances(smollm2_tokenizer, 1, 0)
    prompt = instance.cells[0, 0]
    assert f"the badge color is {instance.meta['v0']}. Thank you" in prompt.text
    assert "".join(prompt.tokens[p] for p in prompt.positions("field")).strip() == instance.meta["v0"]
    with pytest.raises(TaskError, match="phrasing"):
        GatedDecisions(phrasing="poem")


def test_fixed_words_vary_the_filler_only(words: Any) -> None:
    task = GatedDecisions(families=["badge_color", "room_state"], forms=["swapped"], fixed_words=True)
    found = task.draws(words, 10, 0)
    for family in ("badge_color", "room_state"):
        mine = [d for d in found if d.family.name == family]
        assert len({(d.values, d.actions, d.restrictive) for d in mine}) == 1
        assert len({d.filler for d in mine}) == len(mine) == 5
    free = GatedDecisions(families=["badge_color", "room_state"], forms=["swapped"]).draws(words, 10, 0)
    assert [d.filler for d in free] == [d.filler for d in found], "the other draws stay as they are"
    assert len({(d.values, d.actions) for d in free if d.family.name == "badge_color"}) > 1
