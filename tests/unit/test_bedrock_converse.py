"""Converse requests as OpenAI chat bodies; vLLM's own request class is the judge of them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tests.fakes.bedrock_client import HI
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from lorahost.bedrock.converse import Conversation, parse
from lorahost.errors import InvalidRequestError

SPEC = {"toolSpec": {"name": "weather", "description": "d", "inputSchema": {"json": {"type": "object"}}}}


def read(stream: bool = False, **request: Any) -> Conversation:
    return parse(json.dumps({"messages": HI, **request}).encode(), None, stream=stream)


def refused(match: str, **request: Any) -> None:
    with pytest.raises(InvalidRequestError, match=match) as error:
        read(**request)
    assert error.value.status == 400


def said(*content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


def test_a_whole_conversation_with_tools() -> None:
    asked = read(
        system=[{"text": "be brief"}, {"cachePoint": {"type": "default"}}],
        messages=[
            *said({"text": "one"}, {"cachePoint": {"type": "default"}}),
            *said(
                {"reasoningContent": {"reasoningText": {"text": "hm", "signature": "s"}}},
                {"text": "let me look"},
                {"toolUse": {"toolUseId": "t1", "name": "weather", "input": {"city": "Łódź"}}},
                {"toolUse": {"toolUseId": "t2", "name": "weather", "input": {}}},
                role="assistant",
            ),
            *said(
                {"toolResult": {"toolUseId": "t1", "content": [{"json": {"c": 3}}, {"text": "cold"}]}},
                {"toolResult": {"toolUseId": "t2", "content": [{"text": "no"}], "status": "error"}},
                {"text": "and now?"},
                {"guardContent": {"text": {"text": "guarded", "qualifiers": ["query"]}}},
            ),
        ],
        inferenceConfig={"maxTokens": 5, "temperature": 0.5, "topP": 1, "stopSequences": ["x"]},
        toolConfig={"tools": [SPEC, {"cachePoint": {"type": "default"}}], "toolChoice": {"tool": {"name": "weather"}}},
        additionalModelRequestFields={"top_k": 4, "chat_template_kwargs": {"a": 1}},
        additionalModelResponseFieldPaths=["/id"],
    )
    function = {"name": "weather", "parameters": {"type": "object"}, "description": "d"}
    assert asked.body == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {
                "role": "assistant",
                "content": "let me look",
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Łódź"}'}},
                    {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": '{"c":3}\ncold'},
            {"role": "tool", "tool_call_id": "t2", "content": "error: no"},
            {"role": "user", "content": [{"type": "text", "text": "and now?"}, {"type": "text", "text": "guarded"}]},
        ],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 1,
        "stop": ["x"],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "top_k": 4,
        "chat_template_kwargs": {"a": 1},
    }
    assert (asked.paths, asked.max_tokens, asked.own) == (("/id",), 5, {})
    request = ChatCompletionRequest.model_validate({**copy.deepcopy(asked.body), "model": "m"})
    assert request.tool_choice.function.name == "weather"  # type: ignore[union-attr]
    assert request.to_sampling_params(9, {}).max_tokens == 9


@pytest.mark.parametrize(
    ("choice", "said_to_engine"),
    [({"auto": {}}, {"tool_choice": "auto"}), ({"any": {}}, {"tool_choice": "required"}), (None, {})],
)
def test_tool_choice(choice: Any, said_to_engine: dict[str, str]) -> None:
    body = read(toolConfig={"tools": [SPEC], "toolChoice": choice}).body
    assert {key: body[key] for key in body if key == "tool_choice"} == said_to_engine


def test_output_configuration() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    text_format = {"type": "json_schema", "structure": {"jsonSchema": {"schema": json.dumps(schema), "name": "x"}}}
    body = read(outputConfig={"textFormat": text_format, "effort": "low"}).body
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = ChatCompletionRequest.model_validate({**body, "model": "m"})
    assert request.response_format is not None
    assert request.reasoning_effort == "low"


def test_a_stream_asks_for_usage_and_with_a_deadline_for_it_in_each_chunk() -> None:
    assert read().body.keys() == {"messages"}
    assert read(stream=True).body["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    asked = read(stream=True, additionalModelRequestFields={"deadline_s": 2, "model": "a1"})
    assert asked.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert asked.own == {"deadline_s": 2, "model": "a1"}


def test_what_has_no_effect_is_taken_and_told() -> None:
    asked = read(
        performanceConfig={"latency": "optimized"},
        serviceTier={"type": "flex"},
        requestMetadata={"team": "x"},
        projectIdentifier="p",
        guardrailConfig=None,
    )
    assert asked.echoed == {"performanceConfig": {"latency": "standard"}, "serviceTier": {"type": "default"}}
    assert asked.body.keys() == {"messages"}


IMAGE = {"image": {"format": "png", "source": {"bytes": "aGk="}}}
TEXT_FORMAT = {"type": "json_schema", "structure": {"jsonSchema": {"schema": "{"}}}
DOCUMENT = {"document": {"name": "d", "format": "pdf", "source": {"bytes": "aGk="}}}


@pytest.mark.parametrize(
    ("content", "role", "named"),
    [
        (IMAGE, "user", "messages.0.content.1 is image content"),
        (DOCUMENT, "user", "messages.0.content.1 is document content"),
        ({"video": {}}, "user", "messages.0.content.1 is video content"),
        ({"audio": {}}, "user", "messages.0.content.1 is audio content"),
        ({"citationsContent": {}}, "assistant", "messages.0.content.1 is citationsContent content"),
        ({"searchResult": {}}, "user", "messages.0.content.1 is searchResult content"),
        ({"toolAddition": {}}, "user", "messages.0.content.1 is toolAddition content"),
        ({"toolResult": {"toolUseId": "t", "content": [IMAGE]}}, "user", "toolResult.content.0 is image content"),
        ({"guardContent": IMAGE}, "user", "guardContent is image content"),
        ({"reasoningContent": {"redactedContent": "aGk="}}, "assistant", "redactedContent"),
        ({"toolUse": {"toolUseId": "t", "name": "n", "input": {}}}, "user", "toolUse, which has no place in a user"),
        ({"toolResult": {"toolUseId": "t", "content": []}}, "assistant", "toolResult, which has no place in a"),
    ],
)
def test_content_that_cannot_be_served_is_named(content: Any, role: str, named: str) -> None:
    refused(named, messages=said({"text": "look"}, content, role=role))


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"messages": []}, "messages is"),
        ({"messages": None}, "messages is None"),
        ({"messages": "hi"}, "messages is 'hi'"),
        ({"messages": [{"role": "tool", "content": [{"text": "x"}]}]}, "messages.0.role is 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"messages": said()}, "messages.0.content is"),
        ({"messages": said({})}, "exactly one member must be given, but there is none"),
        ({"messages": said({"text": "a", "image": {}})}, "there is text, image"),
        ({"messages": said({"txt": "a"})}, "messages.0.content.0.txt is not a field"),
        ({"messages": said({"text": 3})}, "messages.0.content.0.text is 3"),
        ({"messages": said({"cachePoint": {"type": "default"}})}, "nothing but cache points"),
        ({"system": [{"text": ""}]}, "system.0.text is ''"),
        ({"inferenceConfig": {"maxTokens": 0}}, "inferenceConfig.maxTokens is 0"),
        ({"inferenceConfig": {"maxTokens": "5"}}, "inferenceConfig.maxTokens is '5'"),
        ({"inferenceConfig": {"maxTokens": True}}, "inferenceConfig.maxTokens is True"),
        ({"inferenceConfig": {"temperature": 1.5}}, "inferenceConfig.temperature is 1.5"),
        ({"inferenceConfig": {"topK": 1}}, "inferenceConfig.topK is not a field"),
        ({"inferenceConfig": {"stopSequences": ["x"] * 2501}}, "at most 2500"),
        ({"toolConfig": {"tools": []}}, "toolConfig.tools is"),
        ({"toolConfig": {"tools": [{"cachePoint": {"type": "default"}}]}}, "toolConfig.tools has no toolSpec"),
        ({"toolConfig": {"tools": [{"systemTool": {"name": "x"}}]}}, "toolConfig.tools.0.systemTool is not served"),
        ({"toolConfig": {"tools": [SPEC], "toolChoice": {"tool": {"name": "x"}}}}, "is 'x'; the tools are"),
        ({"toolConfig": {"tools": [SPEC], "toolChoice": {}}}, "toolChoice is {}: exactly one"),
        ({"toolConfig": {"tools": [{"toolSpec": {"name": "a b", "inputSchema": {"json": {}}}}]}}, "'a b'"),
        ({"guardrailConfig": {}}, "guardrailConfig is not served"),
        ({"promptVariables": {"a": {"text": "b"}}}, "promptVariables is not served"),
        ({"additionalModelRequestFields": {"messages": []}}, "Fields.messages sets what another member sets"),
        ({"additionalModelRequestFields": {"n": 2}}, "Fields.n can't be set"),
        ({"additionalModelRequestFields": {"stream": True}}, "Fields.stream can't be set"),
        ({"additionalModelRequestFields": [1]}, "additionalModelRequestFields is"),
        ({"additionalModelResponseFieldPaths": ["id"]}, "Paths.0 is 'id'; it must be a JSON pointer"),
        ({"additionalModelResponseFieldPaths": ["/a"] * 11}, "at most 10"),
        (
            {"outputConfig": {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": {"schema": "{"}}}}},
            "as text",
        ),
        ({"anything": 1}, "anything is not a field that this server knows"),
        ({"performanceConfig": {"latency": "fast"}}, "performanceConfig.latency is 'fast'"),
    ],
)
def test_a_bad_request_is_named(request_: dict[str, Any], named: str) -> None:
    refused(named, **request_)


def test_fields_that_two_members_set_are_refused() -> None:
    fields = {"max_tokens": 4}
    assert read(additionalModelRequestFields=fields).max_tokens == 4
    refused("max_tokens sets what", inferenceConfig={"maxTokens": 3}, additionalModelRequestFields=fields)
