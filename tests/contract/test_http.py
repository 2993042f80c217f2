"""HTTP itself: methods, paths, bodies of every size and framing, malformed requests (contract 37, 38)."""

from __future__ import annotations

import json

import pytest
from tests.fakes.running import Server
from tests.fakes.wire import Wire, request_bytes

BODY = b'{"prompt":"hi","max_tokens":2}'
MIB = 1 << 20
CLOSE = {"Connection": "close"}


def exchange(server: Server, data: bytes) -> tuple[int, dict[str, str], bytes]:
    with Wire(server.port) as wire:
        wire.send(data)
        return wire.answer()


def assert_error(answer: tuple[int, dict[str, str], bytes], status: int) -> None:
    assert answer[0] == status, answer
    assert answer[1]["content-type"] == "application/json"
    assert {"message", "type", "code"} <= json.loads(answer[2])["error"].keys()


def prompt_of(size: int) -> bytes:
    """An invocation of `size` bytes whose prompt is one word."""
    frame = b'{"prompt":"","max_tokens":1}'
    return b'{"prompt":"' + b"x" * (size - len(frame)) + b'","max_tokens":1}'


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_ping_takes_get_head_and_post(server: Server, method: str) -> None:
    answer = server.request(method, "/ping")
    assert (answer.status, answer.body, answer.headers["Content-Length"]) == (200, b"", "0")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/invocations"),
        ("HEAD", "/invocations"),
        ("PUT", "/invocations"),
        ("DELETE", "/ping"),
        ("PATCH", "/adapters"),
        ("POST", "/metrics"),
    ],
)
def test_another_method_is_405_with_what_is_allowed(server: Server, method: str, path: str) -> None:
    with Wire(server.port) as wire:
        wire.send(request_bytes(method, path, headers=CLOSE))
        status, headers, _ = wire.head()
        assert status == 405
        assert headers["allow"]
        assert (wire.rest() == b"") == (method == "HEAD")


def test_options_says_what_is_allowed(server: Server) -> None:
    answer = server.request("OPTIONS", "/invocations")
    assert answer.status == 200
    assert set(answer.headers["Allow"].replace(" ", "").split(",")) == {"OPTIONS", "POST"}


@pytest.mark.parametrize(
    "path",
    ["/nope", "/invocations/x", "/%00", "/%ff", "/..", "/../ping", "*", "/v1/embeddings", "/adapters/x/y/z", "/?x=1"],
)
def test_a_path_that_is_not_there_is_404_as_json(server: Server, path: str) -> None:
    assert_error(exchange(server, request_bytes("GET", path)), 404)


@pytest.mark.parametrize("path", ["/ping", "/ping/", "/ping?x=%ff", "http://elsewhere/ping"])
def test_other_ways_to_write_ping(server: Server, path: str) -> None:
    assert exchange(server, request_bytes("GET", path))[0] == 200


@pytest.mark.parametrize("framing", ["length", "chunked", "chunked by the byte", "http/1.0", "expect"])
def test_bodies_in_every_framing(server: Server, framing: str) -> None:
    chunked = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    pieces = [BODY] if framing == "chunked" else [BODY[i : i + 1] for i in range(len(BODY))]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    data = {
        "length": request_bytes("POST", "/invocations", BODY),
        "chunked": request_bytes("POST", "/invocations", headers=chunked) + chunks,
        "chunked by the byte": request_bytes("POST", "/invocations", headers=chunked) + chunks,
        "http/1.0": request_bytes("POST", "/invocations", BODY, version="1.0"),
        "expect": request_bytes("POST", "/invocations", BODY, {"Expect": "100-continue"}),
    }[framing]
    with Wire(server.port) as wire:
        wire.send(data)
        if framing == "expect":
            assert wire.line() == b"HTTP/1.1 100 Continue"
            assert wire.line() == b""
        status, headers, body = wire.answer()
    assert (status, len(body)) == (200, int(headers["content-length"]))


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    """The second one comes with the first; streams and whole answers alike."""
    stream = json.dumps({"prompt": "hi", "max_tokens": 3, "stream": True}).encode()
    ping = request_bytes("GET", "/ping")
    with Wire(server.port) as wire:
        for body in (BODY, stream, BODY, stream):
            wire.send(request_bytes("POST", "/invocations", body) + ping)
        for chunks in (False, True, False, True):
            status, headers, _ = wire.answer()
            assert (status, "transfer-encoding" in headers) == (200, chunks)
            assert wire.answer()[0] == 200


