"""Offering requests to an engine: at random times whatever it does (open loop), or a fixed number at once (closed loop).

In an open loop the waiting time counts from the moment a request was due, not from the moment the client came to send it, so a
slow client or a full queue cannot hide. Everything is bounded in time: each request has a limit, and when the engine ends, what
is still waiting is given up at once.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from notelens.errors import InputError, RequestTimeoutError, ServingError
from notelens.serving.client import Reply

POLL_S = 0.1
GONE = "the engine ended"

Send = Callable[[int], Awaitable[Reply]]
"""Sends request number i."""


@dataclass(frozen=True)
class Timed:
    """One request and what became of it.

    Attributes:
        index: number of the request.
        due_s: when it was due, from the start of the load.
        sent_s: when it was sent; ``None`` where it never was.
        done_s: when its answer was there, or it was given up.
        reply: the answer, or ``None``.
        failure: why there is none: ``timeout``, :data:`GONE` or a sentence; empty where there is one.
    """

    index: int
    due_s: float
    sent_s: float | None
    done_s: float
    reply: Reply | None
    failure: str

    @property
    def ttft_s(self) -> float | None:
        """Seconds from when it was due to the first token."""
        return None if self.reply is None or self.sent_s is None else self.sent_s - self.due_s + self.reply.ttft_s


@dataclass(frozen=True)
class Offered:
    """What a load came to.

    Attributes:
        requests: in the order in which they were due.
        elapsed_s: from the start to the last answer.
        ended: whether the engine ended meanwhile.
    """

    requests: tuple[Timed, ...]
    elapsed_s: float
    ended: bool

    @property
    def answered(self) -> list[Timed]:
        """Those with an answer."""
        return [t for t in self.requests if t.reply is not None]

    @property
    def failures(self) -> list[str]:
        """Why the others have none."""
        return [t.failure for t in self.requests if t.reply is None]


def poisson_arrivals(n: int, rate: float | None, seed: int) -> tuple[float, ...]:
    """When n requests are due: a Poisson process of ``rate`` a second, or all at once without a rate.

    Equal seeds give the same pattern at every rate, only faster or slower.

    Raises:
        InputError: a rate that is not positive.
    """
    if rate is None:
        return (0.0,) * n
    if not rate > 0:
        raise InputError(f"a rate of {rate} requests a second; it must be positive")
    rng, at, found = random.Random(f"{seed}/arrivals"), 0.0, list[float]()
    for _ in range(n):
        at += rng.expovariate(1.0)
        found.append(at / rate)
    return tuple(found)


async def open_loop(
    send: Send,
    due: Sequence[float],
    *,
    alive: Callable[[], bool] = lambda: True,
    done: Callable[[], None] = lambda: None,
) -> Offered:
    """Send request i at ``due[i]`` seconds from now, however many are still waiting.

    Args:
        send: sends one; its :class:`~notelens.errors.ServingError` is a failure of that request only.
        due: ascending.
        alive: whether the engine's process runs.
        done: called after every request.
    """
    begin = time.perf_counter()

    async def one(index: int) -> Timed:
        await asyncio.sleep(max(0.0, begin + due[index] - time.perf_counter()))
        return await _timed(send, index, due[index], begin, done)

    return await _gather([one(i) for i in range(len(due))], due, begin, alive)


async def closed_loop(
    send: Send,
    n: int,
    in_flight: int,
    *,
    alive: Callable[[], bool] = lambda: True,
    done: Callable[[], None] = lambda: None,
) -> Offered:
    """Send n requests, ``in_flight`` at once: a new one as soon as one is answered. Each is due when it is sent."""
    begin = time.perf_counter()
    places = asyncio.Semaphore(in_flight)

    async def one(index: int) -> Timed:
        async with places:
            return await _timed(send, index, time.perf_counter() - begin, begin, done)

    return await _gather([one(i) for i in range(n)], [0.0] * n, begin, alive)


async def _timed(send: Send, index: int, due: float, begin: float, done: Callable[[], None]) -> Timed:
    sent = time.perf_counter() - begin
    reply, failure = None, ""
    try:
        reply = await send(index)
        sent = reply.sent - begin
    except RequestTimeoutError:
        failure = "timeout"
    except ServingError as e:
        failure = str(e)
    done()
    return Timed(index, due, sent, time.perf_counter() - begin, reply, failure)


async def _gather(
    work: Sequence[Awaitable[Timed]], due: Sequence[float], begin: float, alive: Callable[[], bool]
) -> Offered:
    tasks = [asyncio.ensure_future(w) for w in work]
    pending, ended = set(tasks), False
    try:
        while pending:
            _, pending = await asyncio.wait(pending, timeout=POLL_S)
            if pending and not alive():
                ended = True
                break
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    now = time.perf_counter() - begin
    found: list[Timed] = []
    for index, result in enumerate(results):
        if isinstance(result, Timed):
            found.append(result)
        elif isinstance(result, asyncio.CancelledError):
            found.append(Timed(index, due[index], None, now, None, GONE))
        else:
            raise result
    return Offered(tuple(found), max((t.done_s for t in found), default=0.0), ended or not alive())
