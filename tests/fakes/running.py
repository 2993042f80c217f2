"""Starts servers as processes of their own and talks HTTP to them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
ATTRIBUTES_HEADER = "X-Amzn-SageMaker-Custom-Attributes"
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "COVERAGE_PROCESS_START")


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of an error body, whose shape is checked."""
        assert self.headers["Content-Type"] == "application/json", self
        error: dict[str, Any] = self.json()["error"]
        assert {"message", "type", "code"} <= error.keys(), error
        assert error["message"], error
        return error

    @property
    def text(self) -> str:
        """The generated text of a completion or chat."""
        choice = self.json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])


class Server:
    """A running server process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> Answer:
        """One request on a connection of its own; `body` that isn't bytes is sent as JSON."""
        headers = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        return self.request("GET", path, **options)

    def invoke(self, body: Any = None, adapter: str | None = None, **headers: str) -> Answer:
        """POST /invocations; header names are given with underscores."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if adapter is not None:
            sent[ADAPTER_HEADER] = adapter
        return self.request("POST", "/invocations", {"prompt": "hi", "max_tokens": 2} if body is None else body, sent)

    def add(self, name: str, src: Path | str, **fields: Any) -> Answer:
        """POST /adapters."""
        return self.request("POST", "/adapters", {"name": name, "src": str(src), **fields})

    def remove(self, name: str) -> Answer:
        """DELETE /adapters/{name}."""
        return self.request("DELETE", f"/adapters/{name}")

    def engine(self, **settings: Any) -> dict[str, Any]:
        """Reads and sets the controlled engine's state."""
        state: dict[str, Any] = self.request("POST", "/test/engine", settings).json()
        return state

    def metric(self, name: str) -> float:
        """Sum over all labels of one metric's samples."""
        lines = self.get("/metrics").body.decode().splitlines()
        found = [line for line in lines if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def log_lines(self) -> list[dict[str, Any]]:
        """The server's log so far; every line must be JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def log_lines_that_are_json(self) -> list[dict[str, Any]]:
        """The host's lines of a log that the engine writes into, too."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def wait_ready(self, timeout_s: float = 20.0) -> None:
        """Waits for /ping to say 200."""
        wait_for(lambda: self.ping() == 200 or self.process.poll() is not None, timeout_s, "ready")
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.log.read_text()}"

    def ping(self) -> int | None:
        """The status of /ping; None when nothing answers."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/ping", timeout_s=2.0).status
        return None

    def stop(self) -> None:
        """Ends the server and what it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str = "the condition") -> float:
    """Waits until `condition` holds and returns the seconds it took; AssertionError after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{timeout_s} s were not enough for {what}"
        time.sleep(0.01)
    return time.monotonic() - began


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(extra: Mapping[str, str], port: int, work_dir: Path) -> dict[str, str]:
    """The environment of a server: nothing of the caller's settings."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    own = {"LORAHOST_ENGINE": "fake", "LORAHOST_PORT": str(port), "LORAHOST_WORK_DIR": str(work_dir)}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return {**kept, **path, **own, **extra}


def start(
    directory: Path,
    env: Mapping[str, str] | None = None,
    engine: Mapping[str, Any] | None = None,
    files: int | None = None,
) -> Server:
    """Starts `lorahost serve`, or with `engine` the server around the controlled engine; returns at once.

    `files` limits how many files it may have open.
    """
    port = free_port()
    command = [sys.executable, "-m", "lorahost.cli", "serve"]
    if engine is not None:
        command = [sys.executable, "-m", "tests.fakes.server", json.dumps(dict(engine))]
    if files is not None:
        command = ["prlimit", f"--nofile={files}:{files}", *command]
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(env or {}, port, directory / f"work-{port}"),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(process, port, log)


@contextlib.contextmanager
def running(
    directory: Path, env: Mapping[str, str] | None = None, engine: Mapping[str, Any] | None = None
) -> Iterator[Server]:
    """A server that is ready, for the length of a `with`."""
    server = start(directory, env, engine)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def make_adapter(path: Path, tag: str, rank: int = 8) -> Path:
    """An adapter directory as the fake engine takes it; `tag` gives it weights, and so a digest, of its own."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "tag": tag}
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path
