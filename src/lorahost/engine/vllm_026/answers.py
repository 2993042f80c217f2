"""vLLM's errors in the server's own words: which field, which value, which status."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from lorahost.errors import EngineFailedError, HostError, InvalidRequestError, UnavailableError

ERROR_PREFIX = 'data: {"error"'


def is_error_event(event: str) -> bool:
    """Whether an SSE event is vLLM's in-band error."""
    return event.startswith(ERROR_PREFIX)


def validation_error(error: ValidationError, body: dict[str, Any]) -> InvalidRequestError:
    """A 400 that names each field at fault, its value and what is expected."""
    parts: list[str] = []
    first: str | None = None
    for item in error.errors(include_url=False, include_context=False):
        field = ".".join(str(p) for p in item["loc"] if not str(p).startswith("function-"))
        first = first or (field or None)
        value = item.get("input")
        shown = "" if not field or isinstance(value, dict) else f" (got {_short(value)})"
        parts.append(f"{field or 'body'}: {item['msg']}{shown}")
    unique = list(dict.fromkeys(parts))[:5]
    return InvalidRequestError("; ".join(unique), code="invalid_field", param=first)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def host_error(error: Any, engine: Any) -> HostError:
    """Turns an exception, an `ErrorResponse` or an error event of vLLM's into a `HostError`."""
    from vllm.entrypoints.openai.engine.protocol import ErrorResponse
    from vllm.entrypoints.serve.utils.error_response import create_error_response
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineDeadError) or (engine is not None and engine.errored):
        return EngineFailedError("the engine process died; the server is going down", code="engine_dead", status=503)
    if isinstance(error, str):
        response = ErrorResponse.model_validate(json.loads(error.removeprefix("data: ")))
    elif isinstance(error, ErrorResponse):
        response = error
    else:
        response = create_error_response(error)
    info = response.error
    if info.code == 503:
        return UnavailableError(info.message)
    if info.code >= 500:
        return EngineFailedError(info.message, status=info.code)
    return InvalidRequestError(info.message, param=info.param, status=info.code)
