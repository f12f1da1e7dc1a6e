"""Scenario families: what a gated decision is about, as data. Read from JSON, checked once, refused with the reason."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from notelens.errors import TaskError

Split = Literal["train", "eval"]
FORMS: tuple[str, ...] = ("two_clause", "polarity", "swapped", "negated")
BUILTIN = Path(__file__).parent / "data" / "families.json"
_SLOT = re.compile(r"\{(\w+)\}")
_RULE_SLOTS: Mapping[str, frozenset[str]] = {
    "two_clause": frozenset({"label", "v0", "v1", "p", "q"}),
    "swapped": frozenset({"label", "v0", "v1", "p", "q"}),
    "polarity": frozenset({"label", "t", "p", "q"}),
    "negated": frozenset({"label", "t", "p", "q"}),
}
_LISTS = ("values", "restrictive", "permissive", "requests", "filler")
_MINIMUM = {"values": 2, "restrictive": 1, "permissive": 1, "requests": 1, "filler": 1}


@dataclass(frozen=True)
class Family:
    """One scenario family.

    Attributes:
        name: unique name; intervals are clustered by it.
        split: ``train`` families may be used to train adapters, ``eval`` families never.
        label: what the field is called, e.g. ``order status``.
        record: heading of the record that holds the field.
        values: what the field may be.
        restrictive, permissive: the two kinds of action words.
        requests: sentences that ask for the decision without naming an action.
        filler: line templates with slots; they name no value and no action.
        rules: rule templates per form.
        slots: what may stand in the slots of filler lines and distractors.
        distractors: templates of updates about something other than the field.
    """

    name: str
    split: Split
    label: str
    record: str
    values: tuple[str, ...]
    restrictive: tuple[str, ...]
    permissive: tuple[str, ...]
    requests: tuple[str, ...]
    filler: tuple[str, ...]
    rules: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, tuple[str, ...]]
    distractors: tuple[str, ...]

    def fill(self, template: str, rng: random.Random) -> str:
        """The template with every slot drawn at random."""
        return _SLOT.sub(lambda m: rng.choice(self.slots[m.group(1)]), template)

    def lines(self, rng: random.Random) -> Iterator[str]:
        """Endless filler lines without a duplicate.

        Raises:
            TaskError: the templates have no further distinct line.
        """
        seen: set[str] = set()
        turn = misses = 0
        while misses < 1000:
            line = self.fill(self.filler[turn % len(self.filler)], rng)
            turn += 1
            if line in seen:
                misses += 1
                continue
            seen.add(line)
            misses = 0
            yield line
        raise TaskError(
            f"family {self.name!r}: only {len(seen)} distinct filler lines exist; add templates or slot words"
        )


def load_families(path: Path | None = None) -> tuple[Family, ...]:
    """The families of a scenario file (the built-in one when no path is given), in file order.

    A user's file may leave out ``slots``, ``rules`` and ``distractors``; the built-in ones then apply.

    Raises:
        TaskError: the file is missing, empty, not JSON or against the schema; the message names file and problem.
    """
    return _builtin() if path is None else _load(path)


@cache
def _builtin() -> tuple[Family, ...]:
    """The built-in families, read and checked once a process."""
    return _load(None)


def _load(path: Path | None) -> tuple[Family, ...]:
    default = _read(BUILTIN)
    data = default if path is None else _read(path)
    source = (path or BUILTIN).name
    items = data.get("families")
    if not isinstance(items, list) or not items:
        raise TaskError(f"scenario file {source}: 'families' is missing or empty; at least one family is needed")
    slots = _slots(data.get("slots", default["slots"]), source)
    rules = data.get("rules", {})
    if not isinstance(rules, dict):
        raise TaskError(f"scenario file {source}: 'rules' must map rule forms to lists of templates")
    shared = {"rules": {**default["rules"], **rules}, "distractors": data.get("distractors", default["distractors"])}
    families = tuple(_family(item, i, shared, slots, source) for i, item in enumerate(cast(list[Any], items)))
    names = [f.name for f in families]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise TaskError(f"scenario file {source}: family name {twice[0]!r} is used twice")
    return families


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"scenario file {path} cannot be read: {error}") from error
    if not text.strip():
        raise TaskError(f"scenario file {path} is empty")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"scenario file {path} is not JSON: {error.msg} (line {error.lineno})") from error
    if not isinstance(data, dict):
        raise TaskError(f"scenario file {path}: the top level must be an object with 'families'")
    return cast(dict[str, Any], data)


def _slots(data: Any, source: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(data, dict):
        raise TaskError(f"scenario file {source}: 'slots' must be an object")
    slots: dict[str, tuple[str, ...]] = {}
    for name, value in cast(dict[str, Any], data).items():
        if isinstance(value, dict) and set(cast(dict[str, Any], value)) == {"from", "to"}:
            low, high = (cast(dict[str, Any], value)[k] for k in ("from", "to"))
            if not (isinstance(low, int) and isinstance(high, int) and low <= high):
                raise TaskError(f"scenario file {source}: slot {name!r} needs whole numbers with from <= to")
            slots[name] = tuple(str(i) for i in range(low, high + 1))
        else:
            slots[name] = _strings(value, f"slot {name!r}", source, 1)
    return slots


def _strings(value: Any, what: str, source: str, at_least: int) -> tuple[str, ...]:
    if not isinstance(value, list) or any(not isinstance(v, str) or not v.strip() for v in cast(list[Any], value)):
        raise TaskError(f"scenario file {source}: {what} must be a list of non-empty strings")
    found = tuple(cast(list[str], value))
    if len(found) < at_least or len(set(found)) != len(found):
        raise TaskError(f"scenario file {source}: {what} needs at least {at_least} distinct entries, has {list(found)}")
    return found


def _family(item: Any, index: int, shared: Mapping[str, Any], slots: Mapping[str, Any], source: str) -> Family:
    where = f"family {index}"
    if not isinstance(item, dict):
        raise TaskError(f"scenario file {source}: {where} is not an object")
    entry = cast(dict[str, Any], item)
    known = {"name", "split", "label", "record", "rules", "distractors", *_LISTS}
    if unknown := sorted(set(entry) - known):
        raise TaskError(f"scenario file {source}: {where} has the unknown key {unknown[0]!r}; known: {sorted(known)}")
    for key in ("name", "label", *_LISTS):
        if key not in entry:
            raise TaskError(f"scenario file {source}: {where} has no {key!r}")
    for key in ("name", "label", "record"):
        if not isinstance(entry.get(key, "Record"), str) or not str(entry.get(key, "Record")).strip():
            raise TaskError(f"scenario file {source}: {where}: {key!r} must be a non-empty string")
    where = f"family {entry['name']!r}"
    split = entry.get("split", "eval")
    if split not in ("train", "eval"):
        raise TaskError(f"scenario file {source}: {where}: split {split!r} is neither 'train' nor 'eval'")
    lists = {k: _strings(entry[k], f"{where}: {k!r}", source, _MINIMUM[k]) for k in _LISTS}
    own_rules = entry.get("rules", {})
    if not isinstance(own_rules, dict):
        raise TaskError(f"scenario file {source}: {where}: 'rules' must map rule forms to lists of templates")
    rules = _rules({**shared["rules"], **cast(dict[str, Any], own_rules)}, where, source)
    distractors = _strings(entry.get("distractors", shared["distractors"]), f"{where}: 'distractors'", source, 1)
    _check_words(lists, distractors, slots, where, source)
    return Family(
        name=entry["name"],
        split=split,
        label=entry["label"],
        record=entry.get("record", "Record"),
        rules=rules,
        slots=slots,
        distractors=distractors,
        **lists,
    )


def _rules(data: Mapping[str, Any], where: str, source: str) -> dict[str, tuple[str, ...]]:
    rules: dict[str, tuple[str, ...]] = {}
    for form, templates in data.items():
        if form not in FORMS:
            raise TaskError(f"scenario file {source}: {where}: unknown rule form {form!r}; known: {', '.join(FORMS)}")
        rules[form] = _strings(templates, f"{where}: rules of {form!r}", source, 1)
        for template in rules[form]:
            slots = _SLOT.findall(template)
            if set(slots) != _RULE_SLOTS[form] or any(slots.count(s) > 1 for s in slots if s != "label"):
                raise TaskError(
                    f"scenario file {source}: {where}: rule template {template!r} of form {form!r} must use each of "
                    f"{sorted(_RULE_SLOTS[form])} (only the label more than once)"
                )
    return rules


def _check_words(
    lists: Mapping[str, tuple[str, ...]],
    distractors: Sequence[str],
    slots: Mapping[str, tuple[str, ...]],
    where: str,
    source: str,
) -> None:
    """Refuse slots that do not exist and filler that would give the model a second copy of a value or an action."""
    telling = {w.casefold() for k in ("values", "restrictive", "permissive") for w in lists[k]}
    if len(telling) != sum(len(lists[k]) for k in ("values", "restrictive", "permissive")):
        raise TaskError(
            f"scenario file {source}: {where}: a word is both a value and an action, or both kinds of action"
        )
    for template in (*lists["filler"], *distractors):
        for slot in _SLOT.findall(template):
            if slot not in slots:
                raise TaskError(f"scenario file {source}: {where}: {template!r} uses the unknown slot {slot!r}")
    used = {s for t in (*lists["filler"], *distractors) for s in _SLOT.findall(t)}
    for text in (*lists["filler"], *lists["requests"], *distractors, *(w for s in sorted(used) for w in slots[s])):
        if clash := sorted(set(re.findall(r"\w+", _SLOT.sub(" ", text).casefold())) & telling):
            raise TaskError(
                f"scenario file {source}: {where}: {text!r} contains {clash[0]!r}, which is one of its values or actions"
            )
