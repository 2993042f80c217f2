"""Any mix of changes, requests, failures and pauses: requests keep their weights, nothing is left behind.

The registry runs on a loop with its own clock, and each blocking job and engine load can be held and let go, so
that hypothesis decides every interleaving.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.fakes.adapter_engine import FakeAdapterEngine
from tests.fakes.registry_world import Tools, digest
from tests.fakes.virtual_time import VirtualLoop

from lorahost.adapters import events
from lorahost.adapters.registry import AdapterRegistry, RegistrySettings
from lorahost.adapters.residency import EngineLimits
from lorahost.adapters.versions import AdapterRecord, Lease
from lorahost.core import AdapterVersion
from lorahost.errors import (
    AdapterConflictError,
    AdapterNotFoundError,
    AdapterRejectedError,
    CapacityError,
    HostError,
    InvalidRequestError,
    UnavailableError,
)

T = TypeVar("T")
MAX_ADAPTERS, MAX_LORAS, MAX_CPU_LORAS = 3, 3, 4
NAMES = st.sampled_from(["a", "b", "c", "d"])
CONTENTS = st.sampled_from(["v1", "v2", "v3"])
MAYBE = st.sampled_from([None, True, False])
EXPECTED = (AdapterConflictError, AdapterNotFoundError, AdapterRejectedError, CapacityError, InvalidRequestError)
INDEX = st.integers(0, 63)


class _Loop(VirtualLoop):
    def spin(self) -> None:
        """Runs until nothing is ready; the clock stands still."""

        async def until_idle() -> None:
            while True:
                await asyncio.sleep(0)
                if not self._ready:
                    return

        self.run_until_complete(until_idle())


@dataclass(eq=False)
class Request:
    """An acquire: `allowed` are the digests that were live at some time while it waited."""

    name: str
    task: asyncio.Task[Lease]
    allowed: set[str]


@dataclass(eq=False)
class Held:
    """A request that has its lease, and the weights it got."""

    lease: Lease
    version: AdapterVersion


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="registry-machine-"))
        self.loop = _Loop()
        self.engine, self.tools = FakeAdapterEngine(MAX_CPU_LORAS), Tools()
        self.hold_work = self.hold_loads = False
        self.paused: list[asyncio.Future[None]] = []
        self.engine.gate = lambda version: self.pause() if self.hold_loads else None
        self.seen: list[events.AdapterEvent] = []
        self.lost: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.lost.append(context))
        self.requests: list[Request] = []
        self.held: list[Held] = []
        self.changing: dict[str, int] = {}
        self.live: dict[str, str] = {}
        self.registry = self.on_loop(self.make_registry())

    async def make_registry(self) -> AdapterRegistry:
        limits = EngineLimits(MAX_LORAS, MAX_CPU_LORAS, wait_s=2.0)
        settings = RegistrySettings(self.root, MAX_ADAPTERS, limits, acquire_wait_s=5.0, revoke_grace_s=0.5)
        return AdapterRegistry(self.engine, self.tools.bundle(), settings, on_event=self.seen.append, run=self.run)

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def pause(self) -> asyncio.Future[None]:
        self.paused.append(self.loop.create_future())
        return self.paused[-1]

    async def run(self, work: Callable[[], T], /) -> T:
        if self.hold_work:
            await self.pause()
        return work()

    def change(self, name: str, work: Coroutine[Any, Any, AdapterRecord], *, removal: bool = False) -> None:
        async def watched() -> None:
            self.changing[name] = self.changing.get(name, 0) + 1
            try:
                record = await work
                if not removal:
                    assert record.digest is not None
                    self.now_live(name, record.digest)
            except EXPECTED:
                pass
            finally:
                self.changing[name] -= 1

        task = self.loop.create_task(watched())
        task.add_done_callback(lambda done: done.result())
        self.settle()

    def settle(self) -> None:
        """Runs what can run. A request gets weights of its own adapter, live at some time since it came."""
        self.loop.spin()
        for request in [r for r in self.requests if r.task.done()]:
            self.requests.remove(request)
            if request.task.cancelled():
                continue
            error = request.task.exception()
            if error is not None:
                assert isinstance(error, HostError)
                assert not isinstance(error, UnavailableError) or error.code == "adapter_loading"
                continue
            lease = request.task.result()
            assert lease.version.name == request.name
            assert lease.version.digest in request.allowed
            self.held.append(Held(lease, lease.version))

    def now_live(self, name: str, digest: str) -> None:
        self.live[name] = digest
        for request in self.requests:
            if request.name == name:
                request.allowed.add(digest)

    @rule(name=NAMES, content=CONTENTS, preload=st.booleans(), pin=st.booleans())
    def register(self, name: str, content: str, preload: bool, pin: bool) -> None:
        self.change(name, self.registry.register(name, content, preload=preload, pin=pin))

    @rule(name=NAMES, content=st.sampled_from([None, "v1", "v2"]), preload=MAYBE, pin=MAYBE)
    def update(self, name: str, content: str | None, preload: bool | None, pin: bool | None) -> None:
        self.change(name, self.registry.update(name, src=content, preload=preload, pin=pin))

    @rule(name=NAMES, drain_timeout_s=st.sampled_from([0.0, 3.0]))
    def remove(self, name: str, drain_timeout_s: float) -> None:
        if self.live.pop(name, None) is not None:
            assert self.registry.resolve(name) == name
        self.change(name, self.registry.remove(name, drain_timeout_s=drain_timeout_s), removal=True)
        assert self.registry.resolve(name) is None

    @rule(name=NAMES)
    def acquire(self, name: str) -> None:
        live = self.live.get(name)
        task = self.loop.create_task(self.registry.acquire(name))
        self.requests.append(Request(name, task, {live} if live else set()))
        self.settle()
        if not self.changing.get(name) and live is None:
            assert isinstance(task.exception(), AdapterNotFoundError | AdapterRejectedError)

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        self.loop.call_soon(self.held.pop(index % len(self.held)).lease.release)
        self.settle()

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def end_when_revoked(self, index: int) -> None:
        held = self.held[index % len(self.held)]

        def end() -> None:
            if held in self.held:
                self.held.remove(held)
                held.lease.release()

        self.loop.call_soon(held.lease.on_revoke, end)
        self.settle()

    @precondition(lambda self: self.requests)
    @rule(index=INDEX)
    def client_goes_away(self, index: int) -> None:
        self.requests[index % len(self.requests)].task.cancel()
        self.settle()

    @rule(work=st.booleans(), loads=st.booleans())
    def hold(self, work: bool, loads: bool) -> None:
        self.hold_work, self.hold_loads = work, loads

    @precondition(lambda self: self.paused)
    @rule(index=INDEX)
    def let_go(self, index: int) -> None:
        self.paused.pop(index % len(self.paused)).set_result(None)
        self.settle()

    @rule(stage=st.sampled_from(["fetch", "import", "load"]), content=CONTENTS, listed=st.booleans())
    def break_(self, stage: str, content: str, listed: bool) -> None:
        error = AdapterRejectedError(f"{content} is broken at {stage}")
        self.engine.listed_after_fault = listed
        if stage == "load":
            self.engine.faults[digest(content)] = error
        else:
            self.tools.faults[stage, content] = error

    @rule()
    def mend(self) -> None:
        self.engine.faults.clear()
        self.tools.faults.clear()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.on_loop(asyncio.sleep(seconds))
        self.settle()

    @invariant()
    def requests_keep_their_weights(self) -> None:
        for held in self.held:
            assert held.lease.version is held.version
            self.engine.check_usable(held.version)

    @invariant()
    def limits_hold(self) -> None:
        records, _ = self.registry.list()
        serving = [r for r in records if r.state not in ("failed", "draining")]
        assert len(serving) <= MAX_ADAPTERS
        assert sum(r.pin for r in serving if r.digest) <= MAX_LORAS - 1
        assert len(self.engine.held) <= MAX_CPU_LORAS

    @invariant()
    def the_live_version_is_the_last_that_was_registered(self) -> None:
        for record in self.registry.list()[0]:
            if record.digest is not None and record.state != "draining":
                assert record.digest == self.live[record.name]

    @invariant()
    def nothing_fails_unexpectedly(self) -> None:
        assert self.lost == []
        assert not [e for e in self.seen if isinstance(e, events.ChangeFailed) and "AssertionError" in e.reason]

    @invariant()
    def nothing_else_is_in_the_engine_or_on_disk(self) -> None:
        """Once nothing is under way: exactly the live versions and those that requests still use."""
        if asyncio.all_tasks(self.loop):
            return
        used = {held.version.engine_name for held in self.held}
        records = [r for r in self.registry.list()[0] if r.digest is not None]
        live = {f"{r.name}@{r.digest[:12]}": r.loaded for r in records if r.digest}
        loaded = sorted(v.engine_name for v in self.engine.held.values())
        assert loaded == sorted(used | {name for name, is_loaded in live.items() if is_loaded})
        files = [path for path in self.root.rglob("*") if path.is_file()]
        assert len(files) == len(used | set(live)), files
        assert sum(r.in_flight for r in self.registry.list()[0]) == len(self.held)

    def teardown(self) -> None:
        try:
            self.hold_work = self.hold_loads = False
            for name in "abcd":
                self.change(name, self.registry.remove(name, drain_timeout_s=0), removal=True)
            while asyncio.all_tasks(self.loop) or self.requests or self.held:
                self.settle()
                self.requests_keep_their_weights()
                while self.held:
                    self.release(0)
                while self.paused:
                    self.let_go(0)
                self.on_loop(asyncio.sleep(1))
            assert self.registry.list() == ([], None)
            assert self.engine.held == {}
            assert [path for path in self.root.rglob("*") if path.is_file()] == []
        finally:
            self.loop.close()
            shutil.rmtree(self.root)


RegistryMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRegistryMachine = RegistryMachine.TestCase
