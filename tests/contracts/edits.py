"""What every edit method must fulfil, as functions that return the problems they find."""

import contextlib
from collections.abc import Iterator
from typing import Any

from notelens.cache.ops import max_difference
from notelens.edits import EDITS
from notelens.edits.base import EditMethod, PlannedMethod
from notelens.edits.context import EditableContext
from notelens.errors import EditError, LengthChangeError
from tests.contracts.models import ROW_TOLERANCE

TEXT = "start parcel is {{a}} , w0 w1 w2 , if {{t}} then , ; w3 w4 , w5 w6 . please decide . : ?"
EXACT_WHEN = ("always", "prefix_exact", "covers_all_rows", "never")
LINE = " is {value} , "
"""Words of the tiny vocabulary."""


def context(model: Any, a: str = "f0", *, record: bool = True) -> EditableContext:
    """A prompt of 26 words with two fields."""
    return EditableContext.from_text(model, TEXT, {"a": a, "t": "t0"}, rendering="raw", record=record)


def make(kind: type[EditMethod], k: int = 2) -> EditMethod:
    """A member with parameters that work on every model."""
    options: dict[str, Any] = {}
    if issubclass(kind, PlannedMethod) and kind.takes_k:
        options["ranking"] = "chain"
    if kind.name in ("erratum", "field_erratum", "hoist"):
        options["template"] = LINE
    if kind.name == "hoist":
        options["place"] = "w9"
    made = kind(**options)
    if kind.takes_k:
        made.k = k
    return made


@contextlib.contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Tokens that really go through the decoder inside the block."""
    seen: list[int] = []

    def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        seen.append(ids.numel())

    handle = model.family.decoder(model.hf).register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def declared_problems(name: str, kind: type[Any]) -> list[str]:
    """A complete entry of the registry."""
    if not issubclass(kind, EditMethod):
        return [f"{kind.__name__} is no EditMethod"]
    problems: list[str] = []
    if kind.name != name:
        problems.append(f"registered as {name!r} but is called {kind.name!r}")
    if not (kind.__doc__ or "").strip().splitlines()[0:1] or not (kind.__doc__ or "").split("\n")[0].endswith("."):
        problems.append("docstring's first line is not a sentence")
    if not any(word in getattr(kind, "paper_ref", "") for word in ("section", "arXiv")):
        problems.append("paper_ref names no place")
    if kind.exact_when not in EXACT_WHEN:
        problems.append(f"exact_when is {kind.exact_when!r}")
    if getattr(kind.apply, "__isabstractmethod__", False):
        problems.append("apply is not implemented")
    return problems


def cost_problems(model: Any, method: EditMethod) -> list[str]:
    """Reported tokens against those that went through the decoder; every row of the result is accounted for."""
    start = context(model)
    with counted(model) as seen:
        _, report = start.edit("a", "f1", method)
    problems: list[str] = []
    if sum(seen) != report.total_tokens:
        problems.append(f"{sum(seen)} tokens ran, {report.total_tokens} are reported")
    covered = [r for a in report.actions for r in range(a.start, a.stop)]
    if covered != list(range(report.prompt_tokens)):
        problems.append("row actions do not cover every row once")
    if report.method != method.label:
        problems.append(f"the report names {report.method!r}")
    return problems


def exact_problems(model: Any, method: EditMethod) -> list[str]:
    """The exact mark against rows, on an exact context and on one with a stale prefix; ``exact_when`` against both."""
    problems: list[str] = []
    start = context(model)
    stale, _ = start.edit("a", "f1", "in_place")
    cases = {"exact": (start, "a", "f1"), "approximate": (stale, "t", "t1")}
    if method.takes_k:
        method.k = len(start) - 2 - start.tokens.positions("a")[0]
    marks: dict[str, bool] = {}
    for label, (base, name, value) in cases.items():
        if method.takes_k and label == "approximate":
            method.k = 2
        made, report = base.edit(name, value, method)
        fresh = model.prefill(made.tokens.ids).cache
        same = made.rows.token_ids == made.tokens.ids and max_difference(made.rows.join(), fresh) <= ROW_TOLERANCE
        marks[label] = report.exact
        if report.exact and not same:
            problems.append(f"{label} context: called exact, but rows differ from a fresh prefill")
        if (made.exact, bool(made.history)) != (report.exact, not report.exact):
            problems.append(f"{label} context: report and context disagree about the mark")
    wanted = {
        "always": (True, True),
        "prefix_exact": (True, False),
        "covers_all_rows": (True, False),
        "never": (False, False),
    }[method.exact_when]
    if (marks["exact"], marks["approximate"]) != wanted and method.name not in ("in_place", "auto", "field_erratum"):
        problems.append(f"exact_when is {method.exact_when!r}, but the marks are {marks}")
    return problems


def length_problems(model: Any, method: EditMethod) -> list[str]:
    """A longer value: refused exactly by those that declare it, and right in its place otherwise."""
    start = context(model)
    try:
        made, report = start.edit("a", "f1 w7", method)
    except LengthChangeError:
        return [] if method.length_preserving else ["refuses another length without saying so in length_preserving"]
    except EditError as e:
        return [f"raises {type(e).__name__} for a longer value: {e}"]
    problems = ["declares length_preserving, but took a longer value"] if method.length_preserving else []
    if made.rows.positions.tolist() != list(range(len(made.tokens))):
        problems.append("rows and tokens do not stand at the same positions")
    if report.exact and max_difference(made.cache(), model.prefill(made.tokens.ids).cache) > ROW_TOLERANCE:
        problems.append("called exact for a longer value, but rows differ from a fresh prefill")
    return problems


def append_problems(model: Any, method: EditMethod) -> list[str]:
    """``append_only`` against the rows in front of the tail, bit for bit."""
    start = context(model)
    made, report = start.edit("a", "f1", method)
    n = start.tokens.tail if report.surgery else len(start)
    kept = all(
        (held[:, :n] == before[:, :n]).all()
        for layer in range(model.geometry.n_layers)
        for held, before in zip(made.rows.layer(layer), start.rows.layer(layer), strict=True)
    )
    return [] if bool(kept) == method.append_only else [f"append_only is {method.append_only}, rows kept: {bool(kept)}"]


def purity_problems(model: Any, method: EditMethod) -> list[str]:
    """The old context, the model and its attention stay as they are; the method does not run another registered one."""
    start = context(model)
    before = (start.cache().digest(), start.tokens, start.text, start.hidden.clone(), model.attention_kernel)
    others = [EDITS.get(name) for name in EDITS if not isinstance(method, EDITS.get(name))]
    called: list[str] = []
    kept = {kind: kind.__dict__.get("apply") for kind in others}

    def spy(kind: Any, real: Any) -> Any:
        def apply(self: Any, edit: Any) -> Any:
            called.append(kind.name)
            return real(self, edit)

        return apply

    for kind in others:
        kind.apply = spy(kind, kind.apply)
    try:
        start.edit("a", "f1", method)
    finally:
        for kind, own in kept.items():
            if own is None:
                del kind.apply
            else:
                kind.apply = own
    problems = [f"handed over to {name}" for name in called]
    after = (start.cache().digest(), start.tokens, start.text, start.hidden, model.attention_kernel)
    changed = [a for a, b in zip(before, after, strict=True) if not (a.equal(b) if hasattr(a, "equal") else a == b)]
    if changed:
        problems.append("the old context or the model was changed")
    return problems


CONTRACTS = (cost_problems, exact_problems, length_problems, append_problems, purity_problems)
