"""Models and instances on which probes are compared with the oracle.

On the tiny decoder most effects are exactly 0 or 1. Random models give every position an effect of its own; their
answers are chosen afterwards, so that each prompt of a 2 x 2 grid "decides right" by construction.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

from notelens.context import ContextStore
from notelens.probes.base import Aggregate, Probe, ProbeResult, Row
from notelens.tasks.base import Instance
from tests.contracts.models import random_hf
from tests.oracle.swap import full_logits
from tests.tiny import FAMILIES, VOCABULARY, tiny_hf, tiny_instance, tiny_instances, tiny_model, wrapped

CASES = ("tiny", "llama", "gemma2")
"""``gemma2`` adds sliding windows, sinks of the softcap and a final cap to what ``llama`` has."""
FORMS = ("polarity", "swapped", "negated")
TOLERANCE = 2e-4
"""Recoveries over gaps of at least 1 logit, from float32 logits in another order of summation (seen 2e-5)."""
HEAD_SCALE = 40.0
"""Random models hardly tell prompts apart; a larger head makes the gaps of some answer pair exceed one logit."""


@cache
def case(name: str) -> tuple[Any, Any, tuple[Instance, ...]]:
    """(model behind the protocol, the plain transformers model, two decided instances); shared and read-only."""
    if name == "tiny":
        return tiny_model(), tiny_hf(), (tiny_instance("polarity", "parcel"), tiny_instance("swapped", "visit", 1))
    overrides = {} if name != "gemma2" else {"final_logit_softcapping": 1000.0, "sliding_window": 16}
    hf = random_hf(name, **overrides)
    hf.lm_head.weight.data *= HEAD_SCALE
    model = wrapped(hf, f"{name}-decided", gate=False)  # first: wrapping chooses an attention that knows the softcap
    return model, hf, tuple(_decided(hf, form) for form in ("polarity", "swapped"))


def _decided(hf: Any, form: str) -> Instance:
    """The first instance with a pair of answers whose margins have the right signs in all cells, with these answers."""
    for index in range(40):
        instance = tiny_instance(form, FAMILIES[index % len(FAMILIES)], index)
        cells = sorted(instance.cells)
        ids = range(len(VOCABULARY))
        logits = {c: full_logits(hf, instance.cells[c].token_ids, ids).tolist() for c in cells}
        signs = {c: 1 if instance.conclusion[c] == 1 else -1 for c in cells}

        def smallest(pair: tuple[int, ...], signs: Any = signs, logits: Any = logits) -> float:
            return min(sign * (logits[c][pair[1]] - logits[c][pair[0]]) for c, sign in signs.items())

        a, b = max(permutations(ids, 2), key=smallest)
        if smallest((a, b)) > 0.5:
            return replace(instance, answer_ids=(a, b))
    raise AssertionError(f"no instance of form {form} is decided by any pair of answers")


def run(probe: Probe, name: str = "tiny", instances: Sequence[Instance] | None = None) -> ProbeResult:
    """The probe on a case, or on other instances of its model."""
    model, _, own = case(name)
    return probe.run(ContextStore(model), own if instances is None else instances)


def grid(n: int = 8, forms: Sequence[str] = FORMS, **options: Any) -> list[Instance]:
    """Tiny instances."""
    return tiny_instances(n, forms, **options)


def only(rows: Sequence[Row], item: str, direction: str) -> Row:
    """The one row of an item and direction."""
    (row,) = [r for r in rows if r.item == item and r.direction == direction]
    return row


def through_json(rows: Sequence[Row]) -> list[Row]:
    """Rows as they come back from a record."""
    return [Row.from_json(json.loads(json.dumps(r.as_json(), allow_nan=False))) for r in rows]


def assert_rows_make_the_table(probe: Probe, result: ProbeResult) -> None:
    """Aggregates come from rows alone, whatever their order, and survive being written to a record."""
    again = [plain(a) for a in probe.aggregate(through_json(result.rows))]
    assert again == [plain(a) for a in result.aggregates]
    keys = [(a.metric, a.method, json.dumps(dict(a.params), sort_keys=True)) for a in result.aggregates]
    assert len(set(keys)) == len(keys), "two lines of the table have one name"


def plain(line: Aggregate) -> Any:
    return (line.metric, line.method, dict(line.params), line.estimate, line.n_excluded, dict(line.reasons), line.unit)
