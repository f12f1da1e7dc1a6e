"""The diagnostic on decoders whose answer is known: one reads notes, one reads the field itself."""

from dataclasses import replace
from typing import Any

import pytest

from experiments.edit_arms import Arm, Bench
from experiments.edit_cases import instance_case
from notelens.edits.diagnostic import MAPPED, ONE_TOKEN, RECORDED, Diagnostic, Signs, signs
from notelens.edits.report import Plan
from notelens.edits.resolve import resolve
from notelens.errors import AnswerError, EditError, FieldError, LengthChangeError
from tests.contracts import edits as contract
from tests.contracts.models import note_model
from tests.oracle.swap import full_logits, loop_isolated_swap
from tests.tiny import FORMS, broken_direct, tiny_instance, tiny_model

LEVELS = {"recorded": RECORDED, "one token": ONE_TOKEN, "mapped": MAPPED}


def cases(family: str = "parcel") -> list[Any]:
    return [instance_case(tiny_instance(form, family, i), backwards=i == 1) for form in FORMS for i in (0, 1)]


def seen(model: Any, case: Any) -> Signs:
    """Signs with the third value as reference: it says nothing, so the conclusion becomes 0."""
    return signs(case.context(model, record=True), case.name, "f2")


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_reads_notes(form: str) -> None:
    case = instance_case(tiny_instance(form))
    found, uniform = seen(tiny_model(), case), 1 / len(case.old)
    assert found.reader_attention == pytest.approx(uniform, rel=1e-3)  # a head without a task looks everywhere alike
    assert found.note_mass == pytest.approx(1.0, abs=1e-4) and found.transplant_gap == pytest.approx(0.0, abs=1e-4)
    assert found.chain_share == pytest.approx(1 / (1 + uniform), rel=1e-3) and found.reference == "f2"


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_reads_the_field_itself(form: str) -> None:
    found = seen(broken_direct(), instance_case(tiny_instance(form)))
    assert found.reader_attention == pytest.approx(1.0) and found.note_mass == pytest.approx(0.0, abs=1e-4)
    assert found.transplant_gap == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("names", LEVELS.values(), ids=LEVELS)
def test_fitted_on_one_half_it_tells_the_other_half_apart(names: tuple[str, ...]) -> None:
    """Calibration and evaluation prompts differ; one of the models is repaired by in_place, the other is not."""
    data: dict[str, list[tuple[Signs, float]]] = {"parcel": [], "visit": []}
    for family, rows in data.items():
        for model in (tiny_model(), broken_direct()):
            for case in cases(family):
                truth = Bench(model, case).row(Arm.parse("in_place"))["recovery"]
                assert truth == pytest.approx(float(model is not tiny_model()), abs=1e-3)
                rows.append((seen(model, case), truth))
    fitted = Diagnostic.fit([s for s, _ in data["parcel"]], [t for _, t in data["parcel"]], names)
    for found, truth in data["visit"]:
        if names == RECORDED:  # both models hold a chain; the direct read is what tells them apart
            assert (found.chain_share > 0.9) if truth < 0.5 else (found.chain_share == 0.5)
        assert fitted.predict(found) == pytest.approx(truth, abs=0.1)
        assert fitted.needs_more(found) == (truth < 0.5)
    again = Diagnostic.from_dict(fitted.to_dict())
    assert again == fitted and fitted.n == 16


def test_shares_are_what_hand_made_swaps_say() -> None:
    """On random weights nothing is known on paper, so the swap is made row by row from two plain prefills."""
    model = note_model("llama3")
    context = contract.context(model)
    found = signs(context, "a", "f1")
    old, new = context.tokens.ids, contract.context(model, "f1").tokens.ids
    behind = range(context.tokens.positions("a")[0] + 1, len(old) - 1)
    stale, fresh = (full_logits(model.hf, ids, range(model.hf.config.vocab_size)) for ids in (old, new))
    ids = sorted({*stale.topk(8).indices.tolist(), *fresh.topk(8).indices.tolist()})

    def centred(x: Any) -> Any:
        return x - x.mean()

    axis = centred(fresh[ids]) - centred(stale[ids])

    def share(rows: Any) -> float:
        swapped = loop_isolated_swap(model.hf, old, new, rows, ids)
        return float((centred(swapped) - centred(stale[ids])) @ axis / (axis @ axis))

    assert found.note_mass == pytest.approx(share(behind), abs=1e-3)
    best = sorted(behind, key=lambda p: -share([p]))[:8]
    rerun = context.edit("a", "f1", resolve("selective@8", plan=Plan("a", "x", tuple(sorted(best)), 0, 0.0))).context
    again = float((centred(rerun.next_logits()[ids]) - centred(stale[ids])) @ axis / (axis @ axis))
    field = context.tokens.positions("a")
    assert found.transplant_gap == pytest.approx(share([*best, *field]) - again, abs=1e-3)
    assert abs(found.transplant_gap) > 1e-2


def test_costs_are_counted() -> None:
    model = tiny_model()
    context = contract.context(model)
    with contract.counted(model) as run:
        cheap = signs(context, "a")
    assert sum(run) == cheap.tokens == 1 and cheap.note_mass is None
    with contract.counted(model) as run:
        full = signs(context, "a", "f2")
    assert sum(run) == full.tokens > len(context)


def test_what_cannot_be_told() -> None:
    model = tiny_model()
    context = contract.context(model)
    with pytest.raises(FieldError, match="no field 'b'"):
        signs(context, "b")
    with pytest.raises(LengthChangeError):
        signs(context, "a", "f1 w7")
    with pytest.raises(EditError, match="no record of which rows"):
        signs(contract.context(model, record=False), "a")
    with pytest.raises(EditError, match="is approximate"):
        signs(context.edit("a", "f1", "in_place").context, "a")
    with pytest.raises(AnswerError, match=r"moves the next token's logits by 0\.0"):
        signs(contract.context(model, "w1"), "a", "w2")  # neither word says anything
    found = signs(context, "a")
    with pytest.raises(EditError, match="'note_mass' needs a reference"):
        Diagnostic.fit([found] * 3, [0.0] * 3)
    with pytest.raises(EditError, match="at least three"):
        Diagnostic.fit([found] * 2, [0.0] * 2, ONE_TOKEN)


def test_constant_features_and_recoveries_stay_finite() -> None:
    one = Signs(0.5, 0.5, 0.5, 0.0, "x", 1)
    fitted = Diagnostic.fit([one] * 4, [0.0, 0.0, 0.0, 0.0])
    assert fitted.predict(one) < 0.05
    apart = [replace(one, note_mass=float(i % 2)) for i in range(8)]
    sharp = Diagnostic.fit(apart, [1.0 - s.note_mass for s in apart if s.note_mass is not None])
    assert all(abs(w) < 50 for w in sharp.weights) and sharp.predict(apart[0]) > 0.9 > 0.1 > sharp.predict(apart[1])
