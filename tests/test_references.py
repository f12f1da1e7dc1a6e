"""Named rows are run again where they stand, others stay as they were compiled, and names that mean nothing are refused."""

from typing import Any

import pytest

from notelens.cache.ops import max_difference, select_rows
from notelens.compose import References, compile_skill, compose
from notelens.compose.fidelity import compare
from notelens.compose.references import rows_of
from notelens.errors import ComposeError
from tests.contracts.models import note_model, random_ids
from tests.tiny import TOKEN_IDS, ids_of, tiny_instance

BEFORE, SKILL, OTHER, AFTER = (list(random_ids(n, seed=s)) for n, s in ((7, 1), (11, 2), (6, 4), (4, 3)))


@pytest.mark.parametrize("cell", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_the_note_of_a_rule_apart_from_its_field_is_all_that_must_run_again(tiny: Any, cell: tuple[int, int]) -> None:
    """The hand-set decoder reads the note ``;`` alone: that row repairs the decision, all other rows of the skill do not."""
    instance = tiny_instance()
    prompt = instance.cells[cell]
    start, stop = prompt.spans["rule"][0].start, prompt.anchors["before_request"] + 1
    skill = compile_skill(tiny, prompt.token_ids[start:stop], name="s", condition="neutral", prefix=ids_of(["start"]))
    notes = [i for i, t in enumerate(skill.token_ids) if t == TOKEN_IDS[";"]]
    others = [i for i in range(len(skill)) if i not in notes]
    assert notes and others
    parts = [prompt.token_ids[:start], skill, prompt.token_ids[stop:]]
    answers = {}
    for label, rows in (("notes", notes), ("others", others)):
        found = compare(tiny, parts, instance.answer_ids, [References.at([(skill, rows)])])
        answers[label] = found.decisions["references"]
        assert found.full.answer == instance.conclusion[cell]
    assert answers["notes"].distance.kl <= 1e-9 and answers["notes"].answer == instance.conclusion[cell]
    assert answers["others"].distance.kl > 1e-3


def test_only_named_rows_change_and_all_of_them_are_a_prefill() -> None:
    model = note_model("llama")
    skill, other = compile_skill(model, SKILL, name="s"), compile_skill(model, OTHER, name="o")
    parts = [BEFORE, other, skill, AFTER]
    plain = compose(model, parts, method="shift")
    found = compose(model, parts, method=References.at([(skill, [2, 5])]))
    assert found.cost.tokens_recomputed == 2 and not found.exact
    assert "2 rows that refer to other parts" in " ".join(found.cache.history)
    first = len(BEFORE) + len(OTHER)
    same = [r for r in range(first + len(SKILL)) if r not in (first + 2, first + 5)]
    assert max_difference(select_rows(found.cache, same), select_rows(plain.cache, same)) == 0.0
    for row in (first + 2, first + 5):
        assert max_difference(select_rows(found.cache, [row]), select_rows(plain.cache, [row])) > 1e-3
    every = [(skill, range(len(SKILL))), (other, range(len(OTHER)))]
    whole = compose(model, parts, method=References.at(every))
    assert whole.exact and max_difference(whole.cache, model.prefill(whole.token_ids).cache) <= 1e-5


def test_lines_are_found_by_their_tokens(tiny: Any) -> None:
    skill = compile_skill(tiny, "w1 w2 if t0 then ; w3 , w3", name="s")
    assert rows_of(tiny, skill, "if t0 then ;") == range(2, 6)
    method = References([(skill, ["if t0 then ;", "w2"])], model=tiny)
    assert method.rows == {skill.key: frozenset(range(1, 6))}
    assert References.at([(skill, [1]), (skill, [2])]).rows == {skill.key: frozenset({1, 2})}
    for text, message in (("if t1", "does not hold"), ("w3", "holds 2 times"), (" ", "empty")):
        with pytest.raises(ComposeError, match=message):
            References([(skill, [text])], model=tiny)
    with pytest.raises(ComposeError, match="model="):
        References([(skill, ["w2"])])
    for row in (-1, len(skill)):
        with pytest.raises(ComposeError, match="has rows 0"):
            References.at([(skill, [row])])


def test_a_skill_that_nobody_named_is_moved_and_nothing_named_at_all_is_refused() -> None:
    model = note_model("llama")
    skill, other = compile_skill(model, SKILL, name="s"), compile_skill(model, OTHER, name="o")
    moved = compose(model, [BEFORE, other, AFTER], method=References.at([(skill, [1])]))
    assert moved.cost.tokens_recomputed == 0
    assert moved.cache.digest() == compose(model, [BEFORE, other, AFTER], method="shift").cache.digest()
    for method in ("references", References.at([(skill, [])])):
        with pytest.raises(ComposeError, match="which lines refer"):
            compose(model, [BEFORE, skill, AFTER], method=method)
