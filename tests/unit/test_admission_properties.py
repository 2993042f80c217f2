"""Admission under random arrivals, finishes and cancellations, several of them in one tick of the loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorahost.admission import BASE, Admission
from lorahost.errors import OverloadedError

KEYS = st.sampled_from([BASE, 1, 2, 3, 4, 5])


@dataclass
class Request:
    key: int | None
    order: int
    task: asyncio.Task[None]
    cancelled: bool = False


class AdmissionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.faults: list[dict[str, object]] = []
        self.loop.set_exception_handler(lambda _, context: self.faults.append(context))
        self.pending: list[Request] = []
        self.running: list[Request] = []
        self.arrivals = self.finished = self.refused = self.left = 0

    @initialize(slots=st.integers(1, 3), max_running=st.integers(1, 6), max_queued=st.integers(0, 8))
    def limits(self, slots: int, max_running: int, max_queued: int) -> None:
        self.admission = Admission(slots=slots, max_running=max_running, max_queued=max_queued)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), leave=st.booleans(), cancel=st.booleans(), data=st.data())
    def tick(self, keys: list[int | None], leave: bool, cancel: bool, data: st.DataObject) -> None:
        """What may fall into one tick: a finish, a cancellation and some arrivals, in this order."""
        if cancel:
            self.cancel(data)
        if leave:
            self.finish(data)
        self.arrive(keys)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.pending:
            request = data.draw(st.sampled_from(self.pending))
            request.cancelled = True
            request.task.cancel()

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.running:
            request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.admission.leave(request.key)
            self.finished += 1

    @rule(data=st.data())
    def finish_then_cancel(self, data: st.DataObject) -> None:
        """The finish may have admitted the very request that is cancelled."""
        self.finish(data)
        self.cancel(data)

    def arrive(self, keys: list[int | None]) -> None:
        for key in keys:
            self.arrivals += 1
            self.pending.append(Request(key, self.arrivals, self.loop.create_task(self.admission.enter(key))))

    def settle(self) -> None:
        async def ticks() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(ticks())
        for request in list(self.pending):
            if not request.task.done():
                continue
            self.pending.remove(request)
            if request.task.cancelled():
                assert request.cancelled
                self.left += 1
            elif (error := request.task.exception()) is not None:
                assert isinstance(error, OverloadedError), repr(error)
                self.refused += 1
            else:
                self.running.append(request)
                earlier = [p.order for p in self.pending if p.key == request.key and p.order < request.order]
                assert not [o for o in earlier if not self.of(o).task.done()], "overtaken within its adapter"

    def of(self, order: int) -> Request:
        return next(p for p in self.pending if p.order == order)

    @invariant()
    def limits_hold(self) -> None:
        self.settle()
        held = {r.key for r in self.running} - {BASE}
        now = self.admission.occupancy()
        assert len(held) <= self.admission.slots
        assert len(self.running) <= self.admission.max_running
        assert len(self.pending) <= self.admission.max_queued
        assert (now.running, now.queued, now.slots_held) == (len(self.running), len(self.pending), len(held))
        assert self.arrivals == sum((self.finished, self.refused, self.left, len(self.running), len(self.pending)))
        assert not self.faults, self.faults

    @invariant()
    def nothing_waits_that_could_run(self) -> None:
        held = {r.key for r in self.running} - {BASE}
        waiting = Counter(p.key for p in self.pending)
        without_slot = set(waiting) - held - {BASE}
        short = max(0, len(without_slot) - (self.admission.slots - len(held)))
        assert self.admission.occupancy().slots_closed == min(short, len(held))
        if len(self.running) < self.admission.max_running:
            assert BASE not in waiting
            assert not without_slot or len(held) == self.admission.slots
            # only a slot that is being drained for somebody may keep its own adapter waiting
            assert len(set(waiting) & held) <= short

    def teardown(self) -> None:
        if not hasattr(self, "admission"):
            self.loop.close()
            return
        self.settle()
        while self.running:
            for request in self.running:
                self.admission.leave(request.key)
            self.finished += len(self.running)
            self.running.clear()
            self.settle()
        assert not self.pending, "requests were left waiting with nothing running"
        assert self.admission.occupancy().running == 0
        self.loop.close()


AdmissionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAdmission = AdmissionMachine.TestCase
