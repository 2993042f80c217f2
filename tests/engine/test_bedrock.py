"""Bedrock's runtime API on vLLM's real CPU engine, through boto3."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.conftest import NAMES, Models
from tests.fakes.bedrock_client import client
from tests.fakes.running import Server
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.engine
MODELS = ["tiny", *NAMES]
TOKENS = 12
GREEDY = {"maxTokens": TOKENS, "temperature": 0.0}
SYSTEM = [{"text": "Be brief."}]
ASKED = [{"role": "user", "content": [{"text": "Hello world"}]}]
OPENAI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello world"}]
CITIES = ["Rome", "Oslo"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"toolSpec": {"name": "weather", "description": "Weather now", "inputSchema": {"json": SCHEMA}}}


@pytest.fixture(scope="module")
def bedrock(server: Server) -> Any:
    return client(server.url)


@pytest.fixture(scope="module")
def no_blanks(tiny: Models) -> dict[str, int]:
    """A bias against white space, which JSON allows without end and a random model may like best."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.base)
    return {str(token): -100 for text in " \t\r\n" for token in tokenizer.encode(text)}


def chat(server: Server, model: str, **more: Any) -> Any:
    """The same request on the OpenAI route."""
    body = {"model": model, "messages": OPENAI, "max_tokens": TOKENS, "temperature": 0, **more}
    answer = server.request("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer
    return answer.json()


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """OpenAI's usage in Converse's words."""
    names = {"inputTokens": "prompt_tokens", "outputTokens": "completion_tokens", "totalTokens": "total_tokens"}
    return {name: usage[other] for name, other in names.items()}


def streamed(bedrock: Any, **asked: Any) -> tuple[list[Any], str, dict[str, Any]]:
    """Deltas, stop reason and usage of a ConverseStream."""
    first, *events, stop, metadata = bedrock.converse_stream(**asked)["stream"]
    assert first == {"messageStart": {"role": "assistant"}}
    deltas = [event["contentBlockDelta"]["delta"] for event in events if "contentBlockDelta" in event]
    return deltas, stop["messageStop"]["stopReason"], metadata["metadata"]["usage"]


@pytest.mark.parametrize("model", MODELS)
def test_converse_gives_the_text_and_counts_of_the_openai_route(server: Server, bedrock: Any, model: str) -> None:
    expected = chat(server, model)
    asked = {"modelId": model, "system": SYSTEM, "messages": ASKED, "inferenceConfig": GREEDY}
    whole = bedrock.converse(**asked)
    text = expected["choices"][0]["message"]["content"]
    assert whole["output"]["message"]["content"] == [{"text": text}]
    assert whole["usage"] == counts(expected["usage"])
    assert whole["stopReason"] == {"length": "max_tokens", "stop": "end_turn"}[expected["choices"][0]["finish_reason"]]
    deltas, reason, usage = streamed(bedrock, **asked)
    assert "".join(delta["text"] for delta in deltas) == text
    assert (reason, usage) == (whole["stopReason"], whole["usage"])


@pytest.mark.parametrize("model", MODELS)
def test_invoke_model_gives_what_the_openai_route_gives(server: Server, bedrock: Any, model: str) -> None:
    expected = chat(server, model)
    body = json.dumps({"messages": OPENAI, "max_tokens": TOKENS, "temperature": 0})
    answer = bedrock.invoke_model(modelId=f"tiny:{model}" if model in NAMES else model, body=body)
    whole = json.loads(answer["body"].read())
    assert whole["choices"][0]["message"] == expected["choices"][0]["message"]
    assert (whole["usage"], whole["model"]) == (expected["usage"], model)
    stream = bedrock.invoke_model_with_response_stream(modelId=model, body=body)["body"]
    chunks = [json.loads(event["chunk"]["bytes"]) for event in stream]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == expected["choices"][0]["message"]["content"]
    metrics = chunks[-1]["amazon-bedrock-invocationMetrics"]
    assert metrics["inputTokenCount"] == expected["usage"]["prompt_tokens"]
    assert metrics["outputTokenCount"] == expected["usage"]["completion_tokens"]


def test_bedrocks_completion_form(server: Server, bedrock: Any) -> None:
    body = {"prompt": "Hello", "max_gen_len": 6, "temperature": 0}
    expected = server.invoke({"prompt": "Hello", "max_tokens": 6, "temperature": 0}, "bob").json()
    whole = json.loads(bedrock.invoke_model(modelId="bob", body=json.dumps(body))["body"].read())
    assert whole["generation"] == expected["choices"][0]["text"]
    assert whole["generation_token_count"] == expected["usage"]["completion_tokens"]
    stream = bedrock.invoke_model_with_response_stream(modelId="bob", body=json.dumps(body))["body"]
    chunks = [json.loads(event["chunk"]["bytes"]) for event in stream]
    assert "".join(chunk["generation"] for chunk in chunks) == whole["generation"]
    assert (chunks[-1]["generation_token_count"], chunks[-1]["stop_reason"]) == (6, whole["stop_reason"])


@pytest.mark.parametrize("model", ["tiny", "cy"])
@pytest.mark.parametrize("choice", [{"tool": {"name": "weather"}}, {"any": {}}])
def test_a_forced_tool_call_round_trip(
    server: Server, bedrock: Any, no_blanks: dict[str, int], model: str, choice: dict[str, Any]
) -> None:
    """The engine's structured output makes even a random model call the tool; its result goes back in."""
    # a random model that may call more than one tool would call until it is cut
    stop = ["</tool_call>"] if "any" in choice else []
    asked: dict[str, Any] = {
        "modelId": model,
        "system": SYSTEM,
        "messages": ASKED,
        "inferenceConfig": {"maxTokens": 120, "temperature": 0.0, "stopSequences": stop},
        "toolConfig": {"tools": [WEATHER], "toolChoice": choice},
        "additionalModelRequestFields": {"logit_bias": no_blanks},
    }
    whole = bedrock.converse(**asked)
    function = {"name": "weather", "description": "Weather now", "parameters": SCHEMA}
    named = {"type": "function", "function": {"name": "weather"}} if "tool" in choice else "required"
    tools = [{"type": "function", "function": function}]
    expected = chat(server, model, tools=tools, tool_choice=named, max_tokens=120, logit_bias=no_blanks, stop=stop)
    assert whole["stopReason"] == "tool_use"
    assert whole["usage"] == counts(expected["usage"])
    uses = [block["toolUse"] for block in whole["output"]["message"]["content"] if "toolUse" in block]
    calls = [call["function"] for call in expected["choices"][0]["message"]["tool_calls"]]
    assert [(use["name"], use["input"]) for use in uses] == [(c["name"], json.loads(c["arguments"])) for c in calls]
    assert uses[0]["name"] == "weather"
    assert uses[0]["input"]["city"] in CITIES

    deltas, reason, usage = streamed(bedrock, **asked)
    pieces = [delta["toolUse"]["input"] for delta in deltas if "toolUse" in delta]
    assert json.loads("".join(pieces)) == uses[0]["input"]
    assert (reason, usage) == (whole["stopReason"], whole["usage"])

    result = {"toolResult": {"toolUseId": uses[0]["toolUseId"], "content": [{"json": {"celsius": 7}}]}}
    called = {"role": "assistant", "content": [{"toolUse": uses[0]}]}
    history = [*ASKED, called, {"role": "user", "content": [result]}]
    after = bedrock.converse(modelId=model, messages=history, inferenceConfig=GREEDY)
    assert after["usage"]["outputTokens"] >= 1


def test_json_schema_output(bedrock: Any) -> None:
    structure = {"jsonSchema": {"schema": json.dumps({"type": "string", "enum": ["yes", "no"]}), "name": "answer"}}
    answer = bedrock.converse(
        modelId="cy",
        messages=ASKED,
        inferenceConfig={"maxTokens": 40, "temperature": 0.0},
        outputConfig={"textFormat": {"type": "json_schema", "structure": structure}},
    )
    assert json.loads(answer["output"]["message"]["content"][0]["text"]) in ("yes", "no")
    assert answer["stopReason"] == "end_turn"


def test_stop_sequences_and_the_models_own_limit(server: Server, bedrock: Any) -> None:
    asked: dict[str, Any] = {"modelId": "bob", "messages": ASKED, "additionalModelRequestFields": {"ignore_eos": True}}
    text = bedrock.converse(**asked, inferenceConfig={**GREEDY, "maxTokens": 30})["output"]["message"]["content"][0]
    ends = next(char for char in text["text"][3:] if char.isascii())
    config = {**GREEDY, "maxTokens": 30, "stopSequences": [ends]}
    stopped = bedrock.converse(**asked, inferenceConfig=config)
    assert stopped["stopReason"] == "stop_sequence"
    assert streamed(bedrock, **asked, inferenceConfig=config)[1:] == ("stop_sequence", stopped["usage"])
    full = bedrock.converse(**asked, inferenceConfig={"temperature": 0.0})
    context = server.get("/v1/models/tiny").json()["max_model_len"]
    assert (full["stopReason"], full["usage"]["totalTokens"]) == ("model_context_window_exceeded", context)


def test_the_engines_refusals_are_validation_exceptions(server: Server, bedrock: Any) -> None:
    context = server.get("/v1/models/tiny").json()["max_model_len"]
    with pytest.raises(bedrock.exceptions.ValidationException, match=str(context)):
        bedrock.converse(modelId="bob", messages=[{"role": "user", "content": [{"text": "x" * (context + 1)}]}])
    with pytest.raises(bedrock.exceptions.ValidationException, match=r"top_k.*-7"):
        bedrock.converse(modelId="bob", messages=ASKED, additionalModelRequestFields={"top_k": -7})
    with pytest.raises(bedrock.exceptions.ResourceNotFoundException):
        bedrock.converse(modelId="nobody", messages=ASKED)
