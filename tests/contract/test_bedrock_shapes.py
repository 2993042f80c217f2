"""Requests drawn from botocore's own service model, right and wrong: never a 500, always in the model's words.

`BEDROCK_REQUESTS` is their number; 2,000 is the heavy run.
"""

from __future__ import annotations

import http.client
import json
import os
from typing import Any

import pytest
from botocore.exceptions import EventStreamError
from botocore.model import ListShape, MapShape, Shape, StringShape, StructureShape
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.fakes.bedrock_client import events, operation, parsed
from tests.fakes.running import Server

REQUESTS = int(os.environ.get("BEDROCK_REQUESTS", "240"))
PATHS = {
    "InvokeModel": "invoke",
    "InvokeModelWithResponseStream": "invoke-with-response-stream",
    "Converse": "converse",
    "ConverseStream": "converse-stream",
}
# what this server serves comes up more often than what it must refuse
SERVED = ("text", "toolUse", "toolResult", "json", "toolSpec", "cachePoint", "reasoningContent", "auto", "jsonSchema")
REFUSED_MEMBERS = ("guardrailConfig", "promptVariables")
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
NUMBERS = st.sampled_from([0, 1, 2, 3, -1, 0.5, 1.5, 10**30, True, 4096])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["weather", "time", "t_1", "get-x"])
OPENAI = {
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": TEXT | JSON}), max_size=3
    )
    | JSON,
    "prompt": TEXT | JSON,
    "max_tokens": NUMBERS,
    "max_gen_len": NUMBERS,
    "stream": st.booleans() | JSON,
    "stream_options": JSON,
    "model": st.sampled_from(["a1", "base", "gone"]) | JSON,
    "deadline_s": NUMBERS | JSON,
    "n": NUMBERS,
    "parameters": JSON,
}


@st.composite
def value(draw: st.DrawFn, shape: Shape, spoilt: bool, depth: int = 0) -> Any:
    """A value of `shape`, or in a spoilt request now and then one of another kind."""
    if depth and spoilt and draw(st.integers(0, 15)) == 9:
        return draw(JSON)
    return draw(_right(shape, spoilt, depth))


def _right(shape: Shape, spoilt: bool, depth: int) -> st.SearchStrategy[Any]:
    if isinstance(shape, StructureShape):
        return _structure(shape, spoilt, depth)
    if isinstance(shape, ListShape):
        least = 1 if shape.name in ("Messages", "ContentBlocks", "ToolConfigurationToolsList") else 0
        return st.lists(st.deferred(lambda: value(shape.member, spoilt, depth + 1)), min_size=least, max_size=2)
    if isinstance(shape, MapShape):
        return st.dictionaries(TEXT, st.deferred(lambda: value(shape.value, spoilt, depth + 1)), max_size=2)
    if isinstance(shape, StringShape):
        if shape.enum:
            return st.sampled_from(shape.enum)
        if shape.name in ("ToolName", "ToolUseId"):
            return NAMES
        if "FieldPath" in shape.name:
            return st.sampled_from(["/id", "/choices/0", "/usage/x", "/"])
        return TEXT if shape.name == "String" and spoilt else st.sampled_from(["hi", "☃", '{"type": "object"}'])
    if shape.type_name == "boolean":
        return st.booleans()
    if shape.type_name == "blob":
        return st.just("aGk=")
    return st.sampled_from([1, 2, 3, 1, 0, 0.5, 1])


@st.composite
def _structure(draw: st.DrawFn, shape: StructureShape, spoilt: bool, depth: int) -> Any:
    if shape.is_document_type:
        keys = TEXT | st.sampled_from([*OPENAI, "top_k"]) if spoilt else st.sampled_from(["top_k", "seed", "city"])
        return draw(st.dictionaries(keys, JSON | NUMBERS, max_size=2))
    members = {name: one for name, one in shape.members.items() if "location" not in one.serialization}
    if shape.is_tagged_union:
        often = [name for name in members if name in SERVED]
        names = [draw(st.sampled_from([*often * 12, *members] if spoilt or not often else often))]
    else:
        usual = [name for name in members if spoilt or name not in REFUSED_MEMBERS]
        optional = draw(st.sets(st.sampled_from(usual), max_size=4)) if usual else set()
        names = [name for name in members if name in shape.required_members or name in optional]
        if "messages" in members and "messages" not in names:
            names.append("messages")
    return {name: draw(value(members[name], spoilt, depth + 1)) for name in names}


def body_of(name: str) -> st.SearchStrategy[Any]:
    if name.startswith("Converse"):
        return st.booleans().flatmap(lambda spoilt: value(operation(name).input_shape, spoilt))
    some = {field: strategy for field, strategy in OPENAI.items() if field not in ("messages", "prompt")}
    optional = {**some, "temperature": NUMBERS, "stop": JSON}
    return st.one_of(
        st.fixed_dictionaries({"messages": OPENAI["messages"]}, optional=optional),
        st.fixed_dictionaries({"prompt": OPENAI["prompt"]}, optional=optional),
        st.dictionaries(st.sampled_from(list(OPENAI)), JSON, max_size=3),
    )


REQUEST = st.sampled_from(list(PATHS)).flatmap(lambda name: st.tuples(st.just(name), body_of(name)))
MODELS = st.sampled_from(["a1", "base", "base%3Aa2", "gone", "arn%3Aaws%3Abedrock%3Aeu%3A1%3Aimported-model%2Fa1"])


@pytest.fixture(scope="module")
def connection(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)


@settings(
    max_examples=REQUESTS,
    deadline=None,
    derandomize="BEDROCK_REQUESTS" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(request=REQUEST, model=MODELS)
def test_any_request_is_answered_in_the_models_words(
    connection: http.client.HTTPConnection, request: tuple[str, Any], model: str
) -> None:
    name, body = request
    connection.request("POST", f"/model/{model}/{PATHS[name]}", json.dumps(body).encode())
    response = connection.getresponse()
    answer = response.read()
    event(f"{name}: {response.status}")
    if response.status != 200:
        errors = {shape.name: shape for shape in operation(name).error_shapes}
        error = errors[response.headers["x-amzn-ErrorType"]]
        assert error.metadata["error"]["httpStatusCode"] == response.status < 500, answer
        assert json.loads(answer)["message"]
    elif name == "Converse":
        assert parsed(name, json.loads(answer)) == json.loads(answer)
    elif name == "InvokeModel":
        assert json.loads(answer)
    else:
        try:
            assert events(name, answer)
        except EventStreamError as error:
            pytest.fail(f"{error}")
