"""InvokeModel's bodies and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lorahost.bedrock import invoke
from lorahost.errors import InvalidRequestError


def read(body: Any, stream: bool = False) -> invoke.Invoke:
    return invoke.parse(json.dumps(body).encode(), None, stream=stream)


def test_forms_are_told_apart_by_their_fields() -> None:
    assert read({"messages": [], "max_tokens": 3, "model": "x"}).body == {
        "messages": [],
        "max_tokens": 3,
        "stream": False,
    }
    assert read({"prompt": "x", "max_tokens": 3}).form == "completions"
    bedrock = read({"prompt": "x", "max_gen_len": 3, "temperature": 0.5, "stop": ["a"], "deadline_s": 2})
    assert (bedrock.form, bedrock.api) == ("bedrock", "completions")
    assert bedrock.body == {"prompt": "x", "max_tokens": 3, "temperature": 0.5, "stop": ["a"], "stream": False}


def test_a_stream_asks_for_the_counts() -> None:
    chat = read({"messages": [], "stream": True}, stream=True)
    assert (chat.body["stream_options"], chat.usage_asked) == ({"include_usage": True}, False)
    asked = read({"prompt": "x", "stream_options": {"include_usage": True, "x": 1}}, stream=True)
    assert (asked.body["stream_options"], asked.usage_asked) == ({"include_usage": True, "x": 1}, True)
    bedrock = read({"prompt": "x", "max_gen_len": 3, "stream_options": {"include_usage": True}}, stream=True)
    assert bedrock.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert not bedrock.usage_asked


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "fields are none; a body has messages"),
        ({"inputs": "x"}, "fields are 'inputs'; a body has messages"),
        ({"messages": [], "prompt": "x"}, "messages and prompt"),
        ({"prompt": "x", "max_gen_len": 3, "max_tokens": 3}, "max_gen_len and max_tokens"),
        ({"prompt": ["x"], "max_gen_len": 3}, r"prompt is \['x'\]"),
        ({"prompt": "x", "max_gen_len": 3, "n": 2}, "n is 2"),
        ({"prompt": "x", "max_gen_len": "3"}, "max_gen_len is '3'"),
        ({"prompt": "x", "max_gen_len": 0}, "max_gen_len is 0"),
        ({"prompt": "x", "stream": True}, "stream is True, but the operation is InvokeModel"),
        ({"prompt": "x", "stream": 0}, "stream is 0"),
        ({"prompt": "x", "stream_options": "x"}, "stream_options is 'x'"),
        ({"prompt": "x", "parameters": {"a": 1}}, "parameters is"),
    ],
)
def test_a_bad_body_is_named(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        read(body)


def test_a_stream_operation_refuses_stream_false() -> None:
    with pytest.raises(InvalidRequestError, match="InvokeModelWithResponseStream"):
        read({"prompt": "x", "stream": False}, stream=True)


def test_bedrocks_completion_is_answered_in_kind() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    openai = {"choices": [{"text": "abc", "finish_reason": "length", "logprobs": None}], "usage": usage}
    assert invoke.answer(read({"prompt": "x", "max_gen_len": 3}), openai) == {
        "generation": "abc",
        "prompt_token_count": 2,
        "generation_token_count": 3,
        "stop_reason": "length",
    }
    assert invoke.answer(read({"prompt": "x"}), openai) is openai
    assert invoke.token_headers(openai, 7) == {
        "X-Amzn-Bedrock-Input-Token-Count": "2",
        "X-Amzn-Bedrock-Output-Token-Count": "3",
        "X-Amzn-Bedrock-Invocation-Latency": "7",
    }


@pytest.mark.parametrize("accept", [None, "", "*/*", "application/json", "text/html, application/json;q=0.5"])
def test_accepted_answers(accept: str | None) -> None:
    invoke.check_headers({"X-Amzn-Bedrock-GuardrailIdentifier": ""}, accept)


@pytest.mark.parametrize(
    ("headers", "accept", "named"),
    [({"X-Amzn-Bedrock-Guardrailidentifier": "g1"}, None, "'g1'; guardrails"), ({}, "image/png", "'image/png'")],
)
def test_headers_that_cannot_be_served(headers: dict[str, str], accept: str | None, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        invoke.check_headers(headers, accept)
