"""``notelens map``: a note map of any prompt with a marked field, as JSON, safetensors and a figure."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import notelens
from notelens.errors import InputError, RecordError
from notelens.runs.files import reason, write_atomic

if TYPE_CHECKING:
    from notelens.circuits.note_map import NoteMap

SCHEMA_VERSION = 1
DIGITS = 6
DRY_RUN_ANSWERS = ("yes", "no")
"""Read on a random model, which decides nothing, where a dry run names no answers."""


def default_folder(field: str, old: str, new: str) -> Path:
    """``maps/<field>-<old>-<new>`` with everything that is no letter, digit, dot or dash written as ``_``."""
    names = [re.sub(r"[^\w.-]+", "_", part.strip())[:40].strip(".") or "_" for part in (field, old, new)]
    return Path("maps") / "-".join(names)


def check_folder(folder: Path) -> None:
    """Say that results cannot be written here before anything is computed.

    Raises:
        InputError: the folder is a file or lies below one.
        RecordError: the folder, or the nearest one above it, cannot be written to.
    """
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise InputError(f"{folder}: is a file, or lies below one; choose another folder with --out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RecordError(f"{nearest}: cannot be written to; choose another folder with --out")


def read_prompt(path: Path) -> str:
    """The text of a prompt file, without the newline that ends it.

    Raises:
        InputError: the file is missing, unreadable, not UTF-8 or empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: is not UTF-8 text ({e.reason} at byte {e.start})") from e
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({reason(e)})") from e
    if not text.strip():
        raise InputError(f"{path}: is empty; write a prompt with one field such as {{{{status}}}}")
    return text.removesuffix("\n")


def _value(value: float) -> float | None:
    """A number for JSON; ``None`` where it is not defined."""
    return round(float(value), DIGITS) if math.isfinite(value) else None


