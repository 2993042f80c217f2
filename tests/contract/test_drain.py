"""SIGTERM: the listener stays open, running requests end or are told, and the process goes (contract 7)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.running import Server, wait_for
from tests.fakes.wire import Wire, request_bytes

Starter = Callable[..., Server]
DEADLINE_S = 28.0


def stream(tokens: int) -> dict[str, object]:
    return {"prompt": "hi", "max_tokens": tokens, "stream": True}


def descendants(server: Server) -> list[int]:
    pid = server.process.pid
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_idle_server_is_gone_at_once_with_exit_code_0(started: Starter) -> None:
    server = started({}, {})
    children = descendants(server)
    began = time.monotonic()
    server.process.terminate()
    assert server.process.wait(10) == 0
    assert time.monotonic() - began < 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_running_requests_finish_while_new_ones_get_503(started: Starter, adapter: Callable[..., Path]) -> None:
    server = started({}, {"step_s": 0.02})
    began = time.monotonic()
    with Wire(server.port) as streamed, Wire(server.port) as whole, Wire(server.port) as kept:
        streamed.post("/invocations", stream(100))
        whole.post("/invocations", {**stream(100), "stream": False})
        kept.send(request_bytes("GET", "/ping"))
        assert kept.answer()[0] == 200
        assert streamed.head()[0] == 200
        wait_for(lambda: len(server.engine()["running"]) == 2, 5)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ping() == 503, 2, "503")
        ping = server.get("/ping").json()
        assert ping["status"] == "draining"
        refused = (server.invoke(), server.invoke({**stream(3)}), server.add("a", adapter("a")), server.remove("a"))
        for answer in refused:
            assert (answer.status, answer.error["code"]) == (503, "server_draining")
            assert int(answer.headers["Retry-After"]) >= 1
        kept.send(request_bytes("POST", "/invocations", b'{"prompt": "hi"}'))
        assert kept.answer()[0] == 503
        assert server.metric("lorahost_draining") == 1
        events = [data for _, data in streamed.chunks()]
        assert len(events) == 101
        assert events[-1] == b"data: [DONE]\n\n"
        status, _, body = whole.answer()
        assert status == 200
        assert json.loads(body)["usage"]["completion_tokens"] == 100
    assert server.process.wait(10) == 0
    assert time.monotonic() - began < 10


def test_requests_that_do_not_end_are_told_inside_their_answer(started: Starter) -> None:
    server = started({"LORAHOST_DRAIN_S": "1", "LORAHOST_MAX_RUNNING": "2"}, {"step_s": 0.01})
    with Wire(server.port) as streamed, Wire(server.port) as whole, Wire(server.port) as queued:
        streamed.post("/invocations", stream(4000))
        whole.post("/invocations", {**stream(4000), "stream": False})
        wait_for(lambda: len(server.engine()["running"]) == 2, 5)
        queued.post("/invocations", stream(4000))
        wait_for(lambda: server.metric("lorahost_queued") == 1, 5)
        began = time.monotonic()
        server.process.terminate()
        assert streamed.head()[0] == 200
        events = [data.decode() for _, data in streamed.chunks()]
        assert events[-1] == "data: [DONE]\n\n"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "server_draining"
        for wire in (whole, queued):
            status, headers, body = wire.answer()
            assert status == 503
            assert json.loads(body)["error"]["code"] == "server_draining"
            assert int(headers["retry-after"]) >= 1
        assert server.process.wait(10) == 0
        assert 1.0 <= time.monotonic() - began < 6


def test_a_client_that_does_not_read_can_not_delay_the_end(started: Starter) -> None:
    server = started({"LORAHOST_DRAIN_S": "1"}, {"suffix": "x" * 65536})
    with Wire(server.port, receive_buffer=4096) as wire:
        wire.post("/invocations", stream(4000))
        wait_for(lambda: server.engine()["running"], 5)
        began = time.monotonic()
        server.process.terminate()
        assert server.process.wait(DEADLINE_S) == 0
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("to_group", [False, True])
def test_a_second_sigterm_ends_it_at_once(started: Starter, to_group: bool) -> None:
    """Also when a process manager signals master and worker alike."""
    server = started({}, {"step_s": 0.01})
    children = descendants(server)
    with Wire(server.port) as wire:
        wire.post("/invocations", stream(4000))
        assert wire.head()[0] == 200
        server.process.terminate()
        wait_for(lambda: server.ping() == 503, 2)
        began = time.monotonic()
        if to_group:
            os.killpg(server.process.pid, signal.SIGTERM)
        else:
            server.process.terminate()
        server.process.wait(10)
        assert time.monotonic() - began < 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_sigterm_while_the_engine_starts_ends_it(started: Starter) -> None:
    server = started({}, {"start_s": 60}, ready=False)
    wait_for(lambda: server.ping() == 503, 10)
    server.process.terminate()
    assert server.process.wait(10) == 0
