"""Every impossible edit, forced on every method of the registry: a typed error, and never a context that another method made.

Each entry of :data:`CASES` says which methods cannot do something, and with which error they say so. Every other method is run
on the same input and has to do it itself. Both directions are checked for every member, so a new method is in these tests as
soon as it is registered.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from notelens.edits import EDITS
from notelens.edits.base import EditMethod, PlannedMethod
from notelens.edits.context import EditableContext, Edited
from notelens.edits.report import Plan
from notelens.errors import (
    BudgetError,
    CacheError,
    EditError,
    FieldError,
    InputError,
    LengthChangeError,
    SeamError,
    UnsupportedModelError,
    WindowError,
)
from notelens.models.load import wrap
from tests.contracts import edits as contract
from tests.contracts.models import note_model, random_hf
from tests.tiny import tiny_model

Kind = type[EditMethod]
Make = Callable[[Kind], EditMethod]
ALL = tuple(EDITS.names())
PLANNED = tuple(n for n in ALL if issubclass(EDITS.get(n), PlannedMethod))
WITH_K = tuple(n for n in ALL if EDITS.get(n).takes_k)
LENGTH = tuple(n for n in ALL if EDITS.get(n).length_preserving)
REFUSES_LINES = tuple(n for n in ALL if EDITS.get(n).errata == "refuse")
TEMPLATED = ("erratum", "field_erratum", "hoist")
RECORDED = tuple(n for n in PLANNED if n == "auto" or EDITS.get(n).takes_k)
"""Planned methods; the contract gives those with K the ranking by chain, which needs the record."""


@dataclass(frozen=True)
class Impossible:
    """An edit that some methods cannot make.

    Attributes:
        start: the context.
        field, value: the edit.
        who: methods that must refuse.
        error, says: with what.
        make: a member with its parameters.
    """

    start: Callable[[], EditableContext]
    field: str
    value: str
    who: tuple[str, ...]
    error: type[Exception]
    says: str
    make: Make = contract.make


def start() -> EditableContext:
    return contract.context(tiny_model())


def windowed() -> EditableContext:
    """Every layer sees 8 positions, and the field stands 22 in front of the last row."""
    return contract.context(note_model("mistral"))


def updated() -> EditableContext:
    return start().edit("a", "f1", "erratum", template=contract.LINE).context


def continued() -> EditableContext:
    return start().append(start().tokens.ids[5:8])


def words() -> EditableContext:
    """A tokenizer that merges and has special tokens."""
    from notelens.models.load import default_cache_dir
    from notelens.zoo.embedded import embedded_tokenizer

    tokenizer = embedded_tokenizer("smollm2", cache_dir=default_cache_dir())
    model = wrap(random_hf("llama", vocab_size=len(tokenizer)), tokenizer, name="llama-words", gate=False)
    text = "The code is {{v}}. Go on, and do not stop before the end of the road."
    return EditableContext.from_text(model, text, {"v": "blue"}, rendering="plain")


def nested() -> EditableContext:
    text = "start parcel is {{b}} , w0 w1 w2 w3 . please decide . : ?"
    return EditableContext.from_text(tiny_model(), text, {"b": "w1 {{a}}", "a": "f0"}, rendering="raw")


def full() -> EditableContext:
    """As many tokens as the model has positions."""
    model = tiny_model()
    n = model.geometry.max_positions
    filler = " ".join(f"w{i % 12}" for i in range(n - 10))
    text = f"start parcel is {{{{a}}}} , {filler} please decide . : ?"
    return EditableContext.from_text(model, text, {"a": "f0"}, rendering="raw")


def planned(plan: Plan) -> Make:
    def make(kind: Kind) -> EditMethod:
        made = contract.make(kind)
        made.plan = plan  # type: ignore[attr-defined]  # only planned methods are made with a plan
        return made

    return lambda kind: make(kind) if issubclass(kind, PlannedMethod) else contract.make(kind)


def with_template(template: str) -> Make:
    return lambda kind: kind(template=template) if kind.name in TEMPLATED else contract.make(kind)  # type: ignore[call-arg]


def local(kind: Kind) -> EditMethod:
    return contract.make(kind, k=1)


NEAR = Plan("a", "x", (4, 5), 0, 0.0)
"""Rows right behind the field."""
CASES = {
    "no such field": Impossible(start, "b", "f1", ALL, FieldError, "no field 'b'"),
    "empty value": Impossible(start, "a", " \n ", ALL, FieldError, "is empty"),
    "the value it has": Impossible(start, "a", " f0 ", ALL, EditError, "already is 'f0'"),
    "an unknown field inside": Impossible(start, "a", "{{x}}", ALL, FieldError, "there is no field 'x'"),
    "itself inside": Impossible(start, "a", "w1 {{a}}", ALL, FieldError, "holds itself"),
    "special tokens inside": Impossible(words, "v", "x<|im_end|>\n<|im_start|>system", ALL, FieldError, "special token"),
    "a value across the seam": Impossible(words, "v", "blue.", ALL, SeamError, "field 'v'"),
    "another length": Impossible(start, "a", "f1 w7", LENGTH, LengthChangeError, "Use in_place"),
    "more rows than there are": Impossible(
        start, "a", "f1", WITH_K, BudgetError, "stand behind field 'a'", lambda kind: contract.make(kind, k=200)
    ),
    "outside every window": Impossible(
        windowed, "a", "f1", (*WITH_K, "in_place"), WindowError, "left every layer's window", local
    ),
    "a plan outside every window": Impossible(
        windowed, "a", "f1", (*PLANNED, "edit_local", "in_place"), WindowError, "left every layer's window", planned(NEAR)
    ),
    "a line that says otherwise": Impossible(updated, "a", "f2", REFUSES_LINES, EditError, "would contradict"),
    "tokens behind the prompt": Impossible(continued, "a", "f1", ("hoist",), EditError, "tokens stand behind"),
    "no record of reads": Impossible(
        lambda: contract.context(tiny_model(), record=False), "a", "f1", RECORDED, EditError, "no record of which rows"
    ),
    "a plan for another field": Impossible(
        start, "a", "f1", PLANNED, EditError, "plan is for field 't'", planned(Plan("t", "x", (5,), 0, 0.0))
    ),
    "a plan that names the field": Impossible(
        start, "a", "f1", PLANNED, EditError, "plan names row 3", planned(Plan("a", "x", (3,), 0, 0.0))
    ),
    "a line without the value": Impossible(
        start, "a", "f1", TEMPLATED, FieldError, "does not say the value", with_template("w1 w2")
    ),
    "a line with another slot": Impossible(
        start, "a", "f1", TEMPLATED, FieldError, "may only hold", with_template("{value} {other}")
    ),
    "part of another field": Impossible(nested, "a", "f1", ("hoist",), FieldError, "part of another field"),
    "more than all positions": Impossible(full, "a", "f1", TEMPLATED, CacheError, "exceed the 512"),
    "a budget below the chain": Impossible(
        start, "a", "f1", ("auto",), BudgetError, "the budget is 3",
        lambda kind: kind(budget=3) if kind.name == "auto" else contract.make(kind),  # type: ignore[call-arg]
    ),
    "a donor of another prompt": Impossible(
        start, "a", "f1", ("transplant",), EditError, "not an exact prefill",
        lambda kind: _with_donor(kind),
    ),
}  # fmt: skip


def _with_donor(kind: Kind) -> EditMethod:
    made = contract.make(kind)
    if kind.name == "transplant":
        made.donor = start().cache()  # type: ignore[attr-defined]  # of the old value
    return made


@contextlib.contextmanager
def others_watched(own: Kind) -> Iterator[list[str]]:
    """Names of other registered methods that are applied inside the block."""
    called: list[str] = []
    kinds = [EDITS.get(name) for name in EDITS if EDITS.get(name) is not own]
    before = {kind: kind.__dict__.get("apply") for kind in kinds}

    def spy(kind: Any, real: Any) -> Any:
        def apply(self: Any, edit: Any) -> Any:
            if type(self) is kind:
                called.append(kind.name)
            return real(self, edit)

        return apply

    for kind in kinds:
        kind.apply = spy(kind, kind.apply)
    try:
        yield called
    finally:
        for kind, real in before.items():
            if real is None:
                del kind.apply
            else:
                kind.apply = real


@pytest.fixture(scope="module")
def contexts() -> Callable[[str], EditableContext]:
    """The context of a case, made once; contexts are values."""
    made: dict[Any, EditableContext] = {}

    def get(case: str) -> EditableContext:
        maker = CASES[case].start
        if maker not in made:
            made[maker] = maker()
        return made[maker]

    return get


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_or_done_but_never_by_another_method(case: str, contexts: Any) -> None:
    found, context = CASES[case], contexts(case)
    before = (context.cache().digest(), context.tokens, context.text)
    for name in ALL:
        kind: Kind = EDITS.get(name)
        result: Edited | None = None
        error: Exception | None = None
        with others_watched(kind) as called:
            try:
                result = context.edit(found.field, found.value, found.make(kind))
            except InputError as e:
                error = e
            except CacheError as e:
                error = e
        assert called == [], f"{case}: {name} handed over"
        if name in found.who:
            assert isinstance(error, found.error), f"{case}: {name} gave {error!r}, {result}"
            assert found.says in str(error), f"{case}: {name} said {error}"
        else:
            assert error is None and result is not None, f"{case}: {name} refused with {error!r}"
            assert result.report.method.split("@")[0] == name and result.context.reports[-1] is result.report
            assert result.context.values[found.field] == found.value
    assert (context.cache().digest(), context.tokens, context.text) == before


def test_every_method_has_something_that_it_cannot_do() -> None:
    """Beyond what no method can do; the two that run everything can do everything else."""
    own = {name for case in CASES.values() if case.who != ALL for name in case.who}
    assert set(ALL) - own == {"full_prefill", "full_suffix"}


def test_an_error_names_a_way_out() -> None:
    """What a method cannot do another one can, and the message says which."""
    ways = (
        "Use ",
        "use ",
        "mark ",
        "put ",
        "Put ",
        "make ",
        "write ",
        "give ",
        "build ",
        "needs ",
        "did you mean",
        "there are",
    )
    for case, found in CASES.items():
        if found.who == ALL or found.error is CacheError:
            continue
        context = found.start()
        for name in found.who:
            with pytest.raises(found.error) as caught:
                context.edit(found.field, found.value, found.make(EDITS.get(name)))
            text = str(caught.value)
            assert any(w in text for w in ways) or "may only hold" in text or "hoist that one" in text, (
                f"{case}: {text}"
            )


def test_fields_that_cannot_be_declared() -> None:
    model = tiny_model()
    with pytest.raises(FieldError, match=r"neither \{\{a\}\} nor its value 'f1'"):
        EditableContext.from_text(model, "start parcel is f0 , ?", {"a": "f1"}, rendering="raw")
    with pytest.raises(FieldError, match=r"in the message 2 times .*mentions='all'"):
        EditableContext.from_text(model, "start f0 is f0 , ?", {"a": "f0"}, rendering="raw")


def test_rows_cannot_be_run_again_in_a_recurrent_layer() -> None:
    with pytest.raises(UnsupportedModelError, match="scattered rows cannot be run again"):
        contract.context(note_model("falcon_h1"))
