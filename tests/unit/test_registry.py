"""The registry against an engine stand-in: registering, swapping, leasing, updating, listing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.fakes.registry_world import World, digest, fails, until, world_test

from lorahost.adapters import events
from lorahost.errors import AdapterConflictError, InvalidRequestError, UnavailableError


@world_test()
async def test_register_serves_the_weights_and_says_so(w: World) -> None:
    record = await w.registry.register("a", "v1", alias="Alice")
    assert (record.state, record.loaded, record.digest) == ("ready", True, digest("v1"))
    assert (record.rank, record.modules, record.bytes, record.alias) == (8, 2, 1000, "Alice")
    assert set(record.seconds) == {"fetch", "check", "import", "load", "probe"}
    assert await w.serving("a") == digest("v1")
    assert await w.serving("Alice") == digest("v1")
    await w.quiet()
    assert [p.name for p in w.files()] == ["adapter_config.json"]
    states = [(e.before, e.after) for e in w.events if isinstance(e, events.StateChanged)]
    assert states == [(None, "fetching"), ("fetching", "loading"), ("loading", "ready")]
    stages = [e.stage for e in w.events if isinstance(e, events.StageFinished)]
    assert stages == ["fetch", "check", "import", "load", "probe"]


@world_test()
async def test_same_weights_again_change_nothing(w: World) -> None:
    await w.registry.register("a", "v1")
    w.tools.contents["copy of v1"] = "v1"
    record = await w.registry.register("a", "copy of v1")
    assert record.src == "copy of v1"
    assert w.engine.seen_ids == [1]
    await w.quiet()
    assert len(w.files()) == 1


@world_test()
async def test_the_same_registration_while_it_runs_is_shared(w: World) -> None:
    hold = w.tools.held["fetch", "v1"] = threading.Event()
    tasks = [asyncio.create_task(w.registry.register("a", "v1")) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    hold.set()
    records = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(records[0], asyncio.CancelledError)
    assert records[1] == records[2] == w.registry.get("a")
    assert w.tools.calls == ["fetch v1", "import v1"]


@world_test()
async def test_a_swap_leaves_running_requests_alone(w: World) -> None:
    await w.registry.register("a", "v1")
    old = await w.registry.acquire("a")
    await w.registry.register("a", "v2")
    assert await w.serving("a") == digest("v2")
    assert old.version.digest == digest("v1")
    w.engine.check_usable(old.version)
    record = w.registry.get("a")
    assert (record.versions_draining, record.in_flight, record.digest) == (1, 1, digest("v2"))
    old.release()
    old.release()
    await w.quiet()
    assert [v.digest for v in w.engine.held.values()] == [digest("v2")]
    assert len(w.files()) == 1
    assert w.registry.get("a").versions_draining == 0


@world_test()
async def test_while_the_successor_loads_the_old_version_answers(w: World) -> None:
    await w.registry.register("a", "v1")
    gate = asyncio.get_running_loop().create_future()
    w.engine.gate = lambda version: gate
    swap = asyncio.create_task(w.registry.register("a", "v2"))
    await until(lambda: w.registry.get("a").incoming == "loading")
    assert await w.serving("a") == digest("v1")
    assert w.registry.get("a").state == "ready"
    gate.set_result(None)
    assert (await swap).digest == digest("v2")


@world_test()
async def test_back_to_a_version_that_still_drains(w: World) -> None:
    await w.registry.register("a", "v1")
    old = await w.registry.acquire("a")
    await w.registry.register("a", "v2")
    await w.registry.register("a", "v1")
    assert w.engine.seen_ids == [1, 2]
    async with await w.registry.acquire("a") as lease:
        assert lease.version == old.version
    old.release()
    await w.quiet()
    assert await w.serving("a") == digest("v1")
    assert list(w.engine.held) == [1]


@world_test()
async def test_back_to_a_version_that_is_leaving_waits_for_it(w: World) -> None:
    await w.registry.register("a", "v1")
    gate = w.engine.unload_gate = asyncio.get_running_loop().create_future()
    await w.registry.register("a", "v2")
    await until(lambda: "unload 1" in w.engine.calls)
    back = asyncio.create_task(w.registry.register("a", "v1"))
    await until(lambda: w.tools.calls.count("fetch v1") == 2)
    await asyncio.sleep(0.01)
    assert w.engine.seen_ids == [1, 2]
    gate.set_result(None)
    assert (await back).digest == digest("v1")
    assert w.engine.seen_ids == [1, 2, 3]
    await w.quiet()
    assert list(w.engine.held) == [3]
    await w.registry.remove("a", drain_timeout_s=1)
    assert (w.registry.list(), w.engine.held, w.files()) == (([], None), {}, [])


@world_test()
async def test_lazy_adapters_load_once_at_the_first_request(w: World) -> None:
    record = await w.registry.register("a", "v1", preload=False)
    assert (record.state, record.loaded, w.engine.seen_ids) == ("ready", False, [])
    leases = await asyncio.gather(*[w.registry.acquire("a") for _ in range(5)])
    assert {lease.version.engine_id for lease in leases} == {1}
    assert w.registry.get("a").loaded
    for lease in leases:
        lease.release()
    assert list(w.engine.held) == [1]


@world_test(acquire_wait_s=0.05)
async def test_a_request_waits_for_the_first_registration(w: World) -> None:
    hold = w.tools.held["fetch", "v1"] = threading.Event()
    task = asyncio.create_task(w.registry.register("a", "v1"))
    await asyncio.sleep(0)
    error = await fails(UnavailableError, w.registry.acquire("a"), "still loading after 0.05 s")
    assert error.retry_after_s is not None
    request = asyncio.create_task(w.registry.acquire("a"))
    hold.set()
    await task
    (await request).release()


@world_test()
async def test_update(w: World) -> None:
    await w.registry.register("a", "v1", preload=False)
    await fails(InvalidRequestError, w.registry.update("a", pin=True), "preload=true")
    record = await w.registry.update("a", preload=True, pin=True)
    assert (record.pin, record.loaded) == (True, True)
    await fails(InvalidRequestError, w.registry.update("a", preload=False), "preload=true")
    record = await w.registry.update("a", src="v2")
    assert (record.pin, record.digest) == (True, digest("v2"))
    record = await w.registry.update("a", pin=False)
    assert (record.pin, record.preload, record.digest) == (False, True, digest("v2"))


@world_test()
async def test_aliases(w: World) -> None:
    await w.registry.register("id-1", "v1", alias="style")
    taken = await fails(AdapterConflictError, w.registry.register("style-2", "v2", alias="id-1"), "name of another")
    assert taken.code == "alias_taken"
    shadow = await fails(AdapterConflictError, w.registry.register("style", "v2"), "alias of adapter 'id-1'")
    assert shadow.code == "name_taken"
    assert await w.serving("id-1") == digest("v1")
    assert w.registry.resolve("style") == "id-1"
    await w.registry.register("id-3", "v3", alias="style")
    error = await fails(AdapterConflictError, w.registry.acquire("style"), "id-1, id-3")
    assert error.code == "ambiguous_alias"
    await w.registry.remove("id-1", drain_timeout_s=1)
    assert w.registry.resolve("style") == "id-3"
    assert w.registry.resolve("nobody") is None


@world_test(max_adapters=30, max_cpu_loras=64)
async def test_pages(w: World) -> None:
    names = [f"ünï/{i:02d}" for i in range(7)]
    for name in names:
        await w.registry.register(name, name)
    seen, token = [], None
    while True:
        records, token = w.registry.list(3, token)
        seen += [r.name for r in records]
        if token is None:
            break
        assert token.isascii()
        await w.registry.remove(records[0].name, drain_timeout_s=1)
    assert seen == names
    for limit in (0, 1001, "x", True):
        with pytest.raises(InvalidRequestError, match="limit"):
            w.registry.list(limit)
    for token in ("!", "é", "AAA=A"):
        with pytest.raises(InvalidRequestError, match="next_page_token"):
            w.registry.list(3, token)


@world_test()
async def test_other_threads_register_and_read(w: World) -> None:
    loop = asyncio.get_running_loop()

    def client(i: int) -> str:
        def on_loop(call: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(call, loop).result(10)

        on_loop(w.registry.register("a", f"v{i}"))
        lease = on_loop(w.registry.acquire("a"))
        loop.call_soon_threadsafe(lease.release)
        return w.registry.get("a").state + w.registry.list()[0][0].state

    assert await asyncio.gather(*[asyncio.to_thread(client, i) for i in range(8)]) == ["readyready"] * 8
    await w.quiet()
    assert len(w.engine.held) == len(w.files()) == 1
