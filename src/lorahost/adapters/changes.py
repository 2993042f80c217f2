"""One change of one adapter: find or import the weights, load them, make them live."""

from __future__ import annotations

import itertools

from lorahost.adapters import events
from lorahost.adapters.entries import Entry, Wanted
from lorahost.adapters.preparation import Preparation, removed_meanwhile
from lorahost.adapters.residency import EngineResidency
from lorahost.adapters.retirement import Retirement
from lorahost.adapters.table import AdapterTable
from lorahost.adapters.versions import AdapterRecord, Version
from lorahost.errors import AdapterRejectedError, HostError


class Changes:
    """Runs changes; the registry sees to it that one name has one at a time."""

    def __init__(
        self,
        table: AdapterTable,
        preparation: Preparation,
        residency: EngineResidency,
        retirement: Retirement,
        emit: events.Emit,
    ) -> None:
        self._table = table
        self._preparation = preparation
        self._residency = residency
        self._retirement = retirement
        self._emit = emit
        self._uses = itertools.count(1)

    def next_use(self) -> int:
        """Orders uses of versions, for eviction."""
        return next(self._uses)

    async def apply(self, entry: Entry, wanted: Wanted, *, keep_weights: bool = False) -> AdapterRecord:
        if entry.removed.is_set():
            raise removed_meanwhile(entry.name)
        self._table.restart(entry, wanted)
        version = entry.live if keep_weights else None
        try:
            if wanted.pin:
                self._table.reserve_pin(entry)
            if version is None:
                version = await self._version_for(entry, wanted.src)
            await self._go_live(entry, version, wanted)
        except Exception as error:
            failure = self.failed(entry, version, error)
            if failure is error:
                raise
            raise failure from error
        finally:
            entry.incoming, entry.pin_wanted = None, False
            self._table.publish(entry)
        return entry.record()

    async def _version_for(self, entry: Entry, src: str) -> Version:
        entry.incoming = "fetching"
        self._table.publish(entry)
        workspace = self._preparation.open(entry.name, entry.removed)
        made: Version | None = None
        try:
            source, digest = await self._preparation.fetch(workspace, src)
            known = await self._retirement.take(entry, digest)
            if known is not None:
                return known
            made = await self._preparation.import_(workspace, source, digest)
            self._retirement.adopt(entry, made)
            for warning in made.warnings:
                self._emit(events.Warned(entry.name, warning))
            return made
        finally:
            if made is None:
                self._preparation.close(workspace)
            else:
                self._preparation.keep_target(workspace)

    async def _go_live(self, entry: Entry, version: Version, wanted: Wanted) -> None:
        old = entry.live if entry.live is not version else None
        # A successor of loaded weights is loaded too: only the engine can say that it works.
        warm = old is not None and old.resident is not None
        with self._residency.swapping(warm):
            if (wanted.preload or warm) and version.resident is None:
                entry.incoming = "loading"
                self._table.publish(entry)
                await self._residency.ensure(version, swap=warm)
            if entry.removed.is_set():
                raise removed_meanwhile(entry.name)
            entry.live, entry.asked = version, wanted
            entry.failure = entry.last_error = None
            version.evictable = not wanted.preload
            version.used_at = self.next_use()
            if old is not None:
                self._retirement.retire(old)
        entry.settled.set()

    def failed(self, entry: Entry, version: Version | None, error: Exception) -> HostError:
        """Notes a failure; what is live stays live, unless it is itself what the engine refuses."""
        failure = error
        if not isinstance(failure, HostError):
            failure = HostError(
                f"adapter {entry.name!r} could not be loaded: {type(error).__name__}: {error}",
                code="adapter_load_failed",
            )
        if entry.last_error != failure.message:
            self._emit(events.ChangeFailed(entry.name, failure.code, failure.message))
        entry.last_error = failure.message
        refused_live = version is entry.live and isinstance(failure, AdapterRejectedError)
        if entry.live is None or refused_live:
            entry.failure = failure
            entry.settled.set()
        if version is not None and version is not entry.live and not version.retired:
            self._retirement.retire(version)
        self._table.publish(entry)
        return failure
