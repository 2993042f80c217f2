"""Clients that other people wrote: openai, boto3's sagemaker-runtime, litellm."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import boto3
import openai
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from tests.fakes.running import ADAPTER_HEADER, Server, make_adapter, running
from tests.fakes.sagemaker_front import front

CHAT = [{"role": "user", "content": "hi"}]
SNOWMAN = "☃🙂\u2028 "


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Adapters a1 and a2, and text whose characters have up to four bytes."""
    directory = tmp_path_factory.mktemp("clients")
    for name in ("a1", "a2"):
        make_adapter(directory / "adapters" / name, name)
    env = {"LORAHOST_ADAPTERS_DIR": str(directory / "adapters"), "LORAHOST_SESSIONS": "true"}
    with running(directory, env, {"suffix": SNOWMAN}) as one:
        yield one


@pytest.fixture(scope="module")
def oai(wide: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=wide.url + "/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def runtime(wide: Server) -> Iterator[Any]:
    with front(wide.port) as url:
        yield boto3.client(
            "sagemaker-runtime",
            region_name="eu-west-1",
            endpoint_url=url,
            aws_access_key_id="none",
            aws_secret_access_key="none",
            config=Config(retries={"max_attempts": 0}, read_timeout=20),
        )


def name_in(text: str) -> str:
    """The adapter that wrote `text`, which must be whole tokens of one of them."""
    [word] = set(text.split(SNOWMAN)) - {""}
    return word.strip().partition("@")[0]


def test_openai_lists_the_models(oai: openai.OpenAI) -> None:
    assert [model.id for model in oai.models.list()] == ["base", "a1", "a2"]
    assert oai.models.retrieve("a1").id == "a1"


@pytest.mark.parametrize("model", ["base", "a1", "a2"])
def test_openai_chats_and_completes_with_the_adapter_as_model(oai: openai.OpenAI, model: str) -> None:
    chat = oai.chat.completions.create(model=model, messages=CHAT, max_tokens=3)
    assert (name_in(chat.choices[0].message.content), chat.model) == (model, model)
    assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (3, "length")
    done = oai.completions.create(model=model, prompt="hi", max_tokens=3)
    assert (name_in(done.choices[0].text), done.model) == (model, model)


def test_openai_streams(oai: openai.OpenAI) -> None:
    chunks = list(oai.chat.completions.create(model="a1", messages=CHAT, max_tokens=20, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 19 + ["length"]
    assert name_in("".join(chunk.choices[0].delta.content for chunk in chunks)) == "a1"
    options = {"include_usage": True}
    done = list(oai.completions.create(model="a2", prompt="hi", max_tokens=4, stream=True, stream_options=options))
    assert (len(done), done[-1].usage.completion_tokens, done[-1].choices) == (5, 4, [])


def test_openai_reads_raw_lines_of_a_stream_whole(oai: openai.OpenAI) -> None:
    """httpx splits lines at every separator that Python knows."""
    create = oai.completions.with_streaming_response.create
    with create(model="base", prompt="hi", max_tokens=5, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert [json.loads(line.removeprefix("data: "))["model"] for line in lines[:-1]] == ["base"] * 5


def test_openai_maps_errors_to_its_own(oai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        oai.chat.completions.create(model="gone", messages=CHAT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert "gone" in missing.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        oai.chat.completions.create(model="base", messages=CHAT, max_tokens=-4)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        list(oai.chat.completions.create(model="gone", messages=CHAT, stream=True))


def test_openai_raises_for_an_error_inside_a_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("dying"), {}, {"step_s": 0.02}) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="base", messages=CHAT, max_tokens=1000, stream=True)
        next(stream)
        server.engine(dead=True)
        with pytest.raises(openai.APIError) as error:
            list(stream)
    assert error.value.code == "engine_dead"


def test_openai_retries_what_is_overloaded_as_the_answer_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = {"LORAHOST_MAX_RUNNING": "1", "LORAHOST_MAX_QUEUED": "0"}
    with running(tmp_path_factory.mktemp("full"), limits, {"step_s": 0.01}) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=3)
        running_one = client.completions.create(model="base", prompt="hi", max_tokens=60, stream=True)
        next(running_one)
        with pytest.raises(openai.RateLimitError):
            client.with_options(max_retries=0).completions.create(model="base", prompt="hi", max_tokens=1)
        assert client.completions.create(model="base", prompt="hi", max_tokens=1).choices[0].text
        running_one.close()


@pytest.mark.parametrize(("component", "name"), [(None, "base"), ("component-one", "a1"), ("component-two", "a2")])
def test_boto3_invokes_the_base_and_components(runtime: Any, component: str | None, name: str) -> None:
    asked = {"InferenceComponentName": component} if component else {}
    body = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
    answer = runtime.invoke_endpoint(EndpointName="endpoint", Body=body, InferenceId="id-1", **asked)
    parsed = json.loads(answer["Body"].read())
    assert name_in(parsed["choices"][0]["text"]) == name
    assert parsed["model"] == (component or "base")
    assert parsed["id"].endswith("id-1")
    expected = "adapter=;version=base" if name == "base" else f"adapter={name};version="
    assert answer["CustomAttributes"].startswith(expected)
    assert answer["ContentType"] == "application/json"


def test_boto3_names_an_adapter_in_custom_attributes(runtime: Any) -> None:
    answer = runtime.invoke_endpoint(
        EndpointName="endpoint", Body=b'{"inputs": "hi"}', CustomAttributes="adapter=a2", ContentType="application/json"
    )
    assert name_in(json.loads(answer["Body"].read())["generated_text"]) == "a2"


@pytest.mark.parametrize("run", range(5))
@pytest.mark.parametrize("accept", ["text/event-stream", "application/jsonlines"])
def test_boto3_streams_survive_any_cut(runtime: Any, accept: str, run: int) -> None:
    """The payload parts put together are the stream; the API alone asks for it."""
    answer = runtime.invoke_endpoint_with_response_stream(
        EndpointName="endpoint",
        InferenceComponentName="component-one",
        Accept=accept,
        ContentType="application/json",
        Body=json.dumps({"messages": CHAT, "max_tokens": 30}).encode(),
    )
    assert answer["ContentType"].partition(";")[0] == accept
    assert answer["CustomAttributes"].startswith("adapter=a1;version=")
    parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    lines = [line for line in b"".join(parts).decode().splitlines() if line]
    if accept == "text/event-stream":
        assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert name_in("".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)) == "a1"
    assert len(chunks) == 30


@pytest.mark.parametrize(
    ("body", "component", "status", "said"),
    [
        (b"{", None, 400, "malformed_json"),
        (b'{"prompt": "hi"}', "component-lost", 404, "component-lost"),
        (b'{"prompt": "hi", "model": "gone"}', None, 404, "model_not_found"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_boto3_raises_model_error_with_the_answer(
    runtime: Any, body: bytes, component: str | None, status: int, said: str, streaming: bool
) -> None:
    asked = {"InferenceComponentName": component} if component else {}
    call = runtime.invoke_endpoint_with_response_stream if streaming else runtime.invoke_endpoint
    with pytest.raises(ClientError) as error:
        call(EndpointName="endpoint", Body=body, **asked)
    assert error.value.response["Error"]["Code"] == "ModelError"
    assert error.value.response["OriginalStatusCode"] == status
    assert said in error.value.response["OriginalMessage"]


def test_boto3_opens_and_closes_a_session(runtime: Any) -> None:
    def call(body: dict[str, Any], session: str) -> Any:
        return runtime.invoke_endpoint(EndpointName="endpoint", Body=json.dumps(body).encode(), SessionId=session)

    session = call({"requestType": "NEW_SESSION"}, "NEW_SESSION")["NewSessionId"].partition(";")[0]
    assert call({"prompt": "hi"}, session)["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert call({"requestType": "CLOSE"}, session)["ClosedSessionId"] == session
    with pytest.raises(ClientError, match="400"):
        call({"prompt": "hi"}, session)


def test_boto3_sends_large_bodies(runtime: Any) -> None:
    body = json.dumps({"prompt": "x" * (25 << 20), "max_tokens": 1}).encode()
    assert runtime.invoke_endpoint(EndpointName="endpoint", Body=body)["ContentType"] == "application/json"


@pytest.fixture
def litellm(wide: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """litellm with its `sagemaker_chat` pointed at a front; yields a function that asks."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    module = importlib.import_module("litellm")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    with front(wide.port) as url:

        def ask(*, stream: bool = False, **more: Any) -> Any:
            operation = "invocations-response-stream" if stream else "invocations"
            return module.completion(
                model="sagemaker_chat/endpoint",
                messages=CHAT,
                max_tokens=5,
                stream=stream,
                aws_region_name="eu-west-1",
                sagemaker_base_url=f"{url}/endpoints/endpoint/{operation}",
                num_retries=0,
                **more,
            )

        yield ask


@pytest.mark.parametrize(
    ("asked", "name"),
    [({"model_id": "component-two"}, "a2"), ({"hf_model_name": "a1"}, "a1"), ({"hf_model_name": "base"}, "base")],
)
def test_litellm_asks_and_streams(litellm: Any, asked: dict[str, str], name: str) -> None:
    """Its body says nothing of streams: the API that it calls does."""
    assert name_in(litellm(**asked).choices[0].message.content) == name
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm(stream=True, **asked)]
    assert name_in("".join(parts)) == name
    assert sum(bool(text) for text in parts) == 5


def test_litellm_puts_the_endpoints_name_into_model_and_hears_what_to_set(litellm: Any) -> None:
    """An unknown name is no adapter of ours: the base answers only where the operator allows it."""
    with pytest.raises(Exception, match="LORAHOST_UNKNOWN_MODEL=base"):
        litellm()


def test_a_name_in_a_header_reaches_plain_clients_too(oai: openai.OpenAI) -> None:
    chat = oai.chat.completions.create(model="base", messages=CHAT, max_tokens=1, extra_headers={ADAPTER_HEADER: "a2"})
    assert name_in(chat.choices[0].message.content) == "a2"
