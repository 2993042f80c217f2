"""Every exception of Bedrock's runtime API, raised by boto3 from the real server, before a stream and inside it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EventStreamError
from tests.fakes.bedrock_client import HI, client
from tests.fakes.running import Server, wait_for
from tests.fakes.wire import Wire, request_bytes

Starter = Callable[..., Server]
LONG = json.dumps({"prompt": "hi", "max_tokens": 4000}).encode()
OPERATIONS = ("invoke_model", "invoke_model_with_response_stream", "converse", "converse_stream")


def call(server: Server, operation: str, model: str = "base", **more: Any) -> Any:
    asked: dict[str, Any] = {"messages": HI} if operation.startswith("converse") else {"body": b'{"prompt": "hi"}'}
    return getattr(client(server.url), operation)(modelId=model, **{**asked, **more})


def raised(server: Server, name: str, status: int, operation: str, model: str = "base", **more: Any) -> str:
    """The message of the exception that the call must raise."""
    with pytest.raises(ClientError) as error:
        call(server, operation, model, **more)
    response = error.value.response
    assert (type(error.value).__name__, response["Error"]["Code"]) == (name, name)
    assert response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert response["ResponseMetadata"]["RequestId"]
    return str(response["Error"]["Message"])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_wrong_with_a_request_is_a_validation_exception(server: Server, operation: str) -> None:
    asked = {"messages": []} if operation.startswith("converse") else {"body": b'{"prompt": '}
    message = raised(server, "ValidationException", 400, operation, **asked)
    assert "messages is []" in message or "line 1 column 12" in message


def test_content_that_cannot_be_served_is_named(server: Server) -> None:
    image = {"image": {"format": "png", "source": {"bytes": b"x"}}}
    document = {"document": {"format": "pdf", "name": "d", "source": {"bytes": b"x"}}}
    for block, name in ((image, "image"), (document, "document")):
        messages = [{"role": "user", "content": [{"text": "look"}, block]}]
        message = raised(server, "ValidationException", 400, "converse", messages=messages)
        assert message.startswith(f"messages.0.content.1 is {name} content")


def test_guardrails_are_refused(server: Server) -> None:
    guardrail = {"guardrailIdentifier": "g1", "guardrailVersion": "1"}
    for operation, asked in (("invoke_model", guardrail), ("converse", {"guardrailConfig": guardrail})):
        assert "uardrail" in raised(server, "ValidationException", 400, operation, **asked)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_access_is_denied_where_the_api_is_off(started: Starter, operation: str) -> None:
    server = started({"LORAHOST_BEDROCK": "off"})
    assert "LORAHOST_BEDROCK=on" in raised(server, "AccessDeniedException", 403, operation)
    assert server.invoke().status == 200


def test_under_sagemaker_the_api_is_off_unless_asked_for(started: Starter) -> None:
    platform = {"SAGEMAKER_SAFE_PORT_RANGE": "21000-21255"}
    raised(started(platform), "AccessDeniedException", 403, "converse")
    assert call(started({**platform, "LORAHOST_BEDROCK": "on"}), "converse")["stopReason"]


def test_a_server_that_starts_or_is_full_says_when_to_come_back(started: Starter) -> None:
    limits = {"LORAHOST_MAX_RUNNING": "1", "LORAHOST_MAX_QUEUED": "1"}
    server = started(limits, {"start_s": 2.0, "step_s": 0.01}, ready=False)
    wait_for(lambda: server.ping() == 503, 20)
    assert "starting" in raised(server, "ModelNotReadyException", 429, "converse")
    server.wait_ready()
    running = call(server, "invoke_model_with_response_stream", body=LONG)["body"]
    next(iter(running))
    late = {"additionalModelRequestFields": {"deadline_s": 0.3}}
    assert "0.3" in raised(server, "ModelTimeoutException", 408, "converse", **late)
    waiting = threading.Thread(target=lambda: call(server, "converse"))
    waiting.start()
    wait_for(lambda: server.metric("lorahost_queued") == 1, 5)
    for operation in OPERATIONS:
        raised(server, "ThrottlingException", 429, operation)
    running.close()
    waiting.join()


def test_quotas_and_adapters_that_fail(started: Starter, adapter: Callable[..., Path]) -> None:
    server = started({"LORAHOST_MAX_BODY_MB": "0.01"}, {})
    big = b'{"prompt": "' + b"x" * 20_000 + b'"}'
    assert "10485" in raised(server, "ServiceQuotaExceededException", 400, "invoke_model", body=big)
    text = [{"role": "user", "content": [{"text": "x" * 20_000}]}]
    assert "10485" in raised(server, "ValidationException", 400, "converse", messages=text)

    for name in ("full", "lost"):
        assert server.add(name, adapter(name), preload=False).status == 200
    server.engine(full=True)
    assert "memory" in raised(server, "ServiceQuotaExceededException", 400, "invoke_model", "full")
    assert "memory" in raised(server, "ServiceUnavailableException", 503, "converse", "full")
    server.engine(full=False)
    [work] = server.log.parent.glob("work-*")
    shutil.rmtree(work)
    assert "no adapter at" in raised(server, "ModelErrorException", 424, "converse", "lost")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_bug_is_an_internal_server_exception(started: Starter, operation: str) -> None:
    server = started({}, {})
    server.engine(suffix=5)
    assert "TypeError" in raised(server, "InternalServerException", 500, operation)


@pytest.mark.parametrize("operation", ["invoke_model_with_response_stream", "converse_stream"])
def test_a_stream_that_fails_raises_after_its_events(started: Starter, operation: str) -> None:
    server = started({}, {"step_s": 0.01})
    long: dict[str, Any] = {"inferenceConfig": {"maxTokens": 4000}} if "converse" in operation else {"body": LONG}
    answer = call(server, operation, **long)
    events = iter(answer["stream" if "converse" in operation else "body"])
    first = [next(events) for _ in range(3)]
    assert all("xception" not in str(event) for event in first)
    server.engine(dead=True)
    with pytest.raises(EventStreamError) as error:
        list(events)
    assert error.value.response["Error"]["Code"] == "serviceUnavailableException"
    assert "died" in error.value.response["Error"]["Message"]
    wait_for(lambda: server.ping() == 503, 5)
    raised(server, "ServiceUnavailableException", 503, operation)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "empty"),
        (b"[]", "JSON object"),
        (b"\xff{}", "0xff"),
        (b'{"messages": [], "messages": []}', "twice"),
        (b'{"messages": NaN}', "NaN"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", "200 levels"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"inferenceConfig": {"maxTokens": ' + b"9" * 5000 + b"}}", "digits"),
    ],
)
@pytest.mark.parametrize("operation", ["invoke", "converse-stream"])
def test_bodies_that_are_no_json(server: Server, operation: str, body: bytes, named: str) -> None:
    answer = server.request("POST", f"/model/base/{operation}", body)
    assert (answer.status, answer.headers["x-amzn-ErrorType"]) == (400, "ValidationException")
    assert named in answer.json()["message"]


@pytest.mark.parametrize(
    ("model", "status", "named"),
    [
        ("x" * 2049, 400, "the limit is 2048"),
        ("%2e%2e%2f" * 100, 404, "neither the base model"),
        ("%ff%fe", 404, "neither the base model"),
        ("%00", 404, "neither the base model"),
        ("%0a", 400, "empty"),
        ("", 400, "empty"),
        ("%20", 400, "empty"),
        ("a1%0d%0aX-Evil:%201", 404, "neither the base model"),
    ],
)
def test_odd_ids(server: Server, model: str, status: int, named: str) -> None:
    answer = server.request("POST", f"/model/{model}/invoke", {"prompt": "hi"})
    assert answer.status == status
    assert named in answer.json()["message"]
    assert "X-Evil" not in answer.headers


def test_an_id_longer_than_the_request_line_is_refused_in_words(server: Server) -> None:
    answer = server.request("POST", f"/model/{'x' * 100_000}/invoke", {"prompt": "hi"})
    assert (answer.status, answer.error["code"]) == (414, "uri_too_long")


def test_a_body_that_breaks_off_is_a_validation_exception(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(request_bytes("POST", "/model/base/converse", b'{"messages"', {"Content-Length": "4000"}))
        wire.sock.shutdown(1)
        status, headers, body = wire.answer()
    assert (status, headers["x-amzn-errortype"]) == (400, "ValidationException")
    assert "4000" in json.loads(body)["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/model/base/converse"), ("POST", "/model/base/nothing")])
def test_what_is_no_operation_is_not_served(server: Server, method: str, path: str) -> None:
    assert server.request(method, path, {}).status in (404, 405)
