"""Pairs of prompts, isolated swaps between their caches, and what a row says about them."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from notelens.cache.kv import KVCache
from notelens.context import Context, ContextStore
from notelens.errors import InputError, PatchError, TaskError
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.probes.rows import DIRECTIONS, Direction, Json
from notelens.prompt import Axis, Pair
from notelens.readout import Recovery, exclusion
from notelens.tasks.base import Instance

NO_EFFECT = 1e-5
"""Share of the gap below which a margin has not moved: what float32 rounding changes between batch sizes."""
_SINGLES: weakref.WeakKeyDictionary[ContextStore, dict[tuple[tuple[int, ...], ...], dict[Direction, "Swapped"]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Swapped:
    """What :func:`swap_pair` measured in one direction.

    Attributes:
        direction: which end was patched.
        recipient, donor: unpatched margins towards the donor's answer.
        excluded: why recoveries are undefined, or ``None``.
        recoveries: one per site, in order; present also when excluded (their margins then still mean something).
        control: the rows came from other donors than the pair's.
    """

    direction: Direction
    recipient: float
    donor: float
    excluded: str | None
    recoveries: tuple[Recovery, ...]
    control: bool = False

    @property
    def competent(self) -> bool:
        """Both unpatched ends give their own right answer."""
        return self.recipient < 0 < self.donor


def ends(pair: Pair, direction: Direction) -> Pair:
    """``pair`` oriented so that ``old`` is the recipient of this direction."""
    return pair if direction == "denoising" else pair.reversed()


def opposite(direction: Direction) -> Direction:
    """The other direction."""
    return "noising" if direction == "denoising" else "denoising"


def pairs_along(
    instances: Sequence[Instance], axis: Axis, *, per_instance: int = 2, forms: Sequence[str] | None = None
) -> list[tuple[Instance, Pair]]:
    """Pairs of prompts along one axis of every instance that has them, in the order of the instances.

    Args:
        instances: of a task.
        axis: which span differs.
        per_instance: at most so many pairs per instance (1 or 2).
        forms: rule forms to use; all when ``None``.

    Raises:
        InputError: ``per_instance`` is not 1 or 2.
        TaskError: no instance has such a pair; the message names the forms there are.
    """
    check_pairs(per_instance)
    found: list[tuple[Instance, Pair]] = []
    for instance in instances:
        if forms is not None and instance.form not in forms:
            continue
        cells = instance.conclusion
        steps = [(((0, at), (1, at)) if axis == "field" else ((at, 0), (at, 1)), at) for at in (0, 1)]
        usable = [at for (a, b), at in steps if a in cells and b in cells and cells[a] != cells[b]]
        found += [(instance, instance.pair(axis, at)) for at in usable[:per_instance]]
    if not found:
        have = ", ".join(sorted({i.form for i in instances})) or "none"
        wanted = "" if forms is None else f" of form {' or '.join(forms)}"
        raise TaskError(
            f"no instance{wanted} has a pair along the {axis} axis ({len(instances)} instances, forms: {have})"
        )
    return found


def check_pairs(per_instance: int) -> int:
    """The argument, if it is 1 or 2; otherwise an :class:`InputError`."""
    if per_instance not in (1, 2):
        raise InputError(
            f"pairs_per_instance is {per_instance!r}; an instance has at most 2 pairs along an axis, so 1 or 2"
        )
    return per_instance


def margins(
    store: ContextStore,
    recipient: Context,
    donors: Sequence[KVCache],
    sites: Sequence[Site],
    answer_ids: tuple[int, int],
) -> tuple[float, list[float]]:
    """Margins logit(second answer) - logit(first) of the unpatched recipient and behind each patched site.

    Cost: one batch of ``len(sites) + 1`` one-token readers.
    """
    reader = Reader.last(recipient.cache, answer_ids)
    out = swap_effects(store.model, recipient.cache, donors, sites, reader)
    return float(out.baseline[1] - out.baseline[0]), (out.logits[:, 1] - out.logits[:, 0]).tolist()


def swap_pair(
    store: ContextStore, pair: Pair, sites: Sequence[Site] | Mapping[Direction, Sequence[Site]]
) -> dict[Direction, Swapped]:
    """Run isolated swaps between the two prompts of a pair, in both directions.

    ``denoising`` puts rows of ``new`` into the cache of ``old``; ``noising`` the reverse. Margins are
    logit(donor's answer) - logit(recipient's answer) at the decision position. The unpatched reader of each batch is the
    recipient of its own direction and the donor of the other one.

    Args:
        store: contexts of the model.
        pair: the two prompts.
        sites: what to replace, the same in both directions or by direction.

    Cost: two prefills (shared through the store) and, per direction, one batch of ``len(sites) + 1`` one-token readers.
    """
    by_direction = sites if isinstance(sites, Mapping) else dict.fromkeys(DIRECTIONS, sites)
    runs: dict[Direction, tuple[float, list[float]]] = {}
    for direction in DIRECTIONS:
        oriented = ends(pair, direction)
        donors = [store.donor(oriented.old, oriented.new)]
        runs[direction] = margins(store, store.get(oriented.old), donors, by_direction[direction], oriented.answer_ids)
    found: dict[Direction, Swapped] = {}
    for direction in DIRECTIONS:
        base, patched = runs[direction]
        donor = -runs[opposite(direction)][0]  # towards this direction's donor
        recoveries = tuple(Recovery(base, donor, m) for m in patched)
        found[direction] = Swapped(direction, base, donor, exclusion(base, donor), recoveries, store.control)
    return found


def single_effects(store: ContextStore, pair: Pair) -> dict[Direction, Swapped]:
    """:func:`swap_pair` with every row from the field to the decision on its own, field first, then the rows behind it.

    Several probes begin with this map, so it is measured once per store and pair, always as a batch of its own: what a probe
    sees does not depend on which probes ran before it.
    """
    field, downstream = field_and_downstream(pair)
    known = _SINGLES.setdefault(store, {})
    key = (pair.old.token_ids, pair.new.token_ids, pair.answer_ids, (*field, -1, *downstream))
    if key not in known:
        known[key] = swap_pair(store, pair, [Site((p,)) for p in (*field, *downstream)])
    return known[key]


def check_fired(swapped: Swapped, what: str) -> None:
    """Refuse a set of swaps, one of them of all rows that differ, of which none moved the margin; a control may do that.

    Raises:
        PatchError: every patched margin is the unpatched one (up to rounding) although the two ends decide differently.
    """
    still = NO_EFFECT * (swapped.donor - swapped.recipient)
    if (
        swapped.competent
        and not swapped.control
        and all(abs(r.patched - r.recipient) <= still for r in swapped.recoveries)
    ):
        raise PatchError(
            f"{what}: {len(swapped.recoveries)} swaps, among them one of all rows, leave the margin at "
            f"{swapped.recipient:.4f}; the patches did not reach the attention of this model"
        )


def end_values(swapped: Swapped) -> dict[str, Json]:
    """The facts about the two unpatched ends that every row of a swap carries."""
    return {
        "recipient_margin": swapped.recipient,
        "donor_margin": swapped.donor,
        "margin_gap": swapped.donor - swapped.recipient,
        "competent": swapped.competent,
    }


def site_values(swapped: Swapped, names: Sequence[str]) -> dict[str, Json]:
    """Recovery, flip, margin and two-way probability of every site, by name; nothing where recoveries are undefined."""
    if swapped.excluded is not None:
        return {}
    values: dict[str, Json] = {}
    for name, recovery in zip(names, swapped.recoveries, strict=True):
        values |= {
            f"{name}_recovery": recovery.value,
            f"{name}_flipped": recovery.flipped,
            f"{name}_margin": recovery.patched,
            f"{name}_probability": recovery.probability,
        }
    return values


def pair_meta(instance: Instance, pair: Pair) -> dict[str, Json]:
    """What a record says about a pair."""
    return {**pair.meta, "instance": instance.id, "form": pair.form, "axis": pair.axis, "group": instance.group}


def field_and_downstream(pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the field, and every later one in front of the decision that is not the field's."""
    field = sorted({*pair.old.positions("field"), *pair.new.positions("field")})
    return tuple(field), tuple(p for p in range(field[0], pair.old.decision) if p not in field)
