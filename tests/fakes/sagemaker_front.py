"""SageMaker's runtime API in front of a container on this machine, for clients that speak it.

It adds the headers that SageMaker adds, hides the container's errors in ModelError, and wraps streams into event-stream
frames that are cut wherever it pleases.
"""

from __future__ import annotations

import http.client
import json
import random
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PREFIX = "X-Amzn-SageMaker-"
# What SageMaker hands to the container, and what it hands back.
PASSED_ON = ("Content-Type", "Accept", PREFIX + "Custom-Attributes", PREFIX + "Inference-Id", PREFIX + "Session-Id")
PASSED_BACK = tuple(PREFIX + name for name in ("Custom-Attributes", "New-Session-Id", "Closed-Session-Id"))
ADAPTER_OF_COMPONENT = {"component-one": "a1", "component-two": "a2", "component-lost": "gone"}
STREAM = "invocations-response-stream"


def frame(event: dict[str, str], payload: bytes) -> bytes:
    """One event-stream message: prelude, string headers, payload, checksums."""
    headers = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for name, value in event.items()
    )
    prelude = struct.pack(">II", len(headers) + len(payload) + 16, len(headers))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + payload
    return message + struct.pack(">I", zlib.crc32(message))


def part(payload: bytes) -> bytes:
    """A PayloadPart."""
    kind = {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
    return frame(kind, payload)


class Front(BaseHTTPRequestHandler):
    """Handles `/endpoints/{name}/invocations` and its streaming twin."""

    protocol_version = "HTTP/1.1"
    container_port = 0
    cuts = random.Random(7)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        _, root, endpoint, operation = self.path.split("/")
        if root != "endpoints" or endpoint != "endpoint" or operation not in ("invocations", STREAM):
            self._answer(400, {"x-amzn-ErrorType": "ValidationError"}, json.dumps({"Message": self.path}).encode())
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.container_port, timeout=30)
        try:
            connection.request("POST", "/invocations", body, self._container_headers(operation))
            response = connection.getresponse()
            if response.status != 200:
                self._model_error(response.status, response.read().decode())
            elif operation == STREAM:
                self._stream(response)
            else:
                self._answer(200, _headers(response, "Content-Type"), response.read())
        finally:
            connection.close()

    def _container_headers(self, operation: str) -> dict[str, str]:
        sent = {name: self.headers[name] for name in PASSED_ON if self.headers[name]}
        streams = operation == STREAM
        sent[PREFIX + "Forwarded-Api"] = "InvokeEndpointWithResponseStream" if streams else "InvokeEndpoint"
        if streams and self.headers[PREFIX + "Accept"]:
            sent["Accept"] = self.headers[PREFIX + "Accept"]
        if component := self.headers[PREFIX + "Inference-Component"]:
            sent[PREFIX + "Adapter-Identifier"] = ADAPTER_OF_COMPONENT[component]
            sent[PREFIX + "Adapter-Alias"] = component
        return sent

    def _model_error(self, status: int, text: str) -> None:
        error = {"Message": f"Received error ({status}) from model", "OriginalStatusCode": status}
        body = json.dumps({**error, "OriginalMessage": text, "LogStreamArn": "arn:aws:logs:::"}).encode()
        self._answer(424, {"x-amzn-ErrorType": "ModelError", "Content-Type": "application/json"}, body)

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, response: http.client.HTTPResponse) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        for name, value in _headers(response, PREFIX + "Content-Type").items():
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in self._cut(response):
            message = part(piece)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(message), message))
        self.wfile.write(b"0\r\n\r\n")

    def _cut(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The body in pieces of any size: events are split and joined, characters too."""
        held = b""
        while data := response.read1(4096):
            held += data
            while len(held) > 1 and self.cuts.random() < 0.8:
                size = self.cuts.randint(1, len(held) - 1)
                yield held[:size]
                held = held[size:]
        if held:
            yield held

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def _headers(response: http.client.HTTPResponse, content_type: str) -> dict[str, str]:
    found = {name: response.headers[name] for name in PASSED_BACK if response.headers[name]}
    return {**found, content_type: response.headers["Content-Type"]}


@contextmanager
def front(container_port: int) -> Iterator[str]:
    """Runs the front; gives its URL."""
    handler = type("BoundFront", (Front,), {"container_port": container_port})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
