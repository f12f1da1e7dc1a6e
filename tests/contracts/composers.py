"""What every composer must fulfil, as functions that return the problems they find."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from notelens.cache.kv import KVCache
from notelens.cache.ops import max_difference
from notelens.compose import (
    Calibration,
    Composer,
    Linked,
    References,
    Skill,
    compile_skill,
    compose,
    composer,
    fit_link,
)
from notelens.errors import ComposeError
from tests.contracts.entries import PAPER_REF
from tests.contracts.models import random_ids

ROW_TOLERANCE = 1e-5
"""Rows of size 1 to 10 through three float32 layers in another order of summation, keys rotated once more: seen 6e-6."""
EXACT_WHEN = ("one_part", "same_prefix", "always")
BEFORE, SKILL, OTHER, AFTER = (list(random_ids(n, seed=s)) for n, s in ((7, 1), (11, 2), (6, 3), (4, 4)))


def built(name: str, model: Any, skills: Sequence[Skill]) -> Composer:
    """The composer of that name, small enough for short chunks; 'linked' with links, 'references' with rows of the skills."""
    if name == "references":
        return References.at([(skill, (1, len(skill) - 1)) for skill in skills])
    if name != "linked":
        return composer({"seam": "seam@2", "epic": "epic@2", "cacheblend": "cacheblend@0.3"}.get(name, name))
    calibrations = [Calibration([list(random_ids(5 + i % 3, seed=40 + i))], AFTER) for i in range(6)]
    return Linked([fit_link(model, skill, calibrations, k=2, rank=3) for skill in skills])


def skills_of(model: Any) -> tuple[Skill, Skill]:
    return compile_skill(model, SKILL, name="first"), compile_skill(model, OTHER, name="second", scheme="unrotated")


def entry_problems(name: str, entry: Any) -> list[str]:
    """A composer has its registered name, a docstring, its place in the paper, and says how it may be exact."""
    text = (vars(entry).get("__doc__") or "").strip()
    problems = [] if text and text.splitlines()[0][-1] == "." else ["it has no docstring of its own"]
    module = inspect.getmodule(entry)
    if module is None or not (module.__doc__ or "").strip():
        problems.append("its module has no docstring")
    if getattr(entry, "name", None) != name:
        problems.append(f"registered as {name!r} but is called {getattr(entry, 'name', None)!r}")
    if not PAPER_REF.search(getattr(entry, "paper_ref", "")):
        problems.append(f"paper_ref names no place: {getattr(entry, 'paper_ref', '')!r}")
    if entry.exact_when not in EXACT_WHEN:
        problems.append(f"exact_when is {entry.exact_when!r}")
    try:
        entry.parse("no-number")
        problems.append("it takes a parameter that is none")
    except ComposeError:
        pass
    return problems


def identity_problems(model: Any, method: Composer) -> list[str]:
    """One cache alone comes back as it is, exact; so does a text."""
    cache = model.prefill(SKILL).cache
    problems: list[str] = []
    for label, parts in (("a cache", [cache]), ("a text", [SKILL]), ("a cache and text", [cache, AFTER])):
        found = compose(model, parts, method=method)
        wanted = model.prefill([*SKILL, *(AFTER if len(parts) == 2 else [])]).cache
        gap = max_difference(found.cache, wanted)
        if not gap <= ROW_TOLERANCE:
            problems.append(f"{label}: rows differ by {gap:.2g}")
        if not found.exact:
            problems.append(f"{label}: marked {found.cache.history}")
    return problems


def layout_problems(model: Any, method: Composer, skills: Sequence[Skill]) -> list[str]:
    """Ids are those of the parts, positions 0, 1, 2, ..., pieces cover all rows, parts are left alone."""
    first, second = skills
    context = model.prefill(AFTER).cache
    digests = [c.digest() for c in (first.cache, second.cache, context)]
    parts = [BEFORE, first, [second, BEFORE[:2]], first, AFTER]
    found = compose(model, parts, method=method)
    wanted = [*BEFORE, *SKILL, *OTHER, *BEFORE[:2], *SKILL, *AFTER]
    problems: list[str] = []
    if list(found.token_ids) != wanted:
        problems.append("ids are not those of the parts")
    if found.cache.positions.tolist() != list(range(len(wanted))):
        problems.append(f"positions are {found.cache.positions.tolist()}")
    ends = [(p.start, p.stop) for p in found.pieces]
    if [a for a, _ in ends] != [0, *(b for _, b in ends)][:-1] or ends[-1][1] != len(wanted):
        problems.append(f"pieces stand at {ends}")
    if len({p.label for p in found.pieces}) != len(found.pieces):
        problems.append("pieces share a label")
    if [c.digest() for c in (first.cache, second.cache, context)] != digests:
        problems.append("a part was changed")
    again = compose(model, parts, method=method)
    if again.cache.digest() != found.cache.digest() or again.cost != found.cost:
        problems.append("a second run gives something else")
    return problems


def mark_problems(model: Any, method: Composer, skills: Sequence[Skill]) -> list[str]:
    """What is marked exact equals a fresh prefill; what differs from one is marked, and says so in its history."""
    problems: list[str] = []
    behind = compile_skill(model, OTHER, name="behind", condition="prefix", prefix=BEFORE)
    cases = {
        "spliced behind text": [BEFORE, skills[0], AFTER],
        "two skills": [skills[0], skills[1], AFTER],
        "behind its own prefix": [BEFORE, behind, AFTER],
        "behind another prefix": [SKILL, behind, AFTER],
    }
    for label, parts in cases.items():
        try:
            found = compose(model, parts, method=method)
        except ComposeError:
            if method.name != "linked":  # refuses a skill that it has no link for
                raise
            continue
        gap = max_difference(found.cache, model.prefill(found.token_ids).cache)
        if found.exact and not gap <= ROW_TOLERANCE:
            problems.append(f"{label}: marked exact but rows differ by {gap:.2g}")
        if not found.exact and gap == 0.0:
            problems.append(f"{label}: marked approximate but equal")
        if found.exact and label != "behind its own prefix" and method.exact_when == "one_part":
            problems.append(f"{label}: exact, which it says it never is")
    return problems


def layer0_problems(model: Any, method: Composer, skills: Sequence[Skill]) -> list[str]:
    """Rows of layer 0 depend on token and position only: a composer that repositions has them right, whatever it repairs."""
    found = compose(model, [BEFORE, skills[0], skills[1], AFTER], method=method)
    full = model.prefill(found.token_ids).cache
    gap = max(
        float((a[0] - b[0]).abs().max()) for a, b in ((found.cache.keys, full.keys), (found.cache.values, full.values))
    )
    tolerance = ROW_TOLERANCE if method.name != "linked" else 10 * ROW_TOLERANCE
    if method.repositions and not gap <= tolerance:
        return [f"layer 0 is off by {gap:.2g}"]
    if not method.repositions and not gap > 1e-2:
        return [f"says that it does not reposition, but layer 0 is off by {gap:.2g} only"]
    return []


def cost_problems(model: Any, method: Composer, skills: Sequence[Skill]) -> list[str]:
    """Text costs its tokens, recomputed rows at most their number, and unmoved rows nothing."""
    found = compose(model, [BEFORE, skills[0], skills[1], AFTER], method=method)
    cost, spliced = found.cost, len(SKILL) + len(OTHER)
    problems: list[str] = []
    if cost.tokens_text != len(BEFORE) + len(AFTER) or cost.n_spliced != spliced or cost.n_tokens != len(found):
        problems.append(f"counts are wrong: {cost}")
    if not 0 <= cost.tokens_recomputed <= spliced or cost.recompute_share != cost.tokens_recomputed / spliced:
        problems.append(f"recomputed {cost.tokens_recomputed} of {spliced}")
    ran = 0.0
    for layer in range(model.geometry.n_layers):  # rows whose values differ from the spliced ones were computed here
        plain = compose(model, [BEFORE, skills[0], skills[1], AFTER], method="shift").cache
        differ = (found.cache.values[layer] - plain.values[layer]).abs().amax((0, 2)) > 0
        ran += float(differ[len(BEFORE) : len(BEFORE) + spliced].sum()) / model.geometry.n_layers
    if method.name not in ("linked", "prefix_conditioned") and ran > cost.tokens_recomputed + 1e-6:
        problems.append(f"{ran} tokens changed, {cost.tokens_recomputed} were counted")
    alone = compose(model, [model.prefill(SKILL).cache, AFTER], method=method).cost
    if method.exact_when != "always" and alone.tokens_recomputed != 0:
        problems.append(f"recomputed {alone.tokens_recomputed} rows that were right")
    return problems


def reading_problems(model: Any, method: Composer, skills: Sequence[Skill]) -> list[str]:
    """Text behind a splice is run on the composed rows, and what the composition reads is what its last token reads."""
    found = compose(model, [BEFORE, skills[0], AFTER], method=method)
    n = len(found) - len(AFTER)
    cache = found.cache
    past = KVCache(
        tuple(k[:, :n] for k in cache.keys), tuple(v[:, :n] for v in cache.values), cache.positions[:n],
        cache.token_ids[:n], cache.history,
    )  # fmt: skip
    out = model.prefill(AFTER, past)
    gap = max(max_difference(out.cache, cache), float((out.hidden - found.read(model)).abs().max()))
    problems = [] if gap <= ROW_TOLERANCE else [f"text behind the splice differs by {gap:.2g} from running it there"]
    spliced_last = compose(model, [BEFORE, skills[0]], method=method)
    hidden = spliced_last.read(model)
    if not bool(torch.isfinite(hidden).all()) or hidden.shape != (model.geometry.d_model,):
        problems.append("the last spliced token cannot be read")
    return problems


CONTRACTS = {
    "layout": layout_problems,
    "mark": mark_problems,
    "layer 0": layer0_problems,
    "cost": cost_problems,
    "reading": reading_problems,
}
