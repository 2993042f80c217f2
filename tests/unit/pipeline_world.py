"""A pipeline with a fake engine and leases that a test revokes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from lorahost.account import Account
from lorahost.admission import Admission, Occupancy
from lorahost.core import AdapterVersion, Json
from lorahost.engine.fake import FakeHost
from lorahost.errors import AdapterNotFoundError
from lorahost.metrics import Metrics
from lorahost.pipeline import Pipeline, Task

IDLE = Occupancy(running=0, queued=0, slots_held=0, slots_closed=0)


@dataclass
class HandLease:
    """A lease that the test revokes."""

    version: AdapterVersion
    revoked: bool = False
    released: int = 0
    callbacks: list[Callable[[], Any]] = field(default_factory=list)

    def on_revoke(self, callback: Callable[[], Any]) -> None:
        self.callbacks.append(callback)

    def release(self) -> None:
        self.released += 1

    def revoke(self) -> None:
        self.revoked = True
        for callback in self.callbacks:
            callback()


class World:
    def __init__(self, path: Path, *, slots: int = 2, max_running: int = 8, step_s: float = 0.002) -> None:
        self.engine = FakeHost(step_s=step_s)
        self.registry = CollectorRegistry()
        self.metrics = Metrics(8, self.registry)
        self.admission = Admission(slots=slots, max_running=max_running, max_queued=8)
        self.pipeline = Pipeline(self.engine, self, self.admission, self.metrics)
        self.version = AdapterVersion("poet", "ab" * 32, 1, path, 8, frozenset())
        self.leases: list[HandLease] = []
        self.opened: list[AdapterVersion | None] = []

    async def acquire(self, name: str) -> HandLease:
        if name != "poet":
            raise AdapterNotFoundError(f"no adapter {name!r}")
        self.leases.append(HandLease(self.version))
        return self.leases[-1]

    async def whole(self, task: Task) -> tuple[list[Json], AdapterVersion | None, Account]:
        account = accounted(task)
        answers, version = await self.pipeline.whole(task, account)
        return answers, version, account

    def stream(self, task: Task, account: Account | None = None) -> AsyncGenerator[str, None]:
        return self.pipeline.stream(task, account or accounted(task), self.opened.append)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def accounted(task: Task) -> Account:
    return Account(task.request_id, task.adapter, task.adapter or "base", "/invocations")


def task(*calls: Json, adapter: str | None = None, deadline_s: float | None = None, api: Any = "completions") -> Task:
    bodies = calls or ({"prompt": "a b", "max_tokens": 3},)
    return Task(tuple((api, body) for body in bodies), adapter, adapter or "base", "r1", deadline_s)


def endless(**more: Any) -> Json:
    return {"prompt": "a", "max_tokens": 4000, **more}


Scenario = Callable[[World], Awaitable[None]]


def runner(path: Path) -> Callable[..., None]:
    """Runs a scenario in a world of its own, and looks whether it left anything behind; options: those of World."""

    def run_(scenario: Scenario, **options: Any) -> None:
        async def whole() -> None:
            world = World(path, **options)
            await world.engine.start()
            await world.engine.load(world.version)
            await asyncio.wait_for(scenario(world), 20)
            assert world.admission.occupancy() == IDLE
            assert [lease.released for lease in world.leases] == [1] * len(world.leases)
            assert world.engine.running == {}
            await world.engine.stop()

        asyncio.run(whole())

    return run_


def parsed(events: list[str]) -> list[Json]:
    return [json.loads(event[6:]) for event in events if event.startswith("data: {")]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
