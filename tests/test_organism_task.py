"""The organisms' language: answers read off the text by an independent reader, splits, spans, tokens, refusals."""

import re
from collections import Counter
from itertools import product
from typing import Any

import pytest

from notelens.errors import SpanError, TaskError
from notelens.prompt import Prompt
from notelens.spans import encode, make_prompt
from notelens.tasks import TASKS, Task
from notelens.tasks.organism import N_TRAINED, OrganismLanguage, held_out, organism_families, pairings, vocabulary
from notelens.tasks.organism_text import KIND_FORMS, scene_pieces
from notelens.zoo.organisms import CHAT_TEMPLATE, build_tokenizer, organism_tokenizer

KINDS = tuple(KIND_FORMS)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return organism_tokenizer()


def read(text: str) -> str:
    """The right answer of a prompt, from its text alone; knows the wordings and nothing of the code that wrote them."""
    text = text.lower()
    facts = dict(re.findall(r"^- (\w+): (\w+)$", text, re.MULTILINE))
    facts |= dict(re.findall(r"update: the (\w+) is now (\w+)\.", text))
    asked = re.findall(r"which (\w+)\?|what now\?", text)[-1]
    if asked not in ("", "step"):
        return facts[asked]
    rules = [r for r in re.findall(r"rule: (.*)\n", text) if re.split(r"(?:if|when) the ", r)[1].split()[0] in facts]
    assert len(set(rules)) == 1, rules
    first, *means = rules[0].rstrip(".").split(". ")
    clause = re.match(
        r"(?:if|when) the (\w+) is (not )?(\w+)(?: and the (\w+) is (\w+))?(?: then|,) (\w+)(?:, otherwise|; else) (\w+)$",
        first,
    )
    if clause:
        label, negated, value, other, wanted, yes, no = clause.groups()
        holds = (facts[label] == value) != bool(negated) and (other is None or facts[other] == wanted)
        result = yes if holds else no
    else:
        clause = re.match(
            r"(?:if|when) the (\w+) is (\w+)(?: then|,) (\w+); (?:if it is|when) (\w+)(?: then|,) (\w+)$", first
        )
        assert clause is not None, first
        label, v0, a0, v1, a1 = clause.groups()
        result = {v0: a0, v1: a1}[facts[label]]
    return dict(re.findall(r"(\w+) means (\w+)", means[0]))[result] if means else result


class TestAnswers:
    @pytest.mark.parametrize(
        ("kind", "order", "split"), list(product(KINDS, ("value_first", "rule_first"), ("eval", "train")))
    )
    def test_every_cell_is_what_its_text_says(self, tokenizer: Any, kind: str, order: str, split: str) -> None:
        task = OrganismLanguage(kinds=[kind], order=order, split=split)
        instances = task.instances(tokenizer, 48, 0)
        assert {i.form for i in instances} == ({"lookup"} if kind == "lookup" else set(KIND_FORMS[kind]))
        for instance in instances:
            for cell, prompt in instance.cells.items():
                assert read(prompt.text) == prompt.answer == instance.answers[instance.conclusion[cell]], prompt.text

    def test_the_reader_is_not_blind(self, tokenizer: Any) -> None:
        prompt = OrganismLanguage().instances(tokenizer, 1, 0)[0].cells[0, 0]
        value = prompt.tokens[prompt.positions("field")[0]]
        other = OrganismLanguage().instances(tokenizer, 1, 0)[0].cells[1, 0]
        new = other.tokens[other.positions("field")[0]]
        assert read(prompt.text) != read(prompt.text.replace(f": {value}\n", f": {new}\n"))

    def test_a_second_fact_that_fails_decides(self) -> None:
        from dataclasses import replace

        scene = OrganismLanguage(kinds=["two_fact"], forms=["polarity"]).scenes(1, 0)[0]
        assert scene.fact is not None
        label, wanted, _ = scene.fact
        broken = replace(scene, fact=(label, wanted, "nothing"), others=((label, "nothing"),), n_before=0)
        for cell in broken.cells:
            text = "".join(p.text for p in scene_pieces(broken, cell, "act"))
            assert read(text) == broken.answer(broken.draw.values[cell[0]], cell[1]) == broken.draw.actions[1]

    def test_histories_go_there_and_back(self) -> None:
        scenes = OrganismLanguage(kinds=["update"], updates=2).scenes(200, 0)
        back = [s for s in scenes if s.history[0] in s.draw.values and s.history[1] != s.history[0]]
        assert len(back) > 50 and all(len(s.history) == 2 for s in scenes)
        assert {s.history[0] == s.draw.values[0] for s in back} == {True, False}
        assert all(a != b for s in scenes for a, b in zip(s.history, s.history[1:], strict=False))

    @pytest.mark.parametrize(("kind", "mode"), list(product(KINDS, ("act", "call", "think"))))
    def test_supervised_texts_end_in_what_is_right(self, tokenizer: Any, kind: str, mode: Any) -> None:
        task = OrganismLanguage(kinds=[kind])
        for scene in task.scenes(24, 3):
            for cell in scene.cells:
                made = task.render(tokenizer, scene, cell, mode=mode)
                word = re.match(r"\w+", made.target[made.action_at :])
                assert word is not None and word[0] == made.prompt.answer == read(made.prompt.text)
                assert made.prompt.text.count(f" {mode}<end>") == 1
                if mode == "think":
                    assert made.target.startswith(f"{scene.draw.family.label} is {scene.draw.values[cell[0]]}.")


