"""How requests arrive: closed loop, or open loop as a Poisson process; standard library only.

A load is written `closed:16` (16 requests in flight, the next starts when one ends) or `poisson:0.8` (0.8 requests a
second at random times, whatever is in flight).
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lorahost.bench.timings import Record

Choice = Literal["round-robin", "zipf"]
Send = Callable[[int, str], Awaitable[Record]]


@dataclass(frozen=True)
class Load:
    """`concurrency` requests in flight, or `rate` requests a second; the other is 0."""

    concurrency: int = 0
    rate: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Load:
        """Reads `closed:N` or `poisson:R`.

        Raises:
            ValueError: anything else; the message says what is allowed.
        """
        kind, _, value = text.partition(":")
        try:
            if kind == "closed" and int(value) >= 1:
                return cls(concurrency=int(value))
            if kind == "poisson" and 0 < float(value) < float("inf"):
                return cls(rate=float(value))
        except ValueError:
            pass
        raise ValueError(f"load {text!r}: must be closed:N with N >= 1, or poisson:R with R > 0 requests a second")

    def __str__(self) -> str:
        return f"closed:{self.concurrency}" if self.concurrency else f"poisson:{self.rate:g}"


def choose(names: Sequence[str], choice: Choice, rng: random.Random, exponent: float = 1.0) -> Iterator[str]:
    """Adapters for one request after the other; Zipf: the k-th name's weight is k to the power of -exponent."""
    if choice == "round-robin":
        return itertools.cycle(names)
    edges = list(itertools.accumulate((k + 1) ** -exponent for k in range(len(names))))
    return (names[bisect.bisect(edges, rng.random() * edges[-1])] for _ in itertools.repeat(0))


def arrivals(rate: float, requests: int, rng: random.Random) -> list[float]:
    """When `requests` requests of an open loop arrive, in seconds: sorted uniform times in [0, requests / rate).

    That is a Poisson process of which the number of arrivals in this window is known. Independent intervals would
    make the rate of 40 requests deviate from the nominal one by 16 % (standard deviation).
    """
    window = requests / rate
    return sorted(rng.random() * window for _ in range(requests))


async def run(load: Load, requests: int, adapters: Iterator[str], send: Send, rng: random.Random) -> list[Record]:
    """Sends `requests` requests as the load says and waits for all of them.

    Args:
        load: How they arrive.
        requests: How many.
        adapters: Whose each is, in the order in which they start.
        send: Sends request number n for an adapter; an error belongs in its record.
        rng: Draws the times of an open loop.
    """
    numbered = ((n, next(adapters)) for n in range(requests))
    records: list[Record] = []
    if load.concurrency:

        async def worker() -> None:
            for n, adapter in numbered:
                records.append(await send(n, adapter))

        await asyncio.gather(*(worker() for _ in range(min(load.concurrency, requests))))
        return records
    start = time.perf_counter()
    tasks = []
    for due, (n, adapter) in zip(arrivals(load.rate, requests, rng), numbered, strict=True):
        # until an absolute time, so that a late start does not thin the load out
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        tasks.append(asyncio.create_task(_send_to(records, send, n, adapter)))
    await asyncio.gather(*tasks)
    return records


async def _send_to(records: list[Record], send: Send, n: int, adapter: str) -> None:
    records.append(await send(n, adapter))


def seconds(records: Sequence[Record]) -> float:
    """From the first request's start to the last token of all, errors left out; NaN without a token."""
    ends = [r.at[-1] for r in records if r.at]
    return max(ends) - min(r.start for r in records) if ends else float("nan")
