from __future__ import annotations

import asyncio

import pytest

from lorahost.admission import BASE, Admission, Occupancy
from lorahost.errors import OverloadedError


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_limits_that_make_no_sense_are_refused() -> None:
    for slots, running, queued in ((0, 1, 1), (1, 0, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match=f"slots={slots} and max_running={running} .* max_queued={queued}"):
            Admission(slots=slots, max_running=running, max_queued=queued)


async def _queue_bound() -> OverloadedError:
    admission = Admission(slots=1, max_running=1, max_queued=2)
    await admission.enter("a")
    waiting = [asyncio.create_task(admission.enter("a")) for _ in range(2)]
    await settle()
    with pytest.raises(OverloadedError) as refused:
        await admission.enter("a")
    assert admission.occupancy() == Occupancy(running=1, queued=2, slots_held=1, slots_closed=0)
    admission.leave("a")
    await waiting[0]
    assert not waiting[1].done()
    admission.leave("a")
    await waiting[1]
    return refused.value


def test_one_more_than_the_queue_holds_is_told_when_to_come_back() -> None:
    error = asyncio.run(_queue_bound())
    assert error.status == 429
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 1
    assert error.details == {"running": 1, "queued": 2, "max_queued": 2}
    assert "2 requests are waiting" in error.message


def test_a_full_queue_does_not_refuse_what_can_run_at_once() -> None:
    async def scenario() -> None:
        admission = Admission(slots=1, max_running=4, max_queued=1)
        await admission.enter("a")
        waiting = asyncio.create_task(admission.enter("b"))
        await settle()
        assert not waiting.done()
        await asyncio.wait_for(admission.enter(BASE), 1)
        with pytest.raises(OverloadedError):
            await admission.enter("c")
        waiting.cancel()

    asyncio.run(scenario())


def test_no_queue_at_all() -> None:
    async def scenario() -> None:
        admission = Admission(slots=1, max_running=2, max_queued=0)
        await admission.enter("a")
        with pytest.raises(OverloadedError):
            await admission.enter("b")
        assert admission.occupancy().slots_closed == 0
        await asyncio.wait_for(admission.enter("a"), 1)

    asyncio.run(scenario())


def test_a_cancelled_request_gives_its_place_in_the_queue_to_another() -> None:
    async def scenario() -> None:
        admission = Admission(slots=1, max_running=1, max_queued=1)
        await admission.enter("a")
        first = asyncio.create_task(admission.enter("b"))
        await settle()
        first.cancel()
        await settle()
        assert first.cancelled()
        assert admission.occupancy() == Occupancy(running=1, queued=0, slots_held=1, slots_closed=0)
        second = asyncio.create_task(admission.enter("c"))
        await settle()
        admission.leave("a")
        await second

    asyncio.run(scenario())


def test_cancelled_in_the_very_tick_in_which_its_turn_comes() -> None:
    """The waiter's future is cancelled at once, its task runs later: it must neither be admitted nor block."""

    async def scenario() -> None:
        admission = Admission(slots=1, max_running=1, max_queued=4)
        await admission.enter("a")
        gone = asyncio.create_task(admission.enter("a"))
        next_ = asyncio.create_task(admission.enter("a"))
        await settle()
        gone.cancel()
        admission.leave("a")
        await asyncio.wait_for(next_, 1)
        await settle()
        assert gone.cancelled()
        assert admission.occupancy() == Occupancy(running=1, queued=0, slots_held=1, slots_closed=0)

    asyncio.run(scenario())


def test_cancelled_after_its_admission_and_before_it_ran() -> None:
    async def scenario() -> None:
        admission = Admission(slots=1, max_running=1, max_queued=4)
        await admission.enter("a")
        gone = asyncio.create_task(admission.enter("b"))
        next_ = asyncio.create_task(admission.enter("c"))
        await settle()
        admission.leave("a")
        gone.cancel()
        await asyncio.wait_for(next_, 1)
        assert gone.cancelled()
        assert admission.occupancy() == Occupancy(running=1, queued=0, slots_held=1, slots_closed=0)

    asyncio.run(scenario())


def test_base_requests_need_no_slot() -> None:
    async def scenario() -> None:
        admission = Admission(slots=2, max_running=8, max_queued=8)
        await admission.enter("a")
        await admission.enter("b")
        waiting = asyncio.create_task(admission.enter("c"))
        await settle()
        for _ in range(3):
            await asyncio.wait_for(admission.enter(BASE), 1)
        assert not waiting.done()
        assert admission.occupancy() == Occupancy(running=5, queued=1, slots_held=2, slots_closed=1)
        waiting.cancel()

    asyncio.run(scenario())


def test_slots_close_only_when_none_is_free() -> None:
    async def scenario() -> None:
        admission = Admission(slots=4, max_running=2, max_queued=8)
        await admission.enter("a")
        await admission.enter("b")
        waiting = [asyncio.create_task(admission.enter(key)) for key in ("c", "d")]
        await settle()
        assert admission.occupancy() == Occupancy(running=2, queued=2, slots_held=2, slots_closed=0)
        for task in waiting:
            task.cancel()

    asyncio.run(scenario())


def test_nothing_is_kept_of_an_adapter_that_is_gone() -> None:
    async def scenario() -> Admission:
        admission = Admission(slots=1, max_running=1, max_queued=8)
        for number in range(20):
            await admission.enter(number)
            queued = asyncio.create_task(admission.enter(number))
            await settle()
            queued.cancel()
            admission.leave(number)
            await settle()
        return admission

    admission = asyncio.run(scenario())
    kept = {name: value for name, value in vars(admission).items() if isinstance(value, dict)}
    assert kept
    assert all(not value for value in kept.values()), kept


async def _full_queue() -> None:
    admission = Admission(slots=2, max_running=1, max_queued=3)
    await admission.enter("hot")
    hot = [asyncio.create_task(admission.enter("hot")) for _ in range(3)]
    await settle()
    cold = asyncio.create_task(admission.enter("cold"))
    await settle()
    with pytest.raises(OverloadedError):
        await hot[2]
    assert not cold.done()
    with pytest.raises(OverloadedError):
        await admission.enter("hot")
    assert admission.occupancy().queued == 3
    admission.leave("hot")
    await cold
    for task in hot:
        task.cancel()


def test_a_full_queue_turns_away_the_adapter_that_fills_it() -> None:
    asyncio.run(asyncio.wait_for(_full_queue(), 5))
