"""What the card of an organism says: accuracy on held-out prompts, cell by cell, and how it was trained."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.organism_models import Architecture
from notelens.spans import encode
from notelens.tasks.organism import OrganismLanguage
from notelens.tasks.organism_text import KIND_FORMS, Mode
from notelens.zoo.organisms import organism_tokenizer, read_organism

CLAIM = 0.98
"""Accuracy from which the card claims a cell; DESIGN section 4 and the gate of every probe rest on it."""
FILLER = (0, 100, 250, 600)
SPLITS = ("values", "combos")
MODES: tuple[Mode, ...] = ("act", "call", "think")
DIRECT: tuple[Mode, ...] = ("act",)
Wanted = tuple[str, str, Mode, str, str, int | None]
"""Kind, form, mode, order, split and filler of a cell."""


@dataclass(frozen=True)
class Cell:
    """One line of the card: what was asked, how often, how often it was answered right.

    ``filler`` is a number of tokens, or ``None`` for 2 to 5 lines.
    """

    kind: str
    form: str
    mode: str
    order: str
    split: str
    filler: int | None
    n: int
    right: int


@torch.no_grad()
def right_answers(model: Any, texts: Sequence[tuple[tuple[int, ...], int]]) -> list[bool]:
    """Whether greedy decoding writes exactly the supervised text.

    Args:
        model: a transformers model.
        texts: ids of prompt and answer together, and the number of ids of the prompt.
    """
    right = [False] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
    at = 0
    while at < len(order):
        size = max(1, 8192 // len(texts[order[at]][0]))
        rows = order[at : at + size]
        at += size
        width = max(len(texts[i][0]) for i in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for row, i in enumerate(rows):
            ids[row, : len(texts[i][0])] = torch.tensor(texts[i][0])
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        for row, i in enumerate(rows):
            n, stop = texts[i][1], len(texts[i][0])
            right[i] = bool((best[row, n - 1 : stop - 1] == ids[row, n:stop]).all())
    return right


def measure(model: Any, tokenizer: Any, wanted: Iterable[Wanted], n: int, seed: int) -> list[Cell]:
    """Cells of a card, ``n`` prompts each; cells of a prompt's grid are taken in turn."""
    keys, texts = [], []
    for kind, form, mode, order, split, filler in wanted:
        task = OrganismLanguage(split=split, kinds=[kind], forms=[form], order=order, filler=filler)
        for i, scene in enumerate(task.scenes(n, seed + 1000)):
            made = task.render(tokenizer, scene, scene.cells[i % len(scene.cells)], mode=mode)
            ids = encode(tokenizer, made.prompt.text + made.target, templated=True)
            keys.append((kind, form, mode, order, split, filler))
            texts.append((ids, len(made.prompt)))
    found: dict[Any, list[bool]] = {}
    for key, ok in zip(keys, right_answers(model, texts), strict=True):
        found.setdefault(key, []).append(ok)
    return [Cell(*key, n=len(hits), right=sum(hits)) for key, hits in found.items()]


def accuracy_cells(
    path: Path, config: Mapping[str, Any], seed: int, n: int, longest_filler: int, notes_free: bool
) -> list[Cell]:
    """Held-out accuracy of a saved organism: every kind, form, mode, order and split, and long filler.

    The notes-free control claims direct gated decisions with the value first, and is asked for nothing else.
    """
    model, tokenizer = read_organism(path, dict(config)), organism_tokenizer()
    if notes_free:
        short = product(["gated"], KIND_FORMS["gated"], DIRECT, ["value_first"], SPLITS, [None])
        return measure(model, tokenizer, short, n, seed)
    wanted: list[Wanted] = [
        (kind, form, mode, order, split, None)
        for kind, forms in KIND_FORMS.items()
        for form, mode, order, split in product(forms, MODES, ("value_first", "rule_first"), SPLITS)
    ]
    long = product(
        ["gated"], KIND_FORMS["gated"], DIRECT, ["value_first"], SPLITS, [f for f in FILLER if f <= longest_filler]
    )
    return measure(model, tokenizer, [*wanted, *long], n, seed)


