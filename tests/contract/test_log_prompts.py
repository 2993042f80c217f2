"""LORAHOST_LOG_PROMPTS: each route's log lines have what was asked and answered; without it none has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.bedrock_client import client
from tests.fakes.running import Server, running, wait_for
from tests.fakes.wire import Wire

MESSAGES = [{"role": "user", "content": "tell me"}]
CONVERSED = [{"role": "user", "content": [{"text": "tell me"}]}]
OPENAI = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "tell me", "max_tokens": 2},
}
INVOKED: dict[str, dict[str, Any]] = {
    "chat": OPENAI["/v1/chat/completions"],
    "completions": OPENAI["/v1/completions"],
    "LMI": {"inputs": "tell me", "parameters": {"max_new_tokens": 2}},
}


@pytest.fixture(scope="module")
def logging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("prompts"), {"LORAHOST_LOG_PROMPTS": "true"}, {}) as one:
        yield one


def request_lines(server: Server) -> list[dict[str, Any]]:
    return [line for line in server.log_lines() if line["logger"] == "lorahost.request"]


def added(server: Server, before: int) -> dict[str, Any]:
    """The one line that a request has added to `before`."""
    wait_for(lambda: len(request_lines(server)) > before, 5, "the log line")
    [line] = request_lines(server)[before:]
    return line


def asked_for(line: dict[str, Any]) -> Any:
    return json.loads(line["prompt"]) if line["prompt"][0] in "[{" else line["prompt"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", INVOKED.values(), ids=INVOKED)
def test_invocations(logging: Server, body: dict[str, Any], stream: bool) -> None:
    before = len(request_lines(logging))
    assert logging.invoke({**body, "stream": stream}).status == 200
    line = added(logging, before)
    assert asked_for(line) == (MESSAGES if "messages" in body else "tell me")
    assert line["answer"] == ["base base "]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", OPENAI)
def test_openai_routes(logging: Server, route: str, stream: bool) -> None:
    before = len(request_lines(logging))
    assert logging.request("POST", route, {**OPENAI[route], "stream": stream}).status == 200
    line = added(logging, before)
    assert asked_for(line) == (MESSAGES if "messages" in OPENAI[route] else "tell me")
    assert (line["route"], line["answer"]) == (route, ["base base "])


@pytest.mark.parametrize("operation", ["converse", "converse_stream"])
def test_converse(logging: Server, operation: str) -> None:
    before = len(request_lines(logging))
    system = [{"text": "be kind"}]
    limit = {"maxTokens": 2}
    ask = getattr(client(logging.url), operation)
    answer = ask(modelId="base", messages=CONVERSED, system=system, inferenceConfig=limit)
    list(answer.get("stream", []))
    line = added(logging, before)
    assert asked_for(line) == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "tell me"}]
    assert line["answer"] == ["base base "]


@pytest.mark.parametrize("operation", ["invoke_model", "invoke_model_with_response_stream"])
def test_invoke_model(logging: Server, operation: str) -> None:
    before = len(request_lines(logging))
    body = json.dumps({"prompt": "tell me", "max_gen_len": 2}).encode()
    list(getattr(client(logging.url), operation)(modelId="base", body=body)["body"])
    line = added(logging, before)
    assert (line["prompt"], line["answer"]) == ("tell me", ["base base "])


def test_a_client_that_leaves_its_stream_is_logged_with_what_there_was(logging: Server) -> None:
    before = len(request_lines(logging))
    with Wire(logging.port) as wire:
        wire.post("/invocations", {"prompt": "go on", "max_tokens": 4000, "stream": True})
        assert wire.head()[0] == 200
        wait_for(lambda: logging.engine()["running"], 5)
    line = added(logging, before)
    assert (line["code"], line["prompt"]) == (499, "go on")
    [text] = line["answer"]
    assert text
    assert set(text.split()) == {"base"}
    assert len(text.split()) < 4000


def test_a_failed_request_is_logged_with_its_prompt(logging: Server) -> None:
    before = len(request_lines(logging))
    assert logging.invoke({"prompt": "too much", "max_tokens": 5000}).status == 400
    line = added(logging, before)
    assert (line["code"], line["prompt"], line["answer"]) == (400, "too much", [])


def test_the_start_warns_once(logging: Server) -> None:
    warnings = [line["message"] for line in logging.log_lines() if "LORAHOST_LOG_PROMPTS" in line["message"]]
    assert len(warnings) == 1
    assert "prompts" in warnings[0]


@pytest.mark.parametrize("stream", [False, True])
def test_off_neither_prompt_nor_answer_is_logged(server: Server, stream: bool) -> None:
    before = len(request_lines(server))
    assert server.invoke({"prompt": "a secret of mine", "max_tokens": 2, "stream": stream}).status == 200
    line = added(server, before)
    assert not {"prompt", "answer"} & line.keys()
    assert "a secret of mine" not in server.log.read_text()
