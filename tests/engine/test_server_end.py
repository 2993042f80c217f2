"""How the server ends, with the real CPU engine: SIGTERM drains, a dead engine ends the process."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.engine.conftest import Models, start_server
from tests.fakes.running import Server, wait_for

from lorahost.host import _descendants

pytestmark = pytest.mark.engine
LONG = {"prompt": [65, 66], "max_tokens": 500, "n": 16, "ignore_eos": True, "stream": True}


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sigterm_finishes_the_running_stream_refuses_new_ones_and_takes_the_engine_along(
    tiny: Models, tmp_path: Path
) -> None:
    server = start_server(tmp_path, tiny)
    try:
        family = _descendants(server.process.pid)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.invoke, LONG)
            wait_for(lambda: server.metric("lorahost_running") == 1, 20)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.ping() == 503, 2)
            refused = server.invoke()
            assert refused.status == 503
            assert refused.headers["Retry-After"]
            events = running.result().body.decode().split("\n\n")
        assert events[-2] == "data: [DONE]"
        assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(28 - (time.monotonic() - began)) == 0
        assert not [pid for pid in family if alive(pid)]
    finally:
        server.stop()


def engine_processes(server: Server) -> list[int]:
    """Processes below the gunicorn worker."""
    worker = next(p for p in _descendants(server.process.pid))
    return _descendants(worker)


def test_a_killed_engine_fails_ping_and_ends_the_process(tiny: Models, tmp_path: Path) -> None:
    server = start_server(tmp_path, tiny, LORAHOST_EXIT_GRACE_S="3")
    try:
        assert server.invoke().status == 200
        for pid in engine_processes(server):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: server.ping() == 503, 2, "ping to fail")
        assert server.invoke().status == 503
        assert server.process.wait(20) == 3
    finally:
        server.stop()


def test_a_killed_worker_takes_the_engine_along(tiny: Models, tmp_path: Path) -> None:
    server = start_server(tmp_path, tiny)
    try:
        family = _descendants(server.process.pid)
        os.kill(family[0], signal.SIGKILL)
        assert server.process.wait(20) == 5
        wait_for(lambda: not [pid for pid in family if alive(pid)], 5, "the engine to end")
    finally:
        server.stop()


def test_a_hung_engine_is_noticed_by_an_adapter_change_alone(tiny: Models, tmp_path: Path) -> None:
    server = start_server(tmp_path, tiny, LORAHOST_STALL_S="4", LORAHOST_EXIT_GRACE_S="1")
    try:
        for pid in engine_processes(server):
            os.kill(pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            change = pool.submit(server.add, "ada", tiny.adapters["ada"])
            wait_for(lambda: server.ping() == 503, 10, "ping to fail")
            assert server.process.wait(20) == 3
            assert change.exception() is not None or change.result().status >= 500
    finally:
        server.stop()
