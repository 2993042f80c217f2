from __future__ import annotations

import io
import socket
from typing import Any

import pytest

from lorahost.errors import InvalidRequestError
from lorahost.http import bodies
from lorahost.http.bodies import discard_body, read_body


class Sent(io.BytesIO):
    """A request body that ends with an error, where the test wants one."""

    def __init__(self, data: bytes, error: OSError | None = None) -> None:
        super().__init__(data)
        self.error = error

    def read(self, size: int | None = -1, /) -> bytes:
        if self.error is not None:
            raise self.error
        return super().read(size)


def environ(stream: io.BytesIO, **more: Any) -> dict[str, Any]:
    return {"wsgi.input": stream, **more}


def test_a_body_with_its_length() -> None:
    assert read_body(environ(Sent(b"12345"), CONTENT_LENGTH="5"), 5) == b"12345"
    assert read_body(environ(Sent(b"12345 next request"), CONTENT_LENGTH="5"), 100) == b"12345"


def test_a_chunked_body() -> None:
    assert read_body(environ(Sent(b"12345"), HTTP_TRANSFER_ENCODING="Chunked"), 5) == b"12345"


@pytest.mark.parametrize("length", ["", "0", "minus one"])
def test_no_body(length: str) -> None:
    stream = Sent(b"the next request")
    assert read_body(environ(stream, CONTENT_LENGTH=length), 5) == b""
    assert stream.tell() == 0


@pytest.mark.parametrize("more", [{"CONTENT_LENGTH": "200000"}, {"HTTP_TRANSFER_ENCODING": "chunked"}])
def test_a_body_above_the_limit_is_read_to_its_end_and_refused(more: dict[str, str]) -> None:
    stream = Sent(b"x" * 200000)
    with pytest.raises(InvalidRequestError, match=r"the limit is 1000 bytes \(LORAHOST_MAX_BODY_MB\)") as refused:
        read_body(environ(stream, **more), 1000, "LORAHOST_MAX_BODY_MB")
    assert (refused.value.status, refused.value.details) == (413, {"limit_bytes": 1000})
    assert stream.read() == b""


def test_reading_what_is_thrown_away_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "DISCARD_S", 0.0)
    stream = Sent(b"x" * 200000)
    with pytest.raises(InvalidRequestError, match="200000 bytes"):
        read_body(environ(stream, CONTENT_LENGTH="200000"), 1000)
    assert stream.tell() == 0


def test_a_body_that_ends_early() -> None:
    with pytest.raises(InvalidRequestError, match="ended after 3 bytes, its Content-Length is 5") as refused:
        read_body(environ(Sent(b"123"), CONTENT_LENGTH="5"), 10)
    assert (refused.value.status, refused.value.code) == (400, "body_incomplete")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(BlockingIOError(), 408, "body_timeout"), (OSError("bad chunk"), 400, "body_incomplete")],
)
def test_a_body_that_breaks_off_ends_the_connection(error: OSError, status: int, code: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = Sent(b"", error)
        with pytest.raises(InvalidRequestError) as refused:
            read_body(environ(stream, CONTENT_LENGTH="5", **{"gunicorn.socket": ours}), 10)
        assert (refused.value.status, refused.value.code) == (status, code)
        # the answer can be sent, nothing more can be read
        assert ours.recv(1) == b""
        ours.sendall(b"answer")
        assert theirs.recv(6) == b"answer"


def test_a_body_that_nobody_read_is_dropped_once() -> None:
    stream = Sent(b"x" * 100)
    unread = environ(stream, CONTENT_LENGTH="100")
    discard_body(unread)
    assert stream.read() == b""
    stream.seek(0)
    discard_body(unread)
    assert stream.tell() == 0
    read = environ(Sent(b"12"), CONTENT_LENGTH="2")
    read_body(read, 10)
    read["wsgi.input"] = Sent(b"", OSError("must not be read again"))
    discard_body(read)
