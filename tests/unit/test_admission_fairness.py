"""Closed-loop simulations on a virtual clock: who waits how long."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Hashable

import pytest
from tests.fakes.virtual_time import run_virtual

from lorahost.admission import BASE, Admission

Waits = dict[Hashable, list[float]]


class Simulation:
    """Clients that send one request after another through one `Admission`."""

    def __init__(self, seed: int = 0, **limits: int) -> None:
        self.admission = Admission(**{"max_queued": 1000, **limits})
        self.random = random.Random(seed)
        self.waits: Waits = defaultdict(list)

    async def request(self, adapter: Hashable, answer_s: float) -> None:
        clock = asyncio.get_running_loop().time
        arrived = clock()
        await self.admission.enter(adapter)
        self.waits[adapter].append(clock() - arrived)
        await asyncio.sleep(answer_s)
        self.admission.leave(adapter)

    async def client(self, adapter: Hashable, until: float, shortest: float = 1.0, longest: float = 1.0) -> None:
        while asyncio.get_running_loop().time() < until:
            await self.request(adapter, self.random.uniform(shortest, longest))


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize(("shortest", "longest"), [(1.0, 1.0), (0.2, 1.0)])
def test_sixteen_adapters_on_eight_slots_wait_two_answers_at_most(
    clients: int, shortest: float, longest: float
) -> None:
    async def scenario() -> Waits:
        simulation = Simulation(slots=8, max_running=64)
        async with asyncio.TaskGroup() as group:
            for adapter in range(16):
                for _ in range(clients):
                    group.create_task(simulation.client(adapter, 100.0, shortest, longest))
        return simulation.waits

    waits = run_virtual(scenario())
    assert set(waits) == set(range(16))
    assert max(max(times) for times in waits.values()) <= 2 * longest + 1e-6
    served = [len(times) for times in waits.values()]
    assert min(served) > 0.8 * max(served)


def test_a_hot_adapter_does_not_starve_a_cold_one() -> None:
    """A hundred requests of the hot one are older than the cold one's only request."""

    async def scenario() -> Waits:
        simulation = Simulation(slots=1, max_running=4)
        async with asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(simulation.request("hot", 1.0))
            await asyncio.sleep(0.5)
            group.create_task(simulation.request("cold", 1.0))
        return simulation.waits

    waits = run_virtual(scenario())
    assert waits["cold"] == [pytest.approx(0.5)]
    assert len(waits["hot"]) == 100


def test_a_hot_adapter_with_one_place_in_the_engine_takes_turns() -> None:
    async def scenario() -> Waits:
        simulation = Simulation(slots=8, max_running=1)
        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(simulation.request("hot", 1.0))
            await asyncio.sleep(0.5)
            group.create_task(simulation.request(BASE, 1.0))
            group.create_task(simulation.request("cold", 1.0))
        return simulation.waits

    waits = run_virtual(scenario())
    assert max(waits[BASE] + waits["cold"]) <= 2.5 + 1e-6


def test_the_base_model_gets_its_turn_beside_more_adapters_than_places() -> None:
    async def scenario() -> Waits:
        simulation = Simulation(slots=8, max_running=4)
        async with asyncio.TaskGroup() as group:
            for adapter in range(6):
                for _ in range(3):
                    group.create_task(simulation.client(adapter, 60.0))
            group.create_task(simulation.client(BASE, 60.0))
        return simulation.waits

    waits = run_virtual(scenario())
    assert max(waits[BASE]) <= 2 + 1e-6


def test_an_adapter_with_few_clients_is_not_crowded_out_by_one_with_many() -> None:
    async def scenario() -> Waits:
        simulation = Simulation(slots=2, max_running=4)
        async with asyncio.TaskGroup() as group:
            for adapter, clients in (("greedy", 20), ("modest", 2)):
                for _ in range(clients):
                    group.create_task(simulation.client(adapter, 50.0, 0.5, 1.0))
        return simulation.waits

    waits = run_virtual(scenario())
    assert max(waits["modest"]) <= 1.0
    assert len(waits["modest"]) > 0.4 * len(waits["greedy"])


def test_many_more_adapters_than_slots_are_served_in_turn() -> None:
    async def scenario() -> Waits:
        simulation = Simulation(slots=2, max_running=16)
        async with asyncio.TaskGroup() as group:
            for adapter in range(20):
                group.create_task(simulation.client(adapter, 100.0))
        return simulation.waits

    waits = run_virtual(scenario())
    assert len(waits) == 20
    assert max(max(times) for times in waits.values()) <= 20 / 2
