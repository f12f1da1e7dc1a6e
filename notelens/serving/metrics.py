"""What an engine says about itself at ``/metrics``: how much of its prompts came from its prefix cache, and its settings.

A number that the engine does not give is ``None`` and printed as ``unavailable``; it is never 0. A hit rate belongs to a
window: the difference of two readings.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

QUERIES = ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries")
HITS = ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits")
LOADED = ("vllm:external_prefix_cache_hits",)
QUEUE_S, QUEUED = ("vllm:request_queue_time_seconds_sum",), ("vllm:request_queue_time_seconds_count",)
SETTINGS = "vllm:cache_config_info"
UNAVAILABLE = "unavailable"

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, list[tuple[dict[str, str], float]]]


def parse(text: str) -> Samples:
    """Samples by name, from the text format of Prometheus; lines that are no samples are left out."""
    found: Samples = {}
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        if match is None or line.startswith("#"):
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        found.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), value))
    return found


def total(samples: Samples, names: Sequence[str]) -> float | None:
    """Sum over all label sets of the first name that there is, with or without ``_total``; ``None`` where there is none."""
    for name in (full for short in names for full in (f"{short}_total", short)):
        values = [value for _, value in samples.get(name, ())]
        if values and all(map(math.isfinite, values)):
            return math.fsum(values)
    return None


@dataclass(frozen=True)
class Counters:
    """One reading.

    Attributes:
        queries, hits: tokens looked up in the prefix cache, and found there.
        loaded: tokens that came from a connector instead.
        queue_s, queued: seconds that requests waited for the scheduler, and how many requests.
    """

    queries: float | None = None
    hits: float | None = None
    loaded: float | None = None
    queue_s: float | None = None
    queued: float | None = None


def read_counters(text: str | None) -> Counters:
    """Counters in a text from ``/metrics``; all ``None`` where there is no text."""
    if text is None:
        return Counters()
    samples = parse(text)
    return Counters(*(total(samples, names) for names in (QUERIES, HITS, LOADED, QUEUE_S, QUEUED)))


@dataclass(frozen=True)
class Window:
    """What happened between two readings.

    Attributes:
        queries, hits, loaded, queue_s, queued: differences.
        reason: why the hit rate is unavailable; empty where it is known.
    """

    queries: float | None
    hits: float | None
    loaded: float | None
    queue_s: float | None
    queued: float | None
    reason: str

    @property
    def hit_rate(self) -> float | None:
        """Share of the tokens looked up that were found."""
        return self.hits / self.queries if not self.reason and self.hits is not None and self.queries else None

    @property
    def queue_ms(self) -> float | None:
        """Mean wait for the scheduler."""
        return 1e3 * self.queue_s / self.queued if self.queue_s is not None and self.queued else None

    def __str__(self) -> str:
        if self.hit_rate is None:
            return f"{UNAVAILABLE} ({self.reason})"
        return f"{self.hit_rate:.3f} ({self.hits:.0f} of {self.queries:.0f} tokens)"


def window(before: Counters, after: Counters) -> Window:
    """The difference of two readings.

    A counter that went back (the engine was started anew in between) makes the hit rate unavailable.
    """
    names = ("queries", "hits", "loaded", "queue_s", "queued")
    known = {n: (getattr(before, n), getattr(after, n)) for n in names}
    gained = {n: None if a is None or b is None else b - a for n, (a, b) in known.items()}
    back = [n for n, d in gained.items() if d is not None and d < 0]
    if back:
        reason = f"the counter of {back[0]} went back, so the engine was started anew in the window"
        return Window(None, None, None, None, None, reason)
    missing = [n for n in ("queries", "hits") if gained[n] is None]
    reason = f"the engine's metrics have no counter of prefix cache {' and '.join(missing)}" if missing else ""
    if not reason and not gained["queries"]:
        reason = "no token was looked up in the window"
    return Window(*(gained[n] for n in names), reason)


@dataclass(frozen=True)
class Settings:
    """Settings that the engine runs with; ``None`` where it does not say.

    Attributes:
        block_size: tokens of a block; only whole blocks are reused.
        prefix_caching: whether it reuses prefixes.
        cache_dtype: type of cached keys and values.
        n_blocks: blocks that it has room for.
    """

    block_size: int | None = None
    prefix_caching: bool | None = None
    cache_dtype: str | None = None
    n_blocks: int | None = None


def read_settings(text: str | None) -> Settings:
    """Settings in a text from ``/metrics``."""
    infos = parse(text).get(SETTINGS, []) if text is not None else []
    if not infos:
        return Settings()
    labels = infos[0][0]
    on = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}
    blocks = _whole(labels.get("num_gpu_blocks")) or _whole(labels.get("num_cpu_blocks"))
    return Settings(
        _whole(labels.get("block_size")),
        on.get(labels.get("enable_prefix_caching", "")),
        labels.get("cache_dtype"),
        blocks,
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def shown(value: float | None, format: str = ".3f") -> str:
    """A number, or ``unavailable``."""
    return UNAVAILABLE if value is None else f"{value:{format}}"
