"""Blocking adapter work (download, hash, import, delete) in a bounded number of daemon threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Runner(Protocol):
    """Runs a blocking callable off the loop and returns its result."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class Workers:
    """At most `limit` jobs at a time, first come first served.

    Daemon threads rather than an executor: the interpreter joins executor threads at exit, so one slow
    download would keep a terminated server alive.
    """

    def __init__(self, limit: int) -> None:
        self._slots = asyncio.Semaphore(limit)

    async def __call__(self, work: Callable[[], T], /) -> T:
        async with self._slots:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[T] = loop.create_future()

            def settle(setter: Callable[[Any], None], value: Any) -> None:
                def apply() -> None:
                    if not done.done():
                        setter(value)

                # The loop may be closed by the time a slow job ends: nobody waits for it then.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(apply)

            def body() -> None:
                try:
                    result = work()
                except BaseException as error:
                    settle(done.set_exception, error)
                else:
                    settle(done.set_result, result)

            threading.Thread(target=body, name="adapter-worker", daemon=True).start()
            return await done
