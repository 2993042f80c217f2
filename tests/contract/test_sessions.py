"""Sticky sessions (contract 40)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from tests.fakes.running import Answer, Server

Starter = Callable[..., Server]
SESSION = "X-Amzn-SageMaker-Session-Id"
NEW = "X-Amzn-SageMaker-New-Session-Id"
CLOSED = "X-Amzn-SageMaker-Closed-Session-Id"
PROMPT = {"prompt": "hi", "max_tokens": 1}


def send(server: Server, body: dict[str, object], session: str | None = None, **more: str) -> Answer:
    headers = {**({SESSION: session} if session else {}), **more}
    return server.request("POST", "/invocations", body, headers)


def opened(server: Server) -> str:
    answer = send(server, {"requestType": "NEW_SESSION"}, "NEW_SESSION")
    assert answer.status == 200
    match = re.fullmatch(r"([\w-]{1,256}); Expires=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", answer.headers[NEW])
    assert match
    assert answer.headers[SESSION] == answer.headers[NEW]
    assert answer.headers["Content-Length"]
    return match[1]


def test_a_session_opens_serves_and_closes(server: Server) -> None:
    first, second = opened(server), opened(server)
    assert first != second
    assert send(server, PROMPT, first).status == 200
    assert send(server, {**PROMPT, "stream": True}, first).status == 200
    closed = send(server, {"requestType": "CLOSE"}, first)
    assert (closed.status, closed.headers[CLOSED]) == (200, first)
    for body in (PROMPT, {"requestType": "CLOSE"}):
        gone = send(server, body, first)
        assert (gone.status, gone.error["code"]) == (400, "unknown_session")
    assert send(server, PROMPT, second).status == 200


@pytest.mark.parametrize(
    ("body", "session", "code"),
    [
        (PROMPT, "never-opened", "unknown_session"),
        ({"requestType": "CLOSE"}, None, "missing_session"),
        ({"requestType": "OPEN"}, None, "invalid_parameter"),
        ({"requestType": "CLOSE", "prompt": "hi"}, None, "ambiguous_schema"),
    ],
)
def test_what_is_no_session_is_refused(server: Server, body: dict[str, object], session: str | None, code: str) -> None:
    answer = send(server, body, session)
    assert (answer.status, answer.error["code"]) == (400, code)


def test_the_streaming_api_opens_no_session(server: Server) -> None:
    forwarded = {"X-Amzn-SageMaker-Forwarded-Api": "InvokeEndpointWithResponseStream"}
    answer = send(server, {"requestType": "NEW_SESSION"}, **forwarded)
    assert (answer.status, answer.error["code"]) == (400, "session_on_stream")


def test_sessions_expire(started: Starter) -> None:
    server = started({"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true", "SAGEMAKER_SESSIONS_EXPIRATION": "1"})
    session = opened(server)
    assert send(server, PROMPT, session).status == 200
    time.sleep(1.1)
    assert send(server, PROMPT, session).error["code"] == "unknown_session"


def test_sessions_are_off_unless_asked_for(controlled: Server) -> None:
    for body, session in (({"requestType": "NEW_SESSION"}, None), (PROMPT, "some-id")):
        answer = send(controlled, body, session)
        assert (answer.status, answer.error["code"]) == (400, "sessions_disabled")
