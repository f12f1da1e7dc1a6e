"""Aggregates of a serving benchmark from its records, as a table and as rows of ``benchmarks/results.json``.

Percentiles, inter-token times and throughputs have intervals from circular blocks of requests in the order in which they were
due (requests of one queue resemble each other); rates of right answers have Wilson intervals over scenario families; a hit rate
is the engine's own count over the timed window and has an interval only where several loads are pooled.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from notelens.errors import InputError, RecordError
from notelens.runs.files import reason, write_atomic
from notelens.runs.manifest import read_manifest
from notelens.runs.records import Line, Records, read_records
from notelens.runs.serve_record import CAPACITY, CELL, EXPERIMENT, HEADLINE_ARM
from notelens.runs.tables import FORMATS, Table, markdown_grid, md, render
from notelens.serving.metrics import UNAVAILABLE, shown
from notelens.serving.workload import BASELINE
from notelens.stats import Estimate, block_statistic, cluster_rate, cluster_statistic, wilson
from notelens.stats.estimate import Floats

QUANTILES = (0.5, 0.9, 0.99)
FEW_TAIL = "few_tail"
MIN_TAIL = 5
"""Requests beyond a percentile below which it is flagged: its interval then ends at the slowest request."""
FEW_BATCHES = "few_batches"
MIN_BATCHES = 5
"""Groups of answers that ended together below which a throughput has no interval: resampled gaps within a group are near zero,
and a draw without the long ones says that the engine is as fast as one likes."""
TOGETHER = 0.1
"""Share of the mean gap between answers up to which two of them ended together."""
BENCHMARK = "serve"
READING = (
    "TTFT counts from the moment a request was due, so waiting in a queue is part of it; offered_rps null: all at once. "
    "Ratios: baseline's TTFT over the arm's, arm's throughput over the baseline's. Below the baseline's capacity a TTFT "
    "ratio compares prefills; above it mostly the growth of the baseline's queue.",
    "n counts requests, for pooled hit rates loads. Intervals are 95 %; goodput and hit rates of one cell have none.",
)
"""What a reader of a table must know, whichever engine it is."""


class _Lines:
    """Collects aggregate lines with the fields that all of them share."""

    def __init__(self, manifest: Mapping[str, Any], level: float) -> None:
        self.lines: list[Line] = []
        self.seed, self.level = int(manifest["seed"]), level
        self.base: Line = {
            "experiment": EXPERIMENT, "model": manifest["engine"]["model"], "revision": manifest["engine"]["version"],
            "seed": self.seed, "gate": None, "config": manifest["config_hash"], "swap": "none", "paper_value": None,
        }  # fmt: skip

    def add(
        self, metric: str, arm: str, e: Estimate, unit: str, *, flags: Sequence[str] = (),
        reasons: Mapping[str, int] | None = None, **params: Any,
    ) -> None:  # fmt: skip
        """One line."""
        lost = dict(reasons or {})
        self.lines.append({
            **self.base, "metric": metric, "method": arm, "params": params, "value": e.value, "lo": e.lo, "hi": e.hi,
            "n": e.n, "n_excluded": sum(lost.values()), "reasons": lost, "unit": unit, "flags": [*e.flags, *flags],
            "n_clusters": e.n_clusters, "interval": e.method, "level": e.level,
        })  # fmt: skip

    def series(
        self, metric: str, arm: str, samples: Sequence[Sequence[float]], statistic: Callable[..., Floats], unit: str,
        *, paired: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        """One line from series of numbers."""
        e = block_statistic(samples, statistic, paired=paired, seed=self.seed, level=self.level)
        self.add(metric, arm, e, unit, **more)

    def throughput(
        self, metric: str, arm: str, gaps: Sequence[Sequence[float]], statistic: Callable[..., Floats], unit: str,
        *, reasons: Mapping[str, int], paired: bool = False, **params: Any,
    ) -> None:  # fmt: skip
        """One line from gaps between completions; without an interval where most answers ended together."""
        batches = min(map(_batches, gaps))
        if batches >= MIN_BATCHES or not all(gaps):
            self.series(metric, arm, gaps, statistic, unit, paired=paired, reasons=reasons, **params)
            return
        value = float(statistic(*(np.asarray([g], dtype=np.float64) for g in gaps))[0])
        e = Estimate(value if np.isfinite(value) else None, None, None, len(gaps[0]), batches, "none", self.level)
        self.add(metric, arm, e, unit, flags=[FEW_BATCHES], reasons=reasons, **params)

    def share(self, metric: str, arm: str, rows: Sequence[Line], key: str = "right", **more: Any) -> None:
        """One line from truth values by scenario family."""
        e = cluster_rate([bool(r[key]) for r in rows], [str(r["family"]) for r in rows], self.level)
        self.add(metric, arm, e, "share of answers", **more)


def aggregates(records: Records, manifest: Mapping[str, Any], level: float = 0.95) -> list[Line]:
    """Aggregate lines of all whole cells, those of a load beside each other and pooled ones first."""
    out = _Lines(manifest, level)
    cells = {(str(c[0]["load"]), str(c[0]["arm"])): c for key, c in records.items.items() if key[1] == CELL}
    objective = float(manifest["config"]["ttft_objective_ms"])
    for arm in [str(a) for a in manifest["config"]["arms"]]:
        _pooled(out, arm, [c for (_, a), c in cells.items() if a == arm])
    for key, lines in records.items.items():
        if key[1] == CAPACITY:
            answered = _answered(lines)
            out.throughput("capacity_rps", BASELINE, [_gaps(answered)], _rate, "requests/s", reasons=_lost(lines))
            out.series("closed_loop_ttft_ms", BASELINE, [[r["ttft_ms"] for r in answered]], _quantile(0.5), "ms", q=0.5)
    for (load, arm), lines in cells.items():
        _cell(out, load, arm, lines, objective)
        baseline = cells.get((load, BASELINE))
        if baseline is not None and arm != BASELINE:
            _ratios(out, load, arm, lines, baseline)
    return out.lines


def _pooled(out: _Lines, arm: str, cells: Sequence[Sequence[Line]]) -> None:
    """What does not depend on the load, over all loads."""
    facts = [c[0] for c in cells]
    counted = [(f["hits"], f["queries"]) for f in facts if f["hit_rate"] is not None]
    lost = {str(f["hit_reason"]): 1 for f in facts if f["hit_rate"] is None}
    if counted:
        e = cluster_statistic(counted, lambda t: t[:, 0] / t[:, 1], len(counted), seed=out.seed, level=out.level)
        out.add("prefix_hit_rate", arm, e, "share of tokens", reasons=lost)
    elif facts:
        out.add("prefix_hit_rate", arm, Estimate(None, None, None, 0, 0, UNAVAILABLE), "share of tokens", reasons=lost)
    rows = [r for c in cells for r in c[1:]]
    right = [r for r in rows if r["excluded"] is None]
    out.share("p_correct", arm, right, reasons=_reasons(rows))
    for changed in (True, False):
        out.share("p_correct", arm, [r for r in right if r["changed"] is changed], changed=changed)
    out.share("p_stale_answer", arm, [r for r in right if r["changed"]], "stale_answer", changed=True)


def _cell(out: _Lines, load: str, arm: str, lines: Sequence[Line], objective: float) -> None:
    """Times and rates of one arm under one load."""
    facts, answered, lost = lines[0], _answered(lines), _lost(lines)
    n, params = len(answered), {"load": load, "offered_rps": facts["offered_rate"]}
    ttft = [float(r["ttft_ms"]) for r in answered]
    for q in QUANTILES:
        tail = [FEW_TAIL] if n * (1 - q) < MIN_TAIL else []
        out.series("ttft_ms", arm, [ttft], _quantile(q), "ms", flags=tail, reasons=lost, **params, q=q)
    gaps = [float(r["itl_ms"]) for r in answered if r["itl_ms"] is not None]
    short = {"answer of one token or chunk": n - len(gaps)} if len(gaps) < n else {}
    out.series("itl_ms", arm, [gaps], _mean, "ms", reasons={**lost, **short}, **params)
    out.throughput("throughput_rps", arm, [_gaps(answered)], _rate, "requests/s", reasons=lost, **params)
    within = [r for r in answered if r["ttft_ms"] <= objective]
    share = wilson(len(within), len(lines) - 1, out.level)
    out.add("within_objective", arm, share, "share of requests", **params, objective_ms=objective)
    good = len(within) / float(facts["elapsed_s"]) if facts["elapsed_s"] else None
    out.add("goodput_rps", arm, Estimate(good, None, None, len(within), len(within), "none"), "requests/s",
            reasons=lost, **params, objective_ms=objective)  # fmt: skip
    reasons = {} if facts["hit_rate"] is not None else {str(facts["hit_reason"]): 1}
    hit = Estimate(facts["hit_rate"], None, None, n, 1, "engine's counters")
    out.add("prefix_hit_rate", arm, hit, "share of tokens", reasons=reasons, **params)
    wait = Estimate(facts["queue_ms"], None, None, n, 1, "engine's counters")
    out.add("queue_ms", arm, wait, "ms", **params)
    out.share("p_correct", arm, answered, reasons=lost, **params)


def _ratios(out: _Lines, load: str, arm: str, lines: Sequence[Line], baseline: Sequence[Line]) -> None:
    """How many times the baseline waits longer, and how many times this arm gets more done, over requests that both answered.

    Both met the same arrivals, so requests are resampled in pairs.
    """
    both = {r["request"] for r in _answered(lines)} & {r["request"] for r in _answered(baseline)}
    own, base = ([r for r in _answered(x) if r["request"] in both] for x in (lines, baseline))
    reasons = {f"baseline: {k}": v for k, v in _lost(baseline).items()} | _lost(lines)
    more: dict[str, Any] = {"paired": True, "reasons": reasons, "load": load}
    for q in QUANTILES:
        ttft = [[float(r["ttft_ms"]) for r in rows] for rows in (base, own)]
        out.series(f"p{100 * q:.0f}_ttft_ratio", arm, ttft, _quantile_ratio(q), "ratio", **more)
    out.throughput("throughput_ratio", arm, [_gaps(base), _gaps(own)], _mean_ratio, "ratio", **more)


def _answered(lines: Sequence[Line]) -> list[Line]:
    """Rows with an answer, in the order in which they were due."""
    return [r for r in lines[1:] if r["excluded"] is None]


def _lost(lines: Sequence[Line]) -> dict[str, int]:
    return _reasons(lines[1:])


def _reasons(rows: Iterable[Line]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        if row["excluded"] is not None:
            found[str(row["excluded"])] = found.get(str(row["excluded"]), 0) + 1
    return found


def _gaps(answered: Sequence[Line]) -> list[float]:
    """Seconds between completions, the first from the start of the load; their mean is one over the throughput."""
    done = sorted(float(r["done_s"]) for r in answered)
    return [b - a for a, b in zip([0.0, *done], done, strict=False)]


def _batches(gaps: Sequence[float]) -> int:
    """Groups of answers that ended together."""
    return sum(gap > TOGETHER * sum(gaps) / len(gaps) for gap in gaps)


def _quantile(q: float) -> Callable[[Floats], Floats]:
    return lambda x: np.quantile(x, q, axis=1)


def _quantile_ratio(q: float) -> Callable[[Floats, Floats], Floats]:
    return lambda a, b: _over(np.quantile(a, q, axis=1), np.quantile(b, q, axis=1))


def _mean(x: Floats) -> Floats:
    return x.mean(axis=1)


def _rate(gaps: Floats) -> Floats:
    return _over(np.ones(len(gaps)), gaps.mean(axis=1))


def _mean_ratio(a: Floats, b: Floats) -> Floats:
    return _over(a.mean(axis=1), b.mean(axis=1))


def _over(a: Floats, b: Floats) -> Floats:
    return np.divide(a, b, out=np.full(len(a), np.nan), where=b > 0)


# --- tables -----------------------------------------------------------------------------------------------------------


def serve_table(folder: Path) -> Table:
    """The table of a serving benchmark, whole or partial.

    Raises:
        InputError: the folder holds none.
        RecordError: manifest or records cannot be read.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("kind") != "serve":
        raise InputError(f"{folder}: holds no serving benchmark; give the folder that 'notelens serve-bench' wrote to")
    records = read_records(folder)
    done = records.aggregates.get(EXPERIMENT)
    return Table(str(manifest["name"]), _header(manifest, records), tuple(done or aggregates(records, manifest)))


