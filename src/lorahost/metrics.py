"""The host's own Prometheus metrics; vLLM's register in the same registry."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import lorahost

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60)
GAP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)
LOAD_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
OTHER = "other"


class Metrics:
    """All metrics; `adapter` labels are capped so that names from outside can't grow them without bound.

    Args:
        max_adapters: Adapters with a label of their own; later ones are counted as `other`.
        registry: Where to register; the process-wide one by default.
    """

    def __init__(self, max_adapters: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._max = max_adapters
        self._labels: set[str] = set()
        # labels of adapters that are gone, oldest first: their series stay until another adapter needs the place
        self._gone: dict[str, None] = {}
        self._lock = threading.Lock()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"lorahost_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"lorahost_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"lorahost_{name}", text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Finished requests.", "adapter", "code")
        self.tokens = counter("tokens", "Tokens of finished requests.", "adapter", "kind")
        self.ttft = histogram("ttft_seconds", "Arrival to first token.", TTFT_BUCKETS, "adapter")
        self.gap = histogram("inter_token_seconds", "Time between streamed events.", GAP_BUCKETS, "adapter")
        self.queue = histogram("queue_seconds", "Time spent waiting for admission.", TTFT_BUCKETS, "adapter")
        self.inflight = gauge("inflight", "Requests that have arrived and are not answered.", "adapter")
        self.rejected = counter("rejected", "Requests refused before the engine.", "adapter", "reason")
        self.aborted = counter("aborted", "Requests whose client left.", "adapter")
        self.loaded = gauge("adapter_loaded", "1 while the version is in the engine.", "adapter", "version")
        self._by_adapter: tuple[Counter | Gauge | Histogram, ...] = (
            *(self.requests, self.tokens, self.ttft, self.gap, self.queue),
            *(self.inflight, self.rejected, self.aborted, self.loaded),
        )
        self.adapters = gauge("adapters", "Registered adapters by state.", "state")
        self.load_seconds = histogram("adapter_load_seconds", "Adapter load time by stage.", LOAD_BUCKETS, "stage")
        self.load_failures = counter("adapter_load_failures", "Failed adapter loads by code.", "code")
        self.residency_changes = counter(
            "adapter_residency_changes", "Loads into and removals from the engine.", "change"
        )
        self.running = gauge("running", "Requests in the engine.")
        self.queued = gauge("queued", "Requests waiting for admission.")
        self.slots_held = gauge("slots_held", "Adapter slots with running requests.")
        self.slots = gauge("slots", "Adapter slots.")
        self.draining = gauge("draining", "1 after SIGTERM.")
        self.ready = gauge("ready", "1 while /ping answers 200.")
        self.kernel_path = gauge("kernel_path", "1 for the code that runs a LoRA operation.", "operation", "path")
        self.kernel_fallbacks = gauge(
            "kernel_fallbacks", "Workers whose self-check left a LoRA operation to the engine's own code.", "operation"
        )
        self.kernel_tiles = gauge(
            "kernel_tiles", "1 for where a LoRA operation's tiles come from: exact, nearest or default.",
            "operation", "source",
        )  # fmt: skip
        build = gauge("build_info", "Versions, always 1.", "version", "python")
        build.labels(lorahost.__version__, platform.python_version()).set(1)

    def adapter(self, name: str | None) -> str:
        """The label for an adapter (None: the base model, label `base`)."""
        if name is None:
            return "base"
        with self._lock:
            if name in self._labels:
                self._gone.pop(name, None)
                return name
            if name in ("base", OTHER):
                return OTHER
            if len(self._labels) >= self._max and self._gone:
                self._drop(next(iter(self._gone)))
            if len(self._labels) >= self._max:
                return OTHER
            self._labels.add(name)
            return name

    def forget(self, name: str) -> None:
        """The adapter is gone: another one may have its label's place."""
        with self._lock:
            if name in self._labels:
                self._gone[name] = None

    def _drop(self, name: str) -> None:
        del self._gone[name]
        self._labels.discard(name)
        for metric in self._by_adapter:
            metric.remove_by_labels({"adapter": name})

    def set_kernels(self, workers: Iterable[Mapping[str, Any]]) -> list[str]:
        """Shows which code runs each LoRA operation, by the workers' own reports (`lorahost_report`).

        Returns:
            `operation: reason` of each operation that fell back in some worker.
        """
        fallbacks: dict[str, str] = {}
        for worker in workers:
            for operation, found in worker.get("kernels", {}).items():
                self.kernel_path.labels(operation, found["path"]).set(1)
                fell_back = self.kernel_fallbacks.labels(operation)
                if found["fallback"]:
                    fell_back.inc()
                    fallbacks[operation] = found["reason"]
            for operation, found in worker.get("tuned", {}).get("operations", {}).items():
                self.kernel_tiles.labels(operation, found["source"]).set(1)
        return [f"{operation}: {reason}" for operation, reason in fallbacks.items()]

    def text(self) -> bytes:
        """All metrics of the process in Prometheus' text format."""
        return generate_latest(self._registry)
