from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

pytest.importorskip("vllm")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from lorahost.engine.vllm_026.answers import host_error, is_error_event, validation_error
from lorahost.errors import EngineFailedError, InvalidRequestError, UnavailableError

ALIVE, DEAD = SimpleNamespace(errored=False), SimpleNamespace(errored=True)


def refused(kind: Any, body: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    return validation_error(found.value, body)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": [], "temperature": "hot"}, "temperature", "got 'hot'"),
        ({"messages": [], "max_tokens": [1]}, "max_tokens", "got [1]"),
        ({"messages": "hello"}, "messages", "messages"),
        ({}, "messages", "messages: Field required"),
    ],
)
def test_a_bad_field_is_named_with_its_value(body: dict[str, Any], param: str, words: str) -> None:
    error = refused(ChatCompletionRequest, {"model": "m", **body})
    assert (error.status, error.code) == (400, "invalid_field")
    assert (error.param or "").split(".")[0] == param
    assert words in error.message


def test_a_bad_completion_body() -> None:
    error = refused(CompletionRequest, {"model": "m", "prompt": "a", "n": "two"})
    assert (error.param, "'two'" in error.message) == ("n", True)


class Small(BaseModel):
    first: int = Field(ge=1)
    second: list[int]


def test_long_values_are_cut_and_problems_counted() -> None:
    error = refused(Small, {"first": "x" * 500, "second": ["a"] * 50})
    assert len(error.message) < 600
    assert error.message.count(";") == 4
    assert "x" * 100 not in error.message


def test_an_error_event_is_told_from_a_chunk_that_speaks_of_errors() -> None:
    response = create_error_response("too bad").model_dump_json()
    assert is_error_event(f"data: {response}\n\n")
    assert not is_error_event('data: {"id":"1","choices":[{"text":"{\\"error\\""}]}\n\n')
    assert not is_error_event("data: [DONE]\n\n")


def test_an_error_event_becomes_an_error() -> None:
    response = create_error_response("maximum context length is 128 tokens", param="prompt")
    error = host_error(f"data: {response.model_dump_json()}\n\n", ALIVE)
    assert isinstance(error, InvalidRequestError)
    assert (error.status, error.param) == (400, "prompt")
    assert error.message == "maximum context length is 128 tokens"


@pytest.mark.parametrize(
    ("cause", "kind", "status"),
    [
        (ValueError("top_p must be in (0, 1], got 7"), InvalidRequestError, 400),
        (VLLMValidationError("too long", parameter="input_text", value=9), InvalidRequestError, 400),
        (NotImplementedError("not for this model"), EngineFailedError, 501),
        (RuntimeError("broken"), EngineFailedError, 500),
    ],
)
def test_exceptions_keep_their_kind(cause: Exception, kind: type[Exception], status: int) -> None:
    error = host_error(cause, ALIVE)
    assert isinstance(error, kind)
    assert error.status == status
    assert error.message


def test_unavailable_stays_503() -> None:
    response = create_error_response("try later")
    response.error.code = 503
    assert isinstance(host_error(response, ALIVE), UnavailableError)


@pytest.mark.parametrize(("cause", "engine"), [(EngineDeadError(), ALIVE), (ValueError("any"), DEAD)])
def test_a_dead_engine_is_said_as_such(cause: Exception, engine: Any) -> None:
    error = host_error(cause, engine)
    assert isinstance(error, EngineFailedError)
    assert (error.status, error.code) == (503, "engine_dead")


def test_before_the_engine_is_there() -> None:
    assert host_error(ValueError("bad"), None).status == 400
    assert json.loads(json.dumps(host_error(ValueError("bad"), None).body()))["error"]["message"] == "bad"
