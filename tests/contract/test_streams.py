"""Streamed answers: formats, chunk borders, timing (contract 33, 34, 39)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.fakes.running import ATTRIBUTES_HEADER, Server, running
from tests.fakes.wire import Wire

Starter = Callable[..., Server]
PROMPT = {"prompt": "hi", "max_tokens": 5}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
LMI = {"inputs": "hi", "parameters": {"max_new_tokens": 5}}
FORWARDED = {"X-Amzn-SageMaker-Forwarded-Api": "InvokeEndpointWithResponseStream"}
SNOWMAN = "☃é🙂\u2028 "


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Tokens of two, three and four UTF-8 bytes a character, and a separator that some readers split lines at."""
    with running(tmp_path_factory.mktemp("wide"), {}, {"suffix": SNOWMAN}) as one:
        yield one


def streamed(
    server: Server, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[dict[str, str], list[bytes]]:
    with Wire(server.port) as wire:
        wire.post("/invocations", body, headers)
        status, got, size = wire.head()
        assert status == 200, wire.rest()
        assert size < 4096
        assert got["transfer-encoding"] == "chunked"
        assert "content-length" not in got
        chunks = [data for _, data in wire.chunks()]
        # The connection goes on after a stream.
        wire.post("/invocations", PROMPT)
        assert wire.answer()[0] == 200
    return got, chunks


def sse(chunk: bytes) -> Any:
    """The object of a chunk that is exactly one SSE event."""
    text = chunk.decode()
    assert text.startswith("data: ")
    assert text.endswith("\n\n")
    assert text.count("\n") == 2
    return json.loads(text[6:])


def line(chunk: bytes) -> Any:
    """The object of a chunk that is exactly one JSON line."""
    text = chunk.decode()
    assert text.endswith("\n")
    assert len(text.splitlines()) == 1
    return json.loads(text)


@pytest.mark.parametrize("body", [PROMPT, CHAT])
@pytest.mark.parametrize("asked", [{"stream": True}, {}])
def test_openai_streams_are_sse_with_one_event_in_each_chunk(wide: Server, body: dict[str, Any], asked: Any) -> None:
    headers, chunks = streamed(wide, body | asked, {} if asked else FORWARDED)
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers[ATTRIBUTES_HEADER.lower()] == "adapter=;version=base"
    assert chunks[-1] == b"data: [DONE]\n\n"
    assert len(chunks) == 6
    choices = [sse(chunk)["choices"][0] for chunk in chunks[:-1]]
    texts = [choice.get("text") or choice["delta"]["content"] for choice in choices]
    assert texts == ["base " + SNOWMAN] * 5
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]


def test_usage_comes_only_when_asked_for(wide: Server) -> None:
    _, chunks = streamed(wide, {**PROMPT, "stream": True, "stream_options": {"include_usage": True}})
    assert sse(chunks[-2])["usage"]["completion_tokens"] == 5
    assert len(chunks) == 7


@pytest.mark.parametrize("accept", ["application/jsonlines", "application/x-ndjson, */*;q=0.1"])
def test_openai_streams_as_json_lines(wide: Server, accept: str) -> None:
    headers, chunks = streamed(wide, {**PROMPT, "stream": True}, {"Accept": accept})
    assert headers["content-type"] == "application/jsonlines"
    assert [line(chunk)["choices"][0]["text"] for chunk in chunks] == ["base " + SNOWMAN] * 5


@pytest.mark.parametrize("accept", [None, "application/json", "text/event-stream"])
def test_lmi_streams_are_json_lines_or_sse(wide: Server, accept: str | None) -> None:
    headers, chunks = streamed(wide, {**LMI, "stream": True}, {"Accept": accept} if accept else {})
    as_sse = accept == "text/event-stream"
    assert headers["content-type"].startswith("text/event-stream" if as_sse else "application/jsonlines")
    parts = [(sse if as_sse else line)(chunk) for chunk in chunks]
    assert [part["token"]["text"] for part in parts] == ["base " + SNOWMAN] * 5
    assert [part["generated_text"] for part in parts] == [None] * 4 + [("base " + SNOWMAN) * 5]
    assert parts[-1]["details"]["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [False, None])
def test_stream_false_wins_over_the_forwarded_api(server: Server, asked: bool | None) -> None:
    answer = server.request("POST", "/invocations", {**PROMPT, "stream": asked}, FORWARDED)
    assert (answer.headers["Content-Length"] is not None) == (asked is False)


def test_each_event_goes_out_when_its_token_is_there(controlled: Server) -> None:
    """40 ms a token: nothing is held back and nothing is joined."""
    controlled.engine(step_s=0.04)
    with Wire(controlled.port) as wire:
        wire.post("/invocations", {**PROMPT, "max_tokens": 25, "stream": True})
        assert wire.head()[0] == 200
        times = [when for when, _ in wire.chunks()]
    controlled.engine(step_s=0.002)
    gaps = [later - sooner for sooner, later in itertools.pairwise(times[:-1])]
    assert len(gaps) == 24
    assert sorted(gaps)[12] == pytest.approx(0.04, abs=0.015)
    assert sum(gap < 0.01 for gap in gaps) <= 2


def test_a_request_that_is_refused_before_its_first_event_has_a_status(server: Server) -> None:
    answer = server.request("POST", "/invocations", {**PROMPT, "max_tokens": 10**6, "stream": True})
    assert (answer.status, answer.error["param"]) == (400, "prompt")


def test_http_1_0_clients_get_the_stream_without_chunks(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.post("/invocations", {**PROMPT, "stream": True}, version="1.0")
        status, headers, _ = wire.head()
        assert (status, headers.get("transfer-encoding")) == (200, None)
        events = wire.rest().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) == 7