def _header(manifest: Mapping[str, Any], records: Records) -> tuple[str, ...]:
    engine: Mapping[str, Any] = manifest["engine"]
    config: Mapping[str, Any] = manifest["config"]
    lengths = [r["n_prompt"] for r in records.rows() if r.get("arm") == BASELINE and r.get("n_prompt")]
    tokens = f"{min(lengths)} to {max(lengths)}" if lengths else UNAVAILABLE
    repeat = shown(engine["reuse"]) if engine["reuse"] is not None else UNAVAILABLE
    lines = [
        f"Engine: {engine_text(engine)}; share of a known repeat that was cached: {repeat}.",
        f"Baseline: {BASELINE}, prompts of {tokens} tokens, {config['prompt']['max_tokens']} output tokens at most; every cell "
        f"has {config['warm_up']} untimed requests per policy first and a cache salt of its own.",
        *READING,
        *[str(note) for note in engine["notes"]],
    ]
    if EXPERIMENT not in records.probes:
        marks = [str(x) for x in manifest["marks"]]
        lines.insert(
            0, f"PARTIAL: {'; '.join(marks) or 'not finished'}. Run the same command again to measure what is missing."
        )
    return tuple(lines)


def engine_text(engine: Mapping[str, Any]) -> str:
    """What a manifest says about its engine, in words."""
    s: Mapping[str, Any] = engine["settings"]
    caching = {True: "on", False: "off", None: UNAVAILABLE}[s["prefix_caching"]]
    return (
        f"{engine['model']}, version {engine['version'] or UNAVAILABLE}, blocks of {s['block_size'] or UNAVAILABLE} tokens, "
        f"prefix caching {caching}"
    )


