"""Does a generated chain of thought repair a decision that stale notes hold? ``python -m experiments.cot_split CONFIG``.

Hypothesis (arXiv:2606.17107, section "editable", chain of thought): refreshing the field in place fails without a chain and
works with one, because the chain reads the field anew. First trials on a 135M model qualify that: nearly all chains *state the
new value*, and a third of them still *concludes* from stale notes. So both are counted side by side.

Falsifier: with a chain ``in_place`` is as often right as full prefill with a chain (then the chain repairs everything), or no
more often than without one (then it repairs nothing); every chain that states the new value decides for it.

The same edit with the same model, answered directly (``direct``) and with a chain, greedy and sampled with seeds. A case counts
in a mode where full prefill of old and of new prompt is right in that mode (greedy). ``states_new``: the chain holds the new
value and not the old one in front of its conclusion; ``right_given_states_new`` is over those. Thinking tokens are those
generated.
"""

import re
from collections.abc import Sequence

from experiments.edit_arms import Arm, Bench, Row
from experiments.edit_cases import Case
from experiments.edit_harness import EditConfig, Line, Stage, Sums, main
from notelens.edits.context import EditableContext
from notelens.errors import EditError
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.models.base import NoteModel
from notelens.readout import MIN_GAP
from notelens.spans import encode
from notelens.stats import cluster_rate

PAPER = {"direct": {"in_place": 0.0}, "chain": {"in_place": 1.0}}
"""Qwen3-8B, n = 48 with and 8 without a chain."""
METRICS = ("competence", "p_correct", "states_new", "right_given_states_new", "thinking_tokens")
TOP = 8
CONCLUSION = re.compile(r"\b[Aa]nswer\s*:\s*(\w+)")


class ChainConfig(EditConfig):
    """Configuration of this experiment.

    Attributes:
        length: tokens of the prompts.
        arms: see :mod:`experiments.edit_arms`.
        max_tokens: of a chain.
        temperature, samples: of the sampled chains; seeds are 0, 1, ...
    """

    length: int | None
    arms: tuple[str, ...]
    max_tokens: int = 48
    temperature: float = 0.7
    samples: int = 2


