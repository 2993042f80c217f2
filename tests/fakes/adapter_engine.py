"""An engine stand-in for the adapter registry: it keeps what it is told, and fails where vLLM would."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from lorahost.core import AdapterVersion
from lorahost.errors import AdapterRejectedError, CapacityError

BASE_PROBE = (-0.5, -1.25, -2.0)


class FakeAdapterEngine:
    """Implements `AdapterEngine`.

    Attributes:
        capacity: Versions that fit; one more is a CapacityError.
        gate: Awaited in each `load`, for tests that hold a load.
        unload_gate: Awaited in each `unload`.
        modules_of: Modules that the engine finds for a version; the importer's own list by default.
        faults: Digest -> the exception that `load` raises.
        listed_after_fault: A failed load stays in the list, as with vLLM.
        sticky: Ids that `unload` leaves in the list.
        without_effect: Digests whose probe equals the base model's.
        seen_ids: All ids ever given to `load`, in order.
        calls: Names of the calls, with ids.
    """

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = capacity
        self.gate: Callable[[AdapterVersion], asyncio.Future[None] | None] = lambda version: None
        self.unload_gate: asyncio.Future[None] | None = None
        self.modules_of: Callable[[AdapterVersion], frozenset[str]] = lambda version: version.modules
        self.faults: dict[str, Exception] = {}
        self.listed_after_fault = True
        self.sticky: set[int] = set()
        self.without_effect: set[str] = set()
        self.seen_ids: list[int] = []
        self.calls: list[str] = []
        self.held: dict[int, AdapterVersion] = {}
        self.base_probes = 0
        self.busy = False

    async def load(self, version: AdapterVersion) -> frozenset[str]:
        engine_id = version.engine_id
        self.calls.append(f"load {engine_id}")
        assert not self.busy, "two loads or unloads in the engine at a time"
        assert engine_id not in self.seen_ids, f"id {engine_id} was used before"
        names = {v.engine_name for v in self.held.values()}
        assert version.engine_name not in names, f"{version.engine_name} is held twice"
        self.seen_ids.append(engine_id)
        self.busy = True
        try:
            gate = self.gate(version)
            await (gate if gate is not None else asyncio.sleep(0))
            fault = self.faults.get(version.digest)
            if fault is not None:
                if self.listed_after_fault:
                    self.held[engine_id] = version
                raise fault
            if len(self.held) >= self.capacity:
                raise CapacityError(f"no free slot for {version.engine_name}: capacity {self.capacity}")
            if not any(version.path.iterdir()):
                raise AdapterRejectedError(f"no files in {version.path}")
            self.held[engine_id] = version
            return self.modules_of(version)
        finally:
            self.busy = False

    async def unload(self, engine_id: int) -> None:
        self.calls.append(f"unload {engine_id}")
        assert not self.busy, "two loads or unloads in the engine at a time"
        assert engine_id in self.held, f"id {engine_id} is not loaded"
        assert self.held[engine_id].path.exists(), "the files went before the weights"
        self.busy = True
        await (self.unload_gate if self.unload_gate is not None else asyncio.sleep(0))
        self.busy = False
        if engine_id not in self.sticky:
            del self.held[engine_id]

    async def loaded(self) -> frozenset[int]:
        await asyncio.sleep(0)
        return frozenset(self.held)

    async def probe(self, version: AdapterVersion | None) -> tuple[float, ...]:
        await asyncio.sleep(0)
        if version is None:
            self.base_probes += 1
            return BASE_PROBE
        self.check_usable(version)
        if version.digest in self.without_effect:
            return BASE_PROBE
        value = int.from_bytes(hashlib.sha256(version.digest.encode()).digest()[:4], "big")
        return (-0.5, -1.0 - value / 2**32, -2.0)

    def check_usable(self, version: AdapterVersion) -> None:
        """What a decode step needs: the weights are held, and the files are there for a re-read."""
        assert self.held.get(version.engine_id) == version, f"{version.engine_name} is not in the engine"
        assert any(version.path.iterdir()), f"the files of {version.engine_name} are gone"
