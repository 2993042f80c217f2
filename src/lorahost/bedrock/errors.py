"""The host's errors as Bedrock's exceptions, before a stream and inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lorahost.bedrock import frames
from lorahost.core import Json
from lorahost.errors import HostError
from lorahost.requests.events import dumps

Operation = Literal["InvokeModel", "InvokeModelWithResponseStream", "Converse", "ConverseStream"]

STATUSES = {
    "AccessDeniedException": 403,
    "InternalServerException": 500,
    "ModelErrorException": 424,
    "ModelNotReadyException": 429,
    "ModelTimeoutException": 408,
    "ResourceNotFoundException": 404,
    "ServiceQuotaExceededException": 400,
    "ServiceUnavailableException": 503,
    "ThrottlingException": 429,
    "ValidationException": 400,
}
_BY_CODE = {
    "adapter_loading": "ModelNotReadyException",
    "ambiguous_alias": "ValidationException",
    "body_timeout": "ValidationException",
    "deadline_in_queue": "ModelTimeoutException",
    "internal_error": "InternalServerException",
    "server_starting": "ModelNotReadyException",
}
_BY_STATUS = {
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    408: "ModelTimeoutException",
    409: "ModelErrorException",
    413: "ServiceQuotaExceededException",
    424: "ModelErrorException",
    429: "ThrottlingException",
    503: "ServiceUnavailableException",
    507: "ServiceQuotaExceededException",
}
_WITHOUT_QUOTA = {413: "ValidationException", 507: "ServiceUnavailableException"}
_QUOTA_OPERATIONS = ("InvokeModel", "InvokeModelWithResponseStream")
_IN_STREAM = {
    "InternalServerException": "internalServerException",
    "ModelNotReadyException": "throttlingException",
    "ModelTimeoutException": "modelTimeoutException",
    "ServiceQuotaExceededException": "validationException",
    "ServiceUnavailableException": "serviceUnavailableException",
    "ThrottlingException": "throttlingException",
    "ValidationException": "validationException",
}
MODEL_STREAM_ERROR = "modelStreamErrorException"


@dataclass(frozen=True, slots=True)
class Fault:
    """An error answer: HTTP status, the exception's name for `x-amzn-ErrorType`, and the JSON body."""

    status: int
    name: str
    body: Json


def fault(error: HostError, operation: Operation) -> Fault:
    """The answer that makes an SDK raise the exception that `error` is to Bedrock's clients."""
    name = exception_name(error, operation)
    body: Json = {"message": error.message}
    if name == "ModelErrorException":
        body["originalStatusCode"] = error.status
    return Fault(STATUSES[name], name, body)


def exception_name(error: HostError, operation: Operation) -> str:
    """Which of the operation's exceptions `error` is.

    What the engine fails at is the model's error; quotas are known to the Invoke operations alone.
    """
    if (name := _BY_CODE.get(error.code)) is not None:
        return name
    default = "ModelErrorException" if error.status >= 500 else "ValidationException"
    name = _BY_STATUS.get(error.status, default)
    if name == "ServiceQuotaExceededException" and operation not in _QUOTA_OPERATIONS:
        return _WITHOUT_QUOTA[error.status]
    return name


def exception_frame(error: HostError, operation: Operation) -> bytes:
    """The last message of a stream that fails after it has begun."""
    name = _IN_STREAM.get(exception_name(error, operation), MODEL_STREAM_ERROR)
    if name == "modelTimeoutException" and operation == "ConverseStream":
        name = MODEL_STREAM_ERROR
    body: Json = {"message": error.message}
    if name == MODEL_STREAM_ERROR:
        body |= {"originalStatusCode": error.status, "originalMessage": error.message}
    return frames.exception(name, dumps(body).encode())