def pooled(cells: Sequence[Cell], *names: str) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Right and n over all cells that agree in ``names``."""
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for cell in cells:
        key = tuple(getattr(cell, name) for name in names)
        right, n = found.get(key, (0, 0))
        found[key] = (right + cell.right, n + cell.n)
    return found


def claims(cells: Sequence[Cell]) -> list[str]:
    """What the organism can be asked: ``kind/mode/order`` at or above :data:`CLAIM` on both splits together."""
    short = [c for c in cells if c.filler is None]
    return ["/".join(k) for k, (right, n) in pooled(short, "kind", "mode", "order").items() if right >= CLAIM * n]


def write_card(
    path: Path, architecture: Architecture, config: Mapping[str, Any], facts: Mapping[str, Any], cells: Sequence[Cell]
) -> None:
    """Card beside the weights, for programs (JSON) and for people (Markdown)."""
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    card = {
        "config": dict(config),
        "why": architecture.why,
        "training": dict(facts),
        "claims": claims(cells),
        "accuracy": [asdict(c) for c in cells],
        "sha256": sha,
    }
    path.with_suffix(".json").write_text(json.dumps(card, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    flag = " --notes-free" if facts["notes_free"] else ""
    flag += f" --scale {facts['scale']}" if facts["scale"] != 1 else ""
    flag += "".join(f" --{name} {facts[name]}" for name in ("width", "layers") if facts.get(name))
    parent = facts.get("parent")
    start = (
        f"Started from the weights of {parent} (`experiments/organism_inherit.py`) and trained"
        if parent
        else "Trained from scratch"
    )
    short = [c for c in cells if c.filler is None]
    lines = [
        f"# organism-{path.stem}",
        "",
        f"`{config['model_type']}`: {architecture.why}. {facts['parameters']:,} parameters, {path.stat().st_size / 1e6:.1f} "
        f"MB, bfloat16, sha256 `{sha[:16]}`.",
        "",
        f"{start} by `python -m experiments.train_organisms --family "
        f"{facts['family']} --seed {facts['seed']}{flag}`: {facts['steps']} steps, {facts['trained_tokens']:,} tokens, "
        f"float32, {facts['train_seconds'] / 60:.1f} minutes on {facts['threads']} CPU threads"
        + (
            f", in {facts['parts']} parts that began with the weights of the one before." if facts.get("parts") else "."
        ),
        "",
        "## Accuracy on held-out prompts",
        "",
        "`values`: the field's values were never used in a field or a rule during training. `combos`: this pair of values",
        "never occurred with this pair of actions. Right means that greedy decoding writes the whole answer, chain and call",
        "included.",
        "",
        "| kind | mode | order | values | combos | n each |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    table = pooled(short, "kind", "mode", "order", "split")
    for kind, mode, order in dict.fromkeys(k[:3] for k in table):
        shown = [table[kind, mode, order, s] for s in SPLITS]
        rates = " | ".join(f"{right / n:.3f}" for right, n in shown)
        lines.append(f"| {kind} | {mode} | {order} | {rates} | {shown[0][1]} |")
    long = pooled([c for c in cells if c.filler is not None], "filler", "split")
    if long:
        lines += [
            "",
            "Gated decisions, direct, value first, by tokens of filler:",
            "",
            "| filler | values | combos | n each |",
        ]
        lines.append("| --- | --- | --- | --- |")
        for (filler,) in dict.fromkeys((k[0],) for k in long):
            shown = [long[filler, s] for s in SPLITS]
            lines.append(f"| {filler} | {' | '.join(f'{r / n:.3f}' for r, n in shown)} | {shown[0][1]} |")
    lines += ["", f"Claimed (at least {CLAIM} on both together): {', '.join(claims(cells)) or 'nothing'}.", ""]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
