"""The registry's events as metrics and log lines."""

from __future__ import annotations

import logging
from collections import Counter

from lorahost.adapters.events import (
    AdapterEvent,
    ChangeFailed,
    Residency,
    StageFinished,
    StateChanged,
    Warned,
)
from lorahost.metrics import Metrics

log = logging.getLogger(__name__)


class RegistryObserver:
    """Called on the loop with every event of the registry."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._states: Counter[str] = Counter()
        self._loaded: dict[int, tuple[str, str]] = {}

    def __call__(self, event: AdapterEvent) -> None:
        match event:
            case StateChanged():
                self._count(event)
                log.info("adapter %s: %s", event.name, event.after or "gone", extra={"reason": event.reason})
            case StageFinished():
                self._metrics.load_seconds.labels(event.stage).observe(event.seconds)
            case ChangeFailed():
                self._metrics.load_failures.labels(event.code).inc()
                log.warning("adapter %s: %s", event.name, event.reason, extra={"code": event.code})
            case Residency():
                self._residency(event)
            case Warned():
                log.warning("adapter %s: %s", event.name, event.message)

    def _count(self, event: StateChanged) -> None:
        for state, step in ((event.before, -1), (event.after, 1)):
            if state is not None:
                self._states[state] += step
                self._metrics.adapters.labels(state).set(self._states[state])
        if event.after is None:
            self._metrics.forget(event.name)

    def _residency(self, event: Residency) -> None:
        # the label of a removed adapter may be gone, or have become `other`, by the time its weights go
        if event.change == "loaded":
            labels = self._loaded[event.engine_id] = (self._metrics.adapter(event.name), event.digest[:12])
            self._metrics.loaded.labels(*labels).set(1)
        elif event.engine_id in self._loaded:
            self._metrics.loaded.remove(*self._loaded.pop(event.engine_id))
        self._metrics.residency_changes.labels(event.change).inc()