class TestPrompts:
    def test_it_is_a_task(self) -> None:
        assert TASKS.get("organism") is OrganismLanguage and isinstance(OrganismLanguage(), Task)

    def test_instances_are_spread_and_do_not_depend_on_n(self, tokenizer: Any) -> None:
        task = OrganismLanguage(kinds=KINDS)
        found = task.instances(tokenizer, 12 * len(task.variants), 5)
        assert Counter(i.family for i in found) == dict.fromkeys(
            [f.name for f in organism_families()], len(task.variants)
        )
        assert len(set(Counter((i.meta["kind"], i.form) for i in found).values())) == 1
        assert task.instances(tokenizer, 10, 5) == found[:10] != task.instances(tokenizer, 10, 6)
        assert len({i.id for i in found}) == len(found)

    def test_forms_of_a_group_share_everything_else(self) -> None:
        scenes = OrganismLanguage(forms=["polarity", "negated", "two_clause"]).scenes(36, 0)
        groups: dict[str, list[Any]] = {}
        for s in scenes:
            groups.setdefault(s.draw.group, []).append(s)
        assert all(len(g) == 3 for g in groups.values())
        for group in groups.values():
            assert len({(s.draw.values, s.draw.actions, s.draw.filler, s.others, s.draw.request) for s in group}) == 1

    def test_spans_and_anchors(self, tokenizer: Any) -> None:
        for instance in OrganismLanguage(kinds=["gated", "multi_hop", "update"]).instances(tokenizer, 60, 0):
            for (f, r), prompt in instance.cells.items():
                v = (instance.meta["v0"], instance.meta["v1"])
                assert prompt.tokens[prompt.positions("field")[0]] == v[f]
                assert prompt.tokens[prompt.decision] == "<assistant>" and prompt.tokens[prompt.decision - 1] == "<end>"
                assert prompt.tokens[prompt.anchors["before_request"]] == "\n"
                assert prompt.tokens[prompt.anchors["rule_end"]] == "."
                if instance.form in ("polarity", "negated"):
                    assert [prompt.tokens[p] for p in prompt.positions("trigger")] == [v[r]]

    @pytest.mark.parametrize("order", ["value_first", "rule_first"])
    def test_order(self, tokenizer: Any, order: str) -> None:
        for instance in OrganismLanguage(order=order).instances(tokenizer, 12, 0):
            prompt = instance.cells[0, 0]
            assert (prompt.positions("field")[0] < prompt.positions("rule")[0]) == (order == "value_first")

    @pytest.mark.parametrize("filler", [0, 60, 600])
    def test_filler(self, tokenizer: Any, filler: int) -> None:
        for instance in OrganismLanguage(filler=filler).instances(tokenizer, 12, 0):
            n = sum(r == "filler" for r in instance.cells[0, 0].regions)
            assert filler - 0.2 * filler <= n <= filler + 0.1 * filler + 2

    def test_plain_rendering(self, tokenizer: Any) -> None:
        for instance in OrganismLanguage(rendering="plain", kinds=KINDS).instances(tokenizer, 15, 0):
            prompt = instance.cells[0, 0]
            assert prompt.tokens[-2:] == ("answer", ":") and prompt.tokens[:1] == ("<s>",)


