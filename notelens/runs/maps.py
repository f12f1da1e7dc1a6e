"""``notelens map``: a note map of any prompt with a marked field, as JSON, safetensors and a figure."""

import json
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


def read_prompt(path: Path) -> str:
    """The text of a prompt file.

    Raises:
        InputError: the file is missing, unreadable, not UTF-8 or empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: is not UTF-8 text ({e.reason} at byte {e.start})") from e
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({reason(e)})") from e
    if not text.strip():
        raise InputError(f"{path}: is empty; write a prompt with one field such as {{{{status}}}}")
    return text


def _floats(values: Any) -> list[float]:
    return [round(float(v), DIGITS) for v in values]


def as_json(found: "NoteMap") -> dict[str, Any]:
    """Everything of a map but the layer map (which is in the safetensors file), as plain data."""
    old, new = found.pair.old, found.pair.new
    smallest = found.minimal
    return {
        "schema_version": SCHEMA_VERSION,
        "notelens": notelens.__version__,
        "swap": found.swap,
        "model": found.facts,
        "old": old.text,
        "new": new.text,
        "tokens": list(old.tokens),
        "regions": list(old.regions),
        "token_ids": list(old.token_ids),
        "changed_rows": list(found.pair.differing),
        "answers": [old.answer, new.answer],
        "answer_ids": list(found.pair.answer_ids),
        "margins": {k: _floats(v) for k, v in found.margins.items()},
        "excluded": dict(found.excluded),
        "recovery": {k: _floats(v) for k, v in found.positions.items()},
        "recompute": {"in_place": round(found.in_place, DIGITS), "rows": _floats(found.recompute)},
        "attribution": None
        if found.attribution is None
        else {
            "note": "first-order estimate, not a measurement",
            "recovery": _floats(found.attribution),
            "rank_correlation": found.rank_correlation,
            "false_negatives": list(found.false_negatives),
        },
        "minimal_set": None
        if smallest is None
        else {
            "rows": list(smallest.rows),
            "tokens": [old.tokens[r] for r in smallest.rows],
            "path": _floats(smallest.path),
            "recovery": round(smallest.recovery, DIGITS),
            "recomputed": round(smallest.recomputed, DIGITS),
            "flips": smallest.flips,
        },
    }


def write_map(found: "NoteMap", folder: Path) -> list[Path]:
    """Write ``map.json``, ``map.safetensors`` (float32 maps) and ``map.png``/``.svg``; each is whole or absent.

    Raises:
        RecordError: a file cannot be written.
    """
    from safetensors.torch import save

    from notelens.report.map_figure import draw_map
    from notelens.report.style import save as save_figure

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RecordError(f"{folder}: could not be created ({reason(e)}); choose another folder with --out") from e
    tensors = {f"recovery.{k}": v.float().contiguous() for k, v in found.positions.items()}
    tensors["recompute"] = found.recompute.float().contiguous()
    if found.layers is not None:
        tensors["layers"] = found.layers.float().contiguous()
    if found.attribution is not None:
        tensors["attribution"] = found.attribution.float().contiguous()
    data = as_json(found)
    target, part = folder / "map.safetensors", folder / ".map.safetensors.part"
    try:
        part.write_bytes(save(tensors, metadata={"swap": found.swap}))
        part.replace(target)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise RecordError(f"{target}: could not be written ({reason(e)})") from e
    write_atomic(folder / "map.json", json.dumps(data, indent=1) + "\n")
    layers = None if found.layers is None else found.layers.tolist()
    return [folder / "map.json", target, *save_figure(draw_map(data, layers), folder, "map")]


def summary(found: "NoteMap", top: int = 8) -> list[str]:
    """What a map says, in a few lines."""
    pair = found.pair
    lines: list[str] = []
    for direction, (low, high) in found.margins.items():
        state = f"excluded: {found.excluded[direction]}" if direction in found.excluded else "competent"
        lines.append(f"{direction}: margin {low:.2f} unpatched, {high:.2f} at the donor ({state})")
    effects = found.positions["denoising"]
    lines.append(f"isolated swaps, field rows alone: {float(effects[list(pair.differing)].sum()):.3f} (sum of single rows)")
    lines.append(f"strongest {top} rows behind the field (isolated transplant | recomputed in the stale cache):")
    for row in found.ranking()[:top]:
        lines.append(f"  {row:>5}  {pair.old.tokens[row]!r:<16} {effects[row]:>7.3f} | {found.recompute[row]:>7.3f}")
    if found.rank_correlation is not None:
        lines.append(
            f"attribution estimate: rank correlation {found.rank_correlation:.2f} with the exact map, "
            f"{len(found.false_negatives)} rows missed"
        )
    if found.minimal is not None:
        verdict = "flips the decision" if found.minimal.flips else "does not flip the decision"
        lines.append(
            f"greedy minimal set: {len(found.minimal.rows)} rows {list(found.minimal.rows)}, {verdict} "
            f"(transplanted {found.minimal.recovery:.3f}, recomputed {found.minimal.recomputed:.3f})"
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
    from notelens.circuits.note_map import note_map, pair_from_text
    from notelens.models.load import load

    model = load(model_name, **load_options)
    pair = pair_from_text(model, text, field, old, new, answers=answers, rendering=rendering)
    return note_map(model, pair, layers=layers, on_step=on_step)
