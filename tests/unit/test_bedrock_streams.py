"""vLLM's stream chunks as Bedrock's event streams, read by botocore whatever the cuts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import EventStreamError
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.bedrock_client import events
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.engine.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, UsageInfo

from lorahost.bedrock import invoke
from lorahost.bedrock.converse import Conversation
from lorahost.bedrock.converse_stream import PLAIN_TEXT, ConverseStream
from lorahost.bedrock.invoke_stream import METRICS_KEY, InvokeStream
from lorahost.errors import EngineFailedError, OverloadedError
from lorahost.requests.events import CUT_SHORT, event_data

USAGE = UsageInfo(prompt_tokens=10, completion_tokens=6, total_tokens=16)
DONE = "data: [DONE]\n\n"


def chunk(finish: str | None = None, stop: Any = None, usage: bool = False, more: Any = None, **delta: Any) -> str:
    """One SSE event of vLLM's, `more` being further fields of its choice; with `usage`, the last event."""
    fields = {"index": 0, "delta": DeltaMessage(**delta), "finish_reason": finish, **(more or {})}
    if stop is not None:
        fields["stop_reason"] = stop
    choices = [] if usage else [ChatCompletionResponseStreamChoice(**fields)]
    made = ChatCompletionStreamResponse(
        id="chatcmpl-1", created=1, model="m", choices=choices, object="chat.completion.chunk"
    )
    if usage:
        made.usage = USAGE
    return f"data: {made.model_dump_json(exclude_unset=True)}\n\n"


def tool(index: int, arguments: str | None = None, name: str | None = None) -> DeltaToolCall:
    function = DeltaFunctionCall(**{k: v for k, v in {"name": name, "arguments": arguments}.items() if v is not None})
    made = DeltaToolCall(index=index, function=function)
    return made if name is None else DeltaToolCall(index=index, function=function, id=f"t{index}", type="function")


def conversation(*paths: str, max_tokens: int | None = None) -> Conversation:
    return Conversation({}, {}, paths, max_tokens, {})


def converse(
    *chunks: str, asked: Conversation | None = None, context: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    stream = ConverseStream(asked or conversation(), context, lambda: 12)
    parts = [part for one in chunks for part in stream.feed(one)]
    assert stream.finish() == []
    return events("ConverseStream", b"".join(parts), seed)


@pytest.mark.parametrize("seed", range(5))
def test_text_between_start_and_end(seed: int) -> None:
    found = converse(
        chunk(role="assistant", content=""),
        chunk(content="Hel☃"),
        chunk(content=""),
        chunk("stop", content="lo\u2028"),
        chunk(usage=True),
        DONE,
        seed=seed,
    )
    assert found == [
        {"messageStart": {"role": "assistant"}},
        {"contentBlockDelta": {"delta": {"text": "Hel☃"}, "contentBlockIndex": 0}},
        {"contentBlockDelta": {"delta": {"text": "lo\u2028"}, "contentBlockIndex": 0}},
        {"contentBlockStop": {"contentBlockIndex": 0}},
        {"messageStop": {"stopReason": "end_turn"}},
        {
            "metadata": {
                "usage": {"inputTokens": 10, "outputTokens": 6, "totalTokens": 16},
                "metrics": {"latencyMs": 12},
            }
        },
    ]


@given(st.text(min_size=1), st.sampled_from([{}, {"logprobs": None}, {"logprobs": None, "token_ids": None}]))
def test_a_chunk_of_plain_text_is_converted_as_any_other(text: str, more: dict[str, None]) -> None:
    """The short way for them gives what the long way gives."""
    text = text.encode("utf-8", "replace").decode()
    one = chunk(content=text, more=more)
    assert PLAIN_TEXT.search(event_data(one))
    short, long = (ConverseStream(conversation(*paths), None, lambda: 1) for paths in ((), ("/id",)))
    short.feed(chunk(content="a"))
    long.feed(chunk(content="a"))
    [first], [second] = short.feed(one), long.feed(one)
    assert events("ConverseStream", first) == events("ConverseStream", second)
    [event] = events("ConverseStream", first)
    assert event["contentBlockDelta"]["delta"]["text"] == text


@pytest.mark.parametrize(
    "other",
    [
        chunk("stop", content="b"),
        chunk(content=""),
        chunk(usage=True),
        chunk(content="b", tool_calls=[tool(0, "{}", "weather")]),
        chunk(content="b", role="assistant"),
        chunk(reasoning="b"),
        chunk(content="b").replace("}]}", '}],"usage":{"prompt_tokens":1}}'),
        chunk(content="b", more={"token_ids": [3]}),
    ],
)
def test_a_chunk_that_says_more_goes_the_long_way(other: str) -> None:
    assert not PLAIN_TEXT.search(event_data(other))


def test_reasoning_text_and_tools_are_blocks_of_their_own() -> None:
    found = converse(
        chunk(role="assistant", content=""),
        chunk(reasoning="h"),
        chunk(reasoning="m"),
        chunk(content="Sure"),
        chunk(tool_calls=[tool(0, name="weather")]),
        chunk(tool_calls=[tool(0, '{"city":')]),
        chunk(tool_calls=[tool(0, '"Rome"}'), tool(1, name="time")]),
        chunk("tool_calls"),
        chunk(usage=True),
        DONE,
    )
    assert [next(iter(event)).removeprefix("contentBlock") for event in found[1:-2]] == [
        *("Delta", "Delta", "Stop"),
        *("Delta", "Stop"),
        *("Start", "Delta", "Delta", "Stop"),
        *("Start", "Delta", "Stop"),
    ]
    blocks = [next(iter(event.values())) for event in found[1:-2]]
    assert [block["contentBlockIndex"] for block in blocks] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert blocks[0]["delta"] == {"reasoningContent": {"text": "h"}}
    assert blocks[5]["start"] == {"toolUse": {"toolUseId": "t0", "name": "weather"}}
    assert json.loads("".join(block["delta"]["toolUse"]["input"] for block in blocks[6:8])) == {"city": "Rome"}
    assert blocks[10]["delta"] == {"toolUse": {"input": "{}"}}, "clients parse what they put together"
    assert found[-2] == {"messageStop": {"stopReason": "tool_use"}}


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([chunk("stop", "###", content="x")], "stop_sequence"),
        ([chunk("length", content="x")], "model_context_window_exceeded"),
        ([chunk("stop", tool_calls=[tool(0, "{}", "weather")])], "tool_use"),
        ([chunk("tool_calls", tool_calls=[tool(0, '{"a":', "weather")])], "malformed_tool_use"),
        ([chunk("length", tool_calls=[tool(0, '{"a":', "weather")])], "model_context_window_exceeded"),
    ],
)
def test_stop_reasons(chunks: list[str], reason: str) -> None:
    found = converse(*chunks, chunk(usage=True), DONE, context=16)
    assert found[-2] == {"messageStop": {"stopReason": reason}}


