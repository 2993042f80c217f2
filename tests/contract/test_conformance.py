"""The same requests to this server and to model-hosting-container-standards; every difference is listed and meant.

`docs/conformance.md` gives the reason of each.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.running import ADAPTER_HEADER, ROOT, Answer, Server, environment, free_port, make_adapter, running

ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
SESSION = "X-Amzn-SageMaker-Session-Id"
SESSION_HEADERS = (SESSION, "X-Amzn-SageMaker-New-Session-Id", "X-Amzn-SageMaker-Closed-Session-Id")
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
PROMPT = {"prompt": "hi", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
SRC = "SRC"


@dataclass(frozen=True)
class Call:
    """One request; the word SRC stands for a directory with an adapter, SESSION for the id opened before."""

    method: str
    path: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()


def invoke(body: Any, **headers: str) -> Call:
    return Call("POST", "/invocations", body, tuple((k.replace("_", "-"), v) for k, v in headers.items()))


def register(body: Any = None, query: str = "", *headers: tuple[str, str]) -> Call:
    return Call("POST", "/adapters" + query, body, headers)


ADD = register({"name": "x", "src": SRC})
OPEN = invoke({"requestType": "NEW_SESSION"})
CASES: dict[str, list[Call]] = {
    "ping": [Call("GET", "/ping")],
    "ping by POST": [Call("POST", "/ping")],
    "base, completion": [invoke(PROMPT)],
    "base, chat": [invoke(CHAT)],
    "base by name": [invoke({**PROMPT, "model": "base"})],
    "adapter by header": [invoke(PROMPT, **{ADAPTER_HEADER: "a1"})],
    "adapter by header, chat": [invoke(CHAT, **{ADAPTER_HEADER: "a2"})],
    "adapter by header in lower case": [invoke(PROMPT, **{ADAPTER_HEADER.lower(): "a1"})],
    "header beats model": [invoke({**PROMPT, "model": "a2"}, **{ADAPTER_HEADER: "a1"})],
    "unknown adapter in header": [invoke(PROMPT, **{ADAPTER_HEADER: "gone"})],
    "adapter by model": [invoke({**PROMPT, "model": "a1"})],
    "unknown model": [invoke({**PROMPT, "model": "gone"})],
    "adapter by custom attributes": [invoke(PROMPT, **{ATTRIBUTES: "adapter=a1"})],
    "adapter by adapter_id": [invoke({**PROMPT, "adapter_id": "a1"})],
    "adapter by query": [Call("POST", "/invocations?adapter=a1", PROMPT)],
    "malformed JSON": [invoke(b"{")],
    "empty body": [invoke(b"")],
    "body is a list": [invoke(b"[]", **{ADAPTER_HEADER: "a1"})],
    "no known schema": [invoke({"question": "hi"})],
    "no content type": [invoke(b'{"prompt": "hi", "max_tokens": 1}')],
    "inputs": [invoke({"inputs": "hi", "parameters": {"max_new_tokens": 1}})],
    "invocations by GET": [Call("GET", "/invocations")],
    "unknown path": [Call("GET", "/nope")],
    "register": [ADD],
    "register, then ask": [ADD, invoke(PROMPT, **{ADAPTER_HEADER: "x"})],
    "register by query": [register(query="?name=x&src=SRC&preload=true&pin=false")],
    "register by query and body": [register({"name": "x"}, "?src=SRC")],
    "register with an alias": [register({"name": "x", "src": SRC}, "", (ALIAS, "Alias"))],
    "register with text booleans": [register({"name": "x", "src": SRC, "preload": "true", "pin": "false"})],
    "register without name": [register({"src": SRC})],
    "register without src": [register({"name": "x"})],
    "register with empty name": [register({"name": "", "src": SRC})],
    "register with empty src": [register({"name": "x", "src": ""})],
    "register with a bad boolean": [register({"name": "x", "src": SRC, "preload": "perhaps"})],
    "register with an unknown field": [register({"name": "x", "src": SRC, "pinned": True})],
    "register nothing": [register()],
    "register a list": [register([])],
    "register again": [ADD, ADD],
    "register from a missing directory": [register({"name": "x", "src": "/nowhere/at/all"})],
    "unregister": [ADD, Call("DELETE", "/adapters/x")],
    "unregister with an alias": [ADD, Call("DELETE", "/adapters/x", None, ((ALIAS, "Alias"),))],
    "unregister, then ask": [ADD, Call("DELETE", "/adapters/x"), invoke(PROMPT, **{ADAPTER_HEADER: "x"})],
    "unregister an unknown one": [Call("DELETE", "/adapters/gone")],
    "list": [Call("GET", "/adapters")],
    "describe": [Call("GET", "/adapters/a1")],
    "update": [ADD, Call("POST", "/adapters/x/update", {"src": SRC})],
    "register under a model": [Call("POST", "/models/base/adapters", {"name": "x", "src": SRC})],
    "session, open": [OPEN],
    "session, open with header": [invoke({"requestType": "NEW_SESSION"}, **{SESSION: "NEW_SESSION"})],
    "session, use": [OPEN, invoke(PROMPT, **{SESSION: "SESSION"})],
    "session, close": [OPEN, invoke({"requestType": "CLOSE"}, **{SESSION: "SESSION"})],
    "session, use after close": [
        OPEN,
        invoke({"requestType": "CLOSE"}, **{SESSION: "SESSION"}),
        invoke(PROMPT, **{SESSION: "SESSION"}),
    ],
    "session, unknown id": [invoke(PROMPT, **{SESSION: "never"})],
    "session, close an unknown id": [invoke({"requestType": "CLOSE"}, **{SESSION: "never"})],
    "session, close without id": [invoke({"requestType": "CLOSE"})],
    "session, unknown type": [invoke({"requestType": "OPEN"})],
    "session, further fields": [invoke({"requestType": "NEW_SESSION", "more": 1})],
}

Outcome = dict[str, Any]
# Ours, theirs: what differs in the last answer of the case.
BASE_ANSWERS: Outcome = {"status": 200, "who": "base"}
OPENED: Outcome = {"status": 200, "says": "Session SESSION created"}
OPENED_BOTH = {**OPENED, "headers": [SESSION_HEADERS[0], SESSION_HEADERS[1]]}
OPENED_NEW = {**OPENED, "headers": [SESSION_HEADERS[1]]}
REGISTERED: Outcome = {"status": 200, "says": "Adapter x registered"}
DIFFERENCES: dict[str, tuple[Outcome, Outcome]] = {
    "adapter by model": ({"status": 200, "who": "a1"}, BASE_ANSWERS),
    "unknown model": ({"status": 404}, BASE_ANSWERS),
    "adapter by custom attributes": ({"status": 200, "who": "a1"}, BASE_ANSWERS),
    "adapter by adapter_id": ({"status": 200, "who": "a1"}, BASE_ANSWERS),
    "adapter by query": ({"status": 200, "who": "a1"}, BASE_ANSWERS),
    "body is a list": ({"status": 400}, {"status": 500}),
    "inputs": ({"status": 200, "fields": ["generated_text"]}, {"status": 400}),
    "register by query and body": (REGISTERED, {"status": 400}),
    "register again": (REGISTERED, {"status": 400}),
    "register from a missing directory": ({"status": 424}, {"status": 404}),
    "list": ({"status": 200, "fields": ["adapters"]}, {"status": 405}),
    "describe": ({"status": 200, "fields": ["name", "pin", "preload", "src"]}, {"status": 405}),
    "update": ({"status": 200, "says": "Adapter x updated"}, {"status": 404}),
    "register under a model": (REGISTERED, {"status": 404}),
    "session, open": (OPENED_BOTH, OPENED_NEW),
    "session, open with header": (OPENED_BOTH, OPENED_NEW),
    "session, close without id": ({"status": 400}, {"status": 424}),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Path]]:
    """This server and the other, both with a1 and a2."""
    directory = tmp_path_factory.mktemp("conformance")
    for name in ("a1", "a2", "x"):
        make_adapter(directory / name, name)
    env = {"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true", "SAGEMAKER_SESSIONS_PATH": str(directory / "sessions")}
    port = free_port()
    log = (directory / "standards.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.standards_app", str(port)],
        env=environment(env, port, directory),
        cwd=ROOT,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    theirs = Server(process, port, directory / "standards.log")
    try:
        with running(directory, env) as ours:
            theirs.wait_ready()
            for one in (ours, theirs):
                assert {one.add(name, directory / name).status for name in ("a1", "a2")} == {200}
            yield ours, theirs, directory / "x"
    finally:
        theirs.stop()


def outcome(server: Server, calls: list[Call], src: Path) -> Outcome:
    """What the last answer of the calls says; the adapter x is gone afterwards."""
    session = ""
    try:
        for call in calls:
            answer = send(server, call, src, session)
            opened = answer.headers["X-Amzn-SageMaker-New-Session-Id"]
            session = opened.partition(";")[0] if opened else session
        return observed(answer, session)
    finally:
        server.remove("x")


def send(server: Server, call: Call, src: Path, session: str) -> Answer:
    body = {k: str(src) if v == SRC else v for k, v in call.body.items()} if isinstance(call.body, dict) else call.body
    headers = {name: session if value == "SESSION" else value for name, value in call.headers}
    return server.request(call.method, call.path.replace(SRC, str(src)), body, headers)


def observed(answer: Answer, session: str) -> Outcome:
    """Status, who wrote the text, what a status message says, and which session headers are there."""
    found: Outcome = {"status": answer.status}
    if answer.status != 200:
        return found
    is_json = (answer.headers["Content-Type"] or "").startswith("application/json")
    parsed = answer.json() if is_json else None
    if isinstance(parsed, dict) and "choices" in parsed:
        found["who"] = answer.text.split()[0].partition("@")[0]
        assert parsed["model"] == found["who"]
    elif isinstance(parsed, dict) and "status" not in parsed:
        found["fields"] = sorted(parsed.keys() & {"adapters", "name", "src", "preload", "pin", "generated_text"})
    elif answer.body:
        says = answer.body.decode() if parsed is None else parsed["status"]
        found["says"] = says.replace(session, "SESSION") if session else says
    headers = [name for name in SESSION_HEADERS if answer.headers[name]]
    if headers:
        found["headers"] = headers
    return found


@pytest.mark.parametrize("name", CASES)
def test_both_answer_alike_or_differ_as_listed(servers: tuple[Server, Server, Path], name: str) -> None:
    ours, theirs, src = servers
    mine, other = outcome(ours, CASES[name], src), outcome(theirs, CASES[name], src)
    if name not in DIFFERENCES:
        assert mine == other
        return
    assert mine != other
    assert (mine, other) == DIFFERENCES[name]


def test_every_difference_has_its_reason_in_the_documentation() -> None:
    text = (ROOT / "docs" / "conformance.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    listed = {row[0]: row for row in rows if row[0] in CASES}
    assert sorted(listed) == sorted(DIFFERENCES)
    assert f"{len(CASES)} requests" in text
    assert f"{len(CASES) - len(DIFFERENCES)} answers are alike" in text
    assert all(len(row) == 4 and len(row[3]) > 20 for row in listed.values())
