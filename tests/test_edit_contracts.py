"""Every edit method keeps what it declares; a method that does not is noticed; impossible edits raise."""

from dataclasses import replace
from typing import Any

import pytest

from notelens.cache.rows import Rows
from notelens.edits import EDITS
from notelens.edits.base import Edit, EditMethod, Outcome
from notelens.edits.context import EditableContext
from notelens.edits.full_suffix import FullSuffix
from notelens.edits.in_place import InPlace
from notelens.edits.resolve import resolve
from notelens.edits.stale import Stale
from notelens.errors import (
    AnswerError,
    BudgetError,
    EditError,
    FieldError,
    LengthChangeError,
    SeamError,
    UnknownNameError,
    WindowError,
)
from notelens.intervene.run_rows import run_rows
from tests.contracts import edits as contract
from tests.contracts.models import note_model, random_hf
from tests.tiny import wrapped

FAMILIES = ("tiny", "llama3", "gemma2", "gemma3_text", "gpt_oss")
"""No family whose layers all have a window: the field of the test prompt has left it (see the last tests)."""
K_METHODS = [name for name in EDITS if EDITS.get(name).takes_k]


@pytest.mark.parametrize("name", EDITS.names())
def test_entries_are_complete(name: str) -> None:
    assert contract.declared_problems(name, EDITS.get(name)) == []


