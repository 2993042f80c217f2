"""Admission by adapter, in front of the engine.

The engine has `slots` device slots for adapters. Its own scheduler lets requests whose adapter is resident overtake
all others, so that an adapter without a slot can starve. Here a slot is a loan: while an adapter without one waits,
the slot whose holder has the least running is closed to new requests, drains, and goes to the one that waited
longest. Among the adapters that may run, the one with the fewest requests running goes first. An adapter without a
slot therefore waits for one answer of the holder that is drained for it, and no longer.

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
        self._last_admitted: dict[Hashable, int] = {}
        self._ticks = itertools.count(1)
        self._running = 0
        self._queued = 0

    async def enter(self, adapter: Hashable) -> None:
        """Waits until a request for `adapter` (`BASE` for none) may run; pair with `leave`.

        Raises:
            OverloadedError: the queue is full.
        """
        waiter = _Waiter(next(self._ticks))
        self._queues.setdefault(adapter, deque()).append(waiter)
        self._queued += 1
        self._pump()
        if not waiter.admitted.done() and self._queued > self.max_queued:
            self._withdraw(adapter, waiter)
            raise OverloadedError(
                f"{self.max_queued} requests are waiting already, the limit of this server; try again later",
                code="queue_full",
                retry_after_s=1,
                details={"running": self._running, "queued": self._queued, "max_queued": self.max_queued},
            )
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self.leave(adapter)
            else:
                self._withdraw(adapter, waiter)
                self._pump()
            raise

    def leave(self, adapter: Hashable) -> None:
        """Ends a request that `enter` let in."""
        holder = self._holders[adapter]
        holder.running -= 1
        self._running -= 1
        if holder.running == 0:
            del self._holders[adapter]
            if adapter not in self._queues:
                self._last_admitted.pop(adapter, None)
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
            if not queue:
                del self._queues[adapter]

    def _pump(self) -> None:
        """Admits all that may run now, then closes as many slots as adapters wait without one."""
        while self._running < self.max_running:
            self._reopen_slots()
            adapter = self._next()
            if adapter is _NOBODY:
                break
            self._admit(adapter)
        self._reopen_slots()
        self._close_slots()

    def _admit(self, adapter: Hashable) -> None:
        queue = self._queues[adapter]
        waiter = queue.popleft()
        self._queued -= 1
        if not queue:
            del self._queues[adapter]
        self._holders.setdefault(adapter, _Holder()).running += 1
        self._last_admitted[adapter] = next(self._ticks)
        self._running += 1
        waiter.admitted.set_result(None)

    def _next(self) -> Hashable:
        """The queued adapter to admit from, or `_NOBODY`."""
        waiting = self._waiting_for_slot()
        if waiting and self._slots_held() < self.slots:
            return waiting[0]
        open_ = [key for key in self._queues if key is BASE or (key in self._holders and not self._holders[key].closed)]
        if not open_:
            return _NOBODY
        return min(open_, key=lambda key: (self._load(key), self._last_admitted.get(key, 0)))

    def _load(self, adapter: Hashable) -> int:
        holder = self._holders.get(adapter)
        return holder.running if holder else 0

    def _slots_held(self) -> int:
        return sum(key is not BASE for key in self._holders)

    def _waiting_for_slot(self) -> list[Hashable]:
        """Adapters that wait without a slot, longest wait first."""
        waiting = [key for key in self._queues if key is not BASE and key not in self._holders]
        return sorted(waiting, key=lambda key: self._queues[key][0].arrival)

    def _closed(self) -> list[_Holder]:
        return [h for key, h in self._holders.items() if key is not BASE and h.closed]

    def _reopen_slots(self) -> None:
        """Opens the closed slots that nobody waits for any more."""
        for holder in self._closed()[len(self._waiting_for_slot()) :]:
            holder.closed = False

    def _close_slots(self) -> None:
        """Closes one slot for each adapter that waits without one, those that drain soonest first."""
        missing = len(self._waiting_for_slot()) - len(self._closed())
        open_ = sorted(
            ((key, h) for key, h in self._holders.items() if key is not BASE and not h.closed),
            key=lambda item: (item[1].running, self._last_admitted.get(item[0], 0)),
        )
        for _, holder in open_[: max(0, missing)]:
            holder.closed = True


_NOBODY: Hashable = object()
