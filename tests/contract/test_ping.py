"""/ping answers at once whatever else the server does (contract 5, 38)."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.fakes.running import Server, wait_for
from tests.fakes.wire import Wire, request_bytes

Starter = Callable[..., Server]
LIMIT_S = 0.1


def ping_times(server: Server, count: int = 100) -> list[float]:
    """Seconds of `count` pings, each on a connection of its own."""
    times = []
    for _ in range(count):
        began = time.monotonic()
        assert server.get("/ping").status == 200
        times.append(time.monotonic() - began)
        time.sleep(0.005)
    return times


def assert_quick(times: list[float]) -> None:
    worst = statistics.quantiles(times, n=100)[98]
    assert worst < LIMIT_S, f"p99 {worst * 1e3:.1f} ms, median {statistics.median(times) * 1e3:.1f} ms"


def drain(wire: Wire) -> None:
    """Reads a stream to its end, as a client does."""
    with contextlib.suppress(OSError):
        wire.rest()


def test_ping_is_quick_with_64_streams_and_an_adapter_loading(
    started: Starter, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    server = started({}, {"step_s": 0.02, "load_s": 5.0})
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            wire = stack.enter_context(Wire(server.port, timeout_s=60))
            wire.post("/invocations", {"prompt": "hi", "max_tokens": 4000, "stream": True})
            assert wire.head()[0] == 200
            threading.Thread(target=drain, args=(wire,), daemon=True).start()
        loading = threading.Thread(target=server.add, args=("slow", adapter("slow")), daemon=True)
        loading.start()
        wait_for(lambda: server.get("/adapters").json()["adapters"], 5)
        times = ping_times(server)
        assert server.get("/adapters/slow").json()["state"] == "loading"
        assert len(server.engine()["running"]) == 64
        assert server.metric("lorahost_inflight") == 64
    assert_quick(times)
    loading.join(10)


def test_ping_is_quick_while_50_finished_clients_hold_their_connections_open(server: Server) -> None:
    request = request_bytes("POST", "/invocations", b'{"prompt":"hi","max_tokens":1}', {"Connection": "close"})
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            wire = stack.enter_context(Wire(server.port))
            wire.send(request)
            status, headers, _ = wire.answer()
            assert status == 200
            assert headers["connection"] == "close"
        assert_quick(ping_times(server))


def test_ping_is_quick_while_clients_hold_half_a_request(server: Server) -> None:
    body = request_bytes("POST", "/invocations", b'{"prompt":"hi","max_tokens":1}')
    with contextlib.ExitStack() as stack:
        for part in (body[:20], body[:-5], b"") * 10:
            stack.enter_context(Wire(server.port)).send(part)
        assert_quick(ping_times(server, 50))


def test_half_a_request_does_not_hold_its_thread_for_ever(started: Starter) -> None:
    server = started({"LORAHOST_CLIENT_STALL_S": "0.5"})
    whole = request_bytes("POST", "/invocations", b'{"prompt":"hi","max_tokens":1}')
    with Wire(server.port) as body, Wire(server.port) as head:
        body.send(whole[:-5])
        head.send(whole[:20])
        status, _, answer = body.answer()
        assert (status, b"body_timeout" in answer) == (408, True)
        assert body.rest() == b""
        assert head.rest() == b""
    assert [line["message"] for line in server.log_lines() if line["level"] == "error"] == []


def test_a_full_queue_refuses_with_a_hint_and_ping_stays_quick(started: Starter) -> None:
    """Two running, two queued: the fifth gets 429, and one that leaves makes room."""
    server = started({"LORAHOST_MAX_RUNNING": "2", "LORAHOST_MAX_QUEUED": "2"}, {"step_s": 0.05})
    long = {"prompt": "hi", "max_tokens": 4000, "stream": True}
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.port)) for _ in range(4)]
        for wire in wires:
            wire.post("/invocations", long)
        wait_for(lambda: server.metric("lorahost_queued") == 2, 5, "two queued")
        refused = [server.invoke() for _ in range(20)]
        assert {answer.status for answer in refused} == {429}
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        assert {answer.error["type"] for answer in refused} == {"overloaded"}
        assert refused[0].error["retry_after_s"] >= 1
        assert_quick(ping_times(server, 50))
        for wire in wires:
            wire.close()
        wait_for(lambda: server.invoke().status == 200, 2, "room")
    assert server.metric("lorahost_queued") == 0


def test_adapter_changes_can_not_take_all_threads(started: Starter, adapter: Callable[..., Path]) -> None:
    """More registrations at once than there are threads for them: 429 for the rest, all others go on."""
    server = started({"LORAHOST_SPARE_THREADS": "8"}, {"load_s": 1.0})
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: statuses.append(server.add(f"a{i}", adapter(f"a{i}")).status))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert_quick(ping_times(server, 50))
    for thread in threads:
        thread.join(30)
    assert sorted(set(statuses)) == [200, 429]
    assert len(statuses) == 12


def test_more_clients_than_open_files_allow_do_not_end_the_server(started: Starter) -> None:
    """They wait until others leave."""
    server = started({"LORAHOST_MAX_RUNNING": "20"}, {"step_s": 0.05}, files=640)
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.port)) for _ in range(300)]
        for wire in wires:
            wire.post("/invocations", {"prompt": "hi", "max_tokens": 4000, "stream": True})
        time.sleep(0.5)
        assert server.process.poll() is None
    wait_for(lambda: server.ping() == 200, 20)
    assert server.invoke().status == 200
    assert any("640 open files" in line["message"] for line in server.log_lines())