SUMMARY = (
    "load",
    "arm",
    "TTFT p50",
    "p90",
    "p99",
    "p90 ratio",
    "throughput",
    "ratio",
    "goodput",
    "hit rate",
    "P(correct)",
    "n",
)


def summary(table: Table) -> str:
    """One line per cell: the numbers to read first, times in milliseconds, rates in requests a second."""
    cells: dict[tuple[str, str], dict[str, Line]] = {}
    for row in table.rows:
        if "load" in row["params"]:
            metric = f"{row['metric']} {row['params']['q']:g}" if "q" in row["params"] else str(row["metric"])
            cells.setdefault((row["params"]["load"], row["method"]), {})[metric] = row
    names = (("ttft_ms 0.5", ".0f"), ("ttft_ms 0.9", ".0f"), ("ttft_ms 0.99", ".0f"), ("p90_ttft_ratio", ".3g"),
             ("throughput_rps", ".3g"), ("throughput_ratio", ".3g"), ("goodput_rps", ".3g"), ("prefix_hit_rate", ".3f"),
             ("p_correct", ".2f"))  # fmt: skip
    lines = [
        [load, arm, *(_short(rows.get(name), format) for name, format in names), str(rows["p_correct"]["n"])]
        for (load, arm), rows in cells.items()
    ]
    return "\n".join([*(f"{md(line)}  " for line in table.header), "", *markdown_grid(SUMMARY, lines)]) + "\n"


