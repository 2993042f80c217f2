"""`/ping` and `/metrics`. Neither touches the engine's loop."""

from __future__ import annotations

from flask import Flask, Response

from lorahost.host import Host
from lorahost.http.exchange import json_bytes
from lorahost.lifecycle import State

PING_WORDS = {State.STARTING: "loading", State.DRAINING: "draining", State.FAILED: "failed"}


def add_routes(app: Flask, host: Host) -> None:
    """Adds the routes."""

    def ping() -> Response:
        state = host.lifecycle.state
        if state is State.READY:
            return Response(b"", status=200)
        body = json_bytes({"status": PING_WORDS[state], "reason": host.lifecycle.reason})
        return Response(body, status=503, content_type="application/json")

    def metrics() -> Response:
        return Response(host.metrics_text(), content_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_url_rule("/ping", "ping", ping, methods=["GET", "POST"])
    app.add_url_rule("/health", "health", ping, methods=["GET"])
    app.add_url_rule("/metrics", "metrics", metrics, methods=["GET"])
