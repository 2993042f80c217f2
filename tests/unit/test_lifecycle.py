from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lorahost.engine.loop import EngineLoop
from lorahost.errors import UnavailableError
from lorahost.lifecycle import Gate, Lifecycle, State, Watchdog

STALL_S = 0.1
GRACE_S = 0.1


def test_a_server_starts_with_a_reason_and_refuses_requests() -> None:
    lifecycle = Lifecycle()
    assert (lifecycle.state, lifecycle.reason) == (State.STARTING, "the engine is starting")
    with pytest.raises(UnavailableError) as refused:
        lifecycle.require_ready()
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "server_starting", 5.0)
    lifecycle.require_serving_adapters()


def test_ready_serves() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.to(State.READY)
    assert not lifecycle.to(State.READY)
    assert lifecycle.reason == ""
    lifecycle.require_ready()


@pytest.mark.parametrize("state", [State.DRAINING, State.FAILED])
def test_a_server_that_goes_down_does_not_come_back(state: State) -> None:
    lifecycle = Lifecycle()
    lifecycle.to(state, "because")
    assert not lifecycle.to(State.READY)
    assert (lifecycle.state, lifecycle.reason) == (state, "because")
    for refuse in (lifecycle.require_ready, lifecycle.require_serving_adapters):
        with pytest.raises(UnavailableError, match=f"the server is {state}: because") as refused:
            refuse()
        assert refused.value.retry_after_s is not None


def test_failed_is_final_even_for_a_drain() -> None:
    lifecycle = Lifecycle()
    lifecycle.to(State.DRAINING)
    assert lifecycle.to(State.FAILED, "the engine died")
    assert not lifecycle.to(State.DRAINING)
    assert lifecycle.reason == "the engine died"


def test_the_gate_refuses_above_its_limit_and_waits_for_the_last() -> None:
    gate = Gate(2)
    assert gate.enter()
    assert gate.enter()
    assert not gate.enter()
    assert gate.count == 2
    assert not gate.wait_empty(0.01)
    threading.Timer(0.05, gate.leave).start()
    gate.leave()
    assert gate.enter()
    gate.leave()
    assert gate.wait_empty(2)
    assert gate.count == 0


class Watched:
    """An engine's health as the test wants it, and what the watchdog made of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Watchdog, "PERIOD_S", 0.01)
        self.alive, self.running, self.tokens, self.reason = True, 0, 0, ""
        self.loop_hangs = False
        self.error: Exception | None = None
        self.failed: list[str] = []
        self.exits: list[float] = []
        self.fell = threading.Event()
        self.gone = threading.Event()
        self.dog = Watchdog(
            self.health, self.tick, stall_s=STALL_S, exit_grace_s=GRACE_S, fail=self.fail, exit_=self.exit_
        )

    def health(self) -> tuple[bool, int, int, str]:
        if self.error is not None:
            raise self.error
        return self.alive, self.running, self.tokens, self.reason

    def tick(self, callback: Callable[[], None]) -> None:
        if not self.loop_hangs:
            callback()

    def fail(self, reason: str) -> None:
        self.failed.append(reason)
        self.fell.set()

    def exit_(self) -> None:
        self.exits.append(time.monotonic())
        self.gone.set()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_dead_engine_fails_at_once_and_exits_after_the_grace(watched: Watched) -> None:
    watched.dog.start()
    assert not watched.fell.wait(2 * STALL_S)
    watched.alive, watched.reason = False, "the engine process died"
    began = time.monotonic()
    assert watched.fell.wait(2)
    assert watched.gone.wait(2)
    assert watched.exits[0] - began >= GRACE_S
    assert watched.failed == ["the engine process died"]


def test_running_requests_without_a_token_mean_hung(watched: Watched) -> None:
    watched.running = 3
    watched.dog.start()
    assert watched.fell.wait(2)
    assert watched.failed == ["3 requests are running without a token for 0.1 s"]
    assert watched.gone.wait(2)


def test_progress_and_idleness_are_no_stall(watched: Watched) -> None:
    watched.running = 1
    watched.dog.start()
    until = time.monotonic() + 4 * STALL_S
    while time.monotonic() < until:
        watched.tokens += 1
        time.sleep(0.01)
    watched.running = 0
    assert not watched.fell.wait(3 * STALL_S)
    # a request after a long idle time gets the full time for its first token
    watched.running = 1
    assert not watched.fell.wait(STALL_S / 2)
    watched.dog.stop()


def test_a_hung_event_loop_is_seen_from_outside(watched: Watched) -> None:
    watched.dog.start()
    watched.loop_hangs = True
    assert watched.fell.wait(2)
    assert watched.failed == ["the event loop has not answered for 0.1 s"]


def test_a_real_loop_that_blocks(watched: Watched) -> None:
    loop = EngineLoop()
    loop.start()
    dog = Watchdog(
        watched.health, loop.soon, stall_s=STALL_S, exit_grace_s=GRACE_S, fail=watched.fail, exit_=watched.exit_
    )
    dog.start()
    assert not watched.fell.wait(3 * STALL_S)
    release = threading.Event()
    loop.soon(release.wait)
    try:
        assert watched.fell.wait(2)
    finally:
        release.set()
        dog.stop()
        loop.stop()


def test_health_that_can_not_be_read_is_a_failure(watched: Watched) -> None:
    watched.dog.start()
    watched.error = RuntimeError("no such engine")
    assert watched.fell.wait(2)
    assert watched.failed == ["the engine's health can't be read: RuntimeError: no such engine"]
    assert watched.gone.wait(2)


def test_a_watch_that_was_stopped_neither_fails_nor_exits(watched: Watched) -> None:
    watched.dog.start()
    watched.dog.stop()
    watched.alive = False
    assert not watched.fell.wait(3 * STALL_S)


def test_a_drain_within_the_grace_keeps_its_own_exit(watched: Watched) -> None:
    watched.alive = False
    watched.dog.start()
    assert watched.fell.wait(2)
    watched.dog.stop()
    assert not watched.gone.wait(2 * GRACE_S)
