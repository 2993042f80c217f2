"""boto3's bedrock-runtime against the real server: its four operations with the base model and adapters."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.bedrock_client import HI, client, events
from tests.fakes.running import ATTRIBUTES_HEADER, Server, make_adapter, running, wait_for
from tests.fakes.wire import Wire, request_bytes

SNOWMAN = "☃🙂\u2028 "
CHAT = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 3}
LIMIT = {"maxTokens": 3}
ARN = "arn:aws:bedrock:us-east-1:123456789012:imported-model/"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Adapters with odd names too, and text whose characters have up to four bytes."""
    directory = tmp_path_factory.mktemp("bedrock")
    for name in ("a1", "a2"):
        make_adapter(directory / "adapters" / name, name)
    with running(directory, {"LORAHOST_ADAPTERS_DIR": str(directory / "adapters")}, {"suffix": SNOWMAN}) as one:
        odd = make_adapter(directory / "odd", "odd")
        assert one.add("team/od//d:1 é", odd).status == 200
        yield one


@pytest.fixture(scope="module")
def bedrock(wide: Server) -> Any:
    return client(wide.url)


def name_in(text: str) -> str:
    """The adapter that wrote `text`, which must be whole tokens of one of them."""
    [word] = set(text.split(SNOWMAN)) - {""}
    return word.strip().rpartition("@")[0] or word.strip()


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("base", "base"),
        ("a1", "a1"),
        ("base:a2", "a2"),
        (ARN + "a1", "a1"),
        (ARN + "base:a2", "a2"),
        ("arn:aws:bedrock:us-east-1::foundation-model/base", "base"),
        ("team/od//d:1 é", "team/od//d:1 é"),
        (ARN + "team/od//d:1 é", "team/od//d:1 é"),
        ("base:team/od//d:1 é", "team/od//d:1 é"),
    ],
)
def test_every_operation_is_answered_by_the_model_that_the_id_names(bedrock: Any, model_id: str, name: str) -> None:
    body = json.dumps(CHAT).encode()
    whole = bedrock.converse(modelId=model_id, messages=HI, inferenceConfig=LIMIT)
    assert name_in(whole["output"]["message"]["content"][0]["text"]) == name
    stream = bedrock.converse_stream(modelId=model_id, messages=HI, inferenceConfig=LIMIT)["stream"]
    deltas = [e["contentBlockDelta"]["delta"]["text"] for e in stream if "contentBlockDelta" in e]
    assert (len(deltas), name_in("".join(deltas))) == (3, name)
    invoked = json.loads(bedrock.invoke_model(modelId=model_id, body=body)["body"].read())
    assert (name_in(invoked["choices"][0]["message"]["content"]), invoked["model"]) == (name, name)
    chunks = chunks_of(bedrock.invoke_model_with_response_stream(modelId=model_id, body=body))
    assert name_in("".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)) == name


def chunks_of(answer: Any) -> list[dict[str, Any]]:
    """The JSON of a stream's chunks."""
    return [json.loads(event["chunk"]["bytes"]) for event in answer["body"]]


@pytest.mark.parametrize("model_id", ["gone", "base:gone", "other:a1", ARN + "gone", "x/a1", "a1/converse", "A1"])
def test_an_unknown_id_is_never_another_model(bedrock: Any, model_id: str) -> None:
    calls = [
        lambda: bedrock.converse(modelId=model_id, messages=HI),
        lambda: bedrock.converse_stream(modelId=model_id, messages=HI),
        lambda: bedrock.invoke_model(modelId=model_id, body=json.dumps(CHAT)),
        lambda: bedrock.invoke_model_with_response_stream(modelId=model_id, body=json.dumps(CHAT)),
    ]
    for call in calls:
        with pytest.raises(bedrock.exceptions.ResourceNotFoundException) as error:
            call()
        assert repr(model_id) in error.value.response["Error"]["Message"]
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404


def test_converse_answers_as_bedrock_does(bedrock: Any, wide: Server) -> None:
    answer = bedrock.converse(
        modelId="a1",
        messages=HI,
        system=[{"text": "be brief"}],
        inferenceConfig=LIMIT,
        additionalModelResponseFieldPaths=["/model"],
        performanceConfig={"latency": "optimized"},
        serviceTier={"type": "flex"},
    )
    assert answer["stopReason"] == "max_tokens"
    assert answer["metrics"]["latencyMs"] > 0
    assert answer["additionalModelResponseFields"] == {"model": "a1"}
    assert (answer["performanceConfig"], answer["serviceTier"]) == ({"latency": "standard"}, {"type": "default"})
    metadata = answer["ResponseMetadata"]
    digest = wide.get("/adapters/a1").json()["digest"]
    assert metadata["HTTPHeaders"][ATTRIBUTES_HEADER.lower()] == f"adapter=a1;version={digest[:12]}"
    lines = [line for line in wide.log_lines() if line.get("request_id") == metadata["RequestId"]]
    assert [(line["route"], line["adapter"], line["output_tokens"], line["code"]) for line in lines] == [
        ("Converse", "a1", 3, 200)
    ]