def test_a_connection_takes_many_requests(server: Server) -> None:
    with Wire(server.port) as wire:
        for i in range(50):
            body = BODY if i % 2 else b'{"prompt":"hi","max_tokens":2,"model":"gone"}'
            wire.send(request_bytes("POST", "/invocations", body))
            assert wire.answer()[0] == (200 if i % 2 else 404)


@pytest.mark.parametrize("size", [25 * MIB, 32 * MIB])
def test_a_body_up_to_the_limit_is_taken(server: Server, size: int) -> None:
    assert server.request("POST", "/invocations", prompt_of(size)).status == 200


@pytest.mark.parametrize("headers", [{}, CLOSE])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_longer_body_is_413_and_not_a_reset(server: Server, headers: dict[str, str], framing: str) -> None:
    body = prompt_of(33 * MIB)
    if framing == "length":
        answer = server.request("POST", "/invocations", body, headers)
        assert (answer.status, answer.error["code"], answer.error["limit_bytes"]) == (413, "body_too_large", 32 * MIB)
        return
    head = request_bytes("POST", "/invocations", headers={**headers, "Transfer-Encoding": "chunked"})
    with Wire(server.port) as wire:
        wire.send(head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
        assert_error(wire.answer(), 413)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/ping", 200), ("POST", "/nope", 404), ("PUT", "/ping", 405)]
)
def test_a_body_that_nobody_asked_for_does_not_reset_the_connection(
    server: Server, method: str, path: str, status: int
) -> None:
    assert server.request(method, path, b"x" * 4 * MIB, CLOSE).status == status


def test_the_adapter_routes_have_a_limit_of_their_own(server: Server) -> None:
    answer = server.request("POST", "/adapters", b" " * 2 * MIB)
    assert (answer.status, answer.error["limit_bytes"]) == (413, MIB)


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "h', b"5\r\n{}\r\n", b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}xx0\r\n\r\n", b"-2\r\n{}\r\n0\r\n\r\n"],
)
def test_a_body_that_breaks_off_or_is_badly_framed_is_400(server: Server, body: bytes) -> None:
    length = body.startswith(b"{")
    framing = {"Content-Length": "30"} if length else {"Transfer-Encoding": "chunked"}
    with Wire(server.port) as wire:
        wire.send(request_bytes("POST", "/invocations", headers=framing) + body)
        wire.sock.shutdown(1)
        assert_error(wire.answer(), 400)
        assert wire.rest() == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET /ping HTTP/9.9\r\nHost: x\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nA B: c\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400),
        (b"POST /invocations HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /invocations HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /invocations HTTP/1.1\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n{}", 417),
        (b"GET /ping HTTP/1.1\r\nA: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET /ping HTTP/1.1\r\n" + b"".join(b"A%d: x\r\n" % i for i in range(150)) + b"\r\n", 431),
        (b"GET /" + b"p" * 20000 + b" HTTP/1.1\r\n\r\n", 414),
    ],
)
def test_what_is_not_http_is_told_so_in_json(server: Server, data: bytes, status: int) -> None:
    with Wire(server.port) as wire:
        wire.send(data)
        assert_error(wire.answer(), status)
        assert wire.rest() == b""


def test_headers_of_the_longest_kind_are_taken(server: Server) -> None:
    """SageMaker allows 1024 characters of attributes; proxies add headers of their own."""
    headers = {f"X-Other-{i}": "v" * 500 for i in range(20)}
    headers |= {"X-Amzn-SageMaker-Custom-Attributes": "k=" + "v" * 1022, "X-Long": "v" * 8000}
    assert server.request("POST", "/invocations", BODY, headers).status == 200
    too_long = {"X-Amzn-SageMaker-Custom-Attributes": "k=" + "v" * 1023}
    assert server.request("POST", "/invocations", BODY, too_long).error["code"] == "custom_attributes_too_long"


def test_every_log_line_is_json(server: Server) -> None:
    assert all({"time", "level", "message"} <= line.keys() for line in server.log_lines())
    assert [line for line in server.log_lines() if line["level"] == "error"] == []
