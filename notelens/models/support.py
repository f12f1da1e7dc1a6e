"""What is supported, for the README and for ``notelens gate``, written from the registries."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from notelens.attention import ADAPTERS
from notelens.attention.move import adapters
from notelens.cache.hf import CONVERSIONS
from notelens.models import FAMILIES
from notelens.models.refused import REFUSED

if TYPE_CHECKING:
    from notelens.models.model import HFNoteModel

BEGIN, END = "<!-- support table: made by notelens.models.support, checked by tests/test_support.py -->", "<!-- end -->"


def _first_line(entry: object) -> str:
    return (entry.__doc__ or "").strip().splitlines()[0]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *rows)]


def support_table() -> str:
    """The README's tables: representations, families, caches of transformers."""
    representations = [
        (
            f"`{name}`",
            _first_line(a := ADAPTERS.get(name)).rstrip("."),
            a.support,
            a.moves,
            a.limits or "-",
            f"`{a.proof}`",
        )
        for name in ADAPTERS
    ]
    families: list[tuple[str, ...]] = []
    for name in FAMILIES:
        family = FAMILIES.get(name)
        limits = [f"eager attention only ({family.eager_only})"] if family.eager_only else []
        limits += [] if family.bridge_caches else ["hooks on whole prompts only"]
        kind = f"`{family.adapter}`" if family.adapter else "by layer"
        families.append((f"`{name}`", _first_line(family).rstrip("."), kind, "; ".join(limits) or "-"))
    refused = [
        (f"`{kind}`", ", ".join(sorted(t for t in REFUSED if REFUSED[t] == kind)))
        for kind in sorted(set(REFUSED.values()))
    ]
    caches = [(f"`{kind}`", what, f"`{proof}`") for kind, what, proof in CONVERSIONS]
    lines = [
        *_table(("representation", "what it is", "support", "what a move changes", "limits", "proof"), representations),
        "",
        *_table(("family", "checkpoints", "representation", "limits"), families),
        "",
        *_table(("refused for its representation", "model types"), refused),
        "",
        *_table(("transformers cache", "what happens", "proof"), caches),
    ]
    return "\n".join(lines)


def support_lines(model: "HFNoteModel") -> list[str]:
    """What works with a model and what does not, one line each."""
    found = adapters(model)
    names = {ADAPTERS.get(name): name for name in ADAPTERS}
    groups: dict[tuple[str, int | None], list[int]] = {}
    for layer, adapter in enumerate(found):
        groups.setdefault((names[type(adapter)], adapter.facts.window), []).append(layer)
    lines: list[str] = []
    for (name, window), layers in groups.items():
        adapter = ADAPTERS.get(name)
        where = f"layers {_ranges(layers)}: {name}" + (f", window {window}" if window else "")
        lines.append(f"{where}: {adapter.support}; a move changes {adapter.moves}")
        if adapter.limits:
            lines.append(f"  limit: {adapter.limits}")
    if model.family.eager_only:
        lines.append(f"attention kernel: eager only, because of {model.family.eager_only}")
    if not model.family.bridge_caches:
        lines.append("hooks: on whole prompts only")
    if model.geometry.limit:
        lines.append(f"positions: up to {model.geometry.max_positions}, because {model.geometry.limit}")
    if model.quantisation is not None:
        q = model.quantisation
        lines.append(f"quantised: {q.kind}, {q.n_linear} linear layers (torchao {q.version}); {q.kept} are kept")
    if model.drift is not None:
        facts = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in model.drift.items())
        lines.append(f"drift from float32: {facts}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """``0-4, 6`` for 0, 1, 2, 3, 4, 6."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


__all__ = ["BEGIN", "END", "support_lines", "support_table"]
