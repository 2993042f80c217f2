"""From bytes to calls: schemas, content types, streaming, ids, deadlines, and every way to be refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorahost.errors import HostError, InvalidRequestError
from lorahost.requests.headers import CUSTOM_ATTRIBUTES, FORWARDED_API, INFERENCE_ID, SESSION_ID, STREAM_API
from lorahost.requests.invocation import Invocation, RequestSettings, parse
from lorahost.requests.schema import ACCEPTED_SCHEMAS

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Once"}
LMI = {"inputs": "Once"}
DEFAULTS = RequestSettings()


def read(
    body: Any,
    content_type: str | None = "application/json",
    accept: str | None = None,
    headers: dict[str, str] | None = None,
    options: RequestSettings = DEFAULTS,
    route: str = "/invocations",
) -> Invocation:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(data, content_type, accept, headers or {}, options, route)


def refusal(*args: Any, **kwargs: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        read(*args, **kwargs)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("body", "kind", "api", "sent"),
    [
        (CHAT, "chat", "chat", CHAT | {"stream": False}),
        (COMPLETION, "completions", "completions", COMPLETION | {"stream": False}),
        (LMI, "lmi", "completions", {"prompt": "Once", "n": 1, "max_tokens": 30, "stream": False}),
        ({"inputs": CHAT["messages"]}, "lmi", "chat", CHAT | {"n": 1, "max_tokens": 30, "stream": False}),
    ],
)
def test_schemas(body: dict[str, Any], kind: str, api: str, sent: dict[str, Any]) -> None:
    found = read(body)
    assert (found.kind, found.stream, found.format, found.media_type) == (
        kind,
        False,
        "json",
        "application/json",
    )
    assert [(call.api, call.body) for call in found.calls] == [(api, sent)]
    assert found.body == body


def test_own_fields_do_not_reach_the_engine_and_others_do() -> None:
    own = {"model": "m", "adapter_id": "a", "adapters": "a", "deadline_s": 5, "request_id": "r"}
    found = read(CHAT | own | {"temperature": 0.5, "tools": [], "parameters": {"adapter_id": "a"}})
    assert found.calls[0].body == CHAT | {"temperature": 0.5, "tools": [], "stream": False}
    assert (found.request_id, found.deadline_s, found.body["model"]) == ("r", 5.0, "m")


def test_openai_bodies_refuse_lmi_parameters() -> None:
    error = refusal(CHAT | {"parameters": {"max_new_tokens": 5}})
    assert (error.code, error.param) == ("unknown_parameter", "parameters")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "fields are none"),
        ({"input": "x", "model": "m"}, "embeddings"),
        ({"documents": [], "query": "x"}, "rerank"),
        ({"instances": []}, "TensorFlow"),
        ({"text": "x"}, "'text'"),
    ],
)
def test_unknown_schemas_get_the_list(body: dict[str, Any], said: str) -> None:
    error = refusal(body)
    assert (error.status, error.code) == (400, "unknown_schema")
    assert said in error.message
    assert all(schema in error.message for schema in ACCEPTED_SCHEMAS)


def test_two_schemas_at_once() -> None:
    error = refusal(CHAT | COMPLETION)
    assert error.code == "ambiguous_schema"
    assert "messages and prompt" in error.message


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_routes_take_their_own_schema(route: str) -> None:
    good, bad = (CHAT, COMPLETION) if "chat" in route else (COMPLETION, CHAT)
    assert read(good, route=route).calls[0].body == good | {"stream": False}
    assert route in refusal(bad, route=route).message
    assert refusal(LMI, route=route).code == "unknown_schema"
    by_attribute = {CUSTOM_ATTRIBUTES: f"route={route}"}
    assert read(good, headers=by_attribute).kind == read(good).kind
    assert refusal(bad, headers=by_attribute).code == "unknown_schema"


def test_a_route_attribute_only_redirects_invocations() -> None:
    headers = {CUSTOM_ATTRIBUTES: "route=/v1/completions"}
    assert refusal(CHAT, headers=headers, route="/v1/chat/completions").code == "conflicting_route"
    with pytest.raises(ValueError, match="/adapters"):
        read(CHAT, route="/adapters")


@pytest.mark.parametrize(
    ("stream", "forwarded", "expected"),
    [
        (True, None, True),
        (True, "InvokeEndpoint", True),
        (False, STREAM_API, False),
        (None, STREAM_API, True),
        (None, STREAM_API.lower(), True),
        (None, "InvokeEndpoint", False),
        (None, None, False),
    ],
)
@pytest.mark.parametrize("body", [CHAT, COMPLETION, LMI])
def test_when_it_streams(body: dict[str, Any], stream: bool | None, forwarded: str | None, expected: bool) -> None:
    headers = {} if forwarded is None else {FORWARDED_API.lower(): forwarded}
    bodies: list[dict[str, Any]] = [{"stream": stream}]
    for asked in [*bodies, {}] if stream is None else bodies:
        found = read(body | asked, headers=headers)
        assert found.stream is expected
        assert found.calls[0].body["stream"] is expected
        assert (found.format == "json") is not expected


@pytest.mark.parametrize("stream", ["true", 1, []])
def test_stream_must_be_a_boolean(stream: Any) -> None:
    assert refusal(CHAT | {"stream": stream}).param == "stream"


@pytest.mark.parametrize(
    ("accept", "openai", "lmi"),
    [
        (None, "sse", "jsonlines"),
        ("application/json", "sse", "jsonlines"),
        ("*/*", "sse", "jsonlines"),
        ("text/event-stream", "sse", "sse"),
        ("application/jsonlines", "jsonlines", "jsonlines"),
        ("application/x-ndjson;q=0.9, */*", "jsonlines", "jsonlines"),
        ("application/jsonlines;q=0.5, Text/Event-Stream;q=0.8", "sse", "sse"),
        ("text/event-stream, application/jsonlines", "sse", "sse"),
        ("text/event-stream;q=0", "sse", "jsonlines"),
        ("text/event-stream;q=x", "sse", "jsonlines"),
    ],
)
def test_accept_chooses_the_stream_format(accept: str | None, openai: str, lmi: str) -> None:
    assert read(CHAT | {"stream": True}, accept=accept).format == openai
    assert read(LMI | {"stream": True}, accept=accept).format == lmi
    assert read(LMI, accept=accept).format == "json"


def test_tgi_compat_streams_sse() -> None:
    options = RequestSettings(tgi_compat=True)
    assert read(LMI | {"stream": True}, options=options).media_type == "text/event-stream"


def test_request_id() -> None:
    assert read(LMI | {"request_id": "body"}, headers={INFERENCE_ID.lower(): "head-1"}).request_id == "head-1"
    assert read(LMI | {"request_id": "body"}).request_id == "body"
    first, second = read(LMI).request_id, read(LMI).request_id
    assert first != second
    assert len(first) == 32
    assert "65 characters; the limit is 64" in refusal(LMI, headers={INFERENCE_ID: "a" * 65}).message
    for bad in ("a\x01", "é", 5, ""):
        assert refusal(LMI | {"request_id": bad}).param == "request_id"


def test_deadline() -> None:
    by_attribute = {CUSTOM_ATTRIBUTES: "deadline_s=7.5"}
    assert read(LMI).deadline_s is None
    assert read(LMI, headers=by_attribute).deadline_s == 7.5
    assert read(LMI | {"deadline_s": 55}, headers=by_attribute).deadline_s == 55
    for bad in (0, -1, True, "5", 3601, [1]):
        error = refusal(LMI | {"deadline_s": bad})
        assert error.param == "deadline_s"
        assert "3600" in error.message
    for text in ("nan", "inf", "soon"):
        assert "CustomAttributes deadline_s" in refusal(LMI, headers={CUSTOM_ATTRIBUTES: f"deadline_s={text}"}).message


def test_session_control() -> None:
    opened = read({"requestType": "NEW_SESSION"}, headers={SESSION_ID: "NEW_SESSION"})
    assert (opened.kind, opened.session_action, opened.session_id, opened.calls) == (
        "session",
        "NEW_SESSION",
        None,
        (),
    )
    closed = read({"requestType": "CLOSE"}, headers={SESSION_ID.lower(): "s-1"})
    assert (closed.session_action, closed.session_id) == ("CLOSE", "s-1")
    assert read(LMI, headers={SESSION_ID: "s-1"}).session_id == "s-1"


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        ({"requestType": "OPEN"}, {}, "invalid_parameter"),
        ({"requestType": None}, {}, "invalid_parameter"),
        ({"requestType": "CLOSE", "id": 1}, {}, "unknown_parameter"),
        ({"requestType": "CLOSE", "prompt": "x"}, {}, "ambiguous_schema"),
        ({"requestType": "NEW_SESSION"}, {FORWARDED_API: STREAM_API}, "session_on_stream"),
    ],
)
def test_bad_session_control(body: dict[str, Any], headers: dict[str, str], code: str) -> None:
    assert refusal(body, headers=headers).code == code


def error_of(*args: Any, **kwargs: Any) -> HostError | None:
    """The refusal, whose body must be JSON; any other exception passes through and fails the test."""
    try:
        read(*args, **kwargs)
    except HostError as error:
        json.dumps(error.body(), allow_nan=False)
        return error
    return None


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TOP_LEVEL = ("messages", "prompt", "inputs", "requestType", "parameters", "stream", "model", "adapters", "deadline_s")
NESTED = ("max_new_tokens", "details", "stop", "temperature", "n", "seed", "role", "adapter_id", "request_id")
NAMES = st.sampled_from((*TOP_LEVEL, *NESTED, "logit_bias"))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=5)
ROUTES = st.sampled_from(["/invocations", "/v1/chat/completions", "/v1/completions"])


@settings(max_examples=300)
@given(st.binary(max_size=60), st.none() | st.text(max_size=30), st.none() | st.text(max_size=30), ROUTES)
def test_arbitrary_bytes_raise_only_host_errors(
    body: bytes, content_type: str | None, accept: str | None, route: str
) -> None:
    error = error_of(body, content_type, accept, route=route)
    assert error is None or error.status in (400, 415)


@settings(max_examples=500)
@given(BODIES, ROUTES, st.text(max_size=20), st.text(max_size=20))
def test_arbitrary_json_raises_only_host_errors(body: dict[str, Any], route: str, attributes: str, name: str) -> None:
    headers = {CUSTOM_ATTRIBUTES: attributes, INFERENCE_ID: name, FORWARDED_API: STREAM_API}
    data = json.dumps(body).encode()
    error = error_of(data, None, headers=headers, route=route)
    if error is not None:
        assert error.status == 400
        return
    found = read(data, None, headers=headers, route=route)
    assert all(call.body.keys() & {"messages", "prompt"} for call in found.calls)
    json.dumps([call.body for call in found.calls], allow_nan=False)


@settings(max_examples=300)
@given(st.dictionaries(NAMES, VALUES, max_size=4), st.booleans())
def test_arbitrary_lmi_parameters_raise_only_host_errors(parameters: dict[str, Any], stream: bool) -> None:
    error = error_of({"inputs": "x", "parameters": parameters, "stream": stream})
    assert error is None or error.status == 400
