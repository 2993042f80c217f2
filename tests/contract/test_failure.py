"""An engine that dies or hangs takes the server out of service and ends it (contract 6, 35)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.running import Server, wait_for
from tests.fakes.wire import Wire

from lorahost.exit_codes import ExitCode

Starter = Callable[..., Server]
LONG = {"prompt": "hi", "max_tokens": 4000, "stream": True}


@pytest.mark.parametrize("grace_s", [0.5, 2.0])
def test_a_dead_engine_turns_ping_to_503_within_2_s_and_ends_the_process(started: Starter, grace_s: float) -> None:
    server = started({"LORAHOST_EXIT_GRACE_S": str(grace_s)}, {})
    assert server.invoke().status == 200
    server.engine(dead=True)
    assert wait_for(lambda: server.ping() == 503, 5, "503") < 2.0
    ping = server.get("/ping").json()
    assert ping["status"] == "failed"
    assert "died" in ping["reason"]
    refused = server.invoke()
    assert (refused.status, refused.error["code"]) == (503, "server_failed")
    assert int(refused.headers["Retry-After"]) >= 1
    taken = wait_for(lambda: server.process.poll() is not None, grace_s + 5, "the exit")
    assert taken < grace_s + 2
    assert server.process.returncode == ExitCode.ENGINE_DEAD


def test_a_hung_engine_is_seen_by_its_missing_tokens(started: Starter) -> None:
    server = started({"LORAHOST_STALL_S": "0.6", "LORAHOST_EXIT_GRACE_S": "0.5"}, {})
    with Wire(server.port) as wire:
        wire.post("/invocations", LONG)
        assert wire.head()[0] == 200
        server.engine(hung=True)
        assert wait_for(lambda: server.ping() == 503, 5, "503") < 0.6 + 2.0
        assert "0.6 s" in server.get("/ping").json()["reason"]
        assert server.process.wait(5) == ExitCode.ENGINE_DEAD


def test_an_idle_engine_is_not_taken_for_a_hung_one(started: Starter) -> None:
    server = started({"LORAHOST_STALL_S": "0.7"}, {})
    with pytest.raises(AssertionError, match="not enough"):
        wait_for(lambda: server.ping() != 200, 2.0)
    assert server.invoke().status == 200


def test_running_requests_hear_of_the_death_in_their_own_form(started: Starter) -> None:
    """A stream that has begun says it inside, and ends as a stream does; a whole answer has the status."""
    server = started({}, {"step_s": 0.01})
    with Wire(server.port) as sse, Wire(server.port) as lines, Wire(server.port) as lmi, Wire(server.port) as whole:
        sse.post("/invocations", LONG)
        lines.post("/invocations", LONG, {"Accept": "application/jsonlines"})
        lmi.post("/invocations", {"inputs": "hi", "parameters": {"max_new_tokens": 4000}, "stream": True})
        whole.post("/invocations", {**LONG, "stream": False})
        for wire in (sse, lines, lmi):
            assert wire.head()[0] == 200
        wait_for(lambda: len(server.engine()["running"]) == 4, 5)
        server.engine(dead=True)
        status, headers, body = whole.answer()
        assert status == 503
        assert json.loads(body)["error"]["code"] == "engine_dead"
        assert "content-length" in headers
        events = [data.decode() for _, data in sse.chunks()]
        assert events[-1] == "data: [DONE]\n\n"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert json.loads(list(lines.chunks())[-1][1])["error"]["code"] == "engine_dead"
        last = json.loads(list(lmi.chunks())[-1][1])
        assert last["details"]["finish_reason"] == "error"
        assert last["error"]["code"] == "engine_dead"


def test_a_worker_that_is_killed_ends_the_server(started: Starter) -> None:
    """By the out-of-memory killer, say: a new worker would serve without the adapters that were registered."""
    server = started({}, {})
    [worker] = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    assert server.process.wait(5) == ExitCode.WORKER_LOST
    assert server.ping() is None
