"""Which adapter answers, in which form, and what is said when none can (contract 28 to 32, 36, 37, 39, 42)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.fakes.running import ADAPTER_HEADER, ATTRIBUTES_HEADER, Answer, Server
from tests.fakes.wire import Wire

PROMPT = {"prompt": "hi", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ALIAS = "X-Amzn-SageMaker-Adapter-Alias"


def ask(
    server: Server, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = "/invocations"
) -> Answer:
    return server.request("POST", path, body, headers)


def who(answer: Answer) -> str:
    """The adapter that wrote the answer, by the text, the `model` and the header, which must agree."""
    assert answer.status == 200, answer
    [word] = set(answer.text.split())
    name, _, digest = word.partition("@")
    shown = answer.headers[ATTRIBUTES_HEADER]
    assert shown == (f"adapter={name};version={digest}" if digest else "adapter=;version=base")
    assert answer.json()["model"] == name
    return name


@pytest.mark.parametrize(
    ("body", "headers", "path", "expected"),
    [
        (PROMPT, {}, "/invocations", "base"),
        (PROMPT, {ADAPTER_HEADER: "a1"}, "/invocations", "a1"),
        (CHAT, {ADAPTER_HEADER.lower(): "a2"}, "/invocations", "a2"),
        (PROMPT, {ADAPTER_HEADER.upper(): "a1"}, "/invocations", "a1"),
        ({**PROMPT, "model": "a2"}, {ADAPTER_HEADER: "a1"}, "/invocations", "a1"),
        ({**PROMPT, "adapters": "a2"}, {ADAPTER_HEADER: "a1"}, "/invocations", "a1"),
        (PROMPT, {ATTRIBUTES_HEADER: "adapter=a2"}, "/invocations", "a2"),
        (PROMPT, {ATTRIBUTES_HEADER: "trace=1;Adapter=a2;x"}, "/invocations", "a2"),
        (PROMPT, {ATTRIBUTES_HEADER: "adapter=a2", ADAPTER_HEADER: "a1"}, "/invocations", "a1"),
        ({**PROMPT, "adapter_id": "a1"}, {}, "/invocations", "a1"),
        ({**PROMPT, "adapters": ["a1"]}, {}, "/invocations", "a1"),
        ({**PROMPT, "adapters": ""}, {}, "/invocations", "base"),
        ({**CHAT, "model": "a1"}, {}, "/invocations", "a1"),
        ({**CHAT, "model": "base"}, {}, "/invocations", "base"),
        ({**CHAT, "model": "a2"}, {}, "/v1/chat/completions", "a2"),
        ({**PROMPT, "model": "a2"}, {}, "/v1/completions", "a2"),
        (PROMPT, {}, "/invocations?adapter=a1", "a1"),
        (CHAT, {ATTRIBUTES_HEADER: "route=/v1/chat/completions"}, "/invocations", "base"),
    ],
)
def test_who_answers(server: Server, body: dict[str, Any], headers: dict[str, str], path: str, expected: str) -> None:
    assert who(ask(server, body, headers, path)) == expected


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (PROMPT, {ADAPTER_HEADER: "gone"}),
        ({**PROMPT, "model": "a1"}, {ADAPTER_HEADER: "gone"}),
        (PROMPT, {ATTRIBUTES_HEADER: "adapter=gone"}),
        ({**PROMPT, "adapter_id": "gone"}, {}),
        ({**PROMPT, "adapters": ["gone"]}, {}),
        ({**PROMPT, "model": "gone"}, {}),
        ({**PROMPT, "model": "A1"}, {}),
        ({**PROMPT, "stream": True}, {ADAPTER_HEADER: "gone"}),
    ],
)
def test_an_unknown_adapter_is_never_answered_by_another(
    server: Server, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    answer = ask(server, body, headers, path)
    assert (answer.status, answer.error["type"]) == (404, "adapter_not_found")
    assert "gone" in answer.error["message"] or "A1" in answer.error["message"]


def test_the_alias_is_what_callers_read(server: Server) -> None:
    answer = ask(server, PROMPT, {ADAPTER_HEADER: "a1", ALIAS: "my-adapter"})
    assert answer.json()["model"] == "my-adapter"
    assert answer.headers[ATTRIBUTES_HEADER].startswith("adapter=a1;version=")
    unknown = ask(server, PROMPT, {ADAPTER_HEADER: "gone", ALIAS: "my-adapter"})
    assert unknown.status == 404
    assert "my-adapter" in unknown.error["message"]


def test_an_overruled_name_is_said_in_a_header(server: Server) -> None:
    answer = ask(server, {**PROMPT, "adapter_id": "a2"}, {ADAPTER_HEADER: "a1"})
    assert "a2" in answer.headers["X-Lorahost-Warning"]
    assert ask(server, PROMPT, {ADAPTER_HEADER: "a1"}).headers["X-Lorahost-Warning"] is None


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "empty"),
        (b"{", 400, "line 1"),
        (b"[]", 400, "object"),
        (b"null", 400, "object"),
        (b'{"input": "x"}', 400, "embeddings"),
        (b"{}", 400, "messages"),
        (b'{"prompt": "a", "messages": []}', 400, "different schemas"),
        (b'{"prompt": "a", "prompt": "b"}', 400, "twice"),
        (b'{"prompt": "a", "max_tokens": NaN}', 400, "NaN"),
        (b"\xff{}", 400, "byte 0"),
        (b'{"prompt": "a", "stream": "yes"}', 400, "stream"),
        (b'{"prompt": "a", "max_tokens": -1}', 400, "max_tokens"),
        (b'{"messages": []}', 400, "messages"),
        (b'{"prompt": "' + b"w " * 5000 + b'"}', 400, "5000 tokens"),
        (b'{"inputs": "a", "parameters": {"temprature": 1}}', 400, "temprature"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "nested"),
        (b'{"requestType": "OPEN"}', 400, "NEW_SESSION"),
    ],
)
def test_a_bad_body_is_refused_with_what_is_wrong(server: Server, body: bytes, status: int, said: str) -> None:
    answer = server.request("POST", "/invocations", body)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert said in answer.error["message"]


@pytest.mark.parametrize("content_type", [None, "application/json", "application/json; charset=utf-8", "text/plain"])
def test_content_types_that_are_taken(server: Server, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    assert server.request("POST", "/invocations", json.dumps(PROMPT).encode(), headers).status == 200


def test_another_content_type_is_415(server: Server) -> None:
    answer = server.request("POST", "/invocations", b"a,b", {"Content-Type": "text/csv"})
    assert (answer.status, answer.error["param"]) == (415, "Content-Type")


def test_lmi_bodies_have_lmis_defaults_and_forms(server: Server) -> None:
    """30 tokens unless told otherwise, lists for lists, the prompt in front on request."""
    default = ask(server, {"inputs": "hi"}).json()
    assert len(default["generated_text"].split()) == 30
    three = {"max_new_tokens": 3}
    assert ask(server, {"inputs": "hi", "parameters": three}).json() == {"generated_text": "base base base "}
    full = ask(server, {"inputs": "hi ", "parameters": {**three, "return_full_text": True}}).json()
    assert full["generated_text"] == "hi base base base "
    adapter = ask(server, {"inputs": "hi", "parameters": three}, {ADAPTER_HEADER: "a1"})
    assert adapter.json()["generated_text"].startswith("a1@")
    assert adapter.headers[ATTRIBUTES_HEADER].startswith("adapter=a1;")


def test_the_callers_id_is_in_the_answer_and_in_the_log(server: Server) -> None:
    ask(server, PROMPT, {"X-Amzn-SageMaker-Inference-Id": "caller-7", ADAPTER_HEADER: "a1"})
    answer = ask(server, CHAT, {"X-Amzn-SageMaker-Inference-Id": "caller-8"})
    assert answer.json()["id"].endswith("caller-8")
    lines = {line.get("request_id"): line for line in server.log_lines() if line["message"] == "request"}
    assert (lines["caller-7"]["adapter"], lines["caller-7"]["code"]) == ("a1", 200)
    assert lines["caller-7"]["output_tokens"] == 2
    assert "hi" not in json.dumps(lines["caller-7"]).split('"')


@pytest.mark.parametrize("body", [PROMPT, {"inputs": "hi"}, {**CHAT, "model": "gone"}])
def test_whole_answers_have_their_length_and_small_headers(server: Server, body: dict[str, Any]) -> None:
    with Wire(server.port) as wire:
        attributes = {ATTRIBUTES_HEADER: "x=" + "y" * 1000, "X-Amzn-SageMaker-Inference-Id": "i" * 64}
        wire.post("/invocations", {**body, "adapter_id": "a1"} if "inputs" in body else body, attributes)
        _, headers, size = wire.head()
        assert "transfer-encoding" not in headers
        assert len(wire.exactly(int(headers["content-length"]))) > 10
        assert size < 4096
        wire.post("/invocations", PROMPT)
        assert wire.answer()[0] == 200


def test_a_deadline_ends_an_answer_with_what_there_is(controlled: Server) -> None:
    controlled.engine(step_s=0.02)
    began = time.monotonic()
    whole = ask(controlled, {"prompt": "hi", "max_tokens": 4000, "deadline_s": 0.5})
    streamed = ask(
        controlled, {"prompt": "hi", "max_tokens": 4000, "stream": True}, {ATTRIBUTES_HEADER: "deadline_s=0.5"}
    )
    controlled.engine(step_s=0.002)
    assert 1.0 <= time.monotonic() - began < 3
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert 2 < len(whole.text.split()) < 100
    events = streamed.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"
    assert controlled.engine()["running"] == []


def test_a_deadline_that_passes_before_the_first_token_is_an_answer_all_the_same(controlled: Server) -> None:
    controlled.engine(step_s=0.5)
    time.sleep(0.05)
    answer = ask(controlled, {"prompt": "hi", "max_tokens": 9, "deadline_s": 0.1, "model": "a1"})
    controlled.engine(step_s=0.002)
    assert answer.status == 200
    [choice] = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert {"id", "object", "created", "model", "choices", "usage"} <= answer.json().keys()
    assert answer.json()["model"] == "a1"


def test_models_lists_the_base_and_the_adapters(server: Server) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert list(cards) == ["base", "a1", "a2"]
    assert cards["a1"]["parent"] == "base"
    assert server.get("/v1/models/a1").json()["id"] == "a1"
    assert server.get("/v1/models/gone").error["code"] == "adapter_not_found"


def test_routes_take_only_their_own_schema(server: Server) -> None:
    for path, body in (("/v1/chat/completions", PROMPT), ("/v1/completions", CHAT)):
        answer = ask(server, body, path=path)
        assert (answer.status, answer.error["code"]) == (400, "unknown_schema")
    other = ask(server, CHAT, {ATTRIBUTES_HEADER: "route=/admin"})
    assert (other.status, other.error["code"]) == (400, "unknown_route")
