"""The containers behind a base inference component: processes of `lorahost serve`, or a server that runs already."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

from lorahost_deploy.local.forward import PREFIX

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
STOP_S = 30.0
PING_S = 2.0
CHANGE_S = 900.0
LOG_BYTES = 20000


class ContainerError(Exception):
    """A container that did not start, or did not do what it was told.

    Attributes:
        status: The container's HTTP status; 0 when it gave none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Container:
    """One copy of a base model.

    Attributes:
        root: Where its adapters are unpacked, on this machine.
        seen_root: The same directory as the container sees it.
    """

    url: str
    root: Path
    seen_root: Path
    log: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    _transports: random.Random = field(default_factory=lambda: random.Random(5))

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to it."""
        place = urlsplit(self.url)
        return http.client.HTTPConnection(place.hostname or "127.0.0.1", place.port or 80, timeout=timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until /ping says 200; raises ContainerError when it does not in time, or the process ends."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process is not None and self.process.poll() is not None:
                raise ContainerError(f"the container ended with exit code {self.process.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/ping", {}, None, PING_S)[0] == 200:
                    return
            time.sleep(0.05)
        raise ContainerError("The primary container did not pass the ping health check")

    def register(self, identifier: str, alias: str, directory: Path) -> None:
        """POST /adapters; in the body or in the query, as nobody has seen which one SageMaker takes."""
        fields = {"name": identifier, "src": str(self.seen_root / directory.relative_to(self.root))}
        headers = {PREFIX + "Adapter-Alias": alias}
        if self._transports.random() < 0.5:
            self._change("POST", f"/adapters?{urlencode(fields)}", headers, None)
        else:
            body = json.dumps(fields).encode()
            self._change("POST", "/adapters", {**headers, "Content-Type": "application/json"}, body)

    def unregister(self, identifier: str, alias: str) -> None:
        """DELETE /adapters/{name}; unknown is fine."""
        try:
            self._change("DELETE", f"/adapters/{quote(identifier, safe='')}", {PREFIX + "Adapter-Alias": alias}, None)
        except ContainerError as error:
            if error.status != 404:
                raise

    def _change(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> None:
        try:
            status, text = self._request(method, path, headers, body, CHANGE_S)
        except (OSError, http.client.HTTPException) as error:
            raise ContainerError(f"the container did not answer: {error}") from error
        if status != 200:
            raise ContainerError(f"the container answered {status}: {_message(text)}", status)

    def _request(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None, timeout_s: float
    ) -> tuple[int, str]:
        connection = self.connect(timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def log_tail(self) -> str:
        """The end of its log."""
        if self.log is None or not self.log.is_file():
            return ""
        return self.log.read_bytes()[-LOG_BYTES:].decode(errors="replace")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL 30 seconds later, as SageMaker does it; a server of somebody else runs on."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _message(text: str) -> str:
    """The message in a container's error body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return text[:500]


class Launcher(Protocol):
    """Starts the containers of a base component."""

    def launch(self, environment: dict[str, str], model: Path | None) -> Container:
        """Starts one; it is not ready yet."""

    def close(self) -> None:
        """Stops what it started and still runs."""


class ProcessLauncher:
    """Runs `lorahost serve` on this machine.

    Args:
        work_dir: Logs, unpacked adapters and the servers' own files.
        engine: `fake` or `vllm`.
    """

    def __init__(self, work_dir: Path, engine: str, extra: dict[str, str] | None = None) -> None:
        self._work_dir = work_dir
        self._engine = engine
        self._extra = extra or {}
        self._count = itertools.count(1)
        self._started: list[Container] = []

    def launch(self, environment: dict[str, str], model: Path | None) -> Container:
        """One process on a free port."""
        port, number = _free_port(), next(self._count)
        root = self._work_dir / f"container-{number}" / "models"
        root.mkdir(parents=True)
        own = {
            "LORAHOST_ENGINE": self._engine,
            "LORAHOST_HOST": "127.0.0.1",
            "LORAHOST_WORK_DIR": str(root.parent / "work"),
            "SAGEMAKER_BIND_TO_PORT": str(port),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **({"SM_VLLM_MODEL": str(model)} if model else {}),
        }
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        log = root.parent / "container.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "lorahost.cli", "serve"],
                env={**kept, **environment, **own, **self._extra},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        container = Container(f"http://127.0.0.1:{port}", root, root, log, process)
        self._started.append(container)
        return container

    def close(self) -> None:
        """Asks all to stop, then waits for each."""
        for container in self._started:
            if container.process is not None and container.process.poll() is None:
                container.process.terminate()
        for container in self._started:
            container.stop()


class RunningServer:
    """Takes a server that runs already, such as a container started by hand, for every copy.

    Args:
        root: Directory that the server sees as well.
        seen_root: Where it sees it.
    """

    def __init__(self, url: str, root: Path, seen_root: Path) -> None:
        self._url = url
        self._root = root
        self._seen_root = seen_root

    def launch(self, environment: dict[str, str], model: Path | None) -> Container:
        """The same server each time; environment and model are what it was started with."""
        return Container(self._url, self._root, self._seen_root)

    def close(self) -> None:
        """The server belongs to somebody else."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: Any = probe.getsockname()[1]
        return int(port)
