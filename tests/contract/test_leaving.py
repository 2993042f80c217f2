"""Clients that leave, stall or never read: their request leaves the engine within a second (contract 35)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
from tests.fakes.running import ADAPTER_HEADER, Server, wait_for
from tests.fakes.wire import Wire, request_bytes

Starter = Callable[..., Server]
LONG = {"prompt": "hi", "max_tokens": 4000}
SOON_S = 1.0


def requests_of(server: Server, request_id: str) -> list[dict[str, object]]:
    return [line for line in server.log_lines() if line.get("request_id") == request_id]


def cleanly_ended(wire: Wire) -> bool:
    """Whether the body ends as complete ones do; the connection must end in any case."""
    try:
        return wire.rest().endswith(b"0\r\n\r\n")
    except ConnectionError:
        return False


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("adapter", ["", "a1"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_running_request_is_aborted_when_its_client_leaves(
    controlled: Server, stream: bool, adapter: str, leave: str
) -> None:
    request_id = f"leaves-{leave}-{adapter}-{stream}"
    headers = {"X-Amzn-SageMaker-Inference-Id": request_id, **({ADAPTER_HEADER: adapter} if adapter else {})}
    before = controlled.metric("lorahost_aborted_total")
    with Wire(controlled.port) as wire:
        wire.post("/invocations", {**LONG, "stream": stream}, headers)
        wait_for(lambda: controlled.engine()["running"], 5)
        getattr(wire, leave)()
        assert wait_for(lambda: not controlled.engine()["running"], 5, "the abort") < SOON_S
    assert request_id in controlled.engine()["aborted"]
    wait_for(lambda: requests_of(controlled, request_id), 2, "the log line")
    [line] = requests_of(controlled, request_id)
    assert (line["code"], line["aborted"]) == (499, True)
    assert controlled.metric("lorahost_aborted_total") == before + 1
    assert controlled.metric("lorahost_inflight") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_queued_request_whose_client_leaves_never_reaches_the_engine(started: Starter, stream: bool) -> None:
    server = started({"LORAHOST_MAX_RUNNING": "1"}, {"step_s": 0.01})
    with Wire(server.port) as running, Wire(server.port) as queued:
        running.post("/invocations", {**LONG, "stream": True})
        wait_for(lambda: server.engine()["running"], 5)
        queued.post("/invocations", {**LONG, "stream": stream})
        wait_for(lambda: server.metric("lorahost_queued") == 1, 5)
        queued.close()
        assert wait_for(lambda: server.metric("lorahost_queued") == 0, 5) < SOON_S
        assert len(server.engine()["running"]) == 1
        running.close()
        wait_for(lambda: not server.engine()["running"], 2)
    assert server.invoke().status == 200


def test_a_client_with_a_pipelined_request_is_seen_to_leave_too(controlled: Server) -> None:
    """Bytes wait in the socket, so that its end is not the next thing to read."""
    with Wire(controlled.port) as wire:
        wire.post("/invocations", {**LONG, "stream": True})
        assert wire.head()[0] == 200
        wire.send(request_bytes("GET", "/ping"))
        time.sleep(0.1)
        assert controlled.engine()["running"]
        wire.close()
        assert wait_for(lambda: not controlled.engine()["running"], 5) < SOON_S


def test_a_client_that_stops_reading_is_cut_off_and_slows_nobody(started: Starter) -> None:
    server = started({"LORAHOST_CLIENT_STALL_S": "1"}, {"suffix": "x" * 20000, "step_s": 0.002})
    with Wire(server.port, receive_buffer=4096) as stalled:
        stalled.post("/invocations", {**LONG, "stream": True})
        wait_for(lambda: server.engine()["running"], 5)
        began = time.monotonic()
        assert server.invoke().status == 200
        assert server.get("/ping").status == 200
        assert time.monotonic() - began < 1
        wait_for(lambda: not server.engine()["running"], 10, "the cut")
        assert not cleanly_ended(stalled)
    assert server.invoke().status == 200


def test_a_client_that_reads_slowly_gets_all_of_its_stream(started: Starter) -> None:
    server = started({"LORAHOST_CLIENT_STALL_S": "2"}, {"suffix": "x" * 20000})
    with Wire(server.port, receive_buffer=4096) as slow:
        slow.post("/invocations", {**LONG, "max_tokens": 200, "stream": True})
        assert slow.head()[0] == 200
        chunks: list[bytes] = []
        for _, data in slow.chunks():
            chunks.append(data)
            time.sleep(0.005 if len(chunks) % 2 else 0)
        assert chunks[-1] == b"data: [DONE]\n\n"
        assert len(chunks) == 201


def test_a_client_that_never_reads_a_long_whole_answer_does_not_hold_its_thread(started: Starter) -> None:
    server = started(
        {"LORAHOST_CLIENT_STALL_S": "1", "LORAHOST_MAX_RUNNING": "2", "LORAHOST_MAX_QUEUED": "0"},
        {"suffix": "x" * 20000, "step_s": 0.0005},
    )
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            wire = stack.enter_context(Wire(server.port, receive_buffer=4096))
            wire.post("/invocations", {**LONG, "max_tokens": 800})
        wait_for(lambda: server.metric("lorahost_tokens_total") >= 1600, 15, "both answers")
        wait_for(lambda: server.invoke().status == 200, 10, "a free place")


def test_half_closed_clients_are_taken_for_gone(controlled: Server) -> None:
    """A client that closes its sending side can't be told from one that left; the connection ends."""
    with Wire(controlled.port) as wire:
        wire.post("/invocations", {**LONG, "stream": True})
        assert wire.head()[0] == 200
        wire.sock.shutdown(1)
        assert wait_for(lambda: not controlled.engine()["running"], 5) < SOON_S
        assert not cleanly_ended(wire)


def test_many_clients_that_come_and_go_leave_nothing_behind(controlled: Server) -> None:
    for i in range(60):
        wire = Wire(controlled.port)
        wire.post("/invocations", {**LONG, "stream": bool(i % 2)}, {ADAPTER_HEADER: f"a{i % 2 + 1}"})
        if i % 3:
            time.sleep(0.002 * (i % 5))
        wire.reset() if i % 4 else wire.close()
    wait_for(lambda: not controlled.engine()["running"], 3, "an empty engine")
    wait_for(lambda: controlled.metric("lorahost_inflight") == 0, 3)
    wait_for(lambda: all(a["in_flight"] == 0 for a in controlled.get("/adapters").json()["adapters"]), 3)
    assert controlled.invoke(adapter="a1").status == 200
    assert [line for line in controlled.log_lines() if line["level"] == "error"] == []