def test_more_fields_come_from_the_whole_answer() -> None:
    asked = conversation("/id", "/choices/0/message/content")
    found = converse(chunk(content="a"), chunk("stop", content="b"), chunk(usage=True), DONE, asked=asked)
    more = {"id": "chatcmpl-1", "choices": {"0": {"message": {"content": "ab"}}}}
    assert found[-2]["messageStop"]["additionalModelResponseFields"] == more


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (EngineFailedError("it died"), "modelStreamErrorException"),
        (OverloadedError("busy"), "throttlingException"),
        (None, "modelStreamErrorException"),
    ],
)
@pytest.mark.parametrize("called", ["ConverseStream", "InvokeModelWithResponseStream"])
def test_an_error_inside_a_stream_raises_after_what_came_before(called: str, error: Any, name: str) -> None:
    stream: ConverseStream | InvokeStream
    if called == "ConverseStream":
        stream = ConverseStream(conversation(), None, lambda: 1)
    else:
        stream = InvokeStream(invoke.parse(b'{"messages": []}', None, stream=True), lambda: 1)
    parts = stream.feed(chunk(content="a"))
    parts += stream.finish() if error is None else stream.fail(error)
    assert len(events(called, b"".join(parts[:-1]))) == len(parts) - 1 > 0
    with pytest.raises(EventStreamError) as raised:
        events(called, b"".join(parts), seed=3)
    assert raised.value.response["Error"]["Code"] == name
    assert raised.value.response["Error"]["Message"] == (error or EngineFailedError(CUT_SHORT)).message
    assert stream.fail(EngineFailedError("again")) == stream.feed(DONE) == []


def invoked(body: dict[str, Any], *chunks: str, seed: int = 0) -> list[dict[str, Any]]:
    stream = InvokeStream(invoke.parse(json.dumps(body).encode(), None, stream=True), lambda: 12)
    parts = [part for one in chunks for part in stream.feed(one)]
    assert stream.finish() == []
    found = events("InvokeModelWithResponseStream", b"".join(parts), seed)
    return [json.loads(event["chunk"]["bytes"]) for event in found]


@pytest.mark.parametrize("asked", [False, True])
def test_openai_chunks_are_as_they_were_and_the_last_has_the_metrics(asked: bool) -> None:
    chunks = [chunk(role="assistant", content=""), chunk(content='"finish_reason":"x"'), chunk("stop", content="b")]
    body = {"messages": [], "stream_options": {"include_usage": asked}}
    found = invoked(body, *chunks, chunk(usage=True), DONE, seed=int(asked))
    expected = [json.loads(one.removeprefix("data: ")) for one in [*chunks, chunk(usage=True)][: 3 + asked]]
    metrics = {"inputTokenCount": 10, "outputTokenCount": 6, "invocationLatency": 12, "firstByteLatency": 12}
    assert found.pop() == expected.pop() | {METRICS_KEY: metrics}
    assert found == expected


def test_a_choice_that_ends_first_keeps_its_place() -> None:
    texts = ["a", "b", "c"]
    chunks = [chunk("stop", content="a"), chunk(content="b"), chunk("stop", content="c")]
    found = invoked({"messages": []}, *chunks, chunk(usage=True), DONE)
    assert [one["choices"][0]["delta"]["content"] for one in found] == texts


def test_a_held_chunk_is_not_lost_to_an_error() -> None:
    stream = InvokeStream(invoke.parse(b'{"messages": []}', None, stream=True), lambda: 1)
    assert stream.feed(chunk("stop", content="a")) == []
    first, _ = stream.fail(EngineFailedError("late"))
    [event] = events("InvokeModelWithResponseStream", first)
    assert json.loads(event["chunk"]["bytes"])["choices"][0]["delta"]["content"] == "a"
