"""Time to first token and rotation bandwidth: ``python -m benchmarks.compose --out FILE`` (not at length; see ``--lengths``).

``ttft``: full prefill of a prompt against composing it from a skill that holds all but the request, in one process, methods
alternating within a round; the ratio is taken round by round. The first token's logits are read in both arms. Compiling the
skill is timed too, with the number of uses after which it pays. ``rotation``: bytes of keys and values placed per
second by ``Skill.at`` over those of a plain copy of the same tensors.

Rows have the fields of DESIGN section 8; ``merge`` puts them beside those of other benchmarks in ``results.json``.
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
from notelens.compose import compile_skill, compose

OWN = ("ttft", "rotation")
LENGTHS = (512, 1024, 2048, 4096, 8192)
REQUEST_TOKENS = 16
Row = dict[str, Any]


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ttft_rows(model: Any, lengths: Sequence[int], rounds: int) -> list[Row]:
    """Full prefill against composing, per prompt length."""
    rows: list[Row] = []
    for n in lengths:
        ids = text_case(model.tokenizer, n).recipient_ids
        body, request = ids[:-REQUEST_TOKENS], ids[-REQUEST_TOKENS:]
        compiling = seconds(lambda body=body: compile_skill(model, body, name="body"))
        skill = compile_skill(model, body, name="body", scheme="unrotated")
        head = ids[:1]  # one token in front, so that every row has to be placed anew

        def full(ids: Sequence[int] = (*head, *ids)[:n]) -> Any:
            return model.next_logits(model.prefill(ids).hidden)

        def spliced(head: Any = head, skill: Any = skill, request: Any = request[:-1]) -> Any:
            return model.next_logits(compose(model, [head, skill, request]).hidden)

        spliced()
        whole = [seconds(full)]
        short = [seconds(spliced)]
        for _ in range(rounds - 1):
            whole.append(seconds(full))
            short.append(seconds(spliced))
        ratios = [a / b for a, b in zip(whole, short, strict=True)]
        saved = sorted(a - b for a, b in zip(whole, short, strict=True))[len(whole) // 2]
        for metric, values in (
            ("ttft_ratio", ratios),
            ("full_ms", [1e3 * s for s in whole]),
            ("compose_ms", [1e3 * s for s in short]),
            ("compile_ms", [1e3 * compiling]),
            *([("pays_after_uses", [compiling / saved])] if saved > 0 else []),
        ):
            rows.append({"benchmark": "ttft", "case": {"n": n}, "metric": metric, **quartiles(values)})
    return rows


def rotation_rows(model: Any, n: int, rounds: int) -> list[Row]:
    """Placing a skill against copying its rows."""
    ids = text_case(model.tokenizer, n).recipient_ids
    skill = compile_skill(model, ids, name="body")
    cache = skill.cache

    def copied() -> list[torch.Tensor]:
        return [t.clone() for t in (*cache.keys, *cache.values)]

    skill.at(model, 7)
    copied()
    shares: list[float] = []
    rates: list[float] = []
    for _ in range(rounds):
        moving, copying = seconds(lambda: skill.at(model, 7)), seconds(copied)
        shares.append(copying / moving)
        rates.append(cache.nbytes / moving / 2**30)
    base = {"benchmark": "rotation", "case": {"n": n}}
    return [
        {**base, "metric": "share_of_copy_bandwidth", **quartiles(shares)},
        {**base, "metric": "gib_per_s", **quartiles(rates)},
    ]


def merge(rows: Sequence[Row], path: Path, own: Sequence[str] = OWN) -> None:
    """Put rows into a ``results.json``, in place of older ones of the benchmarks in ``own``."""
    before = json.loads(path.read_text()) if path.is_file() else []
    kept = [row for row in before if row["benchmark"] not in own]
    lines = ",\n".join(json.dumps(row) for row in [*kept, *rows])
    path.write_text(f"[\n{lines}\n]\n")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="results.json to merge into; printed when not given")
    given = parser.parse_args(arguments)
    import notelens

    model = notelens.load(given.model, competence=False, device=given.device)
    rows = ttft_rows(model, given.lengths, given.rounds) + rotation_rows(
        model, min(2048, max(given.lengths)), given.rounds
    )
    device = f"{given.device} ({torch.get_num_threads()} threads)"
    rows = [{name: {**row, "device": device}[name] for name in FIELDS} for row in rows]
    if given.out is not None:
        merge(rows, given.out)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
