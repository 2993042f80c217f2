from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lorahost import client
from lorahost.errors import InvalidRequestError

Asked = tuple[str, str, Any]


class Server:
    """Answers with what the test put in, in turn, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[Asked] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.asked.append((self.command, self.path, json.loads(body) if body else None))
                status, text = server.answers.pop(0)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def says(self, *bodies: Any, status: int = 200) -> None:
        self.answers += [(status, json.dumps(body).encode()) for body in bodies]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def test_a_local_source_is_sent_as_an_absolute_path(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server.says({"status": "ok"}, {"status": "ok"})
    assert client.add(server.url, "poet", "poet", preload=True, pin=False) == (200, {"status": "ok"})
    client.add(server.url, "poet", "s3://bucket/poet", preload=False, pin=True)
    assert server.asked == [
        ("POST", "/adapters", {"name": "poet", "src": str(tmp_path / "poet"), "preload": True, "pin": False}),
        ("POST", "/adapters", {"name": "poet", "src": "s3://bucket/poet", "preload": False, "pin": True}),
    ]


def test_names_are_quoted_in_paths(server: Server) -> None:
    server.says({"status": "ok"})
    client.rm(server.url, "team/poet v2")
    assert server.asked == [("DELETE", "/adapters/team%2Fpoet%20v2", None)]


def test_all_pages_are_listed(server: Server) -> None:
    server.says({"adapters": [{"name": "a"}], "nextPageToken": "a+/="}, {"adapters": [{"name": "b"}]})
    assert client.ls(server.url) == (200, {"adapters": [{"name": "a"}, {"name": "b"}]})
    assert [path for _, path, _ in server.asked] == [
        "/adapters?limit=100",
        "/adapters?limit=100&next_page_token=a%2B/%3D",
    ]


def test_a_refusal_comes_back_with_its_status(server: Server) -> None:
    error = {"error": {"message": "rank 64 is above 32"}}
    server.says(error, error, error, status=424)
    assert client.add(server.url, "a", "s3://b/c", preload=True, pin=False) == (424, error)
    assert client.rm(server.url, "a") == (424, error)
    assert client.ls(server.url) == (424, error)


@pytest.mark.parametrize("text", [b"<html>gateway</html>", b"", b"[1]", b"\xff"])
@pytest.mark.parametrize("status", [200, 502])
def test_something_else_on_the_port(server: Server, status: int, text: bytes) -> None:
    server.answers = [(status, text)]
    code, body = client.ls(server.url)
    assert code >= 400
    assert "is no lorahost server" in body["error"]["message"]


def test_no_server_at_all() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    status, body = client.rm(f"http://127.0.0.1:{port}", "a")
    assert status == 503
    assert f"no answer from http://127.0.0.1:{port}/adapters/a" in body["error"]["message"]


def test_a_server_that_hangs_up(server: Server) -> None:
    def hang_up(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, args=(listener,))
        thread.start()
        status, body = client.rm(f"http://127.0.0.1:{listener.getsockname()[1]}", "a")
        thread.join()
    assert status == 503
    assert "no answer from" in body["error"]["message"]


def test_adapters_as_a_table() -> None:
    rows = [
        {"name": "poet", "state": "ready", "loaded": True, "pin": False, "rank": 8, "digest": "ab" * 32, "src": "/x"},
        {"name": "a-long-name", "state": "failed", "rank": None},
    ]
    header, first, second = (line.split() for line in client.table(rows).splitlines())
    assert header == ["name", "state", "loaded", "pin", "rank", "in_flight", "digest", "src"]
    assert first == ["poet", "ready", "True", "False", "8", "-", "abababababab", "/x"]
    assert second == ["a-long-name", "failed", "-", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_check_wants_a_base_model(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidRequestError, match=r"--model .*config.json") as refused:
        client.check(str(tmp_path), str(tmp_path), 32)
    assert refused.value.param == "model"
