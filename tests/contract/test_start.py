"""From `docker run IMAGE serve` to ready: arguments, port, read-only directories, refusals (contract 1, 2, 4, 8, 9)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.running import ROOT, Server, environment, free_port, make_adapter, wait_for

from lorahost.exit_codes import ExitCode

Starter = Callable[..., Server]
SERVE = str(ROOT / "container" / "serve")


def run(command: list[str], tmp_path: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    full = environment(env or {}, free_port(), tmp_path / "work")
    return subprocess.run(command, env=full, cwd=tmp_path, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("arguments", [[], ["serve"]])
def test_the_entry_point_serves_with_and_without_its_argument(arguments: list[str], tmp_path: Path) -> None:
    port = free_port()
    env = environment({}, port, tmp_path / "work")
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(["sh", SERVE, *arguments], env=env, stdout=log, stderr=log, start_new_session=True)
    server = Server(process, port, tmp_path / "log")
    try:
        server.wait_ready()
        # exec: the container's first process is the server itself, so that it gets the signals.
        assert b"/bin/sh" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.terminate()
        assert process.wait(20) == 0
    finally:
        server.stop()


@pytest.mark.parametrize("arguments", [["train"], ["bash"], ["--help"]])
def test_another_argument_is_a_usage_error(arguments: list[str], tmp_path: Path) -> None:
    done = run(["sh", SERVE, *arguments], tmp_path)
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert done.stdout == ""


def test_the_port_is_sagemakers_when_it_says_one(tmp_path: Path, started: Starter) -> None:
    port = free_port()
    server = started({"LORAHOST_PORT": "", "SAGEMAKER_BIND_TO_PORT": str(port)}, ready=False)
    server.port = port
    server.wait_ready()


def test_the_socket_is_open_within_a_second(started: Starter) -> None:
    """Without the time for which others had the processor; three tries."""
    times: list[float] = []
    while len(times) < 3 and min(times, default=9) > 1.0:
        began = time.monotonic()
        server = started(ready=False)
        wait_for(lambda port=server.port: accepts(port), 20, "the socket")
        waited_ns = int(Path(f"/proc/{server.process.pid}/schedstat").read_text().split()[1])
        times.append(time.monotonic() - began - waited_ns / 1e9)
        server.stop()
    assert min(times) < 1.0


def test_ping_says_503_and_why_while_the_engine_loads(started: Starter) -> None:
    server = started({}, {"start_s": 2.0}, ready=False)
    wait_for(lambda: server.ping() == 503, 10, "an answer while the engine loads")
    ping = server.get("/ping")
    assert ping.json()["status"] == "loading"
    assert ping.json()["reason"]
    for answer in (server.invoke(), server.get("/v1/models"), server.add("a", "/nowhere"), server.get("/adapters")):
        assert answer.status == 503
        assert answer.error["code"] == "server_starting"
        assert int(answer.headers["Retry-After"]) >= 1
    assert server.get("/metrics").status == 200
    server.wait_ready()
    assert server.get("/ping").body == b""
    assert server.invoke().status == 200


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.25).close()
    except OSError:
        return False
    return True


def test_adapters_beside_a_read_only_model_are_served_and_a_bad_one_is_only_reported(
    tmp_path: Path, started: Starter
) -> None:
    """Everything is written below the work directory."""
    model = tmp_path / "model"
    for name in ("good", "fine"):
        make_adapter(model / "adapters" / name, name)
    (model / "adapters" / "broken").mkdir()
    (model / "adapters" / "notes.txt").write_text("not an adapter")
    for path in (*model.rglob("*"), model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    env = {"SM_VLLM_MODEL": str(model), "HOME": str(home)}
    server = started(env)
    states = {a["name"]: a["state"] for a in server.get("/adapters").json()["adapters"]}
    assert states == {"good": "ready", "fine": "ready", "broken": "failed"}
    assert server.invoke(adapter="good").status == 200
    broken = server.invoke(adapter="broken")
    assert broken.status == 424
    assert "adapter_config.json" in broken.error["message"]
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before
    assert list(home.iterdir()) == []
    assert any(line["level"] == "error" and "broken" in line["message"] for line in server.log_lines())


@pytest.mark.parametrize(
    ("env", "check", "code", "said"),
    [
        ({"LORAHOST_PROT": "8080"}, "settings", 30, "LORAHOST_PROT"),
        ({"LORAHOST_DRAIN_S": "90"}, "settings", 30, "LORAHOST_DRAIN_S"),
        ({"SM_VLLM_API_KEY": "k"}, "settings", 30, "SM_VLLM_API_KEY"),
        ({"LORAHOST_WORK_DIR": "/proc/nowhere"}, "work_dir", 37, "/proc/nowhere"),
        ({"LORAHOST_ENGINE": "vllm", "SM_VLLM_MODEL": "/nowhere"}, "model", 31, "/nowhere"),
    ],
)
def test_what_can_not_work_ends_at_once_with_one_line_and_a_code(
    env: dict[str, str], check: str, code: int, said: str, tmp_path: Path
) -> None:
    done = run([sys.executable, "-m", "lorahost.cli", "serve"], tmp_path, env)
    assert done.returncode == code
    [line] = done.stdout.splitlines()
    assert json.loads(line)["check"] == check
    assert said in json.loads(line)["message"]


def test_a_port_in_use_is_said_so(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        env = {"LORAHOST_PORT": str(holder.getsockname()[1])}
        done = run([sys.executable, "-m", "lorahost.cli", "serve"], tmp_path, env)
    assert done.returncode == 38
    assert json.loads(done.stdout)["check"] == "port"


def test_an_engine_that_does_not_start_is_reported_and_ends_the_process(tmp_path: Path, started: Starter) -> None:
    server = started({"LORAHOST_START_TIMEOUT_S": "0.2", "LORAHOST_EXIT_GRACE_S": "1"}, {"start_s": 60}, ready=False)
    wait_for(lambda: server.ping() == 503 and server.get("/ping").json()["status"] == "failed", 10, "failure")
    assert "0.2 s" in server.get("/ping").json()["reason"]
    assert server.process.wait(10) == ExitCode.START_FAILED


def test_there_is_one_worker_and_no_control_socket(server: Server) -> None:
    """One engine, one worker; gunicorn's heartbeat file and sockets stay off the disk."""
    tree = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert len(tree) == 1
    assert not (Path(os.environ.get("HOME", "/root")) / ".gunicorn").exists()
