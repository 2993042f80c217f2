"""The end of a version: its requests end, the engine gives it up, its files go last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from lorahost.adapters import events
from lorahost.adapters.entries import Entry
from lorahost.adapters.preparation import Preparation
from lorahost.adapters.residency import EngineResidency
from lorahost.adapters.table import AdapterTable
from lorahost.adapters.versions import AdapterRecord, Lease, Version
from lorahost.errors import EngineFailedError


class Retirement:
    """Knows every version that has files, and whose it is; at most one per name and digest."""

    def __init__(
        self, residency: EngineResidency, preparation: Preparation, table: AdapterTable, emit: events.Emit
    ) -> None:
        self._residency = residency
        self._preparation = preparation
        self._table = table
        self._emit = emit
        self._versions: dict[tuple[str, str], Version] = {}
        self._owners: dict[Version, Entry] = {}

    def adopt(self, entry: Entry, version: Version) -> None:
        """A new version belongs to `entry`."""
        self._versions[version.name, version.digest] = version
        self._owners[version] = entry

    async def take(self, entry: Entry, digest: str) -> Version | None:
        """The version with these very weights: the live one, or a draining one brought back.

        Two copies under one engine name would be confused by the engine, so a copy that is already leaving is
        waited for; None then, as for weights that were never here.

        Raises:
            EngineFailedError: the engine does not give the leaving copy up.
        """
        version = self._versions.get((entry.name, digest))
        if version is None or not version.retired:
            return version
        if version.disposing is None and version.stuck is None:
            former = self._owners[version]
            version.retired = False
            former.draining.discard(version)
            self._owners[version] = entry
            self._left(former)
            return version
        self._reap(version)
        if version.disposing is not None:
            await asyncio.shield(version.disposing)
        _raise_stuck([version])
        return None

    def retire(self, version: Version) -> None:
        """No new request gets `version`; it goes once its last one ends."""
        owner = self._owners[version]
        version.retired = True
        owner.draining.add(version)
        if owner.live is version:
            owner.live = None
        self._table.publish(owner)
        self._reap(version)

    def changed(self, version: Version) -> None:
        """The engine took `version` in or gave it up: its record says so."""
        owner = self._owners.get(version)
        if owner is not None:
            self._table.publish(owner)

    def released(self, lease: Lease) -> None:
        """A request on a version ended."""
        self.changed(lease.held)
        if lease.held in self._owners:
            self._reap(lease.held)

    async def withdraw(self, entry: Entry, timeout_s: float, grace_s: float) -> AdapterRecord:
        """Retires what is live and waits for the requests, `timeout_s` plus, once revoked, `grace_s` at most.

        Raises:
            EngineFailedError: the engine still lists a version; its files stay.
        """
        entry.withdrawn = True
        if entry.live is not None:
            self.retire(entry.live)
        versions = set(entry.draining)
        for version in versions:
            self._reap(version)
        if not await _idle(versions, timeout_s):
            asked = [lease.revoke() for version in versions for lease in list(version.leases)]
            if any(asked):
                await _idle(versions, grace_s)
        for version in versions:
            if version.disposing is not None:
                await asyncio.shield(version.disposing)
        _raise_stuck(versions)
        self._left(entry)
        return entry.record()

    def _reap(self, version: Version) -> None:
        if version.retired and not version.leases and version.disposing is None:
            version.disposing = asyncio.create_task(self._dispose(version))

    async def _dispose(self, version: Version) -> None:
        owner = self._owners[version]
        try:
            await self._residency.remove(version)
        except Exception as error:
            version.stuck = owner.last_error = f"{type(error).__name__}: {error}"
            version.disposing = None
            self._emit(events.ChangeFailed(version.name, "unload_failed", version.stuck))
            self._table.publish(owner)
            return
        version.stuck = None
        await self._preparation.delete(version.workspace)
        del self._versions[version.name, version.digest]
        del self._owners[version]
        owner.draining.discard(version)
        self._left(owner)

    def _left(self, owner: Entry) -> None:
        if owner.withdrawn and not owner.draining:
            self._table.drop(owner)
        self._table.publish(owner)


async def _idle(versions: Iterable[Version], timeout_s: float) -> bool:
    """Whether no request is on any of `versions` within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            for version in versions:
                await version.idle.wait()
    except TimeoutError:
        return False
    return True


def _raise_stuck(versions: Iterable[Version]) -> None:
    for version in versions:
        if version.stuck is not None:
            raise EngineFailedError(
                f"the engine does not give up adapter {version.name!r}: {version.stuck}", code="unload_failed"
            )
