"""HTTP/1.1 by hand, for what no client library sends or shows: raw requests, chunk borders, half a request."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any


class Wire:
    """One TCP connection to the server."""

    def __init__(self, port: int, timeout_s: float = 20.0, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(timeout_s)
        self.sock.connect(("127.0.0.1", port))
        self._buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the server sees end-of-file."""
        self.sock.close()

    def reset(self) -> None:
        """Closes the connection so that the server sees a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None, version: str = "1.1") -> None:
        """Sends one whole POST with a JSON body."""
        self.send(request_bytes("POST", path, json.dumps(body).encode(), headers, version))

    def _more(self) -> bool:
        data = self.sock.recv(1 << 16)
        self._buffer += data
        return bool(data)

    def line(self) -> bytes:
        """One line without its end."""
        while b"\r\n" not in self._buffer:
            if not self._more():
                raise ConnectionError(f"the connection ended after {self._buffer!r}")
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def exactly(self, count: int) -> bytes:
        """`count` bytes."""
        while len(self._buffer) < count:
            if not self._more():
                raise ConnectionError(f"the connection ended after {len(self._buffer)} of {count} bytes")
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def head(self) -> tuple[int, dict[str, str], int]:
        """Status, headers by lower-case name, and the head's size in bytes."""
        first = self.line()
        size = len(first) + 2
        headers: dict[str, str] = {}
        while line := self.line():
            size += len(line) + 2
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return int(first.split()[1]), headers, size + 2

    def chunks(self) -> Iterator[tuple[float, bytes]]:
        """The chunks of a chunked body, each with the time at which it was complete."""
        while size := int(self.line(), 16):
            data = self.exactly(size)
            assert self.exactly(2) == b"\r\n"
            yield time.monotonic(), data
        assert self.line() == b""

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One whole answer."""
        status, headers, _ = self.head()
        if headers.get("transfer-encoding") == "chunked":
            return status, headers, b"".join(data for _, data in self.chunks())
        return status, headers, self.exactly(int(headers.get("content-length", "0")))

    def rest(self) -> bytes:
        """All until the server closes."""
        while self._more():
            pass
        data, self._buffer = self._buffer, b""
        return data


def request_bytes(
    method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, version: str = "1.1"
) -> bytes:
    """A request as it goes over the wire."""
    lines = {"Host": "localhost", **(headers or {})}
    if body is not None:
        lines = {"Content-Type": "application/json", "Content-Length": str(len(body)), **lines}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/{version}\r\n{head}\r\n".encode("latin-1") + (body or b"")
