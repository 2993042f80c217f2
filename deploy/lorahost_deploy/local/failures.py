"""Errors as AWS answers them."""

from __future__ import annotations


class ApiError(Exception):
    """An error of a JSON protocol: its code, its message and the HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def invalid(message: str) -> ApiError:
    """What SageMaker answers to nearly everything that it does not like."""
    return ApiError("ValidationException", message)


def denied(caller: str, action: str) -> ApiError:
    """What an action without permission gets."""
    why = f"because no identity-based policy allows the {action} action"
    return ApiError("AccessDeniedException", f"User: {caller} is not authorized to perform: {action} {why}", 400)
