"""What the registry tells its observer (logs, metrics) about adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lorahost.adapters.versions import Stage, State

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateChanged:
    """`after` is None once the adapter is gone, `before` is None when it appears."""

    name: str
    before: State | None
    after: State | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class StageFinished:
    """One stage of one version took `seconds`."""

    name: str
    stage: Stage
    seconds: float


@dataclass(frozen=True, slots=True)
class ChangeFailed:
    """A registration, an update, a lazy load or an unload failed."""

    name: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Residency:
    """The engine took a version in, or gave it up (`evicted`: files kept; `removed`: for good)."""

    name: str
    digest: str
    engine_id: int
    change: Literal["loaded", "evicted", "removed", "refused"]


@dataclass(frozen=True, slots=True)
class Warned:
    """The adapter is served, and a person should know this about it."""

    name: str
    message: str


AdapterEvent = StateChanged | StageFinished | ChangeFailed | Residency | Warned
Emit = Callable[[AdapterEvent], None]


def guarded(observer: Emit | None) -> Emit:
    """An `Emit` that never raises: an observer's fault must not stop a change half way."""

    def emit(event: AdapterEvent) -> None:
        if observer is None:
            return
        try:
            observer(event)
        except Exception:
            log.exception("adapter observer failed on %r", event)

    return emit
