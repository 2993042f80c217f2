"""What SageMaker's runtime does between its caller and the container: headers, errors, event streams."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any, Protocol

from lorahost.bedrock.frames import CONTENT_TYPE, encode_headers, message

PREFIX = "X-Amzn-SageMaker-"
STREAM_PATH = "invocations-response-stream"
EVENT_STREAM = CONTENT_TYPE
# What SageMaker hands to the container, and what it hands back.
PASSED_ON = ("Content-Type", "Accept", PREFIX + "Custom-Attributes", PREFIX + "Inference-Id", PREFIX + "Session-Id")
PASSED_BACK = tuple(PREFIX + name for name in ("Custom-Attributes", "New-Session-Id", "Closed-Session-Id"))
READ_BYTES = 4096
_PART = encode_headers(
    {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
)


class Headers(Protocol):
    """Headers whose `get` ignores case."""

    def get(self, name: str, /) -> str | None:
        """The value of one; None when it is absent."""


def container_headers(sent: Headers, *, stream: bool, identifier: str | None, alias: str | None) -> dict[str, str]:
    """The headers of POST /invocations on the container.

    Args:
        sent: The caller's headers.
        identifier: The adapter's name on the container; None for the base model.
        alias: The adapter's inference component.
    """
    found = {name: value for name in PASSED_ON if (value := sent.get(name))}
    found[PREFIX + "Forwarded-Api"] = "InvokeEndpointWithResponseStream" if stream else "InvokeEndpoint"
    if stream and (accept := sent.get(PREFIX + "Accept")):
        found["Accept"] = accept
    if identifier is not None:
        found[PREFIX + "Adapter-Identifier"] = identifier
        found[PREFIX + "Adapter-Alias"] = alias or identifier
    return found


def caller_headers(response: HTTPResponse, content_type: str) -> dict[str, str]:
    """The container's headers that reach the caller; its content type under the name `content_type`."""
    found = {name: value for name in PASSED_BACK if (value := response.headers.get(name))}
    return {**found, content_type: response.headers.get("Content-Type", "application/octet-stream")}


def model_error(status: int, text: str, log_stream_arn: str = "arn:aws:logs:::") -> dict[str, Any]:
    """The body of ModelError (424), which hides the container's own answer."""
    return {
        "Message": f'Received error ({status}) from model with message "{text}"',
        "OriginalStatusCode": status,
        "OriginalMessage": text,
        "LogStreamArn": log_stream_arn,
    }


def part(payload: bytes) -> bytes:
    """One PayloadPart of an event stream."""
    return message(_PART, payload)


def broken(text: str) -> bytes:
    """The exception that ends a stream whose container went away."""
    headers = encode_headers(
        {":message-type": "exception", ":exception-type": "ModelStreamError", ":content-type": "application/json"}
    )
    return message(headers, json.dumps({"Message": text, "ErrorCode": "StreamBroken"}).encode())


def cut(response: HTTPResponse, cuts: random.Random) -> Iterator[bytes]:
    """The body in pieces of any size: events are split and joined, characters too."""
    held = b""
    while data := response.read1(READ_BYTES):
        held += data
        while len(held) > 1 and cuts.random() < 0.8:
            size = cuts.randint(1, len(held) - 1)
            yield held[:size]
            held = held[size:]
    if held:
        yield held
