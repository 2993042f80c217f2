"""Reading request bodies: a limit that answers instead of resetting the connection."""

from __future__ import annotations

import time
from typing import Any

from lorahost.errors import InvalidRequestError

PIECE_BYTES = 1 << 16
DISCARD_S = 20.0


def read_body(environ: dict[str, Any], limit_bytes: int) -> bytes:
    """The whole body.

    A body above the limit is still read to its end, and thrown away: a client that is busy sending sees a reset
    connection instead of the answer otherwise.

    Raises:
        InvalidRequestError: 413 above the limit, 400 if the body ends before its Content-Length.
    """
    stream = environ["wsgi.input"]
    declared = _declared(environ)
    if declared is None and environ.get("HTTP_TRANSFER_ENCODING", "").lower() != "chunked":
        return b""
    if declared is not None and declared > limit_bytes:
        _discard(stream)
        raise _too_large(declared, limit_bytes)
    body: bytes = stream.read(limit_bytes + 1 if declared is None else declared)
    if len(body) > limit_bytes:
        _discard(stream)
        raise _too_large(None, limit_bytes)
    if declared is not None and len(body) < declared:
        raise InvalidRequestError(
            f"the body ended after {len(body)} bytes, its Content-Length is {declared}",
            code="body_incomplete",
        )
    return body


def _declared(environ: dict[str, Any]) -> int | None:
    text = environ.get("CONTENT_LENGTH") or ""
    return int(text) if text.isdigit() else None


def _discard(stream: Any) -> None:
    deadline = time.monotonic() + DISCARD_S
    while time.monotonic() < deadline and stream.read(PIECE_BYTES):
        pass


def _too_large(declared: int | None, limit_bytes: int) -> InvalidRequestError:
    size = "more" if declared is None else f"{declared} bytes"
    return InvalidRequestError(
        f"the body has {size}; the limit is {limit_bytes} bytes (LORAHOST_MAX_BODY_MB)",
        code="body_too_large",
        status=413,
        details={"limit_bytes": limit_bytes},
    )
