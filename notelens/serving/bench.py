"""One cell of a serving benchmark at a time: probe the engine, find its capacity, offer a load to an arm, count what it reused.

Nothing here is written to disk; :mod:`notelens.runs.serve` records cells, resumes and tabulates.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from notelens.errors import PrefixCacheError, ServingError
from notelens.serving.client import EngineClient, Reply
from notelens.serving.load import Offered, closed_loop, open_loop, poisson_arrivals
from notelens.serving.metrics import Settings, Window, read_counters, read_settings, window
from notelens.serving.workload import BASELINE, Arm, Asked, Workload

CALIBRATION_LINES = (20, 60)
"""Filler lines of the two short prompts from whose lengths the tokens of a line are taken."""
SETTLE_S = 2.0
"""How long counters may lag behind the last answer."""


@dataclass(frozen=True)
class Options:
    """How requests are sent.

    Attributes:
        max_tokens: of an answer.
        timeout_s: of a request.
        extra: further keys of a request's body.
        warm_up: untimed requests per policy at the beginning of a cell.
        seed: of arrivals.
    """

    max_tokens: int = 4
    timeout_s: float = 60.0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    warm_up: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Cell:
    """An arm under a load.

    Attributes:
        arm: where the field is.
        load: name of the load.
        n: timed requests.
        rate: offered, requests a second; all at once when ``None``.
    """

    arm: Arm
    load: str
    n: int
    rate: float | None


@dataclass(frozen=True)
class Measured:
    """What a cell came to.

    Attributes:
        asked: the timed requests.
        offered: what became of them.
        window: what the engine counted in the timed window.
        salt: of the cell's requests.
    """

    asked: tuple[Asked, ...]
    offered: Offered
    window: Window
    salt: str


@dataclass(frozen=True)
class Facts:
    """What is known of the engine before anything is timed.

    Attributes:
        model: what it serves.
        version: its own word for it.
        settings: that it runs with.
        has_metrics: whether it counts prefix cache hits.
        reuse: share of a repeated prompt that it had cached; ``None`` where it does not count.
        across_salts: share of the same prompt under another salt that it had cached.
        notes: sentences for whoever reads the results.
    """

    model: str
    version: str | None
    settings: Settings
    has_metrics: bool
    reuse: float | None
    across_salts: float | None
    notes: tuple[str, ...]


def new_salt(*parts: str) -> str:
    """A cache salt that nothing was ever cached under."""
    return "-".join((*parts, secrets.token_hex(6)))


class Bench:
    """Measures cells on one engine.

    Args:
        client: of the engine, checked.
        workload: the requests.
        options: how they are sent.
        alive: whether the engine's process runs.
    """

    def __init__(
        self, client: EngineClient, workload: Workload, options: Options, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self.client, self.workload, self.options, self.alive = client, workload, options, alive

    async def send(self, asked: Asked, salt: str) -> Reply:
        """Send one request."""
        o = self.options
        own = None if self.workload.prompt_salt else salt
        return await self.client.chat(
            asked.messages, max_tokens=o.max_tokens, salt=own, timeout_s=o.timeout_s, extra=o.extra
        )

    async def calibrate(self, policy_tokens: int) -> Workload:
        """The workload with policies of so many tokens, as the engine counts them.

        Cost: two short prompts and one of the full length per policy; requests of one token.

        Raises:
            ServingError: the engine does not count tokens, or its counts do not grow with the prompt.
        """

        async def tokens(n_lines: int, index: int) -> int:
            made = replace(self.workload, n_lines=n_lines)
            bench = Bench(self.client, made, replace(self.options, max_tokens=1), self.alive)
            salt = new_salt("calibrate")
            n = (await bench.send(made.request("in_prefix", index, "calibrate", salt), salt)).n_prompt
            if n is None:
                raise ServingError(
                    f"the engine at {self.client.url} does not say how many tokens a prompt has ('usage')"
                )
            return n

        few, many = CALIBRATION_LINES
        lengths = [(await tokens(few, i), await tokens(many, i)) for i in range(self.workload.policies)]
        per_line = min((b - a) / (many - few) for a, b in lengths)
        if per_line <= 0:
            raise ServingError(f"the engine at {self.client.url} counts no more tokens for a longer prompt ({lengths})")
        short = min(a for a, _ in lengths)
        lines = few + max(0, -(-(policy_tokens - short) // per_line))
        self.workload = replace(self.workload, n_lines=max(2, int(lines)))
        return self.workload

    async def facts(self, *, need_metrics: bool = False) -> Facts:
        """Read the engine's settings and check with a known repeat that it reuses prefixes and keeps salts apart.

        Cost: three prompts, of which the second should be cheap.

        Raises:
            PrefixCacheError: it reuses nothing, or what it cached under one salt serves another.
        """
        model, text = await self.client.check(), await self.client.metrics()
        settings, notes = read_settings(text), list[str]()
        if settings.prefix_caching is False:
            raise PrefixCacheError(
                f"the engine at {self.client.url} runs without prefix caching, so there is nothing to measure"
            )
        salts = new_salt("repeat", "a"), new_salt("repeat", "b")
        asked = [self.workload.request("erratum", 0, "repeat", salt) for salt in salts]
        await self.send(asked[0], salts[0])
        same, same_reply = await self.counted(lambda: self.send(asked[0], salts[0]))
        other, other_reply = await self.counted(lambda: self.send(asked[1], salts[1]))
        reuse, across = _reused(same, same_reply), _reused(other, other_reply)
        if reuse == 0:
            raise PrefixCacheError(
                f"the engine at {self.client.url} had nothing cached of a prompt that it had just seen; start it with prefix "
                "caching on, and with one PYTHONHASHSEED for all of its processes"
            )
        if reuse is None:
            notes.append(f"Whether the engine reuses prefixes could not be checked: {same.reason}.")
        elif across is not None and across > max(0.1, reuse / 2):
            raise PrefixCacheError(
                f"the engine at {self.client.url} served a prompt from what it had cached under another salt, so arms would "
                "feed each other; write the salt into the prompt (salt: prompt)"
            )
        n, block = same_reply.n_prompt, settings.block_size
        if n is not None and block is not None and n < 2 * block:
            notes.append(
                f"The prompts ({n} tokens) are shorter than two blocks of {block} tokens: next to nothing can be reused."
            )
        version = await self.client.version()
        return Facts(model, version, settings, same.hit_rate is not None, reuse, across, tuple(notes))

    async def counted(self, send: Callable[[], Any]) -> tuple[Window, Reply]:
        """One request and what the engine counted for it."""
        before = read_counters(await self.client.metrics())
        reply = await send()
        return await self._settled(before, 1), reply

    async def capacity(self, n: int, in_flight: int, done: Callable[[], None] = lambda: None) -> Measured:
        """How many requests a second of the baseline the engine finishes when always ``in_flight`` are with it."""
        cell = Cell(BASELINE, "capacity", n, None)
        return await self._measure(cell, lambda send: closed_loop(send, n, in_flight, alive=self.alive, done=done))

    async def cell(self, cell: Cell, done: Callable[[], None] = lambda: None) -> Measured:
        """Offer a load to an arm. Warm-up and timed requests have a salt of their own.

        Cost: ``warm_up`` requests per policy, then ``n`` timed ones; no longer than the last arrival and one timeout.

        Raises:
            ServingError: the warm-up failed, so that nothing was timed.
        """
        due = poisson_arrivals(cell.n, cell.rate, self.options.seed)
        return await self._measure(cell, lambda send: open_loop(send, due, alive=self.alive, done=done))

    async def _measure(self, cell: Cell, offer: Callable[[Callable[[int], Any]], Any]) -> Measured:
        salt = new_salt(cell.arm, cell.load)
        for i in range(self.options.warm_up * self.workload.policies):
            await self.send(self.workload.request(cell.arm, i, f"{cell.load}/warm-up", salt), salt)
        asked = tuple(self.workload.request(cell.arm, i, cell.load, salt) for i in range(cell.n))
        before = read_counters(await self.client.metrics())
        offered: Offered = await offer(lambda i: self.send(asked[i], salt))
        return Measured(asked, offered, await self._settled(before, len(offered.answered)), salt)

    async def _settled(self, before: Any, n: int) -> Window:
        """The counters' difference, read again for a moment where they lag behind the answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S
        while True:
            found = window(before, read_counters(await self.client.metrics()))
            settled = bool(found.queries) and (found.queued is None or found.queued >= n)
            if settled or before.queries is None or loop.time() > deadline or n == 0:
                return found
            await asyncio.sleep(0.1)


def _reused(found: Window, reply: Reply) -> float | None:
    """Share of a prompt that came from the cache, by the counters or else by the answer's own count."""
    if found.hit_rate is not None:
        return found.hit_rate
    if reply.n_cached is not None and reply.n_prompt:
        return reply.n_cached / reply.n_prompt
    return None


__all__ = ["Bench", "Cell", "Facts", "Measured", "Options", "new_salt"]