def test_token_counts_equal_those_of_the_openai_route(bedrock: Any, wide: Server) -> None:
    body = {"model": "a1", "messages": [{"role": "system", "content": "be very brief"}, *CHAT["messages"]]}
    usage = wide.request("POST", "/v1/chat/completions", {**body, "max_tokens": 3}).json()["usage"]
    expected = dict(zip(("inputTokens", "outputTokens", "totalTokens"), usage.values(), strict=True))
    asked = {"modelId": "a1", "messages": HI, "system": [{"text": "be very brief"}], "inferenceConfig": LIMIT}
    assert bedrock.converse(**asked)["usage"] == expected
    assert list(bedrock.converse_stream(**asked)["stream"])[-1]["metadata"]["usage"] == expected


@pytest.mark.parametrize(
    "body",
    [{"prompt": "one two", "max_tokens": 3}, {"prompt": "one two", "max_gen_len": 3}, CHAT],
)
def test_invoke_model_answers_in_kind(bedrock: Any, body: dict[str, Any]) -> None:
    answer = bedrock.invoke_model(modelId="a2", body=json.dumps(body), accept="application/json", serviceTier="flex")
    whole = json.loads(answer["body"].read())
    streamed = bedrock.invoke_model_with_response_stream(modelId="a2", body=json.dumps(body))
    chunks = chunks_of(streamed)
    assert answer["contentType"] == streamed["contentType"] == "application/json"
    assert answer["serviceTier"] == "default"
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-amzn-bedrock-input-token-count"] == "2"
    assert headers["x-amzn-bedrock-output-token-count"] == "3"
    metrics = chunks[-1].pop("amazon-bedrock-invocationMetrics")
    assert (metrics["inputTokenCount"], metrics["outputTokenCount"]) == (2, 3)
    assert metrics["invocationLatency"] >= metrics["firstByteLatency"] >= 0
    if "max_gen_len" in body:
        assert name_in(whole["generation"]) == "a2"
        assert whole["generation"] == "".join(chunk["generation"] for chunk in chunks)
        assert [chunk["generation_token_count"] for chunk in chunks] == [1, 2, 3]
        assert [chunk["stop_reason"] for chunk in chunks] == [None, None, "length"]
        assert whole["prompt_token_count"] == 2
    else:
        assert whole["object"].endswith("completion")
        assert {chunk["object"] for chunk in chunks} <= {"chat.completion.chunk", "text_completion"}
        assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


def stream_bytes(server: Server, operation: str, body: Any, model: str = "a1") -> list[bytes]:
    """The HTTP chunks of a streamed answer."""
    with Wire(server.port) as wire:
        wire.send(request_bytes("POST", f"/model/{model}/{operation}", json.dumps(body).encode()))
        status, headers, _ = wire.head()
        assert (status, headers["content-type"]) == (200, "application/vnd.amazon.eventstream")
        return [data for _, data in wire.chunks()]


@pytest.mark.parametrize(
    ("operation", "name", "body"),
    [
        ("converse-stream", "ConverseStream", {"messages": HI, "inferenceConfig": {"maxTokens": 20}}),
        ("invoke-with-response-stream", "InvokeModelWithResponseStream", {**CHAT, "max_tokens": 20}),
    ],
)
def test_each_message_is_one_write_and_survives_any_cut(
    wide: Server, operation: str, name: str, body: dict[str, Any]
) -> None:
    chunks = stream_bytes(wide, operation, body)
    assert [struct.unpack(">I", chunk[:4])[0] for chunk in chunks] == [len(chunk) for chunk in chunks]
    read = [events(name, b"".join(chunks), seed) for seed in range(5)]
    assert all(one == read[0] for one in read)
    assert len(read[0]) == (24 if name == "ConverseStream" else 20)


def test_no_content_type_is_needed_and_percent_encoding_is_free(wide: Server) -> None:
    body = json.dumps(CHAT).encode()
    for path in ("/model/base%3Aa1/invoke", "/model/base:a1/invoke", "/model/%61%31/invoke"):
        with Wire(wide.port) as wire:
            wire.send(request_bytes("POST", path, None, {"Content-Length": str(len(body))}) + body)
            status, _, answer = wire.answer()
        assert (status, json.loads(answer)["model"]) == (200, "a1")


def test_a_deadline_ends_an_answer_with_what_there_is(bedrock: Any, wide: Server) -> None:
    wide.engine(step_s=0.02)
    asked: dict[str, Any] = {
        "modelId": "a1",
        "messages": HI,
        "inferenceConfig": {"maxTokens": 2000},
        "additionalModelRequestFields": {"deadline_s": 0.4},
    }
    try:
        whole = bedrock.converse(**asked)
        *_, stop, metadata = bedrock.converse_stream(**asked)["stream"]
    finally:
        wide.engine(step_s=0.002)
    for usage, reason in (
        (whole["usage"], whole["stopReason"]),
        (metadata["metadata"]["usage"], stop["messageStop"]["stopReason"]),
    ):
        assert reason == "max_tokens"
        assert usage["inputTokens"] == 2
        assert 1 <= usage["outputTokens"] < 100


def test_a_client_that_leaves_frees_its_place(bedrock: Any, wide: Server) -> None:
    stream = bedrock.converse_stream(modelId="a1", messages=HI, inferenceConfig={"maxTokens": 4000})["stream"]
    next(iter(stream))
    assert "a1" in wide.engine()["running"][0]
    stream.close()
    wait_for(lambda: wide.engine()["running"] == [], 1.0, "the abort")


def test_bodies_may_be_streams(bedrock: Any) -> None:
    answer = bedrock.invoke_model(modelId="base", body=io.BytesIO(json.dumps(CHAT).encode()))
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
