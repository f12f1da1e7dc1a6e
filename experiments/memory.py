"""A user's memory that is compiled once, moved at every turn and edited: ``python -m experiments.memory CONFIG``.

Hypothesis (arXiv:2606.17107, section on user memory): a Markdown memory of dozens of facts can be precompiled, spliced where it
is needed, moved as the conversation grows, and repaired at its seam, and answers stay those of a full prefill. Facts that stand
on their own can be split into many blocks; facts that refer to each other lose what one block wrote about another.

Falsifier: agreement below 0.95 where full prefill is right; more than 0.02 lost on independent facts over up to 16 blocks.

``place``: filler behind the memory (``early``) or in front of it (``late``). ``blocks``: compiled apart. ``kind``: one fact per
query, or a fact and a rule that stand in the first and the last block. Each turn asks another query and pushes the memory one
line further. Then a tool changes the fact of the last query, and every method of ``edits`` repairs the composed cache; the
``recompile`` arm compiles the changed block again and composes anew, which is in its tokens. What closes a loss across blocks
is read off the composers' lines: ``references`` runs the rows of the rule again, ``other_rows`` (its control) as many rows
drawn among all others of the composition; both exist for facts that refer to each other only.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import field_validator

from experiments.agent_cases import FULL, AgentConfig
from experiments.agent_harness import equivalence, oracle_line
from experiments.edit_arms import Row
from experiments.edit_harness import Line, Stage, Sums, main
from experiments.memory_cases import Laid, Memory, Query, lay_out, memories
from notelens.cache.rows import Rows
from notelens.compose import Composed, Composer, References, Skill, compile_skill, compose
from notelens.compose.references import rows_of
from notelens.edits.context import EditableContext
from notelens.edits.text import FieldText, Node
from notelens.errors import ComposeError, ConfigError, EditError
from notelens.models.base import NoteModel
from notelens.stats import holm, mcnemar_exact

METRICS = (
    "oracle_accuracy", "agreement_given_full_correct", "correctness", "difference_to_full", "tokens_share",
    "edited_correctness", "edit_tokens_share",
)  # fmt: skip
CONDITIONS = ("isolated", "neutral")
OTHER_ROWS = "other_rows"
NEEDS_LINE = ("references", OTHER_ROWS)
"""Arms that exist where one fact refers to another."""


class MemoryConfig(AgentConfig):
    """Configuration of this experiment; ``arms`` are composers.

    Attributes:
        language: see :mod:`experiments.memory_cases`.
        facts, filler: lines.
        places, blocks, kinds_of_facts: cells of the design.
        edits: methods that repair the changed fact.
        condition: how blocks are compiled.
    """

    language: Literal["organism", "plain"] = "organism"
    facts: int = 24
    filler: int = 6
    places: tuple[Literal["early", "late"], ...] = ("early", "late")
    blocks: tuple[int, ...] = (1, 2, 4, 8, 16)
    kinds_of_facts: tuple[Literal["independent", "cross"], ...] = ("independent", "cross")
    edits: tuple[str, ...] = ("stale", "in_place", "erratum", "field_erratum", "recompile")
    condition: Literal["isolated", "neutral"] = "isolated"

    @field_validator("arms")
    @classmethod
    def _last_arm(cls, arms: tuple[str, ...]) -> tuple[str, ...]:
        """What edits repair exists for every kind of facts."""
        if arms[-1:] and arms[-1] in NEEDS_LINE:
            raise ValueError(f"edits repair the last composer, which must not be {arms[-1]}; put seam@1 last")
        return arms


@dataclass(frozen=True)
class MemoryCase:
    """A memory under an id of its own."""

    memory: Memory

    @property
    def id(self) -> str:
        """Of the memory."""
        return self.memory.id


def memory_cases(model: NoteModel, config: MemoryConfig, stage: Stage) -> list[MemoryCase]:
    """Memories of a stage."""
    kind = stage.params["kind"]
    found = memories(
        config.language, config.n, config.seed, kind=kind, n_facts=config.facts,
        n_queries=1 if kind == "cross" else config.turns, n_filler=config.filler,
    )  # fmt: skip
    return [MemoryCase(m) for m in found]


class Blocks:
    """Compiled blocks, each once."""

    def __init__(self, model: NoteModel, condition: str) -> None:
        self.model, self.condition = model, condition
        self.known: dict[tuple[int, ...], Skill] = {}

    def __call__(self, ids: tuple[int, ...]) -> Skill:
        """The skill of a block. Cost the first time: its tokens."""
        if ids not in self.known:
            self.known[ids] = compile_skill(self.model, ids, name=f"block{len(self.known)}", condition=self.condition)
        return self.known[ids]

    def composed(self, laid: Laid, method: str, line: str = "", seed: str = "") -> Composed:
        """Head, blocks and tail.

        Args:
            laid: the prompt.
            method: a composer, ``references`` to ``line`` (in the last block), or ``other_rows``.
            line: the one that refers to another.
            seed: of the other rows.
        """
        head: list[Any] = [laid.head] if laid.head else []
        blocks = [self(b) for b in laid.blocks]
        how: str | Composer = method
        if method in NEEDS_LINE:
            named = rows_of(self.model, blocks[-1], line)
            how = References.at([(blocks[-1], named)])
            if method == OTHER_ROWS:
                every = [(i, r) for i, b in enumerate(blocks) for r in range(len(b))]
                others = [(i, r) for i, r in every if i != len(blocks) - 1 or r not in named]
                drawn = random.Random(f"other_rows/{seed}").sample(others, len(named))
                how = References.at([(b, [r for j, r in drawn if j == i]) for i, b in enumerate(blocks)])
        return compose(self.model, [*head, *blocks, laid.tail], method=how)


def chosen(model: NoteModel, hidden: Any, laid: Laid, query: Query) -> str:
    """The likeliest of the words to choose among."""
    logits = model.answer_logits(hidden, list(laid.answer_ids))
    return query.choices[int(logits.argmax())]


class MemoryExperiment:
    """Composers and edits on memories."""

    name = "memory"

    def stages(self, config: MemoryConfig) -> list[Stage]:
        """Place by number of blocks by kind of facts."""
        return [
            Stage(f"{place}-{kind}-{s}", {"place": place, "kind": kind, "blocks": s}, {})
            for place in config.places
            for kind in config.kinds_of_facts
            for s in config.blocks
        ]

    def measure(self, model: NoteModel, config: MemoryConfig, stage: Stage, case: MemoryCase) -> list[Row]:
        """Every turn with every composer, then the edit of the last fact."""
        memory, blocks = case.memory, Blocks(model, config.condition)
        place, s = stage.params["place"], stage.params["blocks"]
        rows: list[Row] = []
        queries = memory.queries
        turns = len(queries) if len(queries) > 1 else config.turns
        oracle: list[bool] = []
        for turn in range(turns):
            query = queries[turn % len(queries)]
            laid = lay_out(model.tokenizer, memory, query, place=place, blocks=s, turn=turn)
            full = chosen(model, model.prefill(laid.ids).hidden, laid, query)
            oracle.append(full == query.answers[0])
            where = {
                "item": memory.id,
                "family": memory.id,
                "domain": memory.family,
                "turn": turn,
                "n_tokens": len(laid.ids),
            }
            for method in config.arms:
                if method in NEEDS_LINE and query.other is None:
                    continue
                row: Row = {**where, "method": method, "excluded": None if oracle[-1] else "full prefill wrong"}
                try:
                    line = memory.facts[query.other] if query.other is not None else ""
                    made = blocks.composed(laid, method, line, f"{memory.id}/{s}/{turn}")
                except ComposeError as e:
                    rows.append({**row, "excluded": f"refused ({type(e).__name__})", "message": str(e)})
                    continue
                answer = chosen(model, made.read(model), laid, query)
                tokens = made.cost.tokens_run
                rows.append({
                    **row, "answer": answer, "right": answer == query.answers[0], "same": answer == full, "tokens": tokens,
                    "full_tokens": len(laid.ids), "exact": made.exact,
                })  # fmt: skip
            if turn == turns - 1:
                rows += self._edited(model, config, where, blocks, memory, query, place, s, turn)
        first = {"item": memory.id, "family": memory.id, "domain": memory.family, "method": FULL, "excluded": None}
        return [{**first, "oracle": sum(oracle) / len(oracle)}, *rows]

    def _edited(
        self, model: NoteModel, config: MemoryConfig, where: Row, blocks: Blocks, memory: Memory, query: Query, place: Any,
        s: int, turn: int,
    ) -> list[Row]:  # fmt: skip
        """The fact of ``query`` changes; every edit of the configuration repairs the composition of the last composer."""
        facts = tuple(memory.changed[i] if i == query.fact else line for i, line in enumerate(memory.facts))
        lay: dict[str, Any] = {"place": place, "blocks": s, "turn": turn}
        before = lay_out(model.tokenizer, memory, query, **lay)
        after = lay_out(model.tokenizer, memory, query, lines=facts, **lay)
        full = chosen(model, model.prefill(after.ids).hidden, after, query)
        reason = None if full == query.answers[1] else "full prefill wrong behind the change"
        composer = config.arms[-1]
        context = self._context(model, blocks.composed(before, composer), before, memory, query)
        label, value = memory.values[memory.queries.index(query)]
        rows: list[Row] = []
        for method in config.edits:
            row: Row = {**where, "method": f"edit {method}", "excluded": reason}
            if method == "recompile":
                new = [b for b in after.blocks if b not in blocks.known]
                made = blocks.composed(after, composer)
                hidden, tokens, reader = made.read(model), sum(map(len, new)) + made.cost.tokens_run, after
            else:
                try:
                    edited, report = context.edit(label, value, method)
                except EditError as e:
                    rows.append({**row, "excluded": f"refused ({type(e).__name__})", "message": str(e)})
                    continue
                hidden, tokens, reader = edited.hidden, report.total_tokens, before
            answer = chosen(model, hidden, reader, query)
            rows.append({
                **row, "answer": answer, "right": answer == query.answers[1], "same": answer == full, "tokens": tokens,
                "full_tokens": len(after.ids), "edit": True,
            })  # fmt: skip
        return rows

    def _context(self, model: NoteModel, made: Composed, laid: Laid, memory: Memory, query: Query) -> EditableContext:
        """A composition with the value of a fact as its field."""
        line = memory.facts[query.fact]
        label, _ = memory.values[memory.queries.index(query)]
        old = line.rpartition(": ")[2].strip()
        start = laid.text.index(line) + line.rindex(old)
        stop, at = start + len(old), laid.request_at
        nodes = (Node(laid.text[:start]), Node(label, field=True), Node(laid.text[stop:at]), Node(laid.text[at:]))
        text = FieldText(nodes, {label: old}, 3)
        tokens = text.tokenise(model.tokenizer)
        if tokens.ids != made.token_ids:
            raise ConfigError(f"memory {memory.id!r}: the composition holds other tokens than its text")
        spliced = [p for piece in made.pieces if piece.spliced for p in range(piece.start, piece.stop)]
        n = len(tokens) if made.exact else min(spliced)
        return EditableContext(
            model, text, tokens, Rows.of(made.cache), made.read(model), n, () if made.exact else tuple(spliced)
        )

    def aggregate(self, config: MemoryConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Agreement where full prefill is right, losses against one block's composer, edits."""
        sums = Sums(self.name, config, stage, rows)
        oracle_line(sums, config.gate)
        found: list[tuple[str, int, int, float]] = []
        for method in dict.fromkeys(r["method"] for r in rows if r["method"] != FULL):
            own, _ = sums.of(method)
            edited = method.startswith("edit ")
            if not own:
                sums.rate("edited_correctness" if edited else "correctness", method, "right")
                continue
            if edited:
                sums.mean("edited_correctness", method, lambda r: float(r["right"]), unit="rate")
                sums.mean("edit_tokens_share", method, lambda r: r["tokens"] / r["full_tokens"], unit="of a prefill")
                continue
            sums.mean("agreement_given_full_correct", method, lambda r: float(r["same"]), unit="rate")
            sums.mean("correctness", method, lambda r: float(r["right"]), unit="rate")
            sums.mean("tokens_share", method, lambda r: r["tokens"] / r["full_tokens"], unit="of a prefill")
            equivalence(sums, method, [float(r["right"]) - 1.0 for r in own], [r["item"] for r in own], config.margin)
            failed = {r["item"] for r in own if not r["right"]}
            found.append((method, len({r["item"] for r in own}), len(failed), mcnemar_exact(len(failed), 0)))
        for (method, n, failed, p), adjusted in zip(found, holm([p for *_, p in found]) if found else [], strict=True):
            line = next(x for x in sums.lines if x["method"] == method and x["metric"] == "correctness")
            sums.lines.append({
                **line, "metric": "memories_minus_full", "value": -failed / n, "lo": None, "hi": None, "n": n, "p": p,
                "p_holm": adjusted, "interval": "mcnemar",
            })  # fmt: skip
        return sums.lines


if __name__ == "__main__":
    main(MemoryExperiment(), MemoryConfig, METRICS, source=memory_cases)
