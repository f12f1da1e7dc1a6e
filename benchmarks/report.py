"""Timings and peaks to ``results.json`` and ``results.md``: ``python -m benchmarks.report runs/bench``.

``results.json`` is a flat list of rows; rows of benchmarks that are not made here stay in it.
"""

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OWN = ("position_map", "layer_position_map", "equality")
FIELDS = ("benchmark", "case", "metric", "value", "q1", "q3", "n", "device")
NAMES = {
    "prefill": "ordinary prefill, per token",
    "engine": "engine (`swap_effects`)",
    "loop": "(a) one-token loop, copied cache",
    "native_8": "(b) native batching, 8 copies",
    "native_32": "(b) native batching, 32 copies",
    "native_64": "(b) native batching, 64 copies",
    "hook_loop": "(c) TransformerBridge hook loop, full forward",
    "nnsight_loop": "(d) nnsight trace, full forward",
    "attribution": "(e) AtP (an estimate), whole map",
}
INTRODUCTION = """# Benchmarks

Made by `make bench`; the numbers are those of `results.json`. A ratio compares two methods timed in the same round: time per
patch of the other method over time per patch of the engine, so above 1 the engine is faster. Values are medians over rounds
with their quartiles in brackets. An error is the largest absolute difference of a margin between the engine and copied caches,
in logits; its brackets hold the quartiles of the largest difference of each round or prompt."""
SHARED = "\n\n**The machine was busy with other work during this run; absolute times and close ratios are not to be trusted.**"
RATIOS = {
    "loop": "ratio_to_loop",
    "native": "ratio_to_native_batch",
    "hook_loop": "ratio_to_hook_loop",
    "nnsight_loop": "ratio_to_nnsight",
    "attribution": "ratio_to_attribution",
}
BARS: tuple[tuple[str, int, str, str, float], ...] = (
    ("position_map", 512, "ratio_to_loop", ">=", 50.0),
    ("position_map", 512, "ratio_to_native_batch", ">=", 6.0),
    ("position_map", 512, "ratio_to_hook_loop", ">=", 200.0),
    ("position_map", 512, "cost_in_prefills", "<=", 1.25),
    ("layer_position_map", 512, "ratio_to_loop", ">=", 80.0),
    ("equality", 128, "max_abs_error", "<=", 1e-4),
)
MEMORY_SLACK_MIB = 512
"""What the engine may take at 2,048 tokens on top of the model and two caches."""

Row = dict[str, Any]
Key = tuple[str, int]


