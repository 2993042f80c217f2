"""One word means one adapter, on every way into the server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.running import ADAPTER_HEADER, ATTRIBUTES_HEADER, Server

ALIAS_HEADER = "X-Amzn-SageMaker-Adapter-Alias"
Maker = Callable[..., Path]


def add(server: Server, name: str, src: Path, alias: str | None = None) -> Any:
    headers = {ALIAS_HEADER: alias} if alias else {}
    return server.request("POST", "/adapters", {"name": name, "src": str(src)}, headers)


def test_no_alias_takes_over_the_base_models_name(controlled: Server, adapter: Maker) -> None:
    answer = add(controlled, "evil", adapter("evil"), alias="base")
    assert (answer.status, answer.error["param"]) == (400, "alias")
    for body in ({"prompt": "hi", "model": "base"}, {"prompt": "hi"}):
        assert controlled.invoke(body).json()["model"] == "base"
    assert controlled.invoke({"prompt": "hi"}, "base").json()["model"] == "base"


def test_an_alias_and_a_name_never_collide(controlled: Server, adapter: Maker) -> None:
    assert add(controlled, "one", adapter("one"), alias="uno").status == 200
    taken = add(controlled, "two", adapter("two"), alias="one")
    assert (taken.status, taken.error["code"]) == (409, "alias_taken")
    shadow = add(controlled, "uno", adapter("uno"))
    assert (shadow.status, shadow.error["code"]) == (409, "name_taken")
    assert controlled.invoke({"prompt": "hi"}, "uno").headers[ATTRIBUTES_HEADER].startswith("adapter=one;")
    assert controlled.remove("one").status == 200


@pytest.mark.parametrize("name", [" a1", "a1 ", "/a1", "a1/", "base "])
def test_a_name_that_could_be_read_as_another_is_refused(controlled: Server, adapter: Maker, name: str) -> None:
    answer = add(controlled, name, adapter("odd"))
    assert (answer.status, answer.error["param"]) == (400, "name")
    assert repr(name) in answer.error["message"]


def test_no_path_leads_to_another_adapter(controlled: Server) -> None:
    for path in ("/adapters//a1", "/adapters/%2Fa1"):
        assert controlled.request("DELETE", path).status == 404
    assert controlled.get("/adapters/a1").status == 200


def test_a_header_in_utf8_names_its_adapter(controlled: Server, adapter: Maker) -> None:
    for name in ("naïve", "naÃ¯ve"):
        assert add(controlled, name, adapter(f"src{len(name)}", tag=name)).status == 200
    connection = http.client.HTTPConnection("127.0.0.1", controlled.port, timeout=10)
    connection.putrequest("POST", "/invocations")
    body = json.dumps({"prompt": "hi"}).encode()
    for key, value in (("Content-Type", b"application/json"), ("Content-Length", b"%d" % len(body))):
        connection.putheader(key, value)
    connection.putheader(ADAPTER_HEADER, "naïve".encode())
    connection.endheaders(body)
    answer = connection.getresponse()
    assert answer.status == 200
    assert json.loads(answer.read())["model"] == "naïve"
    connection.close()
    for name in ("na%C3%AFve", "na%C3%83%C2%AFve"):
        assert controlled.remove(name).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi", "n": 129},
        {"prompt": ["a"] * 129},
        {"prompt": ["a"] * 17, "n": 8},
        {"inputs": ["a"] * 129},
        {"messages": [{"role": "user", "content": "a"}], "n": 200},
    ],
)
def test_one_request_can_not_take_the_whole_engine(server: Server, body: dict[str, Any]) -> None:
    answer = server.invoke(body)
    assert (answer.status, answer.error["code"]) == (400, "too_many_sequences")
    assert "128" in answer.error["message"]