def _short(row: Line | None, format: str) -> str:
    """A value with its interval."""
    if row is None:
        return ""
    ends = "" if row["lo"] is None or row["hi"] is None else f" [{row['lo']:{format}}, {row['hi']:{format}}]"
    return shown(row["value"], format) + ends


def write_serve_tables(folder: Path) -> Table:
    """Write ``table.md``, ``.csv``, ``.tex``, ``.json`` and ``summary.md`` beside the records."""
    table = serve_table(folder)
    write_atomic(folder / "summary.md", summary(table))
    for format in FORMATS:
        write_atomic(folder / f"table.{format}", render(table, format))
    return table


def benchmark_rows(folder: Path, device: str) -> list[Line]:
    """Rows of ``benchmarks/results.json``: hit rates and right answers by arm, ratios by load.

    ``q1`` and ``q3`` are the ends of the 50 % interval where there is one, else the value. Ratios under a load alone are those
    of :data:`~notelens.runs.serve_record.HEADLINE_ARM`; other arms are named in ``case``.

    Args:
        folder: of a benchmark.
        device: what the engine ran on, in words.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"{folder}: holds no serving benchmark; give the folder that 'notelens serve-bench' wrote to")
    found: list[Line] = []
    for row in aggregates(read_records(folder), manifest, level=0.5):
        params, metric, arm = row["params"], str(row["metric"]), str(row["method"])
        if row["value"] is not None and metric in ("prefix_hit_rate", "p_correct") and not params:
            case = {"arm": arm}
        elif row["value"] is not None and metric in ("p90_ttft_ratio", "throughput_ratio"):
            case = {"load": params["load"], **({} if arm == HEADLINE_ARM else {"arm": arm})}
        else:
            continue
        q1, q3 = (row["value"] if row[k] is None else row[k] for k in ("lo", "hi"))
        found.append({"benchmark": BENCHMARK, "case": case, "metric": metric, "value": row["value"], "q1": q1, "q3": q3,
                      "n": row["n"], "device": device})  # fmt: skip
    return found


def merge_results(path: Path, rows: Sequence[Line]) -> None:
    """Put rows into a file of benchmark results; its rows of other benchmarks and other cases stay.

    Raises:
        RecordError: the file is not a list of rows, or cannot be written.
    """
    try:
        before: list[Line] = json.loads(path.read_bytes()) if path.is_file() else []
        new = {(r["benchmark"], json.dumps(r["case"], sort_keys=True), r["metric"]) for r in rows}
        kept = [r for r in before if (r["benchmark"], json.dumps(r["case"], sort_keys=True), r["metric"]) not in new]
    except OSError as e:
        raise RecordError(f"{path}: could not be read ({reason(e)})") from e
    except (ValueError, TypeError, KeyError) as e:
        raise RecordError(f"{path}: is not a list of benchmark rows; restore it") from e
    write_atomic(path, "[\n" + ",\n".join(json.dumps(row) for row in [*kept, *rows]) + "\n]\n")


__all__ = [
    "FEW_BATCHES",
    "FEW_TAIL",
    "MIN_BATCHES",
    "MIN_TAIL",
    "READING",
    "aggregates",
    "benchmark_rows",
    "engine_text",
    "merge_results",
    "serve_table",
    "summary",
    "write_serve_tables",
]
