"""Time to first token and rotation bandwidth: ``python -m benchmarks.compose --out FILE`` (minutes at 8,192 tokens).

``ttft``: full prefill of a prompt against composing it from a skill that holds all but the request, in one process, methods
alternating within a round; the ratio is taken round by round. The first token's logits are read in both arms, and one token in
front of the skill makes sure that every row has to be placed anew. Compiling the skill is timed too, with the number of uses
after which it pays. ``--model organism-sized`` is a random model of an organism's sizes with 32k positions.

``rotation``: bytes of keys turned per second over those of a plain copy of the same keys, both into memory that is there; and
the same for placing keys and values, and for keys stored unrotated, whose every row turns by another angle.

On a machine that does other work too, ``--clock cpu`` takes the processor time of this one-threaded process instead of wall
time; the device of a row says so. Rows have the fields of DESIGN section 8; ``merge`` puts them beside those of other
benchmarks.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import FIELDS, quartiles
from benchmarks.workbench import text_case
from notelens.attention.move import adapters, move_rows_into
from notelens.cache.room import Room
from notelens.compose import compile_skill
from notelens.compose.timing import first_token

LENGTHS = (512, 1024, 2048, 4096, 8192)
REQUEST_TOKENS = 16
ORGANISM_SIZED = "organism-sized"
Row = dict[str, Any]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call."""
    start = clock()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def ttft_rows(
    model: Any, lengths: Sequence[int], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[Row]:
    """Full prefill against composing, per prompt length."""
    rows: list[Row] = []
    for n in lengths:
        ids = text_case(model.tokenizer, n - 1).recipient_ids
        cut = 1 - REQUEST_TOKENS
        found = first_token(model, ids[:1], ids[:cut], ids[cut:], rounds=rounds, clock=clock)
        for metric, values in (
            ("ttft_ratio", list(found.ratios)),
            ("full_ms", [1e3 * s for s in found.full]),
            ("compose_ms", [1e3 * s for s in found.composed]),
            ("compile_ms", [1e3 * found.compiling]),
            *([("pays_after_uses", [found.pays_after])] if found.pays_after < float("inf") else []),
        ):
            rows.append({"benchmark": "ttft", "case": {"n": n}, "metric": metric, **quartiles(values)})
    return rows


def rotation_rows(model: Any, n: int, rounds: int, clock: Callable[[], float] = time.perf_counter) -> list[Row]:
    """Placing a skill's rows against copying them, both into memory that has been written before."""
    cache = compile_skill(model, text_case(model.tokenizer, n).recipient_ids, name="body").cache
    room, other = Room(cache, n), Room(cache, n)
    moved = torch.arange(7, n + 7)
    steps = torch.arange(n)

    def placed() -> None:
        move_rows_into(model, cache, moved, room)

    def copied() -> None:
        other.write(cache)

    def turned(by: torch.Tensor) -> None:
        for layer, adapter in enumerate(adapters(model)):
            adapter.move_into(cache.keys[layer], no_values, by, (room.keys[layer], no_values.clone()))

    def copied_keys() -> None:
        for layer, keys in enumerate(cache.keys):
            other.keys[layer].copy_(keys)

    no_values = cache.values[0][:, :0]
    keys_only = sum(k.numel() * k.element_size() for k in cache.keys)
    everywhere = torch.full((n,), 7)
    arms: dict[str, tuple[Callable[[], None], Callable[[], None], int]] = {
        "share_of_copy_bandwidth": (lambda: turned(everywhere), copied_keys, keys_only),
        "share_of_copy_bandwidth_unrotated": (lambda: turned(steps), copied_keys, keys_only),
        "share_of_copy_bandwidth_with_values": (placed, copied, cache.nbytes),
    }
    rows: list[Row] = []
    for metric, (moving, copying, n_bytes) in arms.items():
        moving()
        copying()
        pairs = [(seconds(moving, clock), seconds(copying, clock)) for _ in range(rounds)]
        base = {"benchmark": "rotation", "case": {"n": n}}
        rows.append({**base, "metric": metric, **quartiles([b / a for a, b in pairs])})
        rate = metric.replace("share_of_copy_bandwidth", "gib_per_s")
        rows.append({**base, "metric": rate, **quartiles([n_bytes / a / 2**30 for a, _ in pairs])})
    return rows


def organism_sized(positions: int) -> Any:
    """A random model of an organism's sizes with room for ``positions``."""
    from notelens.models.load import default_cache_dir, wrap
    from notelens.models.random import build_model, random_config
    from notelens.zoo.embedded import embedded_tokenizer

    tokenizer = embedded_tokenizer("smollm2", cache_dir=default_cache_dir())
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "head_dim": 32}
    config = random_config("llama", len(tokenizer), **sizes, max_position_embeddings=positions)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return wrap(build_model(config).eval(), tokenizer, name=ORGANISM_SIZED, gate=False)


def merge(rows: Sequence[Row], path: Path) -> None:
    """Put rows into a ``results.json``, in place of older ones of the same benchmark and case."""
    before = json.loads(path.read_text()) if path.is_file() else []
    own = [(row["benchmark"], row["case"]) for row in rows]
    kept = [row for row in before if (row["benchmark"], row["case"]) not in own]
    lines = ",\n".join(json.dumps(row) for row in [*kept, *rows])
    path.write_text(f"[\n{lines}\n]\n")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help=f"as notelens.load takes it, or {ORGANISM_SIZED!r}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--rotation", type=int, default=2048, help="rows of the rotation benchmark; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--out", type=Path, help="results.json to merge into; printed when not given")
    given = parser.parse_args(arguments)
    if given.clock == "cpu" and (torch.get_num_threads() != 1 or given.device != "cpu"):
        parser.error("--clock cpu adds up the time of all threads; set OMP_NUM_THREADS=1 and --device cpu")
    import notelens

    own = given.model == ORGANISM_SIZED
    model = (
        organism_sized(max([*given.lengths, given.rotation]) + 8)
        if own
        else notelens.load(given.model, competence=False, device=given.device)
    )
    clock = CLOCKS[given.clock]
    rows = ttft_rows(model, given.lengths, given.rounds, clock)
    if given.rotation:
        rows += rotation_rows(model, given.rotation, max(given.rounds, 5), clock)
    time_is = ", processor time" if given.clock == "cpu" else ""
    device = f"{given.device} ({torch.get_num_threads()} threads{time_is})"
    named = {"model": given.model} if given.model != "smollm2" else {}
    rows = [{**row, "case": {**row["case"], **named}, "device": device} for row in rows]
    rows = [{name: row[name] for name in FIELDS} for row in rows]
    if given.out is not None:
        merge(rows, given.out)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
