"""Placebo: donors that say the same move nothing on the tiny decoder, and exactly what the oracle says elsewhere."""

from collections import Counter

import pytest

from notelens.context import ContextStore
from notelens.errors import InputError
from notelens.probes.aggregators import repeats
from notelens.probes.base import DIRECTIONS, ProbeResult, field_and_downstream
from notelens.probes.placebo import DONORS, Placebo, filler_variant
from notelens.prompt import Prompt
from tests.oracle import probes as oracle
from tests.oracle.swap import full_logits, margin
from tests.probe_cases import CASES, TOLERANCE, assert_rows_make_the_table, case, grid, run
from tests.tiny import FORMS, broken_direct, tiny_instance, tiny_prompt


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    return run(Placebo(), instances=grid(12, FORMS))


def test_nothing_moves(result: ProbeResult) -> None:
    for donor in DONORS:
        assert result.get("recovery", donor=donor).estimate.value == pytest.approx(0.0, abs=1e-6)
        assert result.get("abs_recovery", donor=donor).estimate.value < 1e-6
        assert result.get("flip_rate", donor=donor).estimate.value == 0.0
    assert dict(result.get("recovery", donor="same_conclusion").reasons) == {"the form has no second rule": 6}
    assert result.get("competence").estimate.n == 24  # pairs and directions, not donors


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    _, hf, instances = case(name)
    found = run(Placebo(), name)
    for instance in instances:
        pair = instance.pair("field")
        _, downstream = field_and_downstream(pair)
        for direction in DIRECTIONS:
            live, false, answers = (
                (pair.old, pair.new, pair.answer_ids)
                if direction == "denoising"
                else (pair.new, pair.old, pair.answer_ids[::-1])
            )
            rows = {r.meta["donor"]: r for r in found.rows if r.item == pair.id and r.direction == direction}
            gap = margin(full_logits(hf, false.token_ids, answers)) - margin(full_logits(hf, live.token_ids, answers))
            f, r = next(cell for cell, p in instance.cells.items() if p is live)
            variant = filler_variant(live, instance.answers)
            assert variant is not None
            donors = {"same_conclusion": instance.cells[1 - f, 1 - r], "other_filler": variant, "rerun": live}
            for donor, prompt in donors.items():
                own = margin(full_logits(hf, prompt.token_ids, answers))
                if own >= 0:
                    assert rows[donor].excluded == "placebo donor wrong"
                    continue
                assert rows[donor].values["placebo_margin"] == pytest.approx(own, abs=1e-2)
                expected = oracle.placebo(hf, live.token_ids, prompt.token_ids, downstream, answers, gap)
                assert rows[donor].values["recovery"] == pytest.approx(expected, abs=TOLERANCE), (donor, direction)
                assert rows[donor].values["abs_recovery"] == abs(rows[donor].values["recovery"])
            assert abs(rows["rerun"].values["recovery"]) < TOLERANCE


def test_other_filler_really_differs_and_only_there() -> None:
    for form in FORMS:
        for prompt in tiny_instance(form).cells.values():
            variant = filler_variant(prompt, ("deny", "approve"))
            assert variant is not None
            changed = [i for i, (a, b) in enumerate(zip(prompt.token_ids, variant.token_ids, strict=True)) if a != b]
            assert changed and min(changed) > prompt.positions("field")[-1]
            assert {prompt.regions[i] for i in changed} == {"filler"}
            assert Counter(prompt.token_ids) == Counter(variant.token_ids)
            assert variant.answer == prompt.answer and variant.anchors == prompt.anchors


def words(text: str, start: str = "f0") -> Prompt:
    labelled = [("start", "template"), (start, "field"), *((w, "filler") for w in text.split()), ("if", "rule"),
                ("t0", "trigger"), ("please", "request"), (":", "template"), ("?", "template")]  # fmt: skip
    return tiny_prompt(labelled, id="p")


def test_filler_that_repeats_the_value_or_an_answer_stays() -> None:
    prompt = words("f0 w1 deny w2 ;")
    variant = filler_variant(prompt, ("deny", "approve"))
    assert variant is not None
    assert variant.tokens[2:7] == ("f0", "w2", "deny", "w1", ";")
    kept = repeats(prompt.tokens, ["f0", "deny"])
    assert all(a == b for a, b, k in zip(prompt.tokens, variant.tokens, kept, strict=True) if k)


def test_no_filler_to_exchange_is_said() -> None:
    assert filler_variant(words("w1 ; ,"), ("deny", "approve")) is None
    assert filler_variant(words("w1 w1"), ("deny", "approve")) is None


def test_digits_are_exchanged_with_digits() -> None:
    from dataclasses import replace

    prompt = words("w1 w2 w3 w4")
    prompt = replace(prompt, tokens=(*prompt.tokens[:2], " 1", " Anna", "2", "Bob", *prompt.tokens[6:]))
    variant = filler_variant(prompt, ("deny", "approve"))
    assert variant is not None and variant.tokens[2:6] == ("2", " Anna", " 1", "Bob")


def test_a_model_that_reads_the_field_is_moved_by_nothing_either() -> None:
    found = Placebo(donors=("rerun",)).run(ContextStore(broken_direct()), grid(4, ("polarity",)))
    assert found.get("abs_recovery", donor="rerun").estimate.value < 1e-6


def test_the_table_comes_from_rows(result: ProbeResult) -> None:
    assert_rows_make_the_table(Placebo(), result)


def test_refusals() -> None:
    with pytest.raises(InputError, match="other"):
        Placebo(donors=("other",))
    with pytest.raises(InputError):
        Placebo(donors=())
    with pytest.raises(InputError, match="5"):
        Placebo(pairs_per_instance=5)
