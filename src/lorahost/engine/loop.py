"""The event loop on which the engine, the registry and admission live, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class EngineLoop:
    """One asyncio loop in one daemon thread; HTTP threads hand it coroutines."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` on the loop; cancelling the future cancels the task there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def soon(self, callback: Callable[[], object]) -> None:
        """Calls `callback` on the loop."""
        self.loop.call_soon_threadsafe(callback)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs `work` on the loop and waits for its result."""
        return self.submit(work).result(timeout_s)

    def stop(self) -> None:
        """Stops the loop and joins its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)
