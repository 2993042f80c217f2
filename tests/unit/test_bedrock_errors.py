"""Every error has an exception that the operation's model knows, with its status."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from botocore.eventstream import EventStreamBuffer
from tests.fakes.bedrock_client import operation

from lorahost import errors as host_errors
from lorahost.bedrock import errors
from lorahost.bedrock.errors import Operation
from lorahost.errors import (
    AdapterConflictError,
    AdapterNotFoundError,
    AdapterRejectedError,
    CapacityError,
    EngineFailedError,
    HostError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)

EXAMPLES: list[tuple[HostError, str]] = [
    (HostError("off", code="bedrock_off", status=403), "AccessDeniedException"),
    (InvalidRequestError("bad"), "ValidationException"),
    (InvalidRequestError("type", status=415), "ValidationException"),
    (InvalidRequestError("slow", code="body_timeout", status=408), "ValidationException"),
    (InvalidRequestError("big", status=413), "ServiceQuotaExceededException"),
    (AdapterNotFoundError("gone"), "ResourceNotFoundException"),
    (AdapterRejectedError("no"), "ModelErrorException"),
    (AdapterConflictError("removed", code="adapter_removed"), "ModelErrorException"),
    (AdapterConflictError("two", code="ambiguous_alias"), "ValidationException"),
    (CapacityError("full"), "ServiceQuotaExceededException"),
    (OverloadedError("busy", retry_after_s=1), "ThrottlingException"),
    (OverloadedError("late", code="deadline_in_queue"), "ModelTimeoutException"),
    (UnavailableError("starts", code="server_starting"), "ModelNotReadyException"),
    (UnavailableError("loads", code="adapter_loading"), "ModelNotReadyException"),
    (UnavailableError("drains", code="server_draining"), "ServiceUnavailableException"),
    (EngineFailedError("died", code="engine_dead", status=503), "ServiceUnavailableException"),
    (EngineFailedError("failed"), "ModelErrorException"),
    (EngineFailedError("bug", code="internal_error"), "InternalServerException"),
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@pytest.mark.parametrize(("error", "name"), EXAMPLES)
def test_an_error_is_the_exception_that_clients_expect(error: HostError, name: str) -> None:
    fault = errors.fault(error, "InvokeModel")
    assert (fault.name, fault.body["message"]) == (name, error.message)
    if name == "ModelErrorException":
        assert fault.body["originalStatusCode"] == error.status


def test_every_exception_of_the_api_is_reached() -> None:
    assert {name for _, name in EXAMPLES} == set(errors.STATUSES)


@pytest.mark.parametrize("called", OPERATIONS)
def test_each_operation_raises_what_its_model_has(called: Operation) -> None:
    """Whatever the class, code and status: an exception of botocore's model with that model's status."""
    known: dict[str, Any] = {shape.name: shape for shape in operation(called).error_shapes}
    classes = [kind for kind in vars(host_errors).values() if isinstance(kind, type) and issubclass(kind, HostError)]
    codes = [None, "internal_error", *errors._BY_CODE]
    for error in [
        kind("x", code=code, status=status) for kind in classes for code in codes for status in range(400, 600)
    ]:
        fault = errors.fault(error, called)
        assert fault.name in known, (error.status, error.code)
        assert known[fault.name].metadata["error"]["httpStatusCode"] == fault.status


@pytest.mark.parametrize("called", ["InvokeModelWithResponseStream", "ConverseStream"])
@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES])
def test_exceptions_in_a_stream_are_members_of_the_streams_union(error: HostError, called: Operation) -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(errors.exception_frame(error, called))
    [message] = list(buffer)
    members = operation(called).get_event_stream_output().members
    name = message.headers[":exception-type"]
    assert members[name].metadata["exception"]
    body = json.loads(message.payload)
    assert body.keys() <= members[name].members.keys()
    assert body["message"] == error.message
