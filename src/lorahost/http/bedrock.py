"""Bedrock's runtime API: `/model/{modelId}/...`, for boto3's `bedrock-runtime` and whatever is built on it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from flask import Flask, Response, request
from werkzeug.routing import BaseConverter

from lorahost.account import Account
from lorahost.bedrock import answers, converse, errors, frames, invoke, model_ids
from lorahost.bedrock.converse_stream import ConverseStream
from lorahost.bedrock.errors import Operation
from lorahost.bedrock.invoke_stream import InvokeStream
from lorahost.core import Api, Json
from lorahost.errors import EngineFailedError, HostError
from lorahost.host import Host
from lorahost.http import answering
from lorahost.http.answering import Job, Streaming
from lorahost.http.bodies import read_body
from lorahost.http.exchange import Head, error_head, json_bytes
from lorahost.pipeline import Task
from lorahost.requests import invocation
from lorahost.requests.attributes import Attributes
from lorahost.requests.invocation import RequestSettings

log = logging.getLogger(__name__)
ROUTES: dict[str, Operation] = {
    "invoke": "InvokeModel",
    "invoke-with-response-stream": "InvokeModelWithResponseStream",
    "converse": "Converse",
    "converse-stream": "ConverseStream",
}
REQUEST_ID = "x-amzn-RequestId"
ERROR_TYPE = "x-amzn-ErrorType"
STREAMED_TYPE = {"X-Amzn-Bedrock-Content-Type": "application/json"}
PERFORMANCE = {
    "X-Amzn-Bedrock-PerformanceConfig-Latency": "standard",
    "X-Amzn-Bedrock-Service-Tier": "default",
}


class ModelIdConverter(BaseConverter):
    """Any text, slashes and line ends included: ids are percent-encoded, and decoded before they are routed."""

    regex = r"[\s\S]*?"
    part_isolating = False


def add_routes(app: Flask, host: Host) -> None:
    """Adds the routes; where the API is off they say so."""
    app.url_map.converters["modelid"] = ModelIdConverter
    limit = int(host.settings.max_body_mb * 2**20)

    def view(operation: Operation) -> Callable[[str], Response]:
        def answer(model_id: str) -> Response:
            try:
                return _answer(host, operation, model_id, limit)
            except HostError as error:
                return _response(fault_head(error, operation))
            except Exception as error:
                log.exception("request failed", exc_info=error)
                failed = EngineFailedError(f"internal error: {type(error).__name__}", code="internal_error")
                return _response(fault_head(failed, operation))

        return answer

    for tail, operation in ROUTES.items():
        # an id may hold two slashes in a row
        app.add_url_rule(
            f"/model/<modelid:model_id>/{tail}", operation, view(operation), methods=["POST"], merge_slashes=False
        )


def fault_head(error: HostError, operation: Operation, request_id: str | None = None) -> Head:
    """The head and body of an error answer; the header makes an SDK raise the exception of that name."""
    fault = errors.fault(error, operation)
    headers = {**error_head(error).headers, ERROR_TYPE: fault.name, REQUEST_ID: request_id or str(uuid.uuid4())}
    return Head(fault.status, headers, json_bytes(fault.body))


def _response(head: Head) -> Response:
    return Response(head.body, status=head.status, headers=dict(head.headers))


def _answer(host: Host, operation: Operation, model_id: str, limit: int) -> Response:
    if host.settings.bedrock == "off":
        raise HostError(
            "the Bedrock runtime API is off on this server (LORAHOST_BEDROCK=on switches it on)",
            code="bedrock_off",
            status=403,
        )
    body = read_body(request.environ, limit, "LORAHOST_MAX_BODY_MB")
    make = _invoke if operation.startswith("Invoke") else _converse
    return answering.counted(host, lambda: answering.respond(host, make(host, operation, model_id, body)))


def _invoke(host: Host, operation: Operation, model_id: str, body: bytes) -> Job:
    stream = operation == "InvokeModelWithResponseStream"
    invoke.check_headers(dict(request.headers), request.headers.get("X-Amzn-Bedrock-Accept" if stream else "Accept"))
    asked = invoke.parse(body, request.headers.get("Content-Type"), stream=stream)

    def whole(found: list[Json], account: Account) -> tuple[Any, Mapping[str, str]]:
        return invoke.answer(asked, found[0]), invoke.token_headers(found[0], _elapsed_ms(account))

    streaming = Streaming(frames.CONTENT_TYPE, lambda account: InvokeStream(asked, lambda: _elapsed_ms(account)))
    headers = {name: value for name, value in PERFORMANCE.items() if name in request.headers}
    return _job(
        host,
        operation,
        model_id,
        (asked.api, asked.body),
        asked.data,
        asked=asked.data,
        whole=whole,
        streaming=streaming if stream else None,
        headers=headers | (STREAMED_TYPE if stream else {}),
    )


def _converse(host: Host, operation: Operation, model_id: str, body: bytes) -> Job:
    stream = operation == "ConverseStream"
    asked = converse.parse(body, request.headers.get("Content-Type"), stream=stream)
    context = host.info.max_model_len if host.info else None

    def whole(found: list[Json], account: Account) -> tuple[Any, Mapping[str, str]]:
        return answers.answer(asked, found[0], latency_ms=_elapsed_ms(account), context=context), {}

    streaming = Streaming(
        frames.CONTENT_TYPE, lambda account: ConverseStream(asked, context, lambda: _elapsed_ms(account))
    )
    return _job(
        host,
        operation,
        model_id,
        ("chat", asked.body),
        asked.own,
        asked=asked.body,
        whole=whole,
        streaming=streaming if stream else None,
        headers={},
    )


def _job(
    host: Host,
    operation: Operation,
    model_id: str,
    call: tuple[Api, Json],
    own: Json,
    *,
    asked: Json,
    whole: Callable[[list[Json], Account], tuple[Any, Mapping[str, str]]],
    streaming: Streaming | None,
    headers: Mapping[str, str],
) -> Job:
    """The job, once it is clear who answers; `own` has the host's own fields, `asked` is for the log."""
    choice = answering.chosen(host, lambda names: model_ids.choose(model_id, own, names))
    request_id = str(uuid.uuid4())
    task = Task(
        calls=(call,),
        adapter=choice.name,
        served_name=choice.name or host.base_name,
        request_id=request_id,
        deadline_s=invocation.deadline(own, Attributes(), RequestSettings()),
    )
    return Job(
        task,
        choice,
        operation,
        asked,
        whole,
        streaming=streaming,
        headers={REQUEST_ID: request_id, **headers},
        fault=lambda error: fault_head(error, operation, request_id),
    )


def _elapsed_ms(account: Account) -> int:
    return round((time.monotonic() - account.started) * 1e3)
