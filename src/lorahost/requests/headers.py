"""Names of the SageMaker headers, and reading them whatever their case."""

from __future__ import annotations

from collections.abc import Mapping

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
ADAPTER_IDENTIFIER = "X-Amzn-SageMaker-Adapter-Identifier"
ADAPTER_ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
FORWARDED_API = "X-Amzn-SageMaker-Forwarded-Api"
INFERENCE_ID = "X-Amzn-SageMaker-Inference-Id"
SESSION_ID = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_ID = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION_ID = "X-Amzn-SageMaker-Closed-Session-Id"

STREAM_API = "InvokeEndpointWithResponseStream"


def decoded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers with values read as UTF-8 where they are valid UTF-8: WSGI hands them over as Latin-1."""
    return {name: _utf8(value) for name, value in headers.items()}


def _utf8(value: str) -> str:
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def header(headers: Mapping[str, str], name: str) -> str | None:
    """The stripped value of header `name` in any case; None when it is absent or blank."""
    wanted = name.lower()
    for key, value in headers.items():
        if key.lower() == wanted:
            return value.strip() or None
    return None
