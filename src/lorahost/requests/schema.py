"""Which schema a request body is written in, told by its fields."""

from __future__ import annotations

from typing import Literal

from lorahost.core import Json
from lorahost.requests.attributes import INVOCATION_ROUTES, Attributes
from lorahost.requests.headers import STREAM_API
from lorahost.requests.problems import invalid, shown
from lorahost.requests.sessions import SessionAction

Kind = Literal["chat", "completions", "lmi", "session"]

ACCEPTED_SCHEMAS = (
    "messages (OpenAI chat completions)",
    "prompt (OpenAI completions)",
    "inputs with parameters (LMI, TGI)",
    "requestType (session control)",
)
_MARKERS: dict[str, Kind] = {
    "messages": "chat",
    "prompt": "completions",
    "inputs": "lmi",
    "requestType": "session",
}
_ROUTE_KINDS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
_OTHER_SCHEMAS = {
    "input": "embeddings or responses",
    "input_ids": "token ids",
    "documents": "rerank",
    "query": "rerank",
    "text_1": "score",
    "instances": "TensorFlow Serving",
    "inputText": "Titan",
}


def effective_route(route: str, attributes: Attributes) -> str:
    """`route`, or for /invocations the one that the custom attributes ask for.

    Raises:
        InvalidRequestError: a route of its own was called, but the attributes ask for another.
    """
    if route not in INVOCATION_ROUTES:
        raise ValueError(f"route is {route!r}; expected one of {INVOCATION_ROUTES}")
    if attributes.route is None or attributes.route == route:
        return route
    if route != "/invocations":
        raise invalid(
            f"CustomAttributes route is {attributes.route}, but the request came in on {route}",
            param="CustomAttributes",
            code="conflicting_route",
        )
    return attributes.route


def detect(data: Json, route: str) -> Kind:
    """The schema of `data`, which must be the one that `route` takes.

    Raises:
        InvalidRequestError: no schema's field is there, or those of two; the message lists what is accepted.
    """
    markers = [name for name in _MARKERS if name in data]
    wanted = _ROUTE_KINDS.get(route)
    if len(markers) > 1:
        raise invalid(
            f"the body has {' and '.join(markers)}, which belong to different schemas; send one of them",
            param=markers[1],
            code="ambiguous_schema",
        )
    if not markers:
        raise _unknown_schema(data, wanted, route)
    kind = _MARKERS[markers[0]]
    if wanted is not None and kind != wanted:
        raise _unknown_schema(data, wanted, route)
    return kind


def _unknown_schema(data: Json, wanted: Kind | None, route: str) -> Exception:
    if wanted is not None:
        accepted: tuple[str, ...] = (ACCEPTED_SCHEMAS[0 if wanted == "chat" else 1],)
    else:
        accepted = ACCEPTED_SCHEMAS
    guess = next((f" ({schema}: not served here)" for name, schema in _OTHER_SCHEMAS.items() if name in data), "")
    fields = ", ".join(sorted(shown(name) for name in data)[:8]) or "none"
    return invalid(
        f"the body's fields are {fields}{guess}; {route} accepts a body with {'; or '.join(accepted)}",
        code="unknown_schema",
        accepted=list(accepted),
    )


def session_action(data: Json, forwarded_stream: bool) -> SessionAction:
    """What a session request asks for.

    Raises:
        InvalidRequestError: unknown `requestType`, other fields beside it, or a new session on the streaming
        API.
    """
    action = data["requestType"]
    if action not in ("NEW_SESSION", "CLOSE"):
        raise invalid(
            f"requestType is {shown(action)}; accepted are NEW_SESSION and CLOSE",
            param="requestType",
            code="invalid_parameter",
        )
    if others := sorted(data.keys() - {"requestType"}):
        raise invalid(
            f"a body with requestType has no other fields, but has {', '.join(map(shown, others[:8]))}",
            param=others[0],
            code="unknown_parameter",
        )
    if action == "NEW_SESSION" and forwarded_stream:
        raise invalid(
            f"a session can't be opened through {STREAM_API}; use InvokeEndpoint",
            param="requestType",
            code="session_on_stream",
        )
    return "NEW_SESSION" if action == "NEW_SESSION" else "CLOSE"
