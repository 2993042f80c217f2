"""Adapter versions as the registry keeps them, the leases of requests, and the records for callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from lorahost.core import AdapterVersion

State = Literal["fetching", "loading", "ready", "draining", "failed"]
Stage = Literal["fetch", "check", "import", "load", "probe"]


class ImportReport(Protocol):
    """What the importer says about the normalised adapter that it wrote."""

    @property
    def rank(self) -> int:
        """Rank of the normalised tensors."""

    @property
    def modules(self) -> Collection[str]:
        """Engine modules whose B·A is not zero."""

    @property
    def bytes(self) -> int:
        """Size of the normalised tensors on disk."""

    @property
    def warnings(self) -> Sequence[str]:
        """What a person should know about this adapter, although it can be served."""


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """One adapter at one moment; immutable, so any thread may read it.

    Attributes:
        state: `ready` while a version answers, also while its successor is still `incoming`.
        incoming: Stage of the version that is about to become live, if there is one.
        reason: Why the state is `failed`.
        last_error: Why the latest change of this adapter failed; None after a change that worked.
        digest: Of the live version, like rank, modules, bytes and seconds.
        loaded: The engine holds the live version.
        in_flight: Requests on the live version and on those that drain.
        seconds: Duration by stage (fetch, check, import, load, probe).
        modules: Number of engine modules with non-zero LoRA weights.
        versions_draining: Older versions that requests still use, or that the engine has not given up yet.
    """

    name: str
    alias: str | None
    src: str
    state: State
    preload: bool
    pin: bool
    reason: str | None = None
    last_error: str | None = None
    incoming: Literal["fetching", "loading"] | None = None
    digest: str | None = None
    rank: int | None = None
    modules: int = 0
    bytes: int = 0
    loaded: bool = False
    in_flight: int = 0
    versions_draining: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(eq=False)
class Version:
    """One digest of one adapter: its files, the requests on it, and its place in the engine while it has one.

    Attributes:
        workspace: Directory that goes when the version goes; `path` lies in it.
        resident: What the engine holds for this version, None while it holds nothing.
        leaving: What the engine is giving up; set until the engine's own list confirms it.
        retired: A successor is live, or the adapter was removed: goes once no lease is left.
        evictable: The adapter is loaded lazily and not pinned: an idle version may leave the engine.
        used_at: Order of last use, for eviction.
        stuck: Why the engine did not give it up.
        idle: Set while no request is on it.
    """

    name: str
    digest: str
    workspace: Path
    path: Path
    rank: int
    modules: frozenset[str]
    bytes: int
    warnings: list[str]
    seconds: dict[str, float]
    resident: AdapterVersion | None = None
    leaving: AdapterVersion | None = None
    retired: bool = False
    evictable: bool = False
    probed: bool = False
    used_at: int = 0
    stuck: str | None = None
    leases: set[Lease] = field(default_factory=set)
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None
    disposing: asyncio.Task[None] | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    def lease(self, on_release: Callable[[Lease], None]) -> Lease:
        """A new request's hold on this version."""
        lease = Lease(self, on_release)
        self.leases.add(lease)
        self.idle.clear()
        return lease


class Lease:
    """One request's hold on one version: its weights and files stay until `release`.

    Lives on the engine's loop; other threads use `loop.call_soon_threadsafe(lease.release)`.
    """

    def __init__(self, held: Version, on_release: Callable[[Lease], None]) -> None:
        self._held = held
        self._on_release = on_release
        self._callbacks: list[Callable[[], Any]] = []
        self._adapter: AdapterVersion | None = None
        self.released = False
        self.revoked = False

    @property
    def version(self) -> AdapterVersion:
        """The weights for this request; the same from `acquire` to `release`."""
        if self._adapter is None:
            raise RuntimeError("the lease has no weights before its acquire has returned")
        return self._adapter

    def bind(self, adapter: AdapterVersion) -> None:
        """Fixes the weights, once; called by the registry."""
        self._adapter = adapter

    def on_revoke(self, callback: Callable[[], Any]) -> None:
        """Calls `callback` on the loop when a removal has waited long enough for this request.

        The callback should end the request (a task's `cancel`, say); the lease still has to be released.
        """
        if self.revoked:
            callback()
        else:
            self._callbacks.append(callback)

    def revoke(self) -> bool:
        """Asks the holder to end; returns whether there was a callback to ask."""
        asked, self.revoked = bool(self._callbacks), True
        while self._callbacks:
            self._callbacks.pop()()
        return asked

    def release(self) -> None:
        """Gives the version back; a second call does nothing."""
        if not self.released:
            self.released = True
            self._held.leases.discard(self)
            if not self._held.leases:
                self._held.idle.set()
            self._on_release(self)

    @property
    def held(self) -> Version:
        return self._held

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
