"""`/invocations` and the OpenAI routes: from an HTTP request to the pipeline and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flask import Flask, Response, request

from lorahost.account import Account
from lorahost.core import Json
from lorahost.errors import HostError
from lorahost.host import Host
from lorahost.http import answering
from lorahost.http.answering import Job, Names, Streaming
from lorahost.http.bodies import read_body
from lorahost.http.exchange import json_bytes
from lorahost.pipeline import Task
from lorahost.requests import attributes, invocation, lmi, selection, streams
from lorahost.requests.headers import decoded
from lorahost.requests.invocation import Invocation, RequestSettings
from lorahost.requests.selection import Choice
from lorahost.requests.streams import StreamWriter

# line ends for Python's `str.splitlines`, and so for httpx; inside JSON they are the same as escapes
LINE_ENDS = ("\x85", "\u2028", "\u2029")


def add_routes(app: Flask, host: Host) -> None:
    """Adds the routes."""
    settings = host.settings
    reading = RequestSettings(
        default_max_new_tokens=settings.lmi_max_new_tokens,
        tgi_compat=settings.tgi_compat,
        unknown_model=settings.unknown_model,
        max_sequences=settings.max_sequences,
    )
    limit = int(settings.max_body_mb * 2**20)

    def invoke() -> Response:
        body = read_body(request.environ, limit, "LORAHOST_MAX_BODY_MB")
        return answering.counted(host, lambda: _run(host, reading, body))

    for route in attributes.INVOCATION_ROUTES:
        app.add_url_rule(route, route, invoke, methods=["POST"])


def _run(host: Host, reading: RequestSettings, body: bytes) -> Response:
    """Reads and runs one request; the gate is left when its answer is complete."""
    headers: Mapping[str, str] = decoded(dict(request.headers))
    asked = invocation.parse(
        body,
        request.headers.get("Content-Type"),
        request.headers.get("Accept"),
        headers,
        reading,
        request.path,
    )
    if asked.session_action is not None:
        answer = host.sessions.handle(asked.session_action, asked.session_id)
        response = Response(json_bytes(answer.body), headers=answer.headers, content_type="application/json")
        response.call_on_close(host.gate.leave)
        return response
    host.sessions.check(asked.session_id)
    choice = answering.chosen(host, lambda names: _choose(names, asked, headers, reading))
    return answering.respond(host, _job(host, asked, choice))


def _choose(names: Names, asked: Invocation, headers: Mapping[str, str], reading: RequestSettings) -> Choice:
    lenient = request.path == "/invocations" and asked.attributes.route is None
    return selection.choose(
        headers,
        request.args,
        asked.body,
        asked.attributes,
        names,
        unknown_model=reading.unknown_model if lenient else "error",
    )


def _job(host: Host, asked: Invocation, choice: Choice) -> Job:
    def whole(answers: list[Json], account: Account) -> tuple[Any, Mapping[str, str]]:
        return answers[0] if asked.lmi is None else lmi.answer(asked.lmi, answers), {}

    task = Task(
        calls=tuple((call.api, call.body) for call in asked.calls),
        adapter=choice.name,
        served_name=choice.alias or choice.name or host.base_name,
        request_id=asked.request_id,
        deadline_s=asked.deadline_s,
    )
    streaming = Streaming(asked.media_type, lambda account: _TextEvents(streams.writer(asked)))
    return Job(
        task,
        choice,
        request.path,
        asked.body,
        whole,
        streaming=streaming if asked.stream else None,
        session_id=asked.session_id,
    )


class _TextEvents:
    """A writer of texts as one of bytes."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer

    def feed(self, event: str) -> list[bytes]:
        return [_wire(part) for part in self._writer.feed(event)]

    def fail(self, error: HostError) -> list[bytes]:
        return [_wire(part) for part in self._writer.fail(error)]

    def finish(self) -> list[bytes]:
        return [_wire(part) for part in self._writer.finish()]


def _wire(part: str) -> bytes:
    """One event in UTF-8, without the characters inside that some clients take for a line's end."""
    if any(mark in part for mark in LINE_ENDS):
        for mark in LINE_ENDS:
            part = part.replace(mark, f"\\u{ord(mark):04x}")
    return part.encode()
