"""From the bytes and headers of an invocation to the OpenAI calls that answer it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lorahost.core import Api, Json
from lorahost.requests import attributes as custom_attributes
from lorahost.requests import lmi, schema, sequences
from lorahost.requests.attributes import Attributes
from lorahost.requests.headers import (
    CUSTOM_ATTRIBUTES,
    FORWARDED_API,
    INFERENCE_ID,
    SESSION_ID,
    STREAM_API,
    header,
)
from lorahost.requests.jsonbody import read_object
from lorahost.requests.problems import invalid, shown
from lorahost.requests.schema import Kind
from lorahost.requests.selection import UnknownModel
from lorahost.requests.sessions import NEW_SESSION, SessionAction

Format = Literal["json", "sse", "jsonlines"]

MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "sse": "text/event-stream",
    "jsonlines": "application/jsonlines",
}
# Ours; the engine must not see them.
_OWN_FIELDS = frozenset({"model", "adapters", "adapter_id", "deadline_s", "request_id", "parameters"})
_MAX_REQUEST_ID_CHARS = 64
_ACCEPTED_FORMATS: dict[str, Format] = {
    "text/event-stream": "sse",
    "application/jsonlines": "jsonlines",
    "application/x-ndjson": "jsonlines",
}


class RequestSettings(BaseModel):
    """How requests are read.

    Attributes:
        default_max_new_tokens: LMI `max_new_tokens` when a request has none.
        max_inputs: Most prompts in one LMI request.
        tgi_compat: Answers LMI requests with a list, and streams them as SSE, as TGI does.
        unknown_model: What a body's unknown `model` means on /invocations (see `selection`).
        max_deadline_s: Longest `deadline_s`, in seconds.
        max_sequences: Most sequences of one request, prompts times `n`.
    """

    model_config = ConfigDict(frozen=True)

    default_max_new_tokens: int = Field(default=30, ge=1)
    max_inputs: int = Field(default=1024, ge=1)
    tgi_compat: bool = False
    unknown_model: UnknownModel = "error"
    max_deadline_s: float = Field(default=3600.0, gt=0)
    max_sequences: int = Field(default=128, ge=1)


@dataclass(frozen=True, slots=True)
class Call:
    """One OpenAI call, without `model`."""

    api: Api
    body: Json


@dataclass(frozen=True, slots=True)
class Invocation:
    """A request that was read and found well-formed.

    Attributes:
        kind: Schema of the request, and so of the answer.
        body: The request as sent; `selection.choose` reads it.
        attributes: The custom attributes.
        calls: What to run; none for session control, several only for a list of LMI conversations. Only one
            call streams.
        format: Of the answer; "json" exactly when `stream` is False.
        stream: Whether tokens are sent as they come.
        request_id: The caller's, or generated. Callers may repeat theirs.
        deadline_s: Seconds after which to answer with what there is, or None.
        session_id: The session header, unless it asks for a new one.
        session_action: Only for session control.
        lmi: How to turn the calls' answers into LMI's, for kind "lmi".
    """

    kind: Kind
    body: Json
    attributes: Attributes
    calls: tuple[Call, ...]
    format: Format
    stream: bool
    request_id: str
    deadline_s: float | None = None
    session_id: str | None = None
    session_action: SessionAction | None = None
    lmi: lmi.LmiPlan | None = field(default=None)

    @property
    def media_type(self) -> str:
        return MEDIA_TYPES[self.format]


def parse(
    body: bytes,
    content_type: str | None,
    accept: str | None,
    headers: Mapping[str, str],
    settings: RequestSettings,
    route: str = "/invocations",
) -> Invocation:
    """Reads one request.

    Args:
        body: As received.
        content_type: Missing means JSON.
        accept: Chooses between SSE and JSON lines for streams; anything else leaves the schema's default.
        headers: The HTTP headers; names in any case.
        settings: Defaults and limits.
        route: The path it came in on, one of `INVOCATION_ROUTES`; /invocations tells schemas apart by their
        fields.

    Raises:
        InvalidRequestError: 415 for the Content-Type, else 400; the message names field, value and limit.
    """
    attributes = custom_attributes.parse(header(headers, CUSTOM_ATTRIBUTES))
    data = read_object(body, content_type)
    kind = schema.detect(data, schema.effective_route(route, attributes))
    forwarded_stream = (header(headers, FORWARDED_API) or "").lower() == STREAM_API.lower()
    session_id = header(headers, SESSION_ID)
    common: dict[str, Any] = {
        "kind": kind,
        "body": data,
        "attributes": attributes,
        "request_id": _request_id(header(headers, INFERENCE_ID), data),
        "session_id": None if session_id == NEW_SESSION else session_id,
    }
    if kind == "session":
        action = schema.session_action(data, forwarded_stream)
        return Invocation(**common, calls=(), format="json", stream=False, session_action=action)
    stream = _stream(data, forwarded_stream)
    deadline_s = deadline(data, attributes, settings)
    plan: lmi.LmiPlan | None = None
    if kind == "lmi":
        bodies, plan = lmi.calls(
            data,
            stream=stream,
            deadline=deadline_s is not None,
            default_max_new_tokens=settings.default_max_new_tokens,
            max_inputs=settings.max_inputs,
            tgi_compat=settings.tgi_compat,
        )
        calls = tuple(Call(plan.api, one) for one in bodies)
    else:
        calls = (Call("chat" if kind == "chat" else "completions", openai_body(data, stream)),)
    sequences.check((call.body for call in calls), settings.max_sequences)
    return Invocation(
        **common,
        calls=calls,
        format=_format(accept, kind, settings) if stream else "json",
        stream=stream,
        deadline_s=deadline_s,
        lmi=plan,
    )


def _stream(data: Json, forwarded_stream: bool) -> bool:
    value = data.get("stream")
    if value is None:
        return forwarded_stream
    if not isinstance(value, bool):
        raise invalid(f"stream is {shown(value)}; it must be true or false", param="stream", code="invalid_type")
    return value


def openai_body(data: Json, stream: bool) -> Json:
    """The engine's part of an OpenAI body, without the host's own fields.

    Raises:
        InvalidRequestError: `parameters` beside OpenAI's fields, or `stream_options` that are no object.
    """
    parameters = data.get("parameters")
    if parameters is not None and (not isinstance(parameters, dict) or parameters.keys() - {"adapter_id"}):
        raise invalid(
            f"parameters is {shown(parameters)}; beside messages or prompt it may only hold adapter_id: "
            "OpenAI fields stand at the top level",
            param="parameters",
            code="unknown_parameter",
        )
    options = data.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid(
            f"stream_options is {shown(options)}; it must be an object", param="stream_options", code="invalid_type"
        )
    body = {name: value for name, value in data.items() if name not in _OWN_FIELDS}
    body["stream"] = stream
    return body


def _request_id(inference_id: str | None, data: Json) -> str:
    field_name, value = (INFERENCE_ID, inference_id) if inference_id else ("request_id", data.get("request_id"))
    if value is None:
        return uuid.uuid4().hex
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or not value.strip():
        raise invalid(
            f"{field_name} is {shown(value)}; it must be printable ASCII text",
            param=field_name,
            code="invalid_parameter",
        )
    if len(value) > _MAX_REQUEST_ID_CHARS:
        raise invalid(
            f"{field_name} has {len(value)} characters; the limit is {_MAX_REQUEST_ID_CHARS}",
            param=field_name,
            code="invalid_parameter",
        )
    return value


def deadline(data: Json, attributes: Attributes, settings: RequestSettings) -> float | None:
    """`deadline_s` of the body, else of the custom attributes, in seconds.

    Raises:
        InvalidRequestError: not a number above 0 and up to `max_deadline_s`.
    """
    value: Any = data.get("deadline_s")
    field_name = "deadline_s"
    if value is None and attributes.deadline_s is not None:
        field_name = "CustomAttributes deadline_s"
        try:
            value = float(attributes.deadline_s)
        except ValueError:
            value = attributes.deadline_s
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Written so that NaN, which a header can hold, is refused too.
    if not is_number or not 0 < value <= settings.max_deadline_s:
        raise invalid(
            f"{field_name} is {shown(value)}; it must be seconds above 0, up to {settings.max_deadline_s:g}",
            param=field_name,
            code="invalid_parameter",
        )
    return float(value)


def _format(accept: str | None, kind: Kind, settings: RequestSettings) -> Format:
    """The streaming format with the highest q in `accept`, the first of equals; else the schema's default."""
    best: tuple[float, Format] | None = None
    for entry in (accept or "").split(","):
        media_type, *parameters = (part.strip().lower() for part in entry.split(";"))
        chosen = _ACCEPTED_FORMATS.get(media_type)
        quality = _quality(parameters)
        if chosen is not None and quality > 0 and (best is None or quality > best[0]):
            best = (quality, chosen)
    if best is not None:
        return best[1]
    return "jsonlines" if kind == "lmi" and not settings.tgi_compat else "sse"


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
