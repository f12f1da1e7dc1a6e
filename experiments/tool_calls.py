"""Skills that hold tool specifications, answers that are calls: ``python -m experiments.tool_calls CONFIG``.

A skill holds the specifications of a family's two tools, with their arguments, and the policy that says which to call; skills
of other families' tools stand beside it. Record and request are run behind them, and the model writes a call.

Hypothesis: the tool that is named (``agreement``) and the whole call, letter by letter (``call_agreement``), are those that a
full prefill writes, in at least 0.95 of the cases in which full prefill is right.

Falsifier: less; or calls that are well formed (``well_formed``) less often than behind full prefill: then the form of a call is
lost with the specification, even where the decision is not.

Organisms were trained on calls (``mode`` ``call`` of their language). A language model that was not writes what it writes: its
competence stands in the table (``full_correct``, ``call_correct`` of ``full_prefill``).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from experiments.compose_cases import Chunk, Pool, SkillCase, chosen_cell, sections, task_of
from experiments.compose_harness import METRICS as COMMON
from experiments.compose_harness import ComposeConfig, agreement_lines, measure_case
from experiments.edit_harness import Line, Row, Stage, Sums, main
from notelens.compose import Composed, compose
from notelens.intervene.run_rows import extend
from notelens.models.base import NoteModel
from notelens.spans import encode
from notelens.tasks.base import Instance

METRICS = (*COMMON[:4], "call_agreement", "call_correct", "well_formed")
MOST_TOKENS = 12
"""Of a call."""


class ToolConfig(ComposeConfig):
    """Configuration of this experiment.

    Attributes:
        toolsets: skills with tools in a row, the one that decides among them.
        specifications: whether the skill states the tools' arguments besides the policy.
    """

    toolsets: tuple[int, ...] = (1, 3)
    specifications: bool = True


class ToolCalls:
    """Calls behind spliced specifications."""

    name = "tool_calls"

    def stages(self, config: ToolConfig) -> list[Stage]:
        """One per number of toolsets."""
        return [Stage(f"toolsets{n}", {"toolsets": n}, {"toolsets": n}) for n in config.toolsets]

    def measure(self, model: NoteModel, config: ToolConfig, stage: Stage, case: SkillCase) -> list[Row]:
        """All methods on one case, and the call that each of them writes."""
        rows = measure_case(model, case, config.methods)
        parts, wanted = case.parts(model, {}), case.meta["call"]
        whole = call_of(model, compose(model, parts, method="full_prefill"))
        first = {**rows[0], "method": "full_prefill", "answer": rows[0]["full"], "recompute_share": 1.0}
        first |= {"cosine": 1.0, "kl": 0.0, "top1": True, "margin": rows[0]["full_margin"]}
        for row in (first, *(r for r in rows if "cosine" in r)):
            method = row["method"]
            call = whole if method == "full_prefill" else call_of(model, compose(model, parts, method=method))
            row |= {
                "call": call, "full_call": whole, "call_agrees": call == whole, "call_right": call == wanted,
                "full_call_right": whole == wanted, "well_formed": well_formed(call),
            }  # fmt: skip
        return [*rows, first]

    def aggregate(self, config: ToolConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Agreement of tools and of calls."""
        sums = Sums(self.name, config, stage, rows)
        agreement_lines(sums, margin=config.margin)
        for method in dict.fromkeys(r["method"] for r in rows if "call" in r):
            sums.rate("call_agreement", method, "call_agrees")
            sums.rate("call_correct", method, "call_right")
            sums.rate("well_formed", method, "well_formed")
            right = Sums(self.name, config, stage, [r for r in rows if r.get("full_call_right")])
            right.rate("call_agreement_given_full_correct", method, "call_agrees")
            sums.lines += right.lines
        return sums.lines


def call_of(model: NoteModel, composed: Composed) -> str:
    """What the model writes behind a composition, greedily, up to the closing bracket."""
    cache, hidden, ids = composed.cache, composed.read(model), list[int]()
    end = getattr(model.tokenizer, "eos_token_id", None)
    while len(ids) < MOST_TOKENS and cache.next_position < model.geometry.max_positions:
        token = int(torch.argmax(model.next_logits(hidden)))
        if token == end:
            break
        ids.append(token)
        if ")" in str(model.tokenizer.decode([token])):
            break
        if model.family.recurrent:
            out = model.prefill([token], cache)
            cache, hidden = out.cache, out.hidden
        else:
            cache, hidden = extend(model, cache, [token])
    return squeezed(str(model.tokenizer.decode(ids)))


def squeezed(text: str) -> str:
    """Without white space, in lower case: what a call means does not depend on either."""
    return "".join(text.split()).lower()


def well_formed(call: str) -> bool:
    """A name, and an argument with a value in brackets."""
    name, bracket, rest = call.partition("(")
    argument, equals, value = rest.removesuffix(")").partition("=")
    return bool(name.isalpha() and bracket and rest.endswith(")") and argument and equals and value)


def specification(tokenizer: Any, instance: Instance) -> tuple[int, ...]:
    """Lines that name both tools and their argument."""
    label = str(instance.meta.get("label", ""))
    text = "".join(f"- {tool}({label} = ?)\n" for tool in instance.answers)
    return encode(tokenizer, text, templated=True)


def tool_cases(model: NoteModel, config: ToolConfig, stage: Stage) -> list[SkillCase]:
    """Cases with so many toolsets."""
    mode = {"mode": "call"} if config.task == "organism" else {}
    task: Any = task_of(config.task, **config.options(order="rule_first", **mode))
    labels = {f.name: f.label for f in task.families}

    def named(instance: Instance) -> Instance:
        return replace(instance, meta={**instance.meta, "label": labels[instance.family]})

    def tools(instance: Instance, policy: tuple[int, ...]) -> tuple[int, ...]:
        return (*specification(model.tokenizer, named(instance)), *policy) if config.specifications else policy

    others = task.instances(model.tokenizer, 4 * len(task.families), config.seed + 1)
    pool = Pool(others, "rule_first")
    sets = [(o.family, tools(o, sections(o.cells[sorted(o.cells)[0]], "rule_first").first)) for o in others]
    n, found = stage.source["toolsets"], list[SkillCase]()
    for index, instance in enumerate(task.instances(model.tokenizer, config.n, config.seed)):
        cell = chosen_cell(instance, config.seed)
        s, key = sections(instance.cells[cell], "rule_first"), f"{config.seed}/{instance.id}"
        beside = [ids for family, ids in sets if family != instance.family]
        row = [Chunk(beside[(index + i) % len(beside)], f"tools{i}") for i in range(n - 1)]
        row.insert(index % n, Chunk(tools(instance, s.first), "tools"))
        right = instance.conclusion[cell]
        value = instance.meta["v1" if cell[0] else "v0"]
        call = squeezed(f"{instance.answers[right]}({labels[instance.family]}={value})")
        found.append(
            SkillCase(
                instance.id, instance.family, instance.form,
                (Chunk(s.head), *row, Chunk((*s.second, *s.request))), instance.answer_ids, right,
                {"tools": tools(instance, pool.like(instance, s, key).first)}, {"cell": list(cell), "call": call},
            )
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main(ToolCalls(), ToolConfig, METRICS, source=tool_cases)
