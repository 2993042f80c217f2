"""The server without HTTP: owns the loop, the engine, the registry and admission; starts and stops them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lorahost.adapters.registry import AdapterRegistry
from lorahost.admission import Admission
from lorahost.core import EngineHost, EngineInfo
from lorahost.engine.loop import EngineLoop
from lorahost.errors import HostError, UnavailableError
from lorahost.exit_codes import ExitCode
from lorahost.lifecycle import Gate, Lifecycle, State, Watchdog
from lorahost.metrics import Metrics
from lorahost.pipeline import Pipeline
from lorahost.requests.sessions import SessionStore
from lorahost.settings import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")
KILL_AFTER_S = 27.0

EngineFactory = Callable[[], EngineHost]
RegistryFactory = Callable[[EngineHost, EngineInfo], AdapterRegistry]
Boot = Callable[["Host"], Coroutine[Any, Any, None]]


class Host:
    """One server. HTTP threads read its parts and hand coroutines to its loop.

    Args:
        settings: All settings.
        engine: Makes the engine; called on the loop's thread, where heavy imports don't delay the socket.
        registry: Makes the registry once the engine's limits are known.
        boot: Registers the adapters found at start, before the server is ready.
        exit_: Ends the process with a code; replaced in tests.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineFactory,
        registry: RegistryFactory,
        *,
        boot: Boot | None = None,
        metrics: Metrics | None = None,
        exit_: Callable[[int], Any] = os._exit,
    ) -> None:
        self.settings = settings
        self.lifecycle = Lifecycle()
        self.loop = EngineLoop()
        self.metrics = metrics or Metrics(settings.metric_adapters)
        self.sessions = SessionStore(settings.sessions, settings.session_ttl_s)
        # above admission's own limit, so that admission can turn away the adapter that fills the queue
        self.gate = Gate(settings.max_running + settings.max_queued + settings.spare_threads // 4)
        self.admin_gate = Gate(max(4, settings.spare_threads // 2))
        self.info: EngineInfo | None = None
        self.engine: EngineHost | None = None
        self._make_engine = engine
        self._make_registry = registry
        self._boot = boot
        self._exit = exit_
        self._registry: AdapterRegistry | None = None
        self._pipeline: Pipeline | None = None
        self._admission: Admission | None = None
        self._watchdog: Watchdog | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self._terminations = 0

    @property
    def registry(self) -> AdapterRegistry:
        """The registry; UnavailableError while the engine is starting."""
        if self._registry is None:
            self.lifecycle.require_ready()
            raise UnavailableError("the server is starting", code="server_starting", retry_after_s=5)
        return self._registry

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; UnavailableError unless the server is ready."""
        self.lifecycle.require_ready()
        assert self._pipeline is not None
        return self._pipeline

    @property
    def base_name(self) -> str:
        """Public name of the base model."""
        return self.info.base_name if self.info else self.settings.base_name

    def start(self) -> None:
        """Starts the loop and, on it, the engine; returns at once."""
        self.loop.start()
        self.loop.submit(self._start())
        threading.Thread(target=self._limit_start, name="start-timeout", daemon=True).start()

    def _limit_start(self) -> None:
        deadline = time.monotonic() + self.settings.start_timeout_s
        while self.lifecycle.state is State.STARTING:
            if time.monotonic() > deadline:
                self._start_failed(f"the engine did not start within {self.settings.start_timeout_s:g} s")
                return
            time.sleep(0.5)

    async def _start(self) -> None:
        began = time.monotonic()
        try:
            engine = self.engine = self._make_engine()
            info = self.info = await engine.start()
            self._admission = Admission(
                slots=max(1, info.max_loras),
                max_running=self.settings.max_running,
                max_queued=self.settings.max_queued,
            )
            self._registry = self._make_registry(engine, info)
            self._pipeline = Pipeline(engine, self._registry, self._admission, self.metrics)
            if self._boot is not None:
                await self._boot(self)
        except HostError as error:
            self._start_failed(error.message)
        except Exception as error:
            log.exception("the engine did not start")
            self._start_failed(f"{type(error).__name__}: {error}")
        else:
            self.metrics.slots.set(info.max_loras)
            for fallback in self.metrics.set_kernels(info.details.get("workers", [])):
                log.warning("a LoRA operation runs on the engine's own kernels: %s", fallback)
            self._watch(engine)
            self.lifecycle.to(State.READY)
            log.info("ready", extra={"seconds": round(time.monotonic() - began, 1), **_facts(info)})

    def _start_failed(self, reason: str) -> None:
        if self.lifecycle.to(State.FAILED, reason):
            log.error("the server can't start: %s", reason)
            threading.Timer(self.settings.exit_grace_s, self.exit, (ExitCode.START_FAILED,)).start()

    def _watch(self, engine: EngineHost) -> None:
        def health() -> tuple[bool, int, int, str]:
            h = engine.health()
            return h.alive, h.running, h.tokens, h.reason

        self._watchdog = Watchdog(
            health,
            self.loop.soon,
            stall_s=self.settings.stall_s,
            exit_grace_s=self.settings.exit_grace_s,
            fail=self._engine_failed,
            exit_=lambda: self.exit(ExitCode.ENGINE_DEAD),
        )
        self._watchdog.start()

    def _engine_failed(self, reason: str) -> None:
        self.lifecycle.to(State.FAILED, reason)
        log.error("engine failed: %s", reason)

    def track(self, task: asyncio.Task[Any]) -> None:
        """Remembers a running request, so that a drain can end it."""
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs a coroutine on the loop from an HTTP thread."""
        return self.loop.run(work, timeout_s)

    def metrics_text(self) -> bytes:
        """The metrics page, gauges brought up to date."""
        if self._admission is not None:
            now = self._admission.occupancy()
            self.metrics.running.set(now.running)
            self.metrics.queued.set(now.queued)
            self.metrics.slots_held.set(now.slots_held)
        self.metrics.ready.set(self.lifecycle.state is State.READY)
        self.metrics.draining.set(self.lifecycle.state is State.DRAINING)
        return self.metrics.text()

    def terminate(self) -> None:
        """SIGTERM: the first drains, the second ends at once. Safe in a signal handler; returns at once."""
        self._terminations += 1
        target = self._drain if self._terminations == 1 else self._exit_now
        threading.Thread(target=target, name="terminate", daemon=True).start()

    def _drain(self) -> None:
        """New requests get 503 from here on; running ones may end; then the engine goes, then the process."""
        self.lifecycle.to(State.DRAINING, "the server is shutting down")
        timer = threading.Timer(KILL_AFTER_S, self._exit_now)
        timer.daemon = True
        timer.start()
        if self._watchdog is not None:
            self._watchdog.stop()
        if not self.gate.wait_empty(self.settings.drain_s):
            log.warning("aborting %d requests that did not end within the drain", self.gate.count)
            self.loop.soon(self._abort_all)
            self.gate.wait_empty(2.0)
        for what, stop in (("engine", self.engine and self.engine.stop), ("registry", self._close_registry)):
            try:
                if stop:
                    self.run(stop(), timeout_s=4.0)
            except Exception:
                log.exception("the %s did not stop in time", what)
        log.info("drained")
        self.exit(ExitCode.DRAINED)

    async def _close_registry(self) -> None:
        if self._registry is not None:
            await self._registry.close()

    def _abort_all(self) -> None:
        for task in list(self._work):
            task.cancel("the server is shutting down")

    def _exit_now(self) -> None:
        self.exit(ExitCode.DRAINED)

    def exit(self, code: int) -> None:
        """Ends this process and the engine's processes with it."""
        kill_children()
        self._exit(code)


def kill_children() -> None:
    """Kills all descendants: an engine process must not outlive its server."""
    for pid in _descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(root: int) -> list[int]:
    """Process ids below `root`, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _facts(info: EngineInfo) -> dict[str, Any]:
    return {
        "engine": info.engine,
        "device": info.device,
        "base": info.base_name,
        "max_model_len": info.max_model_len,
        "max_loras": info.max_loras,
        "max_lora_rank": info.max_lora_rank,
        "max_cpu_loras": info.max_cpu_loras,
    }
