"""`/v1/models`: the base model and every adapter that answers."""

from __future__ import annotations

import time
from typing import Any

from flask import Flask, Response

from lorahost.adapters.versions import AdapterRecord
from lorahost.errors import AdapterNotFoundError
from lorahost.host import Host
from lorahost.http.exchange import json_bytes

PAGE = 1000


def add_routes(app: Flask, host: Host) -> None:
    """Adds the routes."""
    created = int(time.time())

    def card(name: str, record: AdapterRecord | None) -> dict[str, Any]:
        info = host.info
        body: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "lorahost"}
        if info is not None:
            body["max_model_len"] = info.max_model_len
        if record is not None:
            body |= {
                "parent": host.base_name,
                "root": record.src,
                "digest": record.digest,
                "alias": record.alias,
            }
        return body

    def cards() -> list[dict[str, Any]]:
        records, token = host.registry.list(limit=PAGE)
        while token is not None:
            more, token = host.registry.list(limit=PAGE, next_page_token=token)
            records += more
        return [card(host.base_name, None), *(card(r.name, r) for r in records if r.state == "ready")]

    def list_models() -> Response:
        return Response(json_bytes({"object": "list", "data": cards()}), content_type="application/json")

    def get_model(name: str) -> Response:
        wanted = host.registry.resolve(name) or name
        for one in cards():
            if one["id"] == wanted:
                return Response(json_bytes(one), content_type="application/json")
        raise AdapterNotFoundError(f"model {name!r} is neither the base model nor a ready adapter", param="model")

    app.add_url_rule("/v1/models", "list_models", list_models, methods=["GET"])
    app.add_url_rule("/v1/models/<path:name>", "get_model", get_model, methods=["GET"])