class ChainSplit:
    """Every arm, answered directly and with chains."""

    name = "cot_split"

    def stages(self, config: ChainConfig) -> list[Stage]:
        """Direct and chain."""
        return [Stage(mode, {"mode": mode}, {"length": config.length, "mode": mode}) for mode in ("direct", "chain")]

    def measure(self, model: NoteModel, config: ChainConfig, stage: Stage, case: Case) -> list[Row]:
        """All arms in one mode."""
        arms = [Arm.parse(text) for text in config.arms]
        bench = Bench(model, case)
        if stage.name == "direct":
            first: Row = {**bench.facts(), "method": "full_prefill", "decoding": "token"}
            if first["excluded"] is not None:
                return [first]
            rows = [bench.row(arm) for arm in arms]
            return [{**first, **bench.read(bench.after)}, *({**r, "decoding": "token"} for r in rows)]
        return self._chains(config, bench, arms)

    def _chains(self, config: ChainConfig, bench: Bench, arms: Sequence[Arm]) -> list[Row]:
        case = bench.case
        facts = bench.facts()
        old, new = (chain(c, case, config.max_tokens) for c in (bench.plain, bench.fresh))
        reason = {(True, True): None, (False, True): "recipient wrong", (True, False): "donor wrong"}.get(
            (old["answer"] == case.answers[0], new["answer"] == case.answers[1]), "both wrong"
        )
        rows: list[Row] = [{**facts, "excluded": reason, "method": "full_prefill", "decoding": "greedy", **new}]
        if reason is not None:
            return rows
        rows += self._sampled(config, bench, "full_prefill", bench.fresh, facts | {"excluded": None})
        for arm in arms:
            base: Row = {**facts, "excluded": None, "method": arm.text}
            try:
                made = bench.run(arm).context
            except EditError as e:
                rows.append({**base, "decoding": "greedy", "excluded": f"refused ({type(e).__name__})"})
                continue
            found = chain(made, case, config.max_tokens)
            if found["states_new"] and found["stale"]:
                found["responsible"] = responsible_rows(bench, made, config.max_tokens)
            rows.append({**base, "decoding": "greedy", **found})
            rows += self._sampled(config, bench, arm.text, made, base)
        return rows

    def _sampled(
        self, config: ChainConfig, bench: Bench, method: str, context: EditableContext, base: Row
    ) -> list[Row]:
        return [
            {**base, "method": method, "decoding": "sampled", "sample": seed}
            | chain(context, bench.case, config.max_tokens, config.temperature, seed)
            for seed in range(config.samples)
        ]

    def aggregate(self, config: ChainConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Rates by arm and decoding."""
        decodings = ["token"] if stage.name == "direct" else ["greedy", "sampled"]
        base = Sums(self.name, config, stage, [r for r in rows if r["decoding"] == decodings[0]])
        base.competence()
        lines = base.lines
        reasons = [r for r in rows if r["method"] == "full_prefill" and r["excluded"] is not None]
        for decoding in decodings:
            own = [r for r in rows if (r["decoding"] == decoding and r["excluded"] is None) or r in reasons]
            sums = Sums(self.name, config, stage, own)
            for method in dict.fromkeys(["full_prefill", *(r["method"] for r in own)]):
                params = {"decoding": decoding}
                paper = PAPER[stage.name].get(method)
                sums.rate("p_correct", method, "right", params=params, paper_value=paper)
                kept, lost = sums.of(method)
                if stage.name == "direct" or not kept:
                    continue
                sums.rate("states_new", method, "states_new", params=params)
                said = [r for r in kept if r["states_new"]]
                rate = cluster_rate([bool(r["right"]) for r in said], [r["family"] for r in said])
                sums.add(
                    "right_given_states_new",
                    method,
                    rate,
                    excluded=[*lost, *["does not state it"] * (len(kept) - len(said))],
                    params=params,
                )
                sums.mean("thinking_tokens", method, lambda r: float(r["n_generated"]), unit="tokens", params=params)
            lines += sums.lines
        return lines


def chain(
    context: EditableContext, case: Case, max_tokens: int, temperature: float = 0.0, seed: int | None = None
) -> Row:
    """Generate a chain and read it. Cost: one token each."""
    made = context.generate(max_tokens, temperature=temperature, seed=seed)
    return {**read_chain(made.text, case.values, case.answers), "n_generated": len(made.ids), "stopped": made.stopped}


def responsible_rows(bench: Bench, context: EditableContext, max_tokens: int) -> list[Row] | None:
    """Which rows hold the decision of a chain that states the new value and still concludes stale (isolated swaps).

    The chain up to its conclusion is run behind the repaired and behind the fresh prompt; each row behind the field, the
    chain's own included, is then taken from the fresh one.

    Returns:
        The :data:`TOP` rows that move the margin most: row, region (``chain`` for generated rows), share of the gap; ``None``
        where the conclusion cannot be found among the generated tokens, or where the edit added rows (an erratum), so that
        rows of the two prompts do not correspond.

    Cost: the chain three times, and one token per row.
    """
    tokenizer, case = bench.model.tokenizer, bench.case
    ids = [encode(tokenizer, f" {word}", templated=True)[0] for word in case.answers]
    made = context.generate(max_tokens).ids
    at = next((i for i, token in enumerate(made) if token in ids), None)
    if not at:
        return None
    stale, fresh = (c.append(made[:at]).rows.join() for c in (context, bench.fresh))
    if len(stale) != len(fresh):
        return None
    first = case.new.positions("field")[-1] + 1
    rows = range(first, len(stale) - 1)
    found = swap_effects(bench.model, stale, [fresh], [Site((p,)) for p in rows], Reader.last(stale, ids), prefix=0)
    whole = swap_effects(bench.model, stale, [fresh], [Site(tuple(rows))], Reader.last(stale, ids), prefix=0)
    base = float(found.baseline[1] - found.baseline[0])
    gap = float(whole.logits[0, 1] - whole.logits[0, 0]) - base
    if gap < MIN_GAP:
        return None
    moved = (found.logits[:, 1] - found.logits[:, 0] - base) / gap
    best = sorted(zip(rows, moved.tolist(), strict=True), key=lambda x: -x[1])[:TOP]
    regions = case.new.regions
    return [{"row": p, "region": regions[p] if p < len(regions) else "chain", "share": share} for p, share in best]


def read_chain(text: str, values: tuple[str, str], answers: tuple[str, str]) -> Row:
    """What a chain says: its conclusion, and which value it states in front of it."""
    found = CONCLUSION.search(text)
    thought = text[: found.start()] if found else text
    said = [re.search(rf"\b{re.escape(v)}\b", thought, re.IGNORECASE) is not None for v in values]
    answer = found.group(1) if found else None
    return {
        "text": text, "answer": answer, "right": answer == answers[1], "stale": answer == answers[0],
        "states_new": said[1] and not said[0], "states_old": said[0],
    }  # fmt: skip


if __name__ == "__main__":
    main(ChainSplit(), ChainConfig, METRICS)
