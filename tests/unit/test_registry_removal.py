"""Removing adapters: idle, busy, half registered; and what happens in which order."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.fakes.registry_world import World, digest, fails, until, world_test

from lorahost.errors import AdapterConflictError, AdapterNotFoundError, EngineFailedError, UnavailableError


@world_test()
async def test_same_weights_again_after_a_removal_that_still_drains(w: World) -> None:
    await w.registry.register("a", "v1")
    old = await w.registry.acquire("a")
    assert (await w.registry.remove("a", drain_timeout_s=0)).in_flight == 1
    await w.registry.register("a", "v1")
    assert w.engine.seen_ids == [1]
    old.release()
    await w.quiet()
    assert await w.serving("a") == digest("v1")


@world_test()
async def test_removal(w: World) -> None:
    await w.registry.register("a", "v1")
    lease = await w.registry.acquire("a")
    removal = asyncio.create_task(w.registry.remove("a", drain_timeout_s=5))
    await asyncio.sleep(0)
    await fails(AdapterNotFoundError, w.registry.acquire("a"), "'a'")
    assert w.registry.resolve("a") is None
    assert w.registry.get("a").state == "draining"
    await asyncio.sleep(0.02)
    assert not removal.done()
    w.engine.check_usable(lease.version)
    lease.release()
    record = await removal
    assert (record.in_flight, record.versions_draining, w.engine.held, w.files()) == (0, 0, {}, [])
    for call in (w.registry.remove("a", drain_timeout_s=0), w.registry.update("a", pin=True)):
        await fails(AdapterNotFoundError, call)
    with pytest.raises(AdapterNotFoundError):
        w.registry.get("a")
    assert w.engine.calls == ["load 1", "unload 1"]


@world_test()
async def test_removal_revokes_requests_that_take_too_long(w: World) -> None:
    await w.registry.register("a", "v1")
    lease = await w.registry.acquire("a")
    lease.on_revoke(lease.release)
    record = await w.registry.remove("a", drain_timeout_s=0.01)
    assert lease.revoked
    assert (record.versions_draining, w.engine.held, w.files()) == (0, {}, [])


@world_test()
async def test_removal_never_pulls_weights_from_under_a_request(w: World) -> None:
    await w.registry.register("a", "v1")
    lease = await w.registry.acquire("a")
    record = await w.registry.remove("a", drain_timeout_s=0.01)
    assert (record.state, record.in_flight) == ("draining", 1)
    w.engine.check_usable(lease.version)
    lease.release()
    await w.quiet()
    assert (w.engine.held, w.files()) == ({}, [])
    with pytest.raises(AdapterNotFoundError):
        w.registry.get("a")


@pytest.mark.parametrize("stage", ["fetch", "import"])
def test_removal_during_the_preparation(stage: str, tmp_path: Path) -> None:
    @world_test()
    async def run(w: World) -> None:
        hold = w.tools.held[stage, "v1"] = threading.Event()
        task = asyncio.create_task(w.registry.register("a", "v1"))
        await until(lambda: f"{stage} v1" in w.tools.calls)
        await w.registry.remove("a", drain_timeout_s=1)
        error = await fails(AdapterConflictError, task, "'a' was removed")
        assert error.code == "removed_while_loading"
        hold.set()
        await w.quiet()
        assert (w.engine.held, w.files(), w.registry.list()) == ({}, [], ([], None))

    run(tmp_path)


@world_test()
async def test_removal_during_the_load(w: World) -> None:
    gate = asyncio.get_running_loop().create_future()
    w.engine.gate = lambda version: gate
    task = asyncio.create_task(w.registry.register("a", "v1"))
    await until(lambda: bool(w.engine.seen_ids))
    removal = asyncio.create_task(w.registry.remove("a", drain_timeout_s=1))
    await asyncio.sleep(0.01)
    gate.set_result(None)
    await fails(AdapterConflictError, task)
    await removal
    await w.quiet()
    assert (w.engine.held, w.files()) == ({}, [])


@world_test()
async def test_changes_of_one_name_run_in_the_order_of_arrival(w: World) -> None:
    calls = [
        w.registry.register("a", "v1"),
        w.registry.register("a", "v2"),
        w.registry.remove("a", drain_timeout_s=1),
        w.registry.register("a", "v3"),
        w.registry.update("a", src="v4"),
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(r) for r in results[:2]] == [AdapterConflictError] * 2
    await w.quiet()
    assert await w.serving("a") == digest("v4")
    assert len(w.engine.held) == len(w.files()) == 1


@world_test()
async def test_an_engine_that_keeps_the_weights_is_reported(w: World) -> None:
    await w.registry.register("a", "v1")
    w.engine.sticky.add(1)
    error = await fails(EngineFailedError, w.registry.remove("a", drain_timeout_s=1), "still lists id 1")
    assert error.code == "unload_failed"
    await w.quiet()
    assert len(w.files()) == 1
    w.engine.sticky.clear()
    await w.registry.remove("a", drain_timeout_s=1)
    assert (w.engine.held, w.files()) == ({}, [])


@world_test()
async def test_close_gives_up_and_cleans_up(w: World) -> None:
    await w.registry.register("a", "v1")
    hold = w.tools.held["fetch", "v2"] = threading.Event()
    task = asyncio.create_task(w.registry.register("b", "v2"))
    await until(lambda: "fetch v2" in w.tools.calls)
    await w.registry.close()
    await fails(AdapterConflictError, task)
    assert w.files() == []
    await fails(UnavailableError, w.registry.register("c", "v3"), "stopping")
    hold.set()
    await w.quiet()
