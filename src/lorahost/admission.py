"""Admission by adapter, in front of the engine.

The engine has `slots` device slots for adapters. Its own scheduler lets requests whose adapter is resident overtake
all others, so that an adapter without a slot can starve. Here a slot is a loan: while more adapters wait without one
than slots are free, the slot whose holder has the least running is closed to new requests, drains, and goes to the
adapter that has waited longest; one that has just lost its slot waits anew, however old its requests are. Among the
adapters that may run, the one with the fewest requests running goes first. While no more adapters wait than there
are slots, one without a slot therefore waits for one answer of the holder that is drained for it, and no longer; a
request that comes while its adapter's slot drains waits for that first. The base model needs no slot and takes its
turn like an adapter.

Single-threaded: every method runs on the engine's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from lorahost.errors import OverloadedError

BASE: Hashable = None


@dataclass(slots=True)
class _Holder:
    running: int = 0
    closed: bool = False


@dataclass(slots=True)
class _Waiter:
    arrival: int
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A snapshot for metrics: running and queued requests, slots held and closed."""

    running: int
    queued: int
    slots_held: int
    slots_closed: int


class Admission:
    """Decides which request may enter the engine next.

    Args:
        slots: Distinct adapters that may run at once.
        max_running: Requests in the engine at once, base included.
        max_queued: Requests that may wait; one more is refused.
    """

    def __init__(self, *, slots: int, max_running: int, max_queued: int) -> None:
        if slots < 1 or max_running < 1 or max_queued < 0:
            raise ValueError(f"slots={slots} and max_running={max_running} must be >= 1, max_queued={max_queued} >= 0")
        self.slots = slots
        self.max_running = max_running
        self.max_queued = max_queued
        self._holders: dict[Hashable, _Holder] = {}
        self._queues: dict[Hashable, deque[_Waiter]] = {}
        # when an adapter last had its turn: its last admission, or the loss of its slot
        self._turns: dict[Hashable, int] = {}
        self._ticks = itertools.count(1)
        self._running = 0
        self._queued = 0

    async def enter(self, adapter: Hashable) -> None:
        """Waits until a request for `adapter` (`BASE` for none) may run; pair with `leave`.

        Raises:
            OverloadedError: the queue is full and no other adapter has more waiting, or this request was the
                newest of the longest queue when another adapter's came.
        """
        waiter = _Waiter(next(self._ticks))
        self._queues.setdefault(adapter, deque()).append(waiter)
        self._queued += 1
        self._pump()
        if not waiter.admitted.done() and self._queued > self.max_queued:
            self._turn_away(adapter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.cancelled():
                self._withdraw(adapter, waiter)
                self._pump()
            else:
                self.leave(adapter)
            raise

    def _turn_away(self, adapter: Hashable) -> None:
        """Refuses the newest waiter of the longest queue, so that one adapter can't fill the queue for all."""
        longest = max(self._queues, key=lambda key: (len(self._queues[key]), key == adapter))
        waiter = self._queues[longest][-1]
        refusal = OverloadedError(
            f"{self.max_queued} requests are waiting already, the limit of this server; try again later",
            code="queue_full",
            retry_after_s=1,
            details={"running": self._running, "queued": self._queued - 1, "max_queued": self.max_queued},
        )
        if not waiter.admitted.done():
            waiter.admitted.set_exception(refusal)
        self._withdraw(longest, waiter)
        self._settle_slots()

    def leave(self, adapter: Hashable) -> None:
        """Ends a request that `enter` let in."""
        holder = self._holders[adapter]
        holder.running -= 1
        self._running -= 1
        if holder.running == 0:
            del self._holders[adapter]
            self._turns[adapter] = next(self._ticks)
            self._forget_idle(adapter)
        self._pump()

    def occupancy(self) -> Occupancy:
        """Counts of now."""
        held = [h for key, h in self._holders.items() if key is not BASE]
        return Occupancy(self._running, self._queued, len(held), sum(h.closed for h in held))

    def _withdraw(self, adapter: Hashable, waiter: _Waiter) -> None:
        queue = self._queues.get(adapter)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            self._queued -= 1
            self._forget_idle(adapter)

    def _forget_idle(self, adapter: Hashable) -> None:
        """Engine ids are never reused: what is kept of an adapter goes with its last request."""
        if not self._queues.get(adapter):
            self._queues.pop(adapter, None)
            if adapter not in self._holders:
                self._turns.pop(adapter, None)

    def _pump(self) -> None:
        """Admits all that may run now, then closes as many slots as adapters wait without one."""
        while self._running < self.max_running:
            # closing waits for the end: an adapter that gets a slot brings all its queue, as far as there is room
            self._settle_slots(close=False)
            adapter = self._next()
            if adapter is _NOBODY:
                break
            self._admit(adapter)
        self._settle_slots()

    def _admit(self, adapter: Hashable) -> None:
        """Lets the adapter's first waiter in; one that was cancelled and has not run since is only dropped."""
        waiter = self._queues[adapter].popleft()
        self._queued -= 1
        if not waiter.admitted.cancelled():
            self._holders.setdefault(adapter, _Holder()).running += 1
            self._turns[adapter] = next(self._ticks)
            self._running += 1
            waiter.admitted.set_result(None)
        self._forget_idle(adapter)

    def _next(self) -> Hashable:
        """The queued adapter to admit from, or `_NOBODY`."""
        free = self._slots_held() < self.slots
        may_run = [key for key in self._queues if self._may_run(key, free)]
        return min(may_run, key=lambda key: (self._load(key), self._waits_since(key)), default=_NOBODY)

    def _may_run(self, adapter: Hashable, slot_free: bool) -> bool:
        if adapter is BASE:
            return True
        holder = self._holders.get(adapter)
        return slot_free if holder is None else not holder.closed

    def _load(self, adapter: Hashable) -> int:
        holder = self._holders.get(adapter)
        return holder.running if holder else 0

    def _waits_since(self, adapter: Hashable) -> int:
        return max(self._queues[adapter][0].arrival, self._turns.get(adapter, 0))

    def _slots_held(self) -> int:
        return sum(key is not BASE for key in self._holders)

    def _settle_slots(self, *, close: bool = True) -> None:
        """Closes one slot for each adapter that waits and finds none free, those that drain soonest first."""
        waiting = sum(key is not BASE and key not in self._holders for key in self._queues)
        needed = max(0, waiting - (self.slots - self._slots_held()))
        held = [(key, holder) for key, holder in self._holders.items() if key is not BASE]
        # what is closed stays closed, as long as it is needed
        held.sort(key=lambda item: (not item[1].closed, item[1].running, self._turns.get(item[0], 0)))
        for index, (_, holder) in enumerate(held):
            holder.closed = index < needed and (close or holder.closed)


_NOBODY: Hashable = object()
