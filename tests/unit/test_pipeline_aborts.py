"""Requests that end early: the client leaves, the adapter is removed, the engine dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.pipeline_world import World, endless, runner, task, until

from lorahost.errors import AdapterConflictError, EngineFailedError


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    return runner(tmp_path)


def test_cancelling_aborts_the_engines_request(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        running = asyncio.create_task(world.whole(task(endless(), adapter="poet")))
        await until(lambda: bool(world.engine.running))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert world.engine.aborted == ["r1"]

    run(scenario)


def test_leaving_a_stream_aborts_the_engines_request(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        stream = world.stream(task(endless(), adapter="poet"))
        await anext(stream)
        await stream.aclose()
        assert world.engine.aborted == ["r1"]

    run(scenario)


def test_a_removed_adapter_ends_its_running_requests_with_a_reason(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        running = asyncio.create_task(world.whole(task(endless(), adapter="poet")))
        await until(lambda: bool(world.engine.running))
        world.leases[0].revoke()
        with pytest.raises(AdapterConflictError, match="'poet' was removed"):
            await running

    run(scenario)


def test_a_removed_adapter_ends_its_queued_requests_with_a_reason(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.whole(task(endless())))
        await until(lambda: bool(world.engine.running))
        queued = asyncio.create_task(world.whole(task(adapter="poet")))
        await until(lambda: world.admission.occupancy().queued == 1)
        world.leases[0].revoke()
        with pytest.raises(AdapterConflictError, match="'poet' was removed"):
            await queued
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(scenario, max_running=1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_is_an_error_and_frees_everything(run: Callable[..., None], stream: bool) -> None:
    async def scenario(world: World) -> None:
        async def read() -> None:
            if stream:
                async for _ in world.stream(task(endless(), adapter="poet")):
                    pass
            else:
                await world.whole(task(endless(), adapter="poet"))

        running = asyncio.create_task(read())
        await until(lambda: bool(world.engine.running))
        world.engine.dead = True
        with pytest.raises(EngineFailedError):
            await running

    run(scenario)
