"""The organisms' language as a task: gated decisions and their relatives, in words that small models can learn."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, count, islice, product
from pathlib import Path
from typing import Any, Literal, cast, get_args

from notelens.errors import TaskError
from notelens.prompt import Prompt
from notelens.registry import nearest
from notelens.spans import answer_token, make_prompt
from notelens.tasks.base import Cell, Instance
from notelens.tasks.organism_text import KIND_FORMS, LOOKUP_REQUEST, Attribute, Mode, Scene, scene_pieces, target, words
from notelens.tasks.render import Draw, Order, Rendering
from notelens.tasks.scenarios import FORMS, Family, load_families

DATA = Path(__file__).parent / "data" / "organism.json"
MAX_FILLER = 600
N_TRAINED = 5
"""Values of each family that training may put into a field or a rule; the others are held out."""
SPLITS = ("eval", "values", "combos", "train")
_LINE_TOKENS = 6
_GRAMMAR = (
    "a system Rule: - is now not, and update: the means; act think call match differ answer: ( = ) . ? which seal?"
)

Pairing = tuple[tuple[str, str], tuple[str, str]]
"""Two values, and (restrictive, permissive) actions."""


@cache
def organism_families() -> tuple[Family, ...]:
    """The families of the language, in file order; read once a process."""
    return load_families(DATA)


def vocabulary() -> list[str]:
    """Every word of the language, sorted; what the shared tokenizer knows beside its special tokens."""
    families = organism_families()
    texts = [_GRAMMAR, LOOKUP_REQUEST.replace("{label}", "")]
    for f in families:
        texts += [f.label, f.record, *f.values, *f.restrictive, *f.permissive, *f.requests]
        texts += [w for slot in f.slots.values() for w in slot]
        templates = [*f.filler, *f.distractors, *(t for form in f.rules.values() for t in form)]
        texts += [_without_slots(t) for t in templates]
    return words(texts)


def grammar_words() -> list[str]:
    """Words that hold prompts together and are never a value or an action."""
    families = organism_families()
    templates = [t for f in families for form in f.rules.values() for t in form]
    return words([_GRAMMAR, LOOKUP_REQUEST.replace("{label}", ""), *(_without_slots(t) for t in templates)])


def held_out(family: str, values: Sequence[str], actions: Sequence[str]) -> bool:
    """Whether training never shows this pair of values with this pair of actions (about one in four, by a hash)."""
    text = "/".join((family, *sorted(values), *sorted(actions)))
    return hashlib.sha256(text.encode()).digest()[0] % 4 == 0


@cache
def pairings(name: str, split: str) -> tuple[Pairing, ...]:
    """What a split of a family draws from: ``train``, ``values`` (both held out) or ``combos`` (only the combination)."""
    family = next(f for f in organism_families() if f.name == name)
    known = family.values[N_TRAINED:] if split == "values" else family.values[:N_TRAINED]
    every = list(product(combinations(known, 2), product(family.restrictive, family.permissive)))
    return tuple((v, a) for v, a in every if split == "values" or held_out(name, v, a) == (split == "combos"))


class OrganismLanguage:
    """Prompts of the organisms' language: decisions under a rule, several hops, updates, look-ups.

    Args:
        split: ``train``; ``values`` (values that training never used in a field or rule), ``combos`` (known values and
            actions in combinations that training never used), or ``eval``: both of these in turn.
        kinds: out of ``gated``, ``multi_hop``, ``two_fact``, ``update``, ``lookup``.
        forms: rule forms; kinds that do not have a form leave it out.
        families: names of families; all when not given.
        order: whether the field (``value_first``) or the rule (``rule_first``) comes first.
        mode: what the prompt asks for: ``act`` (the answer word) or ``call`` (a tool call that begins with it). A chain
            (``think``) begins with the same word whatever its conclusion, so it is for :meth:`render` only.
        rendering: ``chat`` or ``plain``.
        filler: tokens of filler, 0 to 600, in steps of a line (about 6); 2 to 5 lines when not given.
        updates: update lines about the field in ``update`` prompts, 1 to 4, the last of which counts; drawn from 1 to 3 when
            not given. The values before it are drawn from three, so that "A, then B, then A" occurs.

    Raises:
        TaskError: a parameter is out of range or unknown.
    """

    name = "organism"

    def __init__(
        self,
        *,
        split: str = "eval",
        kinds: Sequence[str] = ("gated",),
        forms: Sequence[str] = FORMS,
        families: Sequence[str] | None = None,
        order: str = "value_first",
        mode: str = "act",
        rendering: str = "chat",
        filler: int | None = None,
        updates: int | None = None,
    ) -> None:
        found = organism_families()
        for what, value, known in (
            ("split", split, SPLITS),
            ("order", order, get_args(Order)),
            ("mode", mode, get_args(Mode)),
            ("rendering", rendering, ("chat", "plain")),
        ):
            _one_of(what, value, known)
        for what, wanted, known in (
            ("kind", kinds, tuple(KIND_FORMS)),
            ("form", forms, FORMS),
            ("family", families, tuple(f.name for f in found)),
        ):
            if wanted is None:
                continue
            if isinstance(wanted, str) or not wanted or len(set(wanted)) != len(wanted):
                raise TaskError(
                    f"a list of distinct names is needed for {what}, out of {', '.join(known)}; got {wanted!r}"
                )
            for one in wanted:
                _one_of(what, one, known)
        for what, number, high in (("filler", filler, MAX_FILLER), ("updates", updates, 4)):
            low = 0 if what == "filler" else 1
            if number is not None and (isinstance(number, bool) or not low <= number <= high):
                raise TaskError(f"{what} {number!r} is not a whole number from {low} to {high}")
        self.variants = tuple((k, f) for k in kinds for f in forms if f in KIND_FORMS[k])
        if not self.variants:
            raise TaskError(f"kinds {list(kinds)} have none of the forms {list(forms)}")
        self.split = split
        self.families = found if families is None else tuple(f for f in found if f.name in families)
        self.order: Order = cast(Order, order)
        self.mode = mode
        self.rendering: Literal["chat", "plain"] = cast(Literal["chat", "plain"], rendering)
        self.filler, self.updates = filler, updates

    def instances(self, tokenizer: Any, n: int, seed: int) -> list[Instance]:
        """The first ``n`` instances, spread evenly over families and over kinds and forms; deterministic in ``seed``.

        Raises:
            TaskError: the mode is ``think``.
            PairError, AnswerError, SpanError: the prompts do not align with this tokenizer.
        """
        if self.mode == "think":
            raise TaskError(
                "mode 'think' has no instances: a chain begins with the same word for both answers; use render()"
            )
        return [self.build(tokenizer, scene) for scene in self.scenes(n, seed)]

    def scenes(self, n: int, seed: int) -> list[Scene]:
        """What :meth:`instances` is built from, in the same order."""

        def every() -> Iterator[Scene]:
            for index in count():
                for shift in range(len(self.variants)):
                    for at, family in enumerate(self.families):
                        kind, form = self.variants[(at + shift) % len(self.variants)]
                        yield self._scene(family, kind, form, index, seed)

        return list(islice(every(), n))

    def build(self, tokenizer: Any, scene: Scene) -> Instance:
        """The instance of a scene; every pair along every axis is checked before it is returned.

        Raises:
            PairError, AnswerError, SpanError: the prompts do not align with this tokenizer.
        """
        draw = scene.draw
        cells = {cell: self._prompt(tokenizer, scene, cell, self.mode) for cell in scene.cells}
        first = cells[0, 0]
        a, b = (answer_token(tokenizer, first, word, self.rendering) for word in scene.answers)
        instance = Instance(
            id=scene.id,
            family=draw.family.name,
            form="lookup" if scene.kind == "lookup" else draw.form,
            group=draw.group,
            cells=cells,
            answers=scene.answers,
            answer_ids=(a, b),
            conclusion={cell: scene.conclusion(cell) for cell in scene.cells},
            meta={
                "v0": draw.values[0],
                "v1": draw.values[1],
                "p": draw.actions[0],
                "q": draw.actions[1],
                "template": draw.template,
                "filler_lines": len(draw.filler),
                "order": draw.order,
                "rendering": self.rendering,
                "kind": scene.kind,
                "mode": self.mode,
                "n_updates": len(scene.history),
                "n_tokens": len(first),
            },
        )
        two_rules = len(scene.cells) == 4
        for at in (0, 1) if two_rules else (0,):
            instance.pair("field", at)
            if two_rules:
                instance.pair("trigger", at)
        return instance

    def render(self, tokenizer: Any, scene: Scene, cell: Cell, *, mode: Mode = "act") -> Rendering:
        """A cell with its supervised answer text, as an ordinary prompt.

        Raises:
            TaskError: the scene has no such cell.
        """
        if cell not in scene.cells:
            raise TaskError(f"{scene.id} has no cell {cell}; it has {scene.cells}")
        text, at = target(scene, cell, mode)
        return Rendering(self._prompt(tokenizer, scene, cell, mode), text, at)

    def _prompt(self, tokenizer: Any, scene: Scene, cell: Cell, mode: str) -> Prompt:
        return make_prompt(
            tokenizer,
            scene_pieces(scene, cell, mode),
            id=f"{scene.id}/{cell[0]}{cell[1]}{'' if mode == 'act' else '/' + mode}",
            answer=scene.answer(scene.draw.values[cell[0]], cell[1]),
            rendering=self.rendering,
        )

    def _scene(self, family: Family, kind: str, form: str, index: int, seed: int) -> Scene:
        rng = random.Random(f"{seed}/{family.name}/{index}")  # text seeds do not depend on PYTHONHASHSEED
        split = ("combos", "values")[index % 2] if self.split == "eval" else self.split
        values, actions = rng.choice(pairings(family.name, split))
        n_lines = rng.randint(2, 5) if self.filler is None else round(self.filler / _LINE_TOKENS)
        return make_scene(
            rng,
            kind=kind,
            form=form,
            family=family,
            others=[f for f in organism_families() if f.name != family.name],
            values=values,
            actions=actions,
            spare=[v for v in family.values[:N_TRAINED] if v not in values],
            order=self.order,
            n_lines=n_lines,
            index=index,
            updates=self.updates,
            wording=random.Random(f"{seed}/{family.name}/{index}/{form}"),
        )


def make_scene(
    rng: random.Random,
    *,
    kind: str,
    form: str,
    family: Family,
    others: Sequence[Family],
    values: tuple[str, str],
    actions: tuple[str, str],
    spare: Sequence[str],
    order: Order,
    n_lines: int,
    index: int = 0,
    updates: int | None = None,
    fact_holds: bool = True,
    wording: random.Random | None = None,
) -> Scene:
    """Draw what is left of a scene.

    Args:
        rng: source of everything that does not depend on the form.
        kind, form: of the prompt.
        family: of the field.
        others: families that further attributes come from.
        values: the two field values, in any order.
        actions: restrictive and permissive action.
        spare: further values of the field, for update histories.
        order: whether the field or the rule comes first.
        n_lines: filler lines.
        index: number of the group within the family.
        updates: update lines about the field in an ``update`` scene.
        fact_holds: whether the second fact of a ``two_fact`` scene is what the rule asks for.
        wording: source of the rule's wording; ``rng`` when not given.
    """
    pair = values if rng.random() < 0.5 else (values[1], values[0])
    restrictive = rng.randrange(2)
    further = [_attribute(f, rng) for f in rng.sample(list(others), 3)]
    n_others = rng.randrange(3)
    lines = tuple(islice(family.lines(rng), n_lines))
    intermediates = tuple(rng.sample(family.slots["intermediate"], 2))
    n_updates = updates or rng.randint(1, 3)
    history = _history(rng, (*pair, *spare[:1]), n_updates)
    asides = further[:1] if rng.random() < (0.5 if kind == "update" else 0.25) else []
    request, reverse, n_before, between = (
        rng.choice(family.requests), rng.random() < 0.5, rng.randint(0, max(1, n_others)), rng.randint(0, n_lines)
    )  # fmt: skip
    fact = None
    if kind == "two_fact":
        n_others = max(1, n_others)
        label, actual = further[-1]
        source = next(f for f in others if f.label == label)
        required = actual if fact_holds else rng.choice([v for v in source.values[:N_TRAINED] if v != actual])
        fact, further = (label, required, actual), [further[-1], *further[:-1]]
        asides = [a for a in asides if a[0] != label]
    draw = Draw(
        family=family,
        form=form,
        index=index,
        values=pair,
        actions=actions if restrictive == 0 else (actions[1], actions[0]),
        restrictive=restrictive,
        template=(wording or rng).choice(family.rules[form]),
        request=request,
        filler=lines,
        between=between,
        order=order,
        distractor="",
    )
    return Scene(
        draw=draw,
        kind=kind,
        others=tuple(further[:n_others]),
        n_before=min(n_before, n_others),
        intermediates=intermediates if kind == "multi_hop" else (),
        means_reversed=reverse,
        fact=fact,
        history=history if kind == "update" else (),
        asides=tuple(asides),
    )


def _history(rng: random.Random, values: Sequence[str], n_updates: int) -> tuple[str, ...]:
    """Values in the record and in all but the last update line, without immediate repetition."""
    found: list[str] = []
    for _ in range(n_updates):
        found.append(rng.choice([v for v in values if not found or v != found[-1]]))
    return tuple(found)


def _attribute(family: Family, rng: random.Random) -> Attribute:
    return family.label, rng.choice(family.values[:N_TRAINED])


def _one_of(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise TaskError(f"unknown {what} {value!r}; {nearest(str(value), list(known))}")


def _without_slots(template: str) -> str:
    return "".join(part.split("}")[-1] for part in template.split("{"))


__all__ = ["OrganismLanguage", "grammar_words", "held_out", "make_scene", "organism_families", "pairings", "vocabulary"]
