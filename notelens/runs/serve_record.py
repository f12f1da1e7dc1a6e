"""Lines that a serving benchmark writes: one of facts and one per request for every cell, whole cells or nothing.

A cell in which a request failed is kept too, under stage ``partial`` and with a mark, so that a resumed benchmark measures it
again and nobody takes it for a whole one.
"""

from collections.abc import Mapping
from typing import Any

from notelens.runs.records import Line, Records
from notelens.serving.bench import Cell, Measured
from notelens.serving.load import Timed
from notelens.serving.workload import Asked, first_word

EXPERIMENT = "serve"
ENGINE_LOG = "engine.log"
"""File beside the records: what a started engine wrote."""
HEADLINE_ARM = "erratum"
"""The arm whose numbers stand where there is room for one arm only."""
ENGINE_FACTS = ("model", "version", "block_size", "prefix_caching", "cache_dtype")
"""Facts of the engine that must not change within a benchmark; how many blocks there is room for may."""
CELL, CAPACITY, PARTIAL = "cell", "capacity", "partial"


def fixed_facts(engine: Mapping[str, Any]) -> dict[str, Any]:
    """:data:`ENGINE_FACTS` from what a manifest says about its engine."""
    known: Mapping[str, Any] = {**engine["settings"], "model": engine["model"], "version": engine["version"]}
    return {name: known[name] for name in ENGINE_FACTS}


def item_of(cell: Cell) -> str:
    """Id of a cell."""
    return f"{cell.load}/{cell.arm}"


def mark_of(measured: Measured) -> str:
    """Why a cell is not whole; empty where it is."""
    lost = measured.offered.failures
    if not lost:
        return "the engine ended right after it" if measured.offered.ended else ""
    reasons = list(dict.fromkeys(lost))
    more = f" and {len(reasons) - 1} other reasons" if len(reasons) > 1 else ""
    return f"{len(lost)} of {len(measured.asked)} requests were not answered ({reasons[0]}{more})"


def group(records: Records, cell: Cell, measured: Measured, stamp: Mapping[str, Any]) -> list[Line]:
    """Lines of a cell with their end marker.

    Args:
        records: what is on record, for the number of a partial cell.
        cell: what was offered.
        measured: what it came to.
        stamp: fields of every line.
    """
    mark = mark_of(measured)
    stage, item = (CAPACITY if cell.load == CAPACITY else CELL), item_of(cell)
    if mark:
        stage = PARTIAL
        item = f"{item}#{sum(key[1] == PARTIAL and key[2].startswith(f'{item}#') for key in records.items) + 1}"
    base = {
        "kind": "instance",
        "experiment": EXPERIMENT,
        "stage": stage,
        "item": item,
        "arm": cell.arm,
        "load": cell.load,
    }
    w, offered = measured.window, measured.offered
    facts = {
        **base, "request": None, "offered_rate": cell.rate, "n": cell.n, "answered": len(offered.answered),
        "elapsed_s": offered.elapsed_s, "queries": w.queries, "hits": w.hits, "loaded": w.loaded, "hit_rate": w.hit_rate,
        "hit_reason": w.reason, "queue_ms": w.queue_ms, "salt": measured.salt, "mark": mark, **stamp,
    }  # fmt: skip
    rows = [{**base, **_row(a, t)} for a, t in zip(measured.asked, offered.requests, strict=True)]
    end = {"kind": "item", "experiment": EXPERIMENT, "stage": stage, "item": item, "n_lines": 1 + len(rows)}
    return [facts, *rows, end]


def _row(asked: Asked, timed: Timed) -> Line:
    reply = timed.reply
    row: Line = {
        "request": timed.index, "family": asked.family, "excluded": timed.failure or None, "due_s": timed.due_s,
        "sent_s": timed.sent_s, "done_s": timed.done_s, "wanted": asked.answer, "changed": asked.changed,
    }  # fmt: skip
    if reply is None:
        return row
    word = first_word(reply.text)
    return {
        **row, "ttft_ms": 1e3 * (timed.ttft_s or 0.0), "itl_ms": None if reply.itl_s is None else 1e3 * reply.itl_s,
        "total_ms": 1e3 * (timed.done_s - timed.due_s), "n_prompt": reply.n_prompt, "n_output": reply.n_output,
        "n_cached": reply.n_cached, "finish": reply.finish, "answer": word, "right": asked.is_right(reply.text),
        "stale_answer": asked.changed and word == asked.stale.casefold(),
    }  # fmt: skip


def on_record(records: Records, cell: Cell) -> list[Line] | None:
    """Lines of a whole cell, or ``None``."""
    stage = CAPACITY if cell.load == CAPACITY else CELL
    return records.items.get((EXPERIMENT, stage, item_of(cell)))


def capacity_of(lines: list[Line]) -> float:
    """Requests a second of a capacity probe."""
    return float(lines[0]["answered"]) / float(lines[0]["elapsed_s"])


__all__ = [
    "CAPACITY",
    "CELL",
    "ENGINE_FACTS",
    "ENGINE_LOG",
    "EXPERIMENT",
    "HEADLINE_ARM",
    "PARTIAL",
    "capacity_of",
    "fixed_facts",
    "group",
    "item_of",
    "mark_of",
    "on_record",
]
