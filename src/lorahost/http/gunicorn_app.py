"""gunicorn around the host: one worker with threads, and a SIGTERM that drains with the listener open."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from pathlib import Path
from typing import Any

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer

from lorahost.exit_codes import ExitCode
from lorahost.host import KILL_AFTER_S, Host, kill_children
from lorahost.http.worker import HostLogger, HostWorker, connection_limit, limit_patience
from lorahost.settings import Settings

log = logging.getLogger(__name__)
PR_SET_CHILD_SUBREAPER = 36
NOT_FOR_US = frozenset({signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2})
SHM = Path("/dev/shm")
KEEPALIVE_S = 75
# kept alive between requests, beside those that hold a thread
IDLE_CONNECTIONS = 1024
# gunicorn's largest: adapters are registered through the query as well
LINE_BYTES = 8190


class HostArbiter(Arbiter):
    """gunicorn's master; a second SIGTERM means at once."""

    terminations = 0

    def start(self) -> None:
        """Orphans of a killed worker, the engine's processes, become this process's children and can be ended."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if isinstance(self.log, HostLogger):
            self.log.workers = self.WORKERS
        super().start()

    def signal(self, sig: int, frame: Any) -> None:
        """Queues a signal; the worker's own handler does the draining."""
        if sig in NOT_FOR_US:
            log.warning("%s is ignored: the one worker can't be replaced or doubled", signal.Signals(sig).name)
            return
        if sig == signal.SIGTERM:
            self.terminations += 1
            if self.terminations > 1:
                sig = signal.SIGQUIT
        super().signal(sig, frame)


class HostApplication(BaseApplication):
    """The server of the image and of the demo alike."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._host: Host | None = None
        super().__init__()

    def load_config(self) -> None:
        """gunicorn's settings; none is read from files or the command line."""
        settings = self._settings
        for name, value in {
            "bind": f"{settings.host}:{settings.port}",
            "workers": 1,
            "worker_class": HostWorker,
            "threads": settings.threads,
            "worker_connections": connection_limit(settings.threads + IDLE_CONNECTIONS),
            "preload_app": False,
            "timeout": 0,
            "graceful_timeout": int(KILL_AFTER_S) + 1,
            "keepalive": KEEPALIVE_S,
            "worker_tmp_dir": str(SHM) if SHM.is_dir() else None,
            "control_socket_disable": True,
            "limit_request_line": LINE_BYTES,
            "when_ready": lambda server: limit_patience(server.LISTENERS, settings.client_stall_s),
            "proc_name": "lorahost",
            "accesslog": None,
            "logger_class": HostLogger,
            "loglevel": "warning",
            "post_worker_init": self._worker_started,
            "worker_int": _quit,
            "child_exit": _worker_ended,
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Runs in the worker: builds the host and starts it; the socket is open already, so imports can take time."""
        from lorahost.http.app import create_app
        from lorahost.server import build

        self._host = build()
        app = create_app(self._host)
        self._host.start()
        return app

    def _worker_started(self, worker: Any) -> None:
        """SIGTERM drains with the listener open, instead of gunicorn's closing it first."""
        host = self._host
        assert host is not None
        signal.signal(signal.SIGTERM, lambda *_: host.terminate())
        signal.siginterrupt(signal.SIGTERM, False)

    def run(self) -> None:
        """Serves until a signal; the exit code is the arbiter's."""
        HostArbiter(self).run()


def _worker_ended(arbiter: Any, worker: Any) -> None:
    """A worker that was killed is not replaced: a new one would not know the adapters that SageMaker registered."""
    stopping = not arbiter.LISTENERS
    if not stopping:
        kill_children()
        raise HaltServer("the worker ended", ExitCode.WORKER_LOST)


def _quit(worker: Any) -> None:
    """SIGQUIT or SIGINT in the worker: nothing is waited for."""
    kill_children()
    os._exit(ExitCode.DRAINED)
