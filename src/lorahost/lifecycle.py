"""Starting, ready, draining, failed: the state that `/ping` tells, and how the process ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import StrEnum

from lorahost.errors import UnavailableError

log = logging.getLogger(__name__)


class State(StrEnum):
    """What the server is doing."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Lifecycle:
    """The server's state and why it is in it; safe to read from any thread without waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = State.STARTING
        self._reason = "the engine is starting"
        self._since = time.monotonic()

    def to(self, state: State, reason: str = "") -> bool:
        """Changes the state; failed is final, and draining only gives way to failed. Says whether it changed."""
        with self._lock:
            final = self._state is State.FAILED
            draining = self._state is State.DRAINING and state is not State.FAILED
            if final or draining or state is self._state:
                return False
            self._state, self._reason, self._since = state, reason, time.monotonic()
        log.info("server is %s", state, extra={"state": str(state), "reason": reason or None})
        return True

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    @property
    def reason(self) -> str:
        """Why, in a sentence; empty when ready."""
        return self._reason

    def require_ready(self) -> None:
        """Raises UnavailableError, with a hint when to come back, unless the server serves."""
        if self._state is State.READY:
            return
        wait_s = {State.STARTING: 5.0, State.DRAINING: 10.0, State.FAILED: 30.0}[self._state]
        raise UnavailableError(
            f"the server is {self._state}: {self._reason}", code=f"server_{self._state}", retry_after_s=wait_s
        )

    def require_serving_adapters(self) -> None:
        """Adapters may change while the server starts its engine's adapters and serves, not while it goes down."""
        if self._state not in (State.STARTING, State.READY):
            self.require_ready()


class Gate:
    """Counts requests that hold a thread, refuses above a limit, and lets a drain wait for none."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._count = 0
        self._changed = threading.Condition()

    def enter(self) -> bool:
        """Counts one in, or says no."""
        with self._changed:
            if self._count >= self.limit:
                return False
            self._count += 1
            return True

    def leave(self) -> None:
        """Counts one out."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    @property
    def count(self) -> int:
        """Requests inside now."""
        return self._count

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits until nothing is inside."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout_s)


class Watchdog:
    """Turns a dead or hung engine into the failed state, and after a grace period into an exit.

    Hung: the engine has requests but makes no progress for `stall_s`, or the event loop does not answer for as long.

    Args:
        health: Reads the engine's health without waiting.
        tick: Asks the event loop to call back; a hung loop never does.
        fail: Called once with the reason.
        exit_: Called `exit_grace_s` later; ends the process.
    """

    PERIOD_S = 0.25

    def __init__(
        self,
        health: Callable[[], tuple[bool, int, int, str]],
        tick: Callable[[Callable[[], None]], None],
        *,
        stall_s: float,
        exit_grace_s: float,
        fail: Callable[[str], None],
        exit_: Callable[[], None],
    ) -> None:
        self._health = health
        self._tick = tick
        self._stall_s = stall_s
        self._grace_s = exit_grace_s
        self._fail = fail
        self._exit = exit_
        self._stop = threading.Event()
        self._loop_seen = self._progressed = time.monotonic()
        self._last_tokens = -1

    def start(self) -> None:
        """Watches from a thread of its own, so that a hung loop is seen too."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stop.set()

    def _watch(self) -> None:
        self._loop_seen = self._progressed = time.monotonic()
        while not self._stop.wait(self.PERIOD_S):
            try:
                reason = self._fault()
            except Exception as error:
                log.exception("the engine's health can't be read")
                reason = f"the engine's health can't be read: {type(error).__name__}: {error}"
            if reason:
                self._fail(reason)
                if not self._stop.wait(self._grace_s):
                    self._exit()
                return

    def _fault(self) -> str:
        """Why the engine counts as failed now; empty while it does not."""
        self._tick(self._seen)
        now = time.monotonic()
        alive, running, tokens, reason = self._health()
        if tokens != self._last_tokens or running == 0:
            self._last_tokens, self._progressed = tokens, now
        if not alive:
            return reason or "the engine is not alive"
        if now - self._progressed > self._stall_s:
            return f"{running} requests are running without a token for {self._stall_s:g} s"
        if now - self._loop_seen > self._stall_s:
            return f"the event loop has not answered for {self._stall_s:g} s"
        return ""

    def _seen(self) -> None:
        self._loop_seen = time.monotonic()
