from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from lorahost.formats import DONE_EVENT, Assembly, usage_of


def event(**body: Any) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def chat(index: int, delta: dict[str, Any], **more: Any) -> str:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
    return event(id="chatcmpl-1", object="chat.completion.chunk", created=7, model="m", choices=[choice])


def text(index: int, part: str, **more: Any) -> str:
    choice = {"index": index, "text": part, "logprobs": None, "finish_reason": None} | more
    return event(id="cmpl-1", object="text_completion", created=7, model="m", choices=[choice])


def test_usage_is_read_from_the_last_chunk_only() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert usage_of(event(id="1", choices=[], usage=usage)) == usage
    assert usage_of(chat(0, {"content": "hi"})) is None
    assert usage_of(chat(0, {"content": '"choices":[]'})) is None
    assert usage_of(DONE_EVENT) is None


def test_a_chat_answer_in_two_choices() -> None:
    assembly = Assembly("chat")
    for one in (
        chat(0, {"role": "assistant", "content": ""}),
        chat(1, {"role": "assistant", "content": ""}),
        chat(0, {"content": "Good "}),
        chat(1, {"content": "Hello"}, finish_reason="stop", stop_reason=13),
        chat(0, {"content": "day é"}),
        DONE_EVENT,
    ):
        assembly.add(one)
    whole = assembly.whole("length")
    parsed = ChatCompletion.model_validate(whole)
    assert [(c.message.content, c.finish_reason) for c in parsed.choices] == [
        ("Good day é", "length"),
        ("Hello", "stop"),
    ]
    assert (whole["id"], whole["created"], whole["model"]) == ("chatcmpl-1", 7, "m")
    assert whole["choices"][1]["stop_reason"] == 13


def test_tool_calls_grow_in_pieces() -> None:
    assembly = Assembly("chat")
    for call in (
        {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": '}},
        {"index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
    ):
        assembly.add(chat(0, {"tool_calls": [call]}))
    [choice] = ChatCompletion.model_validate(assembly.whole("length")).choices
    assert choice.message.tool_calls is not None
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [  # type: ignore[union-attr]
        ("c1", "weather", '{"city": "Rome"}'),
        ("c2", "time", "{}"),
    ]


def test_log_probabilities_of_both_apis_are_kept() -> None:
    chats, texts = Assembly("chat"), Assembly("completions")
    for number, token in enumerate(("a", "b")):
        one = {"token": token, "logprob": -number, "bytes": None, "top_logprobs": []}
        chats.add(chat(0, {"content": token}, logprobs={"content": [one]}))
        lists = {"tokens": [token], "token_logprobs": [-number], "top_logprobs": None, "text_offset": [number]}
        texts.add(text(0, token, logprobs=lists))
    content = chats.whole("length")["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]
    assert texts.whole("length")["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [0, -1],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }


def test_the_latest_usage_counts() -> None:
    assembly = Assembly("completions")
    for count in (1, 2):
        chunk = json.loads(text(0, "x")[6:])
        assembly.add(event(**chunk, usage={"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}))
    parsed = Completion.model_validate(assembly.whole("length"))
    assert parsed.usage is not None
    assert parsed.usage.completion_tokens == 2
    assert parsed.choices[0].text == "xx"


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_an_answer_that_never_began(api: Any) -> None:
    whole = {"id": "x", "created": 1, "model": "m"} | Assembly(api).whole("length")
    parsed: Any = (ChatCompletion if api == "chat" else Completion).model_validate(whole)
    assert parsed.choices[0].finish_reason == "length"
    assert (parsed.choices[0].message.content if api == "chat" else parsed.choices[0].text) == ""


def test_a_stream_is_closed_for_the_choices_that_are_open() -> None:
    assembly = Assembly("chat")
    assembly.add(chat(0, {"content": "a"}, finish_reason="stop"))
    assembly.add(chat(1, {"content": "b"}))
    chunk = ChatCompletionChunk.model_validate_json(assembly.closing("m", "length").removeprefix("data: "))
    assert [(c.index, c.finish_reason, c.delta.content) for c in chunk.choices] == [(1, "length", None)]
    assert (chunk.id, chunk.created, chunk.object) == ("chatcmpl-1", 7, "chat.completion.chunk")


def test_a_stream_that_has_ended_needs_no_closing() -> None:
    assembly = Assembly("completions")
    assembly.add(text(0, "a", finish_reason="stop"))
    assert assembly.closing("m", "length") == ""


def test_a_stream_without_a_chunk_is_closed_too() -> None:
    body = json.loads(Assembly("completions").closing("tuned", "length").removeprefix("data: "))
    assert body == {
        "model": "tuned",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}],
    }