@pytest.mark.parametrize("check", contract.CONTRACTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", EDITS.names())
def test_methods_keep_what_they_declare(name: str, check: Any) -> None:
    for family in FAMILIES:
        problems = check(note_model(family), contract.make(EDITS.get(name)))
        assert problems == [], family


# --- broken members ---------------------------------------------------------------------------------------------------


class Boaster(InPlace):
    """Says that it is always right."""

    exact_when = "always"


class Liar(InPlace):
    """Calls every row run."""

    def apply(self, edit: Edit) -> Outcome:
        return replace(super().apply(edit), run=tuple(range(edit.n)))


class Smuggler(InPlace):
    """Runs rows past the meter."""

    def apply(self, edit: Edit) -> Outcome:
        run_rows(edit.model, None, edit.new.ids, range(edit.n))
        return super().apply(edit)


class Substitute(InPlace):
    """Does something else than asked."""

    def apply(self, edit: Edit) -> Outcome:
        return FullSuffix().apply(edit)


class Vandal(InPlace):
    """Writes into the old rows."""

    def apply(self, edit: Edit) -> Outcome:
        done = super().apply(edit)
        edit.context.rows.segments[0].source.values[0][:, 1] += 1.0
        return done


class Rigid(InPlace):
    """Refuses other lengths without saying so."""

    def apply(self, edit: Edit) -> Outcome:
        edit.require_equal_length()
        return super().apply(edit)


class Elastic(Stale):
    """Says that it needs equal lengths and takes others."""

    def apply(self, edit: Edit) -> Outcome:
        return InPlace().apply(edit)


class Appender(InPlace):
    """Says that it only appends."""

    append_only = True


class Loose(InPlace):
    """Forgets a row."""

    def apply(self, edit: Edit) -> Outcome:
        done = super().apply(edit)
        return replace(done, rows=Rows(done.rows.between(0, edit.n - 1), done.rows.history))


class Overrun(InPlace):
    """Reports rows that do not exist."""

    def apply(self, edit: Edit) -> Outcome:
        done = super().apply(edit)
        return replace(done, run=(*done.run, edit.n + 1))


@pytest.mark.parametrize(
    ("kind", "check", "problem"),
    [
        (Liar, contract.exact_problems, "called exact, but rows differ"),
        (Smuggler, contract.cost_problems, "tokens ran"),
        (Substitute, contract.purity_problems, "handed over to full_suffix"),
        (Vandal, contract.purity_problems, "was changed"),
        (Rigid, contract.length_problems, "without saying so"),
        (Appender, contract.append_problems, "append_only is True"),
        (Overrun, contract.cost_problems, "do not cover"),
        (Loose, contract.length_problems, "same positions"),
    ],
)
def test_broken_members_are_noticed(kind: type[EditMethod], check: Any, problem: str) -> None:
    found = check(wrapped(random_hf("llama"), "llama", gate=False), kind())
    assert any(problem in text for text in found), found


def test_a_method_that_boasts_is_noticed() -> None:
    Boaster.name, before = "boaster", Boaster.name
    try:
        found = contract.exact_problems(note_model("llama"), Boaster())
    finally:
        Boaster.name = before
    assert any("exact_when is 'always'" in text for text in found), found


def test_incomplete_entries_are_noticed() -> None:
    class Nameless(InPlace):
        pass

    Nameless.__doc__, Nameless.exact_when, Nameless.paper_ref = "", "sometimes", "somewhere"  # type: ignore[assignment] - broken on purpose
    found = contract.declared_problems("other", Nameless)
    for problem in ("called 'in_place'", "not a sentence", "no place", "exact_when is 'sometimes'"):
        assert any(problem in text for text in found), problem
    assert contract.declared_problems("x", int) == ["int is no EditMethod"]


# --- the impossible ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDITS.names())
def test_fields_and_values_that_no_method_can_edit(name: str, tiny: Any) -> None:
    context = contract.context(tiny)
    cases = (("b", "f1", FieldError), ("a", " ", FieldError), ("a", "f0", EditError), ("a", "{{x}}", FieldError))
    for field, value, error in cases:
        with pytest.raises(error):
            context.edit(field, value, contract.make(EDITS.get(name)))


@pytest.mark.parametrize("name", K_METHODS)
def test_more_rows_than_there_are(name: str, tiny: Any) -> None:
    with pytest.raises(BudgetError, match=r"only \d+ rows stand behind field 'a'; use a smaller K or full_suffix"):
        contract.context(tiny).edit("a", "f1", contract.make(EDITS.get(name), k=200))


@pytest.mark.parametrize("name", ["stale"])
def test_another_length_where_rows_stay_one_by_one(name: str, tiny: Any) -> None:
    with pytest.raises(LengthChangeError, match=r"\+1 tokens.*Use in_place, full_suffix, auto or erratum"):
        contract.context(tiny).edit("a", "f1 w7", name)


@pytest.mark.parametrize(
    "spec", ["selective", "selective@x", "selective@0", "selective@-3", "selective@150%", "in_place@4", "auto@3"]
)
def test_methods_that_are_written_wrong(spec: str, tiny: Any) -> None:
    with pytest.raises(EditError, match="method"):
        contract.context(tiny).edit("a", "f1", spec)


def test_names_options_and_rankings_that_do_not_exist(tiny: Any) -> None:
    context = contract.context(tiny)
    with pytest.raises(UnknownNameError, match="did you mean 'full_prefill'"):
        context.edit("a", "f1", "full_prefil")
    with pytest.raises(EditError, match="method 'in_place': InPlace"):
        context.edit("a", "f1", "in_place", depth=3)
    with pytest.raises(EditError, match="unknown ranking 'efect'"):
        context.edit("a", "f1", "selective@2", ranking="efect")
    with pytest.raises(EditError, match="chooses no rows"):
        context.plan("a", "f1", "in_place")
    for template in ("no slot", "{value} {other}", "{value} {"):
        with pytest.raises(FieldError):
            context.edit("a", "f1", "erratum", template=template)
    for budget in (0, -1, 1.5):
        with pytest.raises(EditError, match="neither a positive number"):
            context.edit("a", "f1", "auto", budget=budget)
    assert resolve("selective@15%").label == "selective@15%" and resolve("selective@8").label == "selective@8"


def test_a_budget_that_does_not_hold_the_chain(tiny: Any) -> None:
    with pytest.raises(BudgetError, match=r"the budget is 3; raise the budget"):
        contract.context(tiny).edit("a", "f1", "auto", budget=3)


def test_planning_without_a_record(tiny: Any) -> None:
    context = contract.context(tiny, record=False)
    for method, options in (("auto", {}), ("selective@2", {"ranking": "chain"})):
        with pytest.raises(EditError, match=r"no record of which rows read which"):
            context.edit("a", "f1", method, **options)
    again = context.recorded()
    assert again.edit("a", "f1", "selective@2", ranking="chain")[1].planning_tokens == 0
    assert again.build_tokens == 2 * len(context)


def test_a_decision_that_does_not_depend_on_the_field(tiny: Any) -> None:
    with pytest.raises(AnswerError, match="same first token"):
        contract.context(tiny).edit("a", "f1", "selective@2", answers=("deny", "deny"))


@pytest.mark.parametrize("method", ["in_place", "edit_local@1"])
def test_a_field_outside_every_window(method: str) -> None:
    with pytest.raises(WindowError, match=r"have left every layer's window \(8 positions.*Use full_suffix or erratum"):
        contract.context(note_model("mistral")).edit("a", "f1", method)
    contract.context(note_model("gemma3_text")).edit("a", "f1", method)  # one of its layers sees everything


def test_plans_are_for_their_own_field_and_any_value(tiny: Any) -> None:
    context = contract.context(tiny)
    plan = context.plan("a", "f1", "selective@3", ranking="effect")
    assert plan.tokens > 0 and len(plan.rows) == 3 and plan.field == "a"
    for value in ("f1", "f2", "f1 w7"):
        made, report = context.edit("a", value, "selective@3", plan=plan)
        assert report.planning_tokens == 0 and report.facts["plan"] is plan
        assert report.tokens_run == 3 + len(made.tokens.positions("a")) + 1
    with pytest.raises(EditError, match="the plan is for field 'a', not 't'"):
        context.edit("t", "t1", "selective@3", plan=plan)
    other = context.plan("t", "t1", "selective@3", ranking="chain")
    broken = type(plan)("a", "x", (*other.rows, context.tokens.positions("a")[0]), 0, 0.0)
    with pytest.raises(EditError, match="the plan names row"):
        context.edit("a", "f1", "selective@3", plan=broken)


def test_nested_fields_cannot_be_hoisted_out_of_another(tiny: Any) -> None:
    text = "start parcel is {{b}} , w0 please decide . : ?"
    context = EditableContext.from_text(tiny, text, {"b": "w1 {{a}}", "a": "f0"}, rendering="raw")
    made, _ = context.edit("a", "f1", "full_suffix")
    assert made.exact and "w1 f1" in made.tokens.text
    outer, _ = context.edit("b", "{{a}} w2 w3", "in_place")
    assert "f0 w2 w3" in outer.tokens.text
    with pytest.raises(FieldError, match="part of another field"):
        context.edit("a", "f1", "hoist", template="is {value} , ", place="w9")


def test_a_value_that_merges_with_its_neighbour(smollm2_tokenizer: Any) -> None:
    from notelens.models.load import wrap

    hf = random_hf("llama", vocab_size=len(smollm2_tokenizer))
    model = wrap(hf, smollm2_tokenizer, name="llama-words", gate=False)
    context = EditableContext.from_text(model, "The code is {{v}}. Go on.", {"v": "blue"}, rendering="plain")
    for method in EDITS.names():
        with pytest.raises(SeamError, match="field 'v'"):
            context.edit("v", "blue.", contract.make(EDITS.get(method)))
    with pytest.raises(FieldError, match="special token"):
        context.edit("v", "a <|im_end|> b", "in_place")
    assert context.edit("v", "dark red", "in_place")[0].values["v"] == "dark red"
