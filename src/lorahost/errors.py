"""Every error that a caller can meet, with its HTTP status.

A `HostError` becomes the JSON body `{"error": {"message", "type", "code", "param"?, ...details}}`. The message
names the field, the value and the limit; `details` carries the same as data.
"""

from __future__ import annotations

from typing import Any


class HostError(Exception):
    """Base of all errors that are answered to the caller.

    Args:
        message: One sentence that names the field, the value and the limit.
        code: A stable snake_case identifier, for programs.
        param: The request field at fault.
        status: HTTP status, when it differs from the class's own.
        retry_after_s: Seconds for the `Retry-After` header.
        details: More facts for the error body, JSON types only.
    """

    status = 500
    type = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.type
        self.param = param
        self.status = status or self.status
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        error: dict[str, Any] = {"message": self.message, "type": self.type, "code": self.code}
        if self.param is not None:
            error["param"] = self.param
        if self.retry_after_s is not None:
            error["retry_after_s"] = self.retry_after_s
        error.update(self.details)
        return {"error": error}


class InvalidRequestError(HostError):
    """The request itself is at fault (400, or 413, 415 and the like by `status`)."""

    status = 400
    type = "invalid_request_error"


class AdapterNotFoundError(HostError):
    """No adapter of that name is registered; a request is never answered by another model instead."""

    status = 404
    type = "adapter_not_found"


class AdapterRejectedError(HostError):
    """The adapter can't be served; the message has both sides of the mismatch (424, parameter errors 400)."""

    status = 424
    type = "adapter_rejected"


class AdapterConflictError(HostError):
    """The adapter is being changed in a way that excludes this operation (409)."""

    status = 409
    type = "adapter_conflict"


class CapacityError(HostError):
    """No slot or memory is left for one more adapter (507), with the counts in `details`."""

    status = 507
    type = "insufficient_capacity"


class OverloadedError(HostError):
    """The bounded queue is full (429, with `Retry-After`)."""

    status = 429
    type = "overloaded"


class UnavailableError(HostError):
    """The server is starting, draining or its engine is dead (503)."""

    status = 503
    type = "unavailable"


class EngineFailedError(HostError):
    """The engine failed while it worked on this request (500)."""

    status = 500
    type = "engine_error"
