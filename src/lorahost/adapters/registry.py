"""The adapter registry: registers, swaps, leases and removes adapters without disturbing requests.

It lives on the engine's event loop; every change of state happens there. Changes of one name run in the order
of their arrival. `get`, `list` and `resolve` may be called from any thread, the rest through
`asyncio.run_coroutine_threadsafe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from lorahost.adapters import entries, events
from lorahost.adapters.changes import Changes
from lorahost.adapters.entries import Entry, Wanted
from lorahost.adapters.preparation import AdapterTools, Preparation
from lorahost.adapters.residency import EngineLimits, EngineResidency, ProbePolicy
from lorahost.adapters.retirement import Retirement
from lorahost.adapters.table import AdapterTable, not_found
from lorahost.adapters.versions import AdapterRecord, Lease, Version
from lorahost.adapters.workers import Runner, Workers
from lorahost.core import AdapterEngine
from lorahost.errors import UnavailableError

ACQUIRE_RETRY_S = 5.0
CLOSE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """How the registry behaves.

    Attributes:
        work_dir: Directory for downloads and normalised adapters.
        max_adapters: Adapters that may be registered; failed and draining ones don't count.
        limits: Capacity of the engine.
        probe: What to do about an adapter that doesn't change the probe's log-probabilities.
        reserved: Names of the base model, which no adapter may take.
        workers: Fetches, checks and imports at a time.
        acquire_wait_s: Longest wait of a request for an adapter that is being registered or loaded.
        revoke_grace_s: After a removal's drain timeout, seconds for revoked requests to end.
    """

    work_dir: Path
    max_adapters: int
    limits: EngineLimits
    probe: ProbePolicy = "warn"
    reserved: frozenset[str] = frozenset()
    workers: int = 2
    acquire_wait_s: float = 30.0
    revoke_grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Change:
    """The last change of a name; an equal registration that arrives before it is done shares it."""

    wanted: Wanted | None
    task: asyncio.Task[AdapterRecord]


class AdapterRegistry:
    """Create it on the loop. `run` replaces the worker threads, `on_event` observes."""

    def __init__(
        self,
        engine: AdapterEngine,
        tools: AdapterTools,
        settings: RegistrySettings,
        *,
        on_event: events.Emit | None = None,
        run: Runner | None = None,
    ) -> None:
        emit = events.guarded(on_event)
        limits = settings.limits
        self._settings = settings
        self._table = AdapterTable(
            max_adapters=settings.max_adapters,
            max_loras=limits.max_loras,
            max_cpu_loras=limits.max_cpu_loras,
            emit=emit,
            held=lambda: self._residency.held,
        )
        self._residency = EngineResidency(
            engine,
            limits,
            probe=settings.probe,
            emit=emit,
            counts=self._table.counts,
            changed=lambda version: self._retirement.changed(version),
        )
        self._preparation = Preparation(
            tools, settings.work_dir, run or Workers(settings.workers), run or Workers(1), emit
        )
        self._retirement = Retirement(self._residency, self._preparation, self._table, emit)
        self._changes = Changes(self._table, self._preparation, self._residency, self._retirement, emit)
        self._tails: dict[str, _Change] = {}
        self._closed = False

    def get(self, name: str) -> AdapterRecord:
        """Raises AdapterNotFoundError."""
        return self._table.record(name)

    def list(self, limit: int = 100, next_page_token: str | None = None) -> tuple[list[AdapterRecord], str | None]:
        """One page in the order of names, and the token of the next page or None.

        Raises:
            InvalidRequestError: limit out of range or an unknown token.
        """
        return entries.page(self._table.records(), limit, next_page_token)

    def resolve(self, name_or_alias: str) -> str | None:
        """Canonical name of an adapter that requests may name, or None.

        Raises:
            AdapterConflictError: the alias belongs to several adapters.
        """
        return self._table.resolve(name_or_alias)

    async def register(
        self, name: str, src: str, *, alias: str | None = None, preload: bool = True, pin: bool = False
    ) -> AdapterRecord:
        """Registers `name`, or replaces its weights; returns once requests get the new version.

        The same weights again change nothing but the options. If a replacement fails, the old version stays.

        Raises:
            InvalidRequestError: a bad parameter, or pin without preload.
            AdapterRejectedError: the source can't be fetched, imported or served.
            AdapterConflictError: it was removed meanwhile, or name or alias mean another adapter.
            CapacityError: too many adapters, versions in the engine, or pins.
        """
        wanted = Wanted(src, alias, preload, pin)
        entries.check_wanted(name, wanted, self._settings.reserved)
        self._check_open()
        self._table.check_alias(name, alias)
        entry = self._table.entries.get(name)
        if entry is None or entry.removed.is_set():
            entry = self._table.add(name, wanted)
        tail = self._tails.get(name)
        if tail is not None and tail.wanted == wanted:
            return await asyncio.shield(tail.task)
        self._table.restart(entry, wanted)
        return await asyncio.shield(self._enqueue(name, wanted, lambda: self._changes.apply(entry, wanted)))

    async def update(
        self, name: str, *, src: str | None = None, preload: bool | None = None, pin: bool | None = None
    ) -> AdapterRecord:
        """Changes source or options of a registered adapter; None keeps what is.

        Raises:
            AdapterNotFoundError: not registered.
            and what `register` raises.
        """
        self._check_open()
        entry = self._table.current(name)

        def change() -> Awaitable[AdapterRecord]:
            asked = entry.asked
            wanted = Wanted(
                asked.src if src is None else src,
                asked.alias,
                asked.preload if preload is None else preload,
                asked.pin if pin is None else pin,
            )
            entries.check_wanted(name, wanted, self._settings.reserved)
            if src is None and entry.live is None and entry.failure is not None:
                raise entry.refusal()
            return self._changes.apply(entry, wanted, keep_weights=src is None)

        return await asyncio.shield(self._enqueue(name, None, change))

    async def remove(self, name: str, *, drain_timeout_s: float) -> AdapterRecord:
        """Removes an adapter: no new requests from now on, weights and files go once its requests are done.

        After `drain_timeout_s` the requests left are revoked; if they hold on, the record that is returned
        says how many, and the rest of the removal happens when they end. A second removal shares the first.

        Raises:
            AdapterNotFoundError: not registered.
            EngineFailedError: the engine doesn't give the weights up.
        """
        entry = self._table.entries.get(name)
        if entry is None:
            raise not_found(name)
        if not entry.removed.is_set():
            entry.removed.set()
            entry.settled.set()
            self._table.publish(entry)
        if entry.removal is None or entry.removal.done():
            grace = self._settings.revoke_grace_s
            entry.removal = self._enqueue(name, None, lambda: self._retirement.withdraw(entry, drain_timeout_s, grace))
        return await asyncio.shield(entry.removal)

    async def acquire(self, name_or_alias: str) -> Lease:
        """A hold on the live version of an adapter, loaded if it wasn't; release it when the request is done.

        Raises:
            AdapterNotFoundError: not registered, or being removed.
            AdapterRejectedError: it failed to load; the message says why.
            AdapterConflictError: the alias belongs to several adapters.
            CapacityError: no place in the engine.
            UnavailableError: still loading after `acquire_wait_s`.
        """
        try:
            async with asyncio.timeout(self._settings.acquire_wait_s):
                entry, version = await self._answering(name_or_alias)
                return await self._lease(entry, version)
        except TimeoutError as error:
            raise UnavailableError(
                f"adapter {name_or_alias!r} is still loading after {self._settings.acquire_wait_s:g} s",
                code="adapter_loading",
                retry_after_s=ACQUIRE_RETRY_S,
            ) from error

    async def close(self) -> None:
        """Gives up the changes under way and deletes all files; call it after the engine has stopped."""
        self._closed = True
        for entry in self._table.entries.values():
            entry.removed.set()
            entry.settled.set()
        if self._tails:
            await asyncio.wait({tail.task for tail in self._tails.values()}, timeout=CLOSE_WAIT_S)
        await self._preparation.delete(self._preparation.root)

    async def _answering(self, name_or_alias: str) -> tuple[Entry, Version]:
        while True:
            entry = self._table.find(name_or_alias)
            if entry.failure is not None:
                raise entry.refusal()
            if entry.live is not None:
                return entry, entry.live
            await entry.settled.wait()

    async def _lease(self, entry: Entry, version: Version) -> Lease:
        lease = version.lease(self._retirement.released)
        version.used_at = self._changes.next_use()
        self._table.publish(entry)
        try:
            lease.bind(version.resident or await self._residency.ensure(version))
        except Exception as error:
            lease.release()
            failure = self._changes.failed(entry, version, error)
            if failure is error:
                raise
            raise failure from error
        except BaseException:
            lease.release()
            raise
        self._table.publish(entry)
        return lease

    def _enqueue(
        self, name: str, wanted: Wanted | None, change: Callable[[], Awaitable[AdapterRecord]]
    ) -> asyncio.Task[AdapterRecord]:
        """Runs `change` after the earlier changes of `name`, whether its caller stays or not."""
        previous = self._tails.get(name)

        async def run() -> AdapterRecord:
            if previous is not None:
                await asyncio.wait({previous.task})
            return await change()

        def done(finished: asyncio.Task[AdapterRecord]) -> None:
            if self._tails[name].task is finished:
                del self._tails[name]
            if not finished.cancelled():
                # Seen, also when every caller has gone.
                finished.exception()

        task = asyncio.create_task(run(), name=f"adapter {name}")
        self._tails[name] = _Change(wanted, task)
        task.add_done_callback(done)
        return task

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the server is stopping; no adapter can be changed", code="stopping")
