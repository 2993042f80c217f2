"""Limits of the registry: adapters, pins, places in the engine, eviction."""

from __future__ import annotations

import asyncio

from tests.fakes.registry_world import World, digest, fails, world_test

from lorahost.adapters import events
from lorahost.errors import AdapterRejectedError, CapacityError


@world_test(max_adapters=2, max_cpu_loras=8)
async def test_number_of_adapters(w: World) -> None:
    w.tools.faults["fetch", "bad"] = AdapterRejectedError("absent")
    await fails(AdapterRejectedError, w.registry.register("failed", "bad"))
    await w.registry.register("a", "v1")
    await w.registry.register("b", "v2", preload=False)
    error = await fails(CapacityError, w.registry.register("c", "v3"), "max_adapters is 2")
    assert error.status == 507
    assert {"loaded": 1, "max_loras": 4, "max_cpu_loras": 8, "pinned": 0}.items() <= error.details.items()
    await w.registry.register("a", "v4")
    await w.registry.remove("b", drain_timeout_s=1)
    await w.registry.register("c", "v3")


@world_test(max_adapters=2)
async def test_failed_adapters_do_not_pile_up(w: World) -> None:
    for i in range(9):
        w.tools.faults["fetch", f"bad{i}"] = AdapterRejectedError("absent")
        await fails(AdapterRejectedError, w.registry.register(f"a{i}", f"bad{i}"))
    assert [r.name for r in w.registry.list()[0]] == ["a6", "a7", "a8"]


@world_test(max_loras=3, max_cpu_loras=8)
async def test_pins_leave_a_slot(w: World) -> None:
    await asyncio.gather(*[w.registry.register(n, n, pin=True) for n in "ab"])
    error = await fails(CapacityError, w.registry.register("c", "c", pin=True), "max_loras - 1 = 2")
    assert (error.details["pinned"], error.code) == (2, "too_many_pins")
    await w.registry.register("a", "v2", pin=True)
    await w.registry.update("a", pin=False)
    await w.registry.register("c", "c", pin=True)
    assert [r.name for r in w.registry.list()[0] if r.pin] == ["b", "c"]


@world_test(max_cpu_loras=3)
async def test_one_place_is_kept_for_swaps(w: World) -> None:
    await w.registry.register("a", "a1")
    await w.registry.register("b", "b1")
    error = await fails(CapacityError, w.registry.register("c", "c1"), "max_cpu_loras is 3")
    assert {"loaded": 2, "max_loras": 4, "max_cpu_loras": 3, "pinned": 0}.items() <= error.details.items()
    leases = [await w.registry.acquire("a"), await w.registry.acquire("b")]
    await w.registry.register("a", "a2")
    waiting = asyncio.create_task(w.registry.register("b", "b2"))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    leases[0].release()
    await waiting
    assert [await w.serving("a"), await w.serving("b")] == [digest("a2"), digest("b2")]
    leases[1].release()
    await w.quiet()
    assert len(w.engine.held) == 2


@world_test(max_cpu_loras=3)
async def test_two_swaps_at_a_time_share_the_spare_place(w: World) -> None:
    await asyncio.gather(*[w.registry.register(n, f"{n}1") for n in "ab"])
    for i in range(2, 6):
        await asyncio.gather(*[w.registry.register(n, f"{n}{i}") for n in "ab"])
    await w.quiet()
    assert {v.digest for v in w.engine.held.values()} == {digest("a5"), digest("b5")}


@world_test(max_cpu_loras=3)
async def test_idle_lazy_adapters_make_room(w: World) -> None:
    for name in "abc":
        await w.registry.register(name, name, preload=False)
    assert await w.serving("a") == digest("a")
    held = await w.registry.acquire("b")
    assert await w.serving("c") == digest("c")
    assert [w.registry.get(n).loaded for n in "abc"] == [False, True, True]
    assert await w.serving("a") == digest("a")
    assert [w.registry.get(n).loaded for n in "abc"] == [True, True, False]
    evicted = [e.name for e in w.events if isinstance(e, events.Residency) and e.change == "evicted"]
    assert evicted == ["a", "c"]
    w.engine.check_usable(held.version)
    held.release()
    await w.quiet()
    assert w.engine.base_probes == 1
    assert len(w.files()) == 3


@world_test(max_cpu_loras=2)
async def test_a_busy_lazy_adapter_is_not_evicted(w: World) -> None:
    await w.registry.register("a", "a", preload=False)
    await w.registry.register("b", "b", preload=False)
    lease = await w.registry.acquire("a")
    await fails(CapacityError, w.registry.acquire("b"))
    assert w.registry.get("b").state == "ready"
    lease.release()
    assert await w.serving("b") == digest("b")


@world_test()
async def test_the_engines_own_capacity_error_gets_the_counts(w: World) -> None:
    w.engine.capacity = 1
    await w.registry.register("a", "a")
    error = await fails(CapacityError, w.registry.register("b", "b"), "no free slot")
    assert error.details == {"loaded": 2, "max_loras": 4, "max_cpu_loras": 6, "pinned": 0}
    assert list(w.engine.held) == [1]