def _finite(facts: Any) -> Any:
    """Plain data with numbers that JSON can hold (a failed check of the gate may carry an infinite difference)."""
    if isinstance(facts, dict):
        return {k: _finite(v) for k, v in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(v) for v in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


def _values(values: Any) -> list[float | None]:
    return [_value(v) for v in values.tolist()] if hasattr(values, "tolist") else [_value(v) for v in values]


def as_json(found: "NoteMap") -> dict[str, Any]:
    """Everything of a map but the layer map (which is in the safetensors file), as plain data.

    Recoveries that are not defined are ``None``, with the reason under ``excluded``; ``shift`` (logits) is always there.
    """
    old, new = found.pair.old, found.pair.new
    smallest = found.minimal
    return {
        "schema_version": SCHEMA_VERSION,
        "notelens": notelens.__version__,
        "swap": found.swap,
        "model": _finite(found.facts),
        "old": old.text,
        "new": new.text,
        "tokens": list(old.tokens),
        "regions": list(old.regions),
        "token_ids": list(old.token_ids),
        "changed_rows": list(found.pair.differing),
        "answers": [old.answer, new.answer],
        "answer_ids": list(found.pair.answer_ids),
        "margins": {k: _values(v) for k, v in found.margins.items()},
        "excluded": dict(found.excluded),
        "shift": {k: _values(v) for k, v in found.shifts.items()},
        "recovery": {k: _values(v) for k, v in found.positions.items()},
        "field_only": {k: _value(v) for k, v in found.field_only.items()},
        "notes": {k: _value(v) for k, v in found.notes.items()},
        "flipping_rows": {k: list(found.flipping(k)) for k in found.positions},
        "recompute": {"in_place": _value(found.in_place), "rows": _values(found.recompute)},
        "attribution": None
        if found.attribution is None
        else {
            "note": "first-order estimate, not a measurement",
            "recovery": _values(found.attribution),
            "rank_correlation": None if found.rank_correlation is None else _value(found.rank_correlation),
            "false_negatives": list(found.false_negatives),
        },
        "minimal_set": None
        if smallest is None
        else {
            "rows": list(smallest.rows),
            "tokens": [old.tokens[r] for r in smallest.rows],
            "path": _values(smallest.path),
            "recovery": _value(smallest.recovery),
            "recomputed": _value(smallest.recomputed),
            "flips": smallest.flips,
            "recomputed_flips": smallest.recomputed_flips,
        },
    }


def write_map(found: "NoteMap", folder: Path) -> list[Path]:
    """Write ``map.json``, ``map.safetensors`` (float32 maps) and ``map.png``/``.svg``; each is whole or absent.

    Raises:
        InputError: the folder is a file.
        RecordError: a file cannot be written.
    """
    from safetensors.torch import save

    from notelens.report.map_figure import draw_map
    from notelens.report.style import save as save_figure

    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RecordError(f"{folder}: could not be created ({reason(e)}); choose another folder with --out") from e
    tensors = {f"shift.{k}": v for k, v in found.shifts.items()}
    tensors |= {f"recovery.{k}": v for k, v in found.positions.items()}
    tensors |= {"recompute": found.recompute}
    tensors |= {k: v for k, v in (("layers", found.layers), ("attribution", found.attribution)) if v is not None}
    data = as_json(found)
    layers = None if found.layers is None else found.layers.tolist()
    figure = draw_map(data, layers)
    target = folder / "map.safetensors"
    write_atomic(target, save({k: v.float().contiguous() for k, v in tensors.items()}, metadata={"swap": found.swap}))
    write_atomic(folder / "map.json", json.dumps(data, indent=1, allow_nan=False) + "\n")
    return [folder / "map.json", target, *save_figure(figure, folder, "map")]


def summary(found: "NoteMap", top: int = 8) -> list[str]:
    """What a map says, in a few lines."""
    pair = found.pair
    lines: list[str] = []
    for direction, (low, high) in found.margins.items():
        state = (
            f"recovery not defined: {found.excluded[direction]}"
            if direction in found.excluded
            else f"field rows alone {found.field_only[direction]:.3f}, all rows behind it {found.notes[direction]:.3f}"
        )
        lines.append(f"{direction}: margin {low:.2f}, of the donor {high:.2f}; {state}")
    defined = "denoising" not in found.excluded
    effects = found.positions["denoising"] if defined else found.shifts["denoising"]
    unit = "recovery, transplanted | recomputed in the stale cache" if defined else "change of the margin in logits"
    lines.append(f"strongest rows behind the field ({unit}):")
    for row in found.ranking()[:top]:
        again = f" | {found.recompute[row]:>7.3f}" if defined else ""
        lines.append(f"  {row:>5}  {pair.old.tokens[row]!r:<16} {effects[row]:>7.3f}{again}")
    if found.rank_correlation is not None:
        lines.append(
            f"attribution estimate: rank correlation {found.rank_correlation:.2f} with the exact map, "
            f"{len(found.false_negatives)} rows missed"
        )
    if found.minimal is not None:
        smallest = found.minimal
        verdict = "flips" if smallest.flips else "does not flip"
        again = "flips" if smallest.recomputed_flips else "does not flip"
        lines.append(
            f"smallest set found: rows {', '.join(map(str, smallest.rows))}; transplanted it {verdict} the decision "
            f"({smallest.recovery:.3f}), recomputed it {again} it ({smallest.recomputed:.3f})"
        )
    return lines


def make_map(
    model_name: str,
    prompt: Path,
    field: str,
    old: str,
    new: str,
    *,
    answers: tuple[str, str] | None,
    rendering: str,
    layers: bool,
    on_step: Callable[[str], None],
    **load_options: Any,
) -> "NoteMap":
    """Load, build the pair, map.

    Raises:
        InputError and others: as :func:`notelens.models.load.load`, ``pair_from_text`` and ``note_map``.
    """
    from notelens.spans import RENDERINGS

    if rendering not in RENDERINGS:
        raise InputError(f"unknown rendering {rendering!r}; known: {', '.join(RENDERINGS)}")
    text = read_prompt(prompt)
    from notelens.circuits.note_map import note_map
    from notelens.circuits.text_pair import check_text, pair_from_text
    from notelens.models.load import load

    check_text(text, field, old, new)
    on_step("load the model")
    model = load(model_name, **load_options)
    if answers is None and load_options.get("dry_run"):
        answers = DRY_RUN_ANSWERS
    pair = pair_from_text(model, text, field, old, new, answers=answers, rendering=rendering)
    return note_map(model, pair, layers=layers, on_step=on_step)
