"""What an edit of a cached prompt costs: ``python -m benchmarks.edits --out FILE``.

``edit_cost``: a field near the beginning of a prompt changes. ``ratio_to_full`` is the time of a full prefill of the changed
prompt over that of the edit, so 20 means twenty times faster; both are timed in the same round, round by round, and both
include rendering, encoding and planning (``auto`` plans on reads that were recorded when the prompt was first prefilled).
``ms`` and ``tokens`` are those of the edit; ``full_ms`` stands under the method ``full_prefill``.

Rows have the fields of DESIGN section 8 and are put beside those of other benchmarks in ``results.json``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.compose import Row, merge, seconds
from benchmarks.report import FIELDS, quartiles
from experiments.edit_cases import Case, gated_cases
from experiments.organism_cases import organism_cases

METHODS = ("in_place", "erratum", "field_erratum", "auto", "edit_local@32", "full_suffix")
LONG = 2000
BARS = {"erratum": 15.0, "in_place": 20.0}
"""Smallest ``ratio_to_full`` at 2,048 cached tokens."""


def edit_rows(model: Any, case: Case, rounds: int, methods: Sequence[str] = METHODS) -> list[Row]:
    """Every method against a full prefill of the same changed prompt, alternating within a round."""
    plain = case.context(model, record=False)
    recorded = case.context(model, record=True) if "auto" in methods else plain
    value, n = case.values[1], len(case.old)

    def run(method: str) -> Any:
        return (recorded if method == "auto" else plain).edit(case.name, value, method)

    tokens = {method: run(method).report.total_tokens for method in methods}  # and the first, slower call of each
    full = [0.0] * rounds
    spent: dict[str, list[float]] = {method: [] for method in methods}
    for i in range(rounds):
        full[i] = seconds(lambda: run("full_prefill"))
        for method in methods:
            spent[method].append(seconds(lambda method=method: run(method)))
    rows: list[Row] = []
    for method in methods:
        ratios = [f / s for f, s in zip(full, spent[method], strict=True)]
        for metric, values in (
            ("ratio_to_full", ratios),
            ("ms", [1e3 * s for s in spent[method]]),
            ("tokens", [float(tokens[method])]),
        ):
            rows.append(
                {"benchmark": "edit_cost", "case": {"n": n, "method": method}, "metric": metric, **quartiles(values)}
            )
    whole = {"benchmark": "edit_cost", "case": {"n": n, "method": "full_prefill"}}
    return [*rows, {**whole, "metric": "full_ms", **quartiles([1e3 * s for s in full])}]


def missed(rows: Sequence[Row]) -> list[str]:
    """Bars that prompts of 2,000 and more tokens do not reach, one sentence each."""
    found: list[str] = []
    for row in rows:
        bar = BARS.get(row["case"].get("method", ""))
        if row["metric"] == "ratio_to_full" and row["case"]["n"] >= LONG and bar is not None and row["value"] < bar:
            found.append(
                f"{row['case']['method']} at {row['case']['n']} tokens: {row['value']:.1f} times faster, bar {bar:g}"
            )
    return found


def case_of(model: Any, n: int) -> Case:
    """One gated decision whose field stands near the beginning of a prompt of about ``n`` tokens, tail and erratum included."""
    make = organism_cases if model.name.startswith("organism-") else gated_cases
    return make(model.tokenizer, 1, 0, forms=("polarity",), length=n)[0]


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="results.json to merge into; printed when not given")
    given = parser.parse_args(arguments)
    import notelens

    model = notelens.load(given.model, device=given.device)
    rows = [row for n in given.lengths for row in edit_rows(model, case_of(model, n), given.rounds)]
    device = f"{given.device} ({torch.get_num_threads()} threads)"
    rows = [{name: {**row, "device": device}[name] for name in FIELDS} for row in rows]
    if given.out is not None:
        merge(rows, given.out)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    for text in missed(rows):
        sys.stderr.write(f"missed: {text}\n")


if __name__ == "__main__":
    main()
