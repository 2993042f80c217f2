from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from lorahost.engine.loop import EngineLoop


@pytest.fixture
def loop() -> EngineLoop:
    return EngineLoop()


def test_work_runs_on_the_loops_own_thread(loop: EngineLoop) -> None:
    async def where() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    loop.start()
    assert loop.run(where()) == "engine-loop"
    assert loop.run(where(), 5) != threading.current_thread().name
    called = threading.Event()
    loop.soon(called.set)
    assert called.wait(5)
    loop.stop()


def test_errors_come_back_as_they_are(loop: EngineLoop) -> None:
    async def broken() -> None:
        raise ValueError("broken")

    loop.start()
    with pytest.raises(ValueError, match="broken"):
        loop.run(broken())
    loop.stop()


def test_waiting_has_a_limit(loop: EngineLoop) -> None:
    loop.start()
    with pytest.raises(TimeoutError):
        loop.run(asyncio.sleep(60), 0.05)
    loop.stop()


def test_cancelling_the_future_cancels_the_task(loop: EngineLoop) -> None:
    cancelled = threading.Event()
    began = threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    loop.start()
    future = loop.submit(work())
    assert began.wait(5)
    future.cancel()
    assert cancelled.wait(5)
    with pytest.raises(CancelledError):
        future.result(5)
    loop.stop()


def test_stop_ends_the_thread(loop: EngineLoop) -> None:
    loop.start()
    loop.stop()
    assert "engine-loop" not in {thread.name for thread in threading.enumerate()}