def per_patch(timings: Mapping[str, Any]) -> dict[Key, dict[str, dict[int, float]]]:
    """Seconds per patch (per token for the prefill) by benchmark and length, method, round."""
    found: dict[Key, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for entry in timings["benchmarks"]:
        info = entry["extra_info"]
        if "method" in info:
            seconds = entry["stats"]["total"] / info["patches"]
            found[info["benchmark"], info["n"]][info["method"]][info["round"]] = seconds
    return found


def quartiles(values: Iterable[float]) -> dict[str, Any]:
    """Median, quartiles (linear between neighbours) and number of values."""
    listed = list(values)
    q1, median, q3 = (float(q) for q in np.percentile(listed, [25, 50, 75]))
    return {"value": median, "q1": q1, "q3": q3, "n": len(listed)}


def ratios(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> list[float]:
    """Round by round, for the rounds that both have."""
    return [numerator[r] / denominator[r] for r in sorted(numerator.keys() & denominator.keys())]


def best_batch(methods: Mapping[str, Mapping[int, float]]) -> str | None:
    """The native batch size with the smallest median time per patch; ``None`` where none was timed."""
    sizes = [name for name in methods if name.startswith("native_")]
    return min(sizes, key=lambda name: float(np.median(list(methods[name].values()))), default=None)


def largest(values: Sequence[float], n: int) -> dict[str, Any]:
    """The largest value; its quartiles are those of the given (per round or per prompt) maxima."""
    found = quartiles(values)
    return {**found, "value": max(values), "n": n}


def timing_rows(timings: Mapping[str, Any]) -> list[Row]:
    """Ratios, costs and milliseconds per patch of every benchmark and prompt length."""
    rows: list[Row] = []
    for (benchmark, n), methods in per_patch(timings).items():
        base = {"benchmark": benchmark, "case": {"n": n}}
        engine, native = methods["engine"], best_batch(methods)
        for short, metric in RATIOS.items():
            name = native if short == "native" else short
            if name in methods and (shared := ratios(methods[name], engine)):
                rows.append({**base, "metric": metric, **quartiles(shared)})
        if native is not None:
            size = float(native.removeprefix("native_"))
            rows.append({**base, "metric": "best_native_batch", "value": size, "q1": size, "q3": size, "n": 1})
        if shared := ratios(engine, methods["prefill"]):
            rows.append({**base, "metric": "cost_in_prefills", **quartiles(shared)})
        for name, seconds in methods.items():
            rows.append({**base, "metric": f"ms_per_patch_{name}", **quartiles(1e3 * s for s in seconds.values())})
    return rows


def error_rows(timings: Mapping[str, Any]) -> list[Row]:
    """Differences between the engine and copied caches, and the rank correlation of the estimate."""
    errors: dict[Key, list[list[float]]] = defaultdict(list)
    rows: list[Row] = []
    for entry in timings["benchmarks"]:
        info = entry["extra_info"]
        case = {"benchmark": info["benchmark"], "case": {"n": info["n"]}}
        if info["benchmark"] == "equality":
            case["case"]["prompts"] = info["prompts"]
            rows.append({**case, "metric": "max_abs_error", **largest(info["errors"], info["sites"])})
            rows.append({**case, "metric": "margin_span", **quartiles(info["margin_spans"])})
        elif "errors" in info:
            errors[info["benchmark"], info["n"]].append(info["errors"])
        elif "rank_correlation" in info and info["round"] == 0:
            rho = info["rank_correlation"]
            figures = {"value": rho, "q1": rho, "q3": rho, "n": info["compared"]}
            rows.append({**case, "metric": "attribution_rank_correlation", **figures})
    for (benchmark, n), found in errors.items():
        figures = largest([max(each) for each in found], sum(map(len, found)))
        rows.append({"benchmark": benchmark, "case": {"n": n}, "metric": "max_abs_error", **figures})
    return rows


def memory_rows(measured: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Peaks of each method (the model's weights included), with the sizes that they are made of."""
    rows: list[Row] = []

    def add(n: int, metric: str, value: float) -> None:
        row = {"benchmark": "position_map", "case": {"n": n}, "metric": metric}
        rows.append({**row, "value": value, "q1": value, "q3": value, "n": 1})

    for one in measured:
        peak = one["model_mib"] + one["over_model_mib"]
        if one["method"] == "engine":
            add(one["n"], "peak_mib", peak)
            add(one["n"], "model_mib", one["model_mib"])
            add(one["n"], "cache_mib", one["cache_mib"])
        else:
            add(one["n"], f"peak_mib_{one['method']}", peak)
    return rows


def all_rows(timings: Mapping[str, Any], memory: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Every row, with the fields of :data:`FIELDS` in that order."""
    machine = timings["machine_info"]
    device = f"cpu ({machine['cpu']}, {machine['threads']} threads)"
    rows = [*timing_rows(timings), *error_rows(timings), *memory_rows(memory)]
    return [{name: {**row, "device": device}[name] for name in FIELDS} for row in rows]


def merged(rows: Sequence[Row], path: Path) -> list[Row]:
    """``rows`` and those of other benchmarks that the file already has."""
    before: list[Row] = json.loads(path.read_text()) if path.is_file() else []
    return [row for row in before if row["benchmark"] not in OWN] + list(rows)


# --- markdown ---------------------------------------------------------------------------------------------------------


def _number(x: float) -> str:
    if x != 0 and abs(x) < 0.01:
        return f"{x:.1e}"
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["n"] == 1:
        return _number(row["value"])
    return f"{_number(row['value'])} [{_number(row['q1'])}, {_number(row['q3'])}]"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def _bar_lines(find: Any) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for benchmark, n, metric, sign, bar in BARS:
        row = find(benchmark, n, metric)
        if row is not None:
            met = row["value"] >= bar if sign == ">=" else row["value"] <= bar
            lines.append((f"{benchmark}, {n} tokens: {metric}", f"{sign} {_number(bar)}", _cell(row), _verdict(met)))
    lengths = [(n, row["value"]) for n in (128, 512, 2048, 8192) if (row := find("position_map", n, "ratio_to_loop"))]
    if len(lengths) > 1:
        rising = all(b[1] > a[1] for a, b in itertools.pairwise(lengths))
        shown = ", ".join(_number(value) for _, value in lengths)
        lines.append(("position_map: ratio_to_loop grows with length", "rising", shown, _verdict(rising)))
    peak, model, cache = (find("position_map", 2048, name) for name in ("peak_mib", "model_mib", "cache_mib"))
    if peak is not None:
        bar = model["value"] + 2 * cache["value"] + MEMORY_SLACK_MIB
        met = _verdict(peak["value"] <= bar)
        lines.append(("position_map, 2048 tokens: peak_mib", f"<= {_number(bar)}", _cell(peak), met))
    return lines


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def markdown(rows: Sequence[Row], timings: Mapping[str, Any]) -> str:
    """Tables with quartiles, the machine, and how it was sampled."""
    index = {(r["benchmark"], r["case"]["n"], r["metric"]): r for r in rows}

    def find(benchmark: str, n: int, metric: str) -> Row | None:
        return index.get((benchmark, n, metric))

    def columns(prefix: str, benchmark: str, names: Mapping[str, str]) -> list[list[str]]:
        lines = [[label, *(_cell(find(benchmark, n, prefix + name)) for n in lengths)] for name, label in names.items()]
        return [line for line in lines if set(line[1:]) != {"-"}]

    info = [e["extra_info"] for e in timings["benchmarks"]]
    lengths = sorted({i["n"] for i in info if i["benchmark"] == "position_map"})
    head = ["", *(f"{n:,} tokens" for n in lengths)]
    metrics = {m: m for m in (*RATIOS.values(), "best_native_batch", "cost_in_prefills", "max_abs_error")}
    metrics["attribution_rank_correlation"] = "attribution_rank_correlation"
    peaks = {"peak_mib": NAMES["engine"], **{f"peak_mib_{m}": label for m, label in NAMES.items()}}
    peaks |= {"model_mib": "the weights alone", "cache_mib": "one cache"}
    machine, load = timings["machine_info"], [i["load"] for i in info if "load" in i]
    sections = [
        INTRODUCTION + (SHARED if np.median(load) > machine["threads"] + 1 else ""),
        "## Bars\n\n" + _table(["what", "bar", "median [quartiles]", ""], _bar_lines(find)),
        "## Position map: milliseconds per patch\n\n" + _table(head, columns("ms_per_patch_", "position_map", NAMES)),
        "## Position map: ratios and errors\n\n" + _table(head, columns("", "position_map", metrics)),
    ]
    if sites := [i for i in info if i["benchmark"] == "layer_position_map" and i["method"] == "engine"]:
        lengths = [sites[0]["n"]]
        head = ["", f"{lengths[0]:,} tokens, {sites[0]['patches']:,} sites"]
        body = columns("ms_per_patch_", "layer_position_map", NAMES) + columns("", "layer_position_map", metrics)
        sections.append("## Layer x position map\n\n" + _table(head, body))
    if lengths := sorted({r["case"]["n"] for r in rows if r["metric"] == "peak_mib"}):
        head = ["MiB", *(f"{n:,} tokens" for n in lengths)]
        note = (
            "Each method in a process of its own. The peak counts the weights and everything beyond the loaded model, both\n"
            "prefills included; Python and its libraries are not counted.\n\n"
        )
        sections.append("## Peak memory\n\n" + note + _table(head, columns("", "position_map", peaks)))
    facts = [
        ("processor", machine["cpu"]),
        ("cores / threads used", f"{machine['cores']} / {machine['threads']} ({machine['capability']})"),
        ("model", f"{machine['model']}, {machine['dtype']}"),
        *((name, version) for name, version in machine["versions"].items()),
        ("load average during the run", f"median {np.median(load):.1f}, largest {max(load):.1f}"),
        ("when", timings["datetime"][:16]),
    ]
    sections.append("## Machine\n\n" + _table(["", ""], facts))
    sections.append(_sampling(info))
    return "\n\n".join(sections) + "\n"


def _sampling(info: Sequence[Mapping[str, Any]]) -> str:
    """What was drawn, by benchmark, length and method."""
    counts: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for i in info:
        if "method" in i:
            counts[i["benchmark"], i["n"], i["method"]].append(i["patches"])
    lines = [(b, f"{n:,}", NAMES[m], str(len(c)), f"{c[0]:,}") for (b, n, m), c in counts.items()]
    text = (
        "The recipient and the donor differ in one token near the start, so every row behind it is live; sites are all rows\n"
        "between that token and the reader, which is the last token. Methods alternate within a round and ratios are taken\n"
        "round by round. Where a method runs fewer patches than the map has, they are drawn at random with the round as seed\n"
        "(evenly spaced for the engine at 8,192 tokens) and the time is scaled per patch. Native batching is timed on one\n"
        "batch of each size and compared at its best; sizes whose copied caches exceed 3 GiB are left out. The hook loop and\n"
        "nnsight run a full forward per site (in-forward swaps, whole vocabulary at every position, as their users run them);\n"
        "their donor run is outside the clock, as are the prefills of all methods. A prefill's milliseconds are per token,\n"
        "and `cost_in_prefills` is the engine's time per patch over an ordinary prefill's time per token.\n\n"
    )
    return (
        "## How it was sampled\n\n"
        + text
        + _table(["benchmark", "tokens", "method", "rounds", "patches a round"], lines)
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has timings.json and memory.jsonl")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of results.json and results.md")
    given = parser.parse_args(arguments)
    timings = json.loads((given.folder / "timings.json").read_text())
    peaks = given.folder / "memory.jsonl"
    memory = [json.loads(line) for line in peaks.read_text().splitlines()] if peaks.is_file() else []
    rows = all_rows(timings, memory)
    given.out.mkdir(parents=True, exist_ok=True)
    target = given.out / "results.json"
    lines = ",\n".join(json.dumps(row) for row in merged(rows, target))
    target.write_text(f"[\n{lines}\n]\n")
    (given.out / "results.md").write_text(markdown(rows, timings))


if __name__ == "__main__":
    main()
