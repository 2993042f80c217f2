"""`/invocations` and the OpenAI routes: from an HTTP request to the pipeline and back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, request

from lorahost.core import AdapterVersion
from lorahost.errors import HostError, OverloadedError
from lorahost.host import Host
from lorahost.http.bodies import read_body
from lorahost.http.exchange import CLIENT_GONE_STATUS, Exchange, Reply, StreamPlan, json_bytes
from lorahost.pipeline import Account, Task
from lorahost.requests import attributes, invocation, lmi, selection, streams
from lorahost.requests.headers import CUSTOM_ATTRIBUTES
from lorahost.requests.invocation import Invocation, RequestSettings
from lorahost.requests.selection import Choice

WARNING_HEADER = "X-Lorahost-Warning"
WARNING_CHARS = 400
# line ends for Python's `str.splitlines`, and so for httpx; in JSON they stand inside strings, where escapes are the same
LINE_ENDS = ("\x85", "\u2028", "\u2029")


@dataclass(frozen=True, slots=True)
class Names:
    """The names that requests may use, for `selection`."""

    host: Host

    @property
    def base_name(self) -> str:
        """The base model's public name."""
        return self.host.base_name

    def resolve(self, name: str) -> str | None:
        """The registered adapter of that name or alias."""
        return self.host.registry.resolve(name)

    def is_base(self, name: str) -> bool:
        """Whether it is the base model's name."""
        return name == self.base_name


def add_routes(app: Flask, host: Host) -> None:
    """Adds the routes."""
    settings = host.settings
    reading = RequestSettings(
        default_max_new_tokens=settings.lmi_max_new_tokens,
        tgi_compat=settings.tgi_compat,
        unknown_model=settings.unknown_model,
    )
    limit = int(settings.max_body_mb * 2**20)

    def invoke() -> Response:
        body = read_body(request.environ, limit, "LORAHOST_MAX_BODY_MB")
        host.lifecycle.require_ready()
        if not host.gate.enter():
            host.metrics.rejected.labels("other", "busy").inc()
            raise OverloadedError(
                f"{host.gate.limit} requests are running or waiting already, the limit of this server",
                code="server_busy",
                retry_after_s=1,
                details={"limit": host.gate.limit},
            )
        try:
            return _run(host, reading, body)
        except BaseException:
            host.gate.leave()
            raise

    for route in attributes.INVOCATION_ROUTES:
        app.add_url_rule(route, route, invoke, methods=["POST"])


def _run(host: Host, reading: RequestSettings, body: bytes) -> Response:
    """Reads and runs one request; the gate is left when its answer is complete."""
    headers: Mapping[str, str] = dict(request.headers)
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
    choice = _choose(host, asked, headers, reading)
    sock = request.environ.get("gunicorn.socket")
    http11 = request.environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
    path = request.path

    async def work(reply: Reply) -> None:
        await _answer(host, asked, choice, path, reply)

    exchange = Exchange(host.loop, sock, http11=http11, stall_s=host.settings.client_stall_s, on_done=host.gate.leave)
    return exchange.respond(work)


def _choose(host: Host, asked: Invocation, headers: Mapping[str, str], reading: RequestSettings) -> Choice:
    lenient = request.path == "/invocations" and asked.attributes.route is None
    try:
        return selection.choose(
            headers,
            request.args,
            asked.body,
            asked.attributes,
            Names(host),
            unknown_model=reading.unknown_model if lenient else "error",
        )
    except HostError as error:
        host.metrics.rejected.labels("other", error.code).inc()
        raise


async def _answer(host: Host, asked: Invocation, choice: Choice, path: str, reply: Reply) -> None:
    """Runs on the loop: the pipeline's answer in the client's format, counted and logged however it ends."""
    pipeline = host.pipeline
    current = asyncio.current_task()
    assert current is not None
    host.track(current)
    account = Account(
        asked.request_id, choice.name, host.metrics.adapter(choice.name), path, session_id=asked.session_id
    )
    task = Task(
        calls=tuple((call.api, call.body) for call in asked.calls),
        adapter=choice.name,
        served_name=choice.alias or choice.name or host.base_name,
        request_id=asked.request_id,
        deadline_s=asked.deadline_s,
    )
    inflight = host.metrics.inflight.labels(account.label)
    inflight.inc()
    try:
        if asked.stream:
            await _stream(host, asked, choice, task, account, reply)
        else:
            answers, version = await pipeline.whole(task, account)
            body: Any = answers[0] if asked.lmi is None else lmi.answer(asked.lmi, answers)
            reply.send(body, _identity(choice, version))
    except HostError as error:
        account.code, account.error = error.status, error.message
        if account.version is None:
            host.metrics.rejected.labels(account.label, error.code).inc()
        raise
    except (asyncio.CancelledError, ConnectionError):
        account.code = CLIENT_GONE_STATUS if reply.client_gone else 503
        raise
    except BaseException:
        account.code = 500
        raise
    finally:
        inflight.dec()
        pipeline.finish(account)


async def _stream(host: Host, asked: Invocation, choice: Choice, task: Task, account: Account, reply: Reply) -> None:
    writer = streams.writer(asked)

    def open_(version: AdapterVersion | None) -> None:
        reply.plan = StreamPlan(
            asked.media_type,
            _identity(choice, version),
            lambda error: [_wire(part) for part in writer.fail(error)],
        )

    events = host.pipeline.stream(task, account, open_)
    try:
        async for event in events:
            for part in writer.feed(event):
                await reply.send_event(_wire(part))
        for part in writer.finish():
            await reply.send_event(_wire(part))
    finally:
        await events.aclose()


def _wire(part: str) -> bytes:
    """One event in UTF-8, without the characters inside that some clients take for a line's end."""
    if any(mark in part for mark in LINE_ENDS):
        for mark in LINE_ENDS:
            part = part.replace(mark, f"\\u{ord(mark):04x}")
    return part.encode()


def _identity(choice: Choice, version: AdapterVersion | None) -> dict[str, str]:
    """Headers that prove who answered."""
    rendered = attributes.render(choice.name, version.digest if version else None)
    headers = {CUSTOM_ATTRIBUTES: rendered}
    if choice.warnings:
        text = "; ".join(choice.warnings).encode("ascii", "backslashreplace").decode()
        headers[WARNING_HEADER] = text[:WARNING_CHARS]
    return headers