class TestSplits:
    def test_training_never_sees_what_is_held_out(self) -> None:
        for family in organism_families():
            known, new = family.values[:N_TRAINED], family.values[N_TRAINED:]
            train, combos, values = (pairings(family.name, s) for s in ("train", "combos", "values"))
            assert train and combos and values and not set(train) & set(combos)
            assert {v for pair, _ in values for v in pair} <= set(new)
            assert {v for pair, _ in (*train, *combos) for v in pair} <= set(known)
            assert not any(held_out(family.name, *p) for p in train) and all(held_out(family.name, *p) for p in combos)

    def test_the_hash_ignores_order(self) -> None:
        assert held_out("gate", ("red", "blue"), ("block", "admit")) == held_out(
            "gate", ("blue", "red"), ("admit", "block")
        )

    @pytest.mark.parametrize(("split", "expected"), [("values", {False}), ("combos", {True}), ("eval", {True, False})])
    def test_scenes_come_from_the_split(self, split: str, expected: set[bool]) -> None:
        families = {f.name: f for f in organism_families()}
        scenes = OrganismLanguage(split=split).scenes(200, 0)
        assert {s.draw.values[0] in families[s.draw.family.name].values[:N_TRAINED] for s in scenes} == expected

    def test_no_word_has_two_roles(self) -> None:
        words = [w for f in organism_families() for w in (f.label, f.record, *f.values, *f.restrictive, *f.permissive)]
        assert [w for w, n in Counter(words).items() if n > 1] == []


class TestTokenizer:
    def test_the_shipped_file_is_what_the_vocabulary_builds(self, tokenizer: Any) -> None:
        built = build_tokenizer(vocabulary())
        assert built.get_vocab() == tokenizer.get_vocab() and tokenizer.chat_template == CHAT_TEMPLATE
        assert built.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()

    def test_every_prompt_is_in_the_vocabulary_one_token_a_word(self, tokenizer: Any) -> None:
        unknown = tokenizer.unk_token_id
        for scene in OrganismLanguage(kinds=KINDS, split="train").scenes(120, 1):
            prompt: Prompt = OrganismLanguage().render(tokenizer, scene, (0, 0), mode="think").prompt
            assert unknown not in prompt.token_ids
            assert len(prompt) == len(re.findall(r"<\w+>|\n|\w+|[^\w\s]", prompt.text))

    def test_one_beginning(self, tokenizer: Any) -> None:
        assert encode(tokenizer, "the seal") == encode(tokenizer, "<s>the seal", templated=True)

    def test_a_word_outside_the_language_is_refused(self, tokenizer: Any) -> None:
        from notelens.spans import Piece

        with pytest.raises(SpanError, match=r"'zebra'.*not in the vocabulary"):
            make_prompt(tokenizer, [Piece("record", "the zebra is open")], id="x", answer="open")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"split": "evil"}, "unknown split 'evil'; did you mean 'eval'"),
        ({"kinds": ["gate"]}, "unknown kind 'gate'"),
        ({"kinds": []}, "a list of distinct names is needed for kind"),
        ({"forms": "polarity"}, "a list of distinct names is needed for form"),
        ({"families": ["zoo"]}, "unknown family 'zoo'"),
        ({"filler": 700}, "filler 700 is not a whole number from 0 to 600"),
        ({"filler": True}, "filler True"),
        ({"updates": 0}, "updates 0 is not a whole number from 1 to 4"),
        ({"kinds": ["two_fact"], "forms": ["swapped"]}, "have none of the forms"),
        ({"order": "both"}, "unknown order 'both'"),
    ],
)
def test_refusals(params: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        OrganismLanguage(**params)


def test_a_chain_has_no_instances(tokenizer: Any) -> None:
    with pytest.raises(TaskError, match="begins with the same word"):
        OrganismLanguage(mode="think").instances(tokenizer, 1, 0)
