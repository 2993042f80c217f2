"""Reading request bodies: a limit that answers instead of resetting the connection."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from lorahost.errors import InvalidRequestError

PIECE_BYTES = 1 << 16
DISCARD_S = 20.0
READ_MARK = "lorahost.body_read"


def read_body(environ: dict[str, Any], limit_bytes: int, setting: str | None = None) -> bytes:
    """The whole body.

    A body above the limit is still read to its end, and thrown away: a client that is busy sending sees a reset
    connection instead of the answer otherwise.

    Args:
        environ: WSGI's.
        limit_bytes: The longest body that is taken.
        setting: Name of the setting behind the limit, for the message.

    Raises:
        InvalidRequestError: 413 above the limit, 408 if the client stops sending, 400 if the body ends before its
            Content-Length or is not chunked as it says.
    """
    declared = _declared(environ)
    environ[READ_MARK] = True
    if declared is None and environ.get("HTTP_TRANSFER_ENCODING", "").lower() != "chunked":
        return b""
    try:
        return _read(environ["wsgi.input"], declared, limit_bytes, setting)
    except BlockingIOError:
        _hang_up(environ)
        raise InvalidRequestError(
            "the body stopped arriving (LORAHOST_CLIENT_STALL_S)", code="body_timeout", status=408
        ) from None
    except OSError as error:
        _hang_up(environ)
        raise InvalidRequestError(f"the body could not be read: {error}", code="body_incomplete") from None


def _read(stream: Any, declared: int | None, limit_bytes: int, setting: str | None) -> bytes:
    if declared is not None and declared > limit_bytes:
        _discard(stream)
        raise _too_large(declared, limit_bytes, setting)
    body: bytes = stream.read(limit_bytes + 1 if declared is None else declared)
    if len(body) > limit_bytes:
        _discard(stream)
        raise _too_large(None, limit_bytes, setting)
    if declared is not None and len(body) < declared:
        raise InvalidRequestError(
            f"the body ended after {len(body)} bytes, its Content-Length is {declared}",
            code="body_incomplete",
        )
    return body


def discard_body(environ: dict[str, Any]) -> None:
    """Reads and drops a body that nobody has looked at, so that the answer arrives; after an early refusal."""
    if READ_MARK in environ:
        return
    environ[READ_MARK] = True
    try:
        _discard(environ["wsgi.input"])
    except OSError:
        _hang_up(environ)


def _declared(environ: dict[str, Any]) -> int | None:
    text = environ.get("CONTENT_LENGTH") or ""
    return int(text) if text.isdigit() else None


def _discard(stream: Any) -> None:
    deadline = time.monotonic() + DISCARD_S
    while time.monotonic() < deadline and stream.read(PIECE_BYTES):
        pass


def _hang_up(environ: dict[str, Any]) -> None:
    """No more requests on this connection: where the next one would start is unknown."""
    sock = environ.get("gunicorn.socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RD)


def _too_large(declared: int | None, limit_bytes: int, setting: str | None) -> InvalidRequestError:
    size = "more" if declared is None else f"{declared} bytes"
    named = f" ({setting})" if setting else ""
    return InvalidRequestError(
        f"the body has {size}; the limit is {limit_bytes} bytes{named}",
        code="body_too_large",
        status=413,
        details={"limit_bytes": limit_bytes},
    )
