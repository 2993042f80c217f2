"""`/adapters` and its aliases under `/models/{model}/adapters`: SageMaker's adapter contract."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flask import Flask, Response, request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lorahost.adapters.versions import AdapterRecord
from lorahost.errors import InvalidRequestError, OverloadedError
from lorahost.host import Host
from lorahost.http.bodies import read_body
from lorahost.http.exchange import json_bytes
from lorahost.requests import attributes
from lorahost.requests.headers import ADAPTER_ALIAS, decoded, header
from lorahost.requests.jsonbody import read_object

log = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)
BODY_LIMIT_BYTES = 1 << 20
DIGEST_CHARS = 12
DRAIN_TIMEOUT_S = 25.0


class RegisterBody(BaseModel):
    """POST /adapters; from a JSON body, the query, or both, the body first.

    Unknown fields are named in the answer and the log rather than refused: the platform may send new ones.
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=256)
    src: str = Field(min_length=1, max_length=2048)
    preload: bool = True
    pin: bool = False

    @field_validator("name")
    @classmethod
    def _fits_header(cls, name: str) -> str:
        """Every answer names its adapter in a header, percent-encoded."""
        attributes.render(name, "0" * DIGEST_CHARS)
        return name


class UpdateBody(BaseModel):
    """POST /adapters/{name}/update; what is absent stays as it is."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    src: str | None = Field(default=None, min_length=1, max_length=2048)
    preload: bool | None = None
    pin: bool | None = None


def add_routes(app: Flask, host: Host) -> None:
    """Adds the routes."""

    def guarded(handler: Callable[..., Response]) -> Callable[..., Response]:
        """Bounds how many HTTP threads adapter changes may hold, so that /ping always finds one."""

        def handle(model: str | None = None, **path: str) -> Response:
            host.lifecycle.require_serving_adapters()
            if not host.admin_gate.enter():
                raise OverloadedError(
                    f"{host.admin_gate.limit} adapter changes are running already",
                    code="too_many_changes",
                    retry_after_s=2,
                )
            try:
                return handler(**path)
            finally:
                host.admin_gate.leave()

        return handle

    def require_lora() -> None:
        if not host.settings.lora:
            raise InvalidRequestError("this server serves the base model alone (LORAHOST_LORA=false)", code="lora_off")

    def register() -> Response:
        require_lora()
        fields = _fields(RegisterBody)
        alias = header(decoded(dict(request.headers)), ADAPTER_ALIAS)
        record = host.run(
            host.registry.register(fields.name, fields.src, alias=alias, preload=fields.preload, pin=fields.pin)
        )
        return _status("registered", alias or fields.name, record, _unknown(fields))

    def update(name: str) -> Response:
        require_lora()
        fields = _fields(UpdateBody)
        if fields.name is not None and fields.name != name:
            raise InvalidRequestError(f"name is {fields.name!r} in the body and {name!r} in the path", param="name")
        record = host.run(host.registry.update(name, src=fields.src, preload=fields.preload, pin=fields.pin))
        return _status("updated", name, record, _unknown(fields))

    def remove(name: str) -> Response:
        record = host.run(host.registry.remove(name, drain_timeout_s=DRAIN_TIMEOUT_S))
        alias = header(decoded(dict(request.headers)), ADAPTER_ALIAS)
        if record.in_flight or record.versions_draining:
            return _status("unregistered", alias or name, record)
        return _json({"status": f"Adapter {alias or name} unregistered"})

    def describe(model: str | None = None, *, name: str) -> Response:
        return _json(_shown(host.registry.get(name)))

    def list_(model: str | None = None) -> Response:
        limit = _limit(request.args.get("limit"))
        records, token = host.registry.list(limit, request.args.get("next_page_token"))
        page: dict[str, Any] = {"adapters": [_shown(record) for record in records]}
        return _json(page if token is None else {"nextPageToken": token, **page})

    for root, where in (("/adapters", ""), ("/models/<model>/adapters", "model_")):
        app.add_url_rule(root, f"{where}register", guarded(register), methods=["POST"])
        app.add_url_rule(root, f"{where}list", list_, methods=["GET"])
        app.add_url_rule(f"{root}/<path:name>/update", f"{where}update", guarded(update), methods=["POST"])
        app.add_url_rule(f"{root}/<path:name>", f"{where}describe", describe, methods=["GET"])
        app.add_url_rule(f"{root}/<path:name>", f"{where}remove", guarded(remove), methods=["DELETE"])


def _fields(kind: type[B]) -> B:
    """The query's parameters, overruled by the JSON body's."""
    body = read_body(request.environ, BODY_LIMIT_BYTES)
    merged: dict[str, Any] = dict(request.args)
    if body.strip():
        # whatever the platform calls it
        merged |= read_object(body, None)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        got = "" if first["type"] == "missing" else f" (got {str(first['input'])[:80]!r})"
        raise InvalidRequestError(f"{field}: {first['msg']}{got}", code="invalid_parameter", param=field) from error


def _limit(text: str | None) -> int:
    if text is None:
        return 100
    try:
        return int(text)
    except ValueError:
        raise InvalidRequestError(f"limit is {text[:80]!r}; it must be an integer", param="limit") from None


def _shown(record: AdapterRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "src": record.src,
        "preload": record.preload,
        "pin": record.pin,
        "alias": record.alias,
        "state": record.state,
        "reason": record.reason,
        "last_error": record.last_error,
        "incoming": record.incoming,
        "digest": record.digest,
        "rank": record.rank,
        "modules": record.modules,
        "bytes": record.bytes,
        "loaded": record.loaded,
        "in_flight": record.in_flight,
        "versions_draining": record.versions_draining,
        "seconds": record.seconds,
        "warnings": list(record.warnings),
    }


def _unknown(fields: BaseModel) -> list[str]:
    """One sentence for each field that means nothing here."""
    known = ", ".join(type(fields).model_fields)
    warnings = [
        f"field {name[:80]!r} is unknown and was ignored; known are {known}" for name in fields.model_extra or {}
    ]
    for warning in warnings:
        log.warning("adapter request: %s", warning)
    return warnings


def _status(what: str, shown_name: str, record: AdapterRecord, warnings: Sequence[str] = ()) -> Response:
    body: dict[str, Any] = {"status": f"Adapter {shown_name} {what}", "adapter": _shown(record)}
    return _json(body | {"warnings": list(warnings)} if warnings else body)


def _json(body: Any) -> Response:
    return Response(json_bytes(body), content_type="application/json")
