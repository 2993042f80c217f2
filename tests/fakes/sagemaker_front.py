"""SageMaker's runtime API in front of a container on this machine, for clients that speak it.

It adds the headers that SageMaker adds, hides the container's errors in ModelError, and wraps streams into event-stream
frames that are cut wherever it pleases: what `lorahost local-aws` does, with fixed components and no account.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lorahost_deploy.local import forward

ADAPTER_OF_COMPONENT = {"component-one": "a1", "component-two": "a2", "component-lost": "gone"}


class Front(BaseHTTPRequestHandler):
    """Handles `/endpoints/{name}/invocations` and its streaming twin."""

    protocol_version = "HTTP/1.1"
    container_port = 0
    cuts = random.Random(7)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        _, root, endpoint, operation = self.path.split("/")
        if root != "endpoints" or endpoint != "endpoint" or operation not in ("invocations", forward.STREAM_PATH):
            self._answer(400, {"x-amzn-ErrorType": "ValidationError"}, json.dumps({"Message": self.path}).encode())
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.container_port, timeout=30)
        stream = operation == forward.STREAM_PATH
        try:
            component = self.headers[forward.PREFIX + "Inference-Component"]
            identifier = ADAPTER_OF_COMPONENT[component] if component else None
            sent = forward.container_headers(self.headers, stream=stream, identifier=identifier, alias=component)
            connection.request("POST", "/invocations", body, sent)
            response = connection.getresponse()
            if response.status != 200:
                self._model_error(response.status, response.read().decode())
            elif stream:
                self._stream(response)
            else:
                self._answer(200, forward.caller_headers(response, "Content-Type"), response.read())
        finally:
            connection.close()

    def _model_error(self, status: int, text: str) -> None:
        headers = {"x-amzn-ErrorType": "ModelError", "Content-Type": "application/json"}
        self._answer(424, headers, json.dumps(forward.model_error(status, text)).encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, response: http.client.HTTPResponse) -> None:
        self.send_response(200)
        self.send_header("Content-Type", forward.EVENT_STREAM)
        for name, value in forward.caller_headers(response, forward.PREFIX + "Content-Type").items():
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in forward.cut(response, self.cuts):
            message = forward.part(piece)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(message), message))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


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
