"""vLLM's chat answers as Converse's, read by botocore."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fakes.bedrock_client import parsed
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.engine.protocol import FunctionCall, PromptTokenUsageInfo, ToolCall, UsageInfo

from lorahost.bedrock import answers, pointers
from lorahost.bedrock.converse import Conversation


def asked(*paths: str, max_tokens: int | None = None, **echoed: Any) -> Conversation:
    return Conversation({}, {}, paths, max_tokens, echoed)


def chat(finish: str = "stop", stop: int | str | None = None, cached: int | None = None, **message: Any) -> Any:
    """The answer that vLLM would give, as a dict."""
    details = None if cached is None else PromptTokenUsageInfo(cached_tokens=cached)
    return ChatCompletionResponse(
        id="chatcmpl-1",
        model="m",
        choices=[
            ChatCompletionResponseChoice(
                index=0, message=ChatMessage(role="assistant", **message), finish_reason=finish, stop_reason=stop
            )
        ],
        usage=UsageInfo(prompt_tokens=10, completion_tokens=6, total_tokens=16, prompt_tokens_details=details),
    ).model_dump()


def answer(openai: Any, conversation: Conversation | None = None, context: int | None = None) -> dict[str, Any]:
    body = answers.answer(conversation or asked(), openai, latency_ms=12, context=context)
    read = parsed("Converse", body)
    assert read == body, "nothing is lost in botocore's model"
    return read


def call(arguments: str, name: str = "weather") -> ToolCall:
    return ToolCall(id="chatcmpl-tool-1", function=FunctionCall(name=name, arguments=arguments))


def test_text() -> None:
    assert answer(chat(content="Hello")) == {
        "output": {"message": {"role": "assistant", "content": [{"text": "Hello"}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 10, "outputTokens": 6, "totalTokens": 16},
        "metrics": {"latencyMs": 12},
    }


def test_reasoning_comes_before_text_and_tools() -> None:
    found = answer(chat("tool_calls", content="Sure", reasoning="hm", tool_calls=[call('{"city": "Rome"}'), call("")]))
    assert found["stopReason"] == "tool_use"
    assert found["output"]["message"]["content"] == [
        {"reasoningContent": {"reasoningText": {"text": "hm"}}},
        {"text": "Sure"},
        {"toolUse": {"toolUseId": "chatcmpl-tool-1", "name": "weather", "input": {"city": "Rome"}}},
        {"toolUse": {"toolUseId": "chatcmpl-tool-1", "name": "weather", "input": {}}},
    ]


def test_an_empty_answer_has_an_empty_text() -> None:
    assert answer(chat(content=""))["output"]["message"]["content"] == [{"text": ""}]


@pytest.mark.parametrize(
    ("finish", "stop", "arguments", "reason"),
    [
        ("stop", None, None, "end_turn"),
        ("stop", 256, None, "end_turn"),
        ("stop", "###", None, "stop_sequence"),
        ("length", None, None, "max_tokens"),
        ("content_filter", None, None, "content_filtered"),
        ("repetition", None, None, "malformed_model_output"),
        ("tool_calls", None, '{"a": 1}', "tool_use"),
        ("stop", None, '{"a": 1}', "tool_use"),
        ("tool_calls", None, '{"a": ', "malformed_tool_use"),
        ("tool_calls", None, "[1]", "malformed_tool_use"),
        ("length", None, '{"a": ', "max_tokens"),
    ],
)
def test_stop_reasons(finish: str, stop: Any, arguments: str | None, reason: str) -> None:
    calls = {} if arguments is None else {"tool_calls": [call(arguments)]}
    found = answer(chat(finish, stop, content="x", **calls))
    assert found["stopReason"] == reason
    if arguments == '{"a": ':
        assert found["output"]["message"]["content"][-1]["toolUse"]["input"] == arguments


@pytest.mark.parametrize(
    ("limit", "context", "reason"),
    [
        (6, 16, "max_tokens"),
        (7, 16, "model_context_window_exceeded"),
        (None, 16, "model_context_window_exceeded"),
        (None, 17, "max_tokens"),
        (None, None, "max_tokens"),
    ],
)
def test_a_cut_answer_tells_whose_limit_it_was(limit: int | None, context: int | None, reason: str) -> None:
    assert answer(chat("length", content="x"), asked(max_tokens=limit), context)["stopReason"] == reason


def test_cached_tokens_are_counted_apart_as_in_bedrock() -> None:
    assert answer(chat(content="x", cached=8))["usage"] == {
        "inputTokens": 2,
        "outputTokens": 6,
        "totalTokens": 16,
        "cacheReadInputTokens": 8,
    }


def test_an_answer_that_ended_before_its_first_token_has_no_counts() -> None:
    assert answers.usage(None) == {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}


def test_more_fields_and_what_was_asked_of_the_service() -> None:
    conversation = asked("/id", "/choices/0/stop_reason", "/nothing", performanceConfig={"latency": "standard"})
    found = answer(chat(content="x"), conversation)
    assert found["additionalModelResponseFields"] == {"id": "chatcmpl-1", "choices": {"0": {"stop_reason": None}}}
    assert found["performanceConfig"] == {"latency": "standard"}


def test_pointers() -> None:
    answer_ = {"a/b": {"~": [1, {"c": 2}]}, "d": None, "": 5}
    assert pointers.pick(answer_, ["/a~1b/~0/1/c", "/d", "/", "/a~1b/~0/9", "/a~1b/~0/x", "/d/e"]) == {
        "a/b": {"~": {"1": {"c": 2}}},
        "d": None,
        "": 5,
    }
    assert json.dumps(pointers.pick(answer_, ["/a~1b", "/a~1b/~0/0"])) == json.dumps({"a/b": answer_["a/b"]})
