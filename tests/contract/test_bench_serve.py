"""`lorahost bench serve` against our server with the fake engine, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.contract.conftest import Starter
from tests.fakes.running import Server

from lorahost.bench import http_point, http_server, rows, steps
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.cli import main

SMALL = ("--input", "24", "--output", "12", "--repeats", "2", "--requests", "8", "--json")


def bench(url: str, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", "serve", "--url", url, *map(str, arguments)])


def measured(url: str, *arguments: object) -> list[dict[str, Any]]:
    ran = bench(url, *arguments)
    assert ran.exit_code == 0, ran.output
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def answered(server: Server, adapter: str) -> float:
    return server.metric(f'lorahost_requests_total{{adapter="{adapter}",code="200"}}')


def check(found: list[dict[str, Any]]) -> None:
    assert [row["repeat"] for row in found] == [1, 2]
    for row in found:
        assert (row["requests"], row["errors"], row["tokens"], row["error_kinds"]) == (8, 0, 8 * 12, "")
        assert row["prompt_tokens"] == pytest.approx(24, abs=1)
        assert row["tokens_per_step"] == 1
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["latency_max_ms"]
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"]
        # steps of 2 ms at the least
        assert 0 < row["otps_p50"] <= 1000 / 2 * 1.5
        assert row["throughput"] == pytest.approx(96 / row["seconds"])


@pytest.mark.parametrize("api", ["completions", "chat", "invocations"])
def test_a_closed_loop_over_discovered_adapters(server: Server, api: str) -> None:
    before = {name: answered(server, name) for name in ("a1", "a2")}
    found = measured(server.url, *SMALL, "--api", api, "--adapters", 2, "--concurrency", 4)
    check(found)
    assert {row["load"] for row in found} == {"closed:4"}
    assert {row["model"] for row in found} == {"base"}
    for name, count in before.items():
        # half of the warm-up and of both repeats
        assert answered(server, name) - count >= (4 + 8 + 8) / 2


def test_an_open_loop_with_zipf_and_the_header(server: Server) -> None:
    before = {name: answered(server, name) for name in ("a1", "a2")}
    line = ("--api", "invocations", "--adapter-by", "header", "--rate", 100, "--choice", "zipf", "--zipf", 9)
    found = measured(server.url, *SMALL, *line, "--adapters", 2, "--warmup", 0)
    check(found)
    assert {(row["load"], row["choice"]) for row in found} == {("poisson:100", "zipf:9")}
    assert answered(server, "a1") - before["a1"] > answered(server, "a2") - before["a2"]


def test_the_base_model_and_named_adapters(server: Server) -> None:
    check(measured(server.url, *SMALL, "--adapters", 0))
    before = answered(server, "a2")
    check(measured(server.url, *SMALL, "--base", "base", "--adapter", "a2", "--warmup", 0))
    assert answered(server, "a2") - before == 16


def test_prompts_from_a_text_are_as_long_as_asked(server: Server, tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("\n".join(" ".join(f"line{i}word{j}" for j in range(7)) for i in range(40)))
    check(measured(server.url, *SMALL, "--adapters", 2, "--text", poem))


def test_rows_go_to_a_file_and_the_table_to_the_terminal(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    ran = bench(server.url, *SMALL[:-1], "--adapters", 2, "--csv", file, "--label", "ours", "--gpu", "none")
    assert ran.exit_code == 0, ran.output
    assert "OTPS p50" in ran.stdout
    found = rows.read(file)
    assert [(row["path"], row["requests"], row["repeat"]) for row in found] == [("ours", "8", "1"), ("ours", "8", "2")]
    compared = CliRunner().invoke(main, ["bench", "compare", str(file), str(file)])
    assert "no difference" in compared.output


def test_errors_are_counted_by_status_and_fail_the_command(server: Server) -> None:
    ran = bench(
        server.url, *SMALL, "--api", "invocations", "--adapter", "a1", "--adapter", "nobody", "--concurrency", 2
    )
    assert ran.exit_code == 1
    for row in json.loads(ran.stdout):
        assert (row["errors"], row["error_kinds"], row["tokens"]) == (4, "HTTP 404 x 4", 4 * 12)
    assert "nobody" in ran.stderr


def test_a_full_queue_is_counted(started: Starter, adapter: Any) -> None:
    one = started({"LORAHOST_MAX_RUNNING": "1", "LORAHOST_MAX_QUEUED": "0"})
    ran = bench(one.url, *SMALL, "--adapters", 0, "--concurrency", 4, "--warmup", 0)
    assert ran.exit_code == 1
    found = json.loads(ran.stdout)
    assert sum(row["errors"] for row in found) > 0
    assert all(row["error_kinds"] == f"HTTP 429 x {row['errors']}" for row in found if row["errors"])


def test_a_step_through_the_server_is_one_start_with_all_its_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAHOST_ENGINE", "fake")
    loads = (Load(concurrency=2), Load(rate=50.0))
    point = Point(
        "ours", model="tiny-gpt-oss", input=16, output=8, loads=loads, requests=4, repeats=2, warmup=1, adapters=2,
        rank=8, via="http",
    )  # fmt: skip
    found = asyncio.run(http_point.measure(point, tmp_path))
    file = tmp_path / "rows.csv"
    rows.append(file, found)
    assert steps.done(point, rows.read(file))
    assert [(row["load"], row["repeat"]) for row in found] == [
        ("closed:2", 1), ("closed:2", 2), ("poisson:50", 1), ("poisson:50", 2),
    ]  # fmt: skip
    assert {(row["errors"], row["tokens"], row["via"]) for row in found} == {(0, 4 * 8, "http")}


def test_a_step_whose_server_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAHOST_ENGINE", "steam")
    with pytest.raises(http_server.ServerEndedError, match=r"ended with 30(.|\n)*LORAHOST_ENGINE='steam'"):
        asyncio.run(http_point.measure(Point("base", model="tiny-gpt-oss", via="http"), tmp_path))


def test_what_can_not_be_measured_is_said(server: Server) -> None:
    assert "adapters 9: the server lists 2" in bench(server.url, *SMALL, "--adapters", 9).stderr
    assert "no answer from http://127.0.0.1:9" in bench("http://127.0.0.1:9", *SMALL).stderr
    assert "must be a JSON object" in bench(server.url, *SMALL, "--body", "[1]").stderr


EVENT = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 24, "completion_tokens": 12}}\n\n'
STREAMS = {
    "one event a token, no usage": (EVENT * 12, ""),
    "too few events and no usage": (EVENT * 5, "uncounted x 8"),
    "usage beside joined events": (EVENT * 4 + USAGE, ""),
    "usage of another length": (EVENT * 12 + USAGE.replace(b": 12", b": 9"), "length x 8"),
    "an error in the stream": (EVENT * 3 + b'data: {"error": {"message": "dead"}}\n\n', "stream error x 8"),
    "nothing": (b"data: [DONE]\n\n", "empty x 8"),
    "no JSON": (b"data: {oops\n\n", "bad event x 8"),
}


@contextlib.contextmanager
def streaming(body: bytes) -> Iterator[str]:
    """A server that answers every POST with the same events."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    one = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=one.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{one.server_port}"
    finally:
        one.shutdown()
        one.server_close()
        thread.join()


@pytest.mark.parametrize("name", STREAMS)
def test_tokens_are_counted_by_usage_or_one_an_event_and_never_guessed(name: str) -> None:
    body, kinds = STREAMS[name]
    with streaming(body) as url:
        ran = bench(url, *SMALL, "--base", "any", "--adapter", "a1", "--warmup", 0)
    assert ran.exit_code == (1 if kinds else 0), ran.output
    for row in json.loads(ran.stdout):
        assert row["error_kinds"] == kinds
        assert row["tokens"] == (0 if kinds else 8 * 12)
