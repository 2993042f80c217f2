"""Which versions the engine holds: loading, checking, evicting and unloading them within its capacity."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lorahost.adapters import events
from lorahost.adapters.versions import Stage, Version
from lorahost.core import AdapterEngine, AdapterVersion, Json
from lorahost.errors import AdapterRejectedError, CapacityError, EngineFailedError, HostError

ProbePolicy = Literal["off", "warn", "refuse"]
Change = Literal["evicted", "removed"]
LISTED = 8


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capacity of the engine.

    Attributes:
        max_loras: Device slots; one is never pinned, so that other adapters can run.
        max_cpu_loras: Versions that the engine can hold at a time.
        swap_spare: Places of `max_cpu_loras` that only the successor of a live version may use.
        wait_s: Seconds that a load waits for a place that is about to become free.
    """

    max_loras: int
    max_cpu_loras: int
    swap_spare: int = 1
    wait_s: float = 30.0

    @property
    def first_loads(self) -> int:
        """Places for versions that replace nothing."""
        return max(1, self.max_cpu_loras - self.swap_spare)


class EngineResidency:
    """Owns the engine ids. One load or unload is in the engine at a time; all methods run on its loop.

    Calls `changed` for a version that the engine took in or gave up; `counts` is for CapacityErrors.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        limits: EngineLimits,
        *,
        probe: ProbePolicy,
        emit: events.Emit,
        counts: Callable[[], Json],
        changed: Callable[[Version], None],
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._probe = probe
        self._emit = emit
        self._counts = counts
        self._changed = changed
        self._ids = itertools.count(1)
        self._held: dict[int, Version] = {}
        self._lock = asyncio.Lock()
        self._freed = asyncio.Event()
        self._swaps = 0
        self._base_lock = asyncio.Lock()
        self._base: tuple[float, ...] | None = None

    @property
    def held(self) -> int:
        """Places in use: loaded, being loaded, or not yet given up by the engine."""
        return len(self._held)

    async def ensure(self, version: Version, *, swap: bool = False) -> AdapterVersion:
        """Returns what the engine holds for `version`, loading it first if need be; callers share one load.

        Raises:
            AdapterRejectedError: the engine refused it, holds other modules than imported, or sees no effect.
            CapacityError: no place is free, and none is about to be.
            EngineFailedError: an earlier copy of this version can't be removed from the engine.
        """
        while version.resident is None:
            if version.loading is None:
                version.loading = asyncio.create_task(self._load(version, swap))
                version.loading.add_done_callback(_retrieve)
            await asyncio.shield(version.loading)
        return version.resident

    async def remove(self, version: Version, change: Change = "removed") -> None:
        """Takes `version` out of the engine and has the engine's own list confirm it.

        Raises:
            EngineFailedError: the engine still lists it; a later call tries again.
        """
        if version.loading is not None and version.loading is not asyncio.current_task():
            await asyncio.wait({version.loading})
        if version.resident is not None:
            version.leaving, version.resident = version.resident, None
        if version.leaving is not None and version.unloading is None:
            version.unloading = asyncio.create_task(self._unload(version, version.leaving, change))
            version.unloading.add_done_callback(_retrieve)
        if version.unloading is not None:
            await asyncio.shield(version.unloading)

    @contextlib.contextmanager
    def swapping(self, active: bool) -> Iterator[None]:
        """While a successor loads and until it is live: the place of its predecessor is about to be free."""
        self._swaps += active
        try:
            yield
        finally:
            self._swaps -= active
            self._wake()

    def _wake(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

    async def _load(self, version: Version, swap: bool) -> None:
        try:
            if version.leaving is not None:
                await self.remove(version)
            engine_id = await self._reserve(version, swap)
            candidate = AdapterVersion(
                version.name, version.digest, engine_id, version.path, version.rank, version.modules
            )
            try:
                await self._load_checked(version, candidate)
            except BaseException as error:
                if isinstance(error, CapacityError):
                    error.details = {**self._counts(), **error.details}
                self._emit(events.Residency(version.name, version.digest, engine_id, "refused"))
                await self._discard(version, candidate, error)
                raise
            version.resident = candidate
            self._emit(events.Residency(version.name, version.digest, engine_id, "loaded"))
        finally:
            version.loading = None
            self._changed(version)

    async def _load_checked(self, version: Version, candidate: AdapterVersion) -> None:
        async with self._lock:
            started = time.monotonic()
            found = await self._engine.load(candidate)
            self._time(version, "load", started)
        if found != version.modules or not found:
            raise _modules_mismatch(version, found)
        if self._probe != "off" and not version.probed:
            started = time.monotonic()
            await self._check_effect(version, candidate)
            self._time(version, "probe", started)
            version.probed = True

    def _time(self, version: Version, stage: Stage, started: float) -> None:
        version.seconds[stage] = time.monotonic() - started
        self._emit(events.StageFinished(version.name, stage, version.seconds[stage]))

    async def _check_effect(self, version: Version, candidate: AdapterVersion) -> None:
        async with self._base_lock:
            if self._base is None:
                self._base = await self._engine.probe(None)
        if await self._engine.probe(candidate) != self._base:
            return
        message = f"adapter {version.name!r} does not change the base model's log-probabilities of the probe prompt"
        if self._probe == "refuse":
            raise AdapterRejectedError(message, code="no_effect_on_probe", param="src")
        version.warnings.append(message)
        self._emit(events.Warned(version.name, message))

    async def _discard(self, version: Version, candidate: AdapterVersion, cause: BaseException) -> None:
        """After a failed load: the engine may list the id all the same."""
        version.leaving = candidate
        try:
            await self._unload(version, candidate, None)
        except HostError as error:
            raise error from cause

    async def _unload(self, version: Version, leaving: AdapterVersion, change: Change | None) -> None:
        engine_id = leaving.engine_id
        try:
            async with self._lock:
                if engine_id in await self._engine.loaded():
                    await self._engine.unload(engine_id)
                    if engine_id in await self._engine.loaded():
                        raise EngineFailedError(
                            f"the engine still lists id {engine_id} ({leaving.engine_name}) after removal",
                            code="unload_failed",
                        )
            version.leaving = None
            del self._held[engine_id]
        finally:
            version.unloading = None
            self._wake()
            self._changed(version)
        if change is not None:
            self._emit(events.Residency(version.name, version.digest, engine_id, change))

    async def _reserve(self, version: Version, swap: bool) -> int:
        """Takes a place and a fresh engine id, evicting or waiting where that helps."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.wait_s
        limit = self._limits.max_cpu_loras if swap else self._limits.first_loads
        while len(self._held) >= limit:
            victim = self._victim()
            if victim is not None:
                await self.remove(victim, "evicted")
                continue
            left = deadline - loop.time()
            if left <= 0 or not self._place_expected():
                raise self._no_place(version, limit)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), left)
        engine_id = next(self._ids)
        self._held[engine_id] = version
        return engine_id

    def _victim(self) -> Version | None:
        idle = [v for v in self._held.values() if v.evictable and v.resident and not v.leases and not v.retired]
        return min(idle, key=lambda v: v.used_at, default=None)

    def _place_expected(self) -> bool:
        return self._swaps > 0 or any(v.retired or v.unloading is not None for v in self._held.values())

    def _no_place(self, version: Version, limit: int) -> CapacityError:
        return CapacityError(
            f"no place for adapter {version.name!r}: the engine holds {self.held} adapter versions, "
            f"max_cpu_loras is {self._limits.max_cpu_loras}, of which {limit} are open to this load; none "
            "is idle and lazily loaded; remove one, or raise max_cpu_loras",
            details=self._counts(),
        )


def _modules_mismatch(version: Version, found: frozenset[str]) -> AdapterRejectedError:
    missing, extra = sorted(version.modules - found), sorted(found - version.modules)
    return AdapterRejectedError(
        f"adapter {version.name!r} has non-zero weights for {len(version.modules)} modules, the engine holds "
        f"{len(found)}: missing in the engine {_some(missing)}; only in the engine {_some(extra)}",
        code="modules_mismatch",
        param="src",
        details={"missing_in_engine": missing, "only_in_engine": extra},
    )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"[{', '.join(names[:LISTED])}]{rest}"


def _retrieve(task: asyncio.Task[None]) -> None:
    """Marks a failure as seen: every waiter may have been cancelled."""
    if not task.cancelled():
        task.exception()
