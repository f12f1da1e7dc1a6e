"""Arms of the editing experiments: a method with its options, run on a case, with what it cost and what a transplant would do.

An arm is written ``method[@K] [option=value ...]``. K may be ``auto``: as many rows as the planner chose for the same case, so
that methods are compared at equal budget. Every arm that runs chosen rows again is followed by a transplant of the same rows
from a fresh prefill: what a perfect repair of these rows would do.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from experiments.edit_cases import Case
from notelens.edits import EDITS
from notelens.edits.base import EditMethod, PlannedMethod
from notelens.edits.context import EditableContext, Edited
from notelens.edits.edit import Edit
from notelens.edits.ranking import scores, top, window
from notelens.edits.report import EditReport, Plan
from notelens.edits.resolve import resolve
from notelens.edits.text import FieldText
from notelens.errors import AnswerError, ConfigError, EditError
from notelens.intervene.run_rows import RowsRun
from notelens.models.base import NoteModel
from notelens.prompt import Span
from notelens.readout import exclusion

WRONG_EDIT = "wrong_edit"
"""Control: the planner's choice for a change of another word, run for this one; as many rows."""
MATCHED = "auto"
SELECTIVE = ("selective", "carrier_window", "edit_local", "auto", WRONG_EDIT)
"""Methods that run chosen rows again; each is shown with a transplant of the same rows."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """A method with its options.

    Attributes:
        text: as written in the configuration; the name in tables.
        method, k: registry name (or ``wrong_edit``) and what stands behind ``@``.
        options: of the method.
    """

    text: str
    method: str
    k: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str, **options: Any) -> "Arm":
        """From ``method[@K] [option=value ...]``; options that hold white space are given as keywords.

        Raises:
            ConfigError: it cannot be read, or no such method exists.
        """
        spec, *words = text.split()
        method, _, k = spec.partition("@")
        if method != WRONG_EDIT and method not in EDITS.names():
            raise ConfigError(f"arm {text!r}: no edit method {method!r}; there are {', '.join(EDITS.names())}")
        found: dict[str, Any] = {}
        for word in words:
            key, sep, value = word.partition("=")
            if not sep:
                raise ConfigError(f"arm {text!r}: {word!r} is not option=value")
            found[key] = int(value) if value.isdigit() else _share(value)
        return cls(text, method, k, {**found, **options})


def _share(value: str) -> Any:
    try:
        return float(value)
    except ValueError:
        return value


@dataclass(frozen=True)
class Scored:
    """A ranking of rows of the new prompt with what it cost."""

    score: torch.Tensor
    tokens: int
    ms: float


@dataclass(frozen=True)
class Decision:
    """What a context decides.

    Attributes:
        margin: logit(new answer) - logit(old answer).
        top: the model's next token.
    """

    margin: float
    top: int


class Bench:
    """One case, prefilled with the old and with the new value; arms are run on it.

    Args:
        model: runs the prompts.
        case: what changes.

    Attributes:
        recorded: context with the old value; ``plain`` is the same without the record of reads.
        fresh: context with the new value; ``full`` is its report.

    Cost: two prefills, one of them with a record of reads.
    """

    def __init__(self, model: NoteModel, case: Case) -> None:
        self.model, self.case = model, case
        self.recorded = case.context(model, record=True)
        self.plain = replace(self.recorded, dependencies=None)
        self.fresh, self.full = self.plain.edit(case.name, case.values[1], "full_prefill")
        if self.fresh.tokens.ids != case.new.token_ids:
            raise EditError(f"case {case.id}: the edited text does not encode to the new prompt")
        self.before, self.after = self.decide(self.plain), self.decide(self.fresh)
        self._scored: dict[str, Scored] = {}
        self._matched: int | None = None

    @property
    def excluded(self) -> str | None:
        """Why the case says nothing about edits: full prefill answers one of the prompts wrong, or hardly tells them apart."""
        return exclusion(self.before.margin, self.after.margin)

    @cached_property
    def _edit(self) -> Edit:
        return Edit(self.plain, self.case.name, self.case.values[1], "plan")

    def decide(self, context: EditableContext) -> Decision:
        """Read the decision. Cost: one unembedding."""
        logits = context.next_logits()
        a, b = (float(logits[i]) for i in self.case.answer_ids)
        return Decision(b - a, int(logits.argmax()))

    def scored(self, ranking: str) -> Scored:
        """Rows ranked once, with the cost that every arm with this ranking is charged."""
        if ranking not in self._scored:
            base = self.recorded if ranking == "chain" else self.plain
            edit, n = Edit(base, self.case.name, self.case.values[1], "plan"), len(self.fresh)
            edit.lend(
                RowsRun(self.fresh.cache(), self.fresh.hidden, n, n, tuple(range(n)))
            )  # run once for all rankings
            started = time.perf_counter()
            score = scores(edit, ranking, self.case.answers, self.case.seed)
            ms = 1e3 * (time.perf_counter() - started)
            tokens = edit.meter.planning
            self._scored[ranking] = Scored(score, tokens, ms + (self.full.ms if tokens >= len(self.fresh) else 0.0))
        return self._scored[ranking]

    def rows_of(self, k: str) -> int:
        """K in rows.

        Raises:
            EditError: it is ``auto``, and the planner refused this case.
        """
        n = len(self._edit.behind)
        if k == MATCHED:
            if self._matched is None:
                self._matched = len(self.chosen(self.run(Arm.parse("auto")).report))
            return min(self._matched, n)
        return max(1, round(float(k[:-1]) / 100 * n)) if k.endswith("%") else int(k)

    def chosen(self, report: EditReport) -> tuple[int, ...]:
        """Rows behind the field that were run, the field's and the last one left out."""
        own = {*self._edit.edited, self._edit.last}
        return tuple(r for r in report.rows("run") if r not in own)

    # --- running ----------------------------------------------------------------------------------------------------------

    def run(self, arm: Arm) -> Edited:
        """Run an arm.

        Raises:
            EditError: the method refuses this case.
        """
        field, value = self.case.name, self.case.values[1]
        base = (
            self.recorded if arm.method in ("auto", WRONG_EDIT) or arm.options.get("ranking") == "chain" else self.plain
        )
        if arm.method == WRONG_EDIT:
            return base.edit(field, value, resolve("auto", plan=self._wrong_plan(self.rows_of(MATCHED))))
        return base.edit(field, value, self._method(arm))

    def _method(self, arm: Arm) -> EditMethod:
        if not arm.k:
            return resolve(arm.method, **arm.options)
        k = self.rows_of(arm.k)
        spec = f"{arm.method}@{max(k, 1)}"
        kind: type[EditMethod] = EDITS.get(arm.method)
        if not issubclass(kind, PlannedMethod):
            return resolve(spec, **arm.options)
        if k > len(self._edit.behind):
            return resolve(spec, **arm.options)  # which refuses
        ranking = str(arm.options.get("ranking", "effect"))
        found, behind = self.scored(ranking), self._edit.behind
        if arm.method == "carrier_window":
            rows = window(found.score, behind, k, at_random=ranking == "random")
        else:
            rows = top(found.score, behind, k)
        plan = self._plan(rows, found.tokens, found.ms)
        more = {"donor": self.fresh.cache()} if arm.method == "transplant" else {}
        return resolve(spec, **arm.options, plan=plan, **more)

    def _plan(self, rows: Sequence[int], tokens: int = 0, ms: float = 0.0) -> Plan:
        old = tuple(sorted(self._edit.old_row[p] for p in rows if p in self._edit.old_row))
        return Plan(self.case.name, "plan", old, tokens, ms)

    def _wrong_plan(self, n_rows: int) -> Plan:
        """``n_rows`` rows that the planner chooses where a word of the filler changes instead.

        Raises:
            EditError: the prompt has no such word.
        """
        prompt = self.case.old
        tail = next((i for i, r in enumerate(prompt.regions) if r == "request"), len(prompt) - 1)
        words = [i for i, r in enumerate(prompt.regions) if r == "filler" and i < tail]
        own = set(self._edit.edited)
        tokenizer = self.model.tokenizer
        for p in words[len(words) // 3 :]:
            if p in own or not str(prompt.tokens[p]).strip().isalnum():
                continue
            marked = replace(prompt, spans={**prompt.spans, "other": (Span(p, p + 1),)})
            try:
                text = FieldText.from_prompt(tokenizer, marked, {"other": "other"})
                other = replace(self.recorded, text=text, tokens=text.tokenise(tokenizer))
                plan = other.plan("other", self.case.values[1], "auto", budget=n_rows + 2)
            except EditError:
                continue
            rows = [r for r in plan.rows if r in self._edit.new_row and r > self._edit.edited[0]]
            return Plan(self.case.name, WRONG_EDIT, tuple(rows[-n_rows:]), 0, plan.ms)
        raise EditError(f"{WRONG_EDIT}: no word of the filler of case {self.case.id} can be taken for a field")

    def transplant(self, rows: Sequence[int]) -> Decision:
        """Copy the field's rows and ``rows`` from the fresh prefill and decide. Cost: one token."""
        made = resolve(f"transplant@{max(len(rows), 1)}", plan=self._plan(rows), donor=self.fresh.cache())
        return self.decide(self.plain.edit(self.case.name, self.case.values[1], made).context)

    # --- rows of the record -----------------------------------------------------------------------------------------------

    def facts(self) -> Row:
        """What all rows of the case have in common."""
        return {
            "item": self.case.id, "family": self.case.family, "form": self.case.form, "n_tokens": len(self.case.old),
            "distance": self.case.distance, "old_margin": self.before.margin, "new_margin": self.after.margin,
            "full_ms": self.full.ms, "excluded": self.excluded,
        }  # fmt: skip

    def row(self, arm: Arm) -> Row:
        """One row: the decision, the cost, the transplant of the same rows; a refusal is a row with its reason."""
        row: Row = {**self.facts(), "method": arm.text}
        if row["excluded"] is not None:
            return row
        try:
            made, report = self.run(arm)
        except (EditError, AnswerError) as e:
            return {**row, "excluded": f"refused ({type(e).__name__})", "message": str(e)}
        decision = self.decide(made)
        plan = report.facts.get("plan")
        tokens, ms = (plan.tokens, plan.ms) if isinstance(plan, Plan) else (report.planning_tokens, report.planning_ms)
        row |= {
            **self.read(decision), "tokens_run": report.tokens_run, "planning_tokens": tokens,
            "prompt_tokens": report.prompt_tokens, "suffix_tokens": report.suffix_tokens, "ms": report.ms,
            "planning_ms": ms, "surgery": report.surgery, "exact": report.exact,
        }  # fmt: skip
        if arm.method in SELECTIVE:
            rows = self.chosen(report)
            copied = self.transplant(rows)
            row |= {f"transplant_{k}": v for k, v in self.read(copied).items()}
            row["rows"] = list(rows)
        return row

    def read(self, decision: Decision) -> Row:
        """The decision as values: right (the next token is the new answer), flipped, margin, recovery."""
        span = self.after.margin - self.before.margin
        return {
            "right": decision.top == self.case.answer_ids[1],
            "stale": decision.top == self.case.answer_ids[0],
            "flipped": decision.margin > 0,
            "margin": decision.margin,
            "recovery": (decision.margin - self.before.margin) / span,
        }
