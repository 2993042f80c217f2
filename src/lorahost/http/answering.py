"""One generation for an HTTP client, whatever the API's form: counted in, run on the loop, accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flask import Response, request

from lorahost.account import CLIENT_GONE_STATUS, Account
from lorahost.core import AdapterVersion, Json
from lorahost.errors import HostError, OverloadedError
from lorahost.host import Host
from lorahost.http.exchange import Exchange, Head, Reply, StreamPlan, error_head
from lorahost.pipeline import Task
from lorahost.requests import attributes
from lorahost.requests.headers import CUSTOM_ATTRIBUTES
from lorahost.requests.selection import Choice
from lorahost.transcript import Transcript

WARNING_HEADER = "X-Lorahost-Warning"
WARNING_CHARS = 400


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
        return None if self.is_base(name) else self.host.registry.resolve(name)

    def is_base(self, name: str) -> bool:
        """Whether it is the base model's name."""
        return name == self.base_name


class EventWriter(Protocol):
    """From the engine's events to the client's; each of the bytes returned is written with one write."""

    def feed(self, event: str) -> Iterable[bytes]:
        """What one event of the engine becomes; may be nothing."""

    def fail(self, error: HostError) -> Iterable[bytes]:
        """An error after the first byte, and the end of the stream."""

    def finish(self) -> Iterable[bytes]:
        """Call when the engine's iterator ended."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How a streamed answer looks.

    Attributes:
        content_type: Of the answer.
        writer: Makes the writer of one answer.
    """

    content_type: str
    writer: Callable[[Account], EventWriter]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be generated for a client, and how it is answered.

    Attributes:
        task: For the pipeline.
        choice: Who answers.
        route: For the request log.
        asked: The body as the client sent it, for the request log if prompts are logged.
        whole: The answer's JSON and headers from the engine's answers; for what is not streamed.
        streaming: Only for what is streamed.
        session_id: For the request log.
        headers: More of the answer's headers.
        fault: How an error looks that is the whole answer.
    """

    task: Task
    choice: Choice
    route: str
    asked: Json
    whole: Callable[[list[Json], Account], tuple[Any, Mapping[str, str]]]
    streaming: Streaming | None = None
    session_id: str | None = None
    headers: Mapping[str, str] | None = None
    fault: Callable[[HostError], Head] = error_head


def counted(host: Host, work: Callable[[], Response]) -> Response:
    """Runs `work` as one of the requests that hold a thread; the response's end counts it out (see `respond`).

    Raises:
        OverloadedError: as many are running or waiting as this server takes.
    """
    host.lifecycle.require_ready()
    if not host.gate.enter():
        busy = OverloadedError(
            f"{host.gate.limit} requests are running or waiting already, the limit of this server",
            code="server_busy",
            retry_after_s=1,
            details={"limit": host.gate.limit},
        )
        host.metrics.rejected.labels("other", busy.code).inc()
        raise busy
    try:
        return work()
    except BaseException:
        host.gate.leave()
        raise


def chosen(host: Host, choose: Callable[[Names], Choice]) -> Choice:
    """The choice that `choose` makes; its refusals are counted."""
    try:
        return choose(Names(host))
    except HostError as error:
        host.metrics.rejected.labels("other", error.code).inc()
        raise


def respond(host: Host, job: Job) -> Response:
    """Answers the current HTTP request, which has been counted in; it is counted out when the answer is complete."""

    # on the request's own thread: a long prompt becomes text here
    transcript = Transcript(job.asked) if host.settings.log_prompts else None

    async def work(reply: Reply) -> None:
        await _answer(host, job, transcript, reply)

    exchange = Exchange(
        host.loop,
        request.environ.get("gunicorn.socket"),
        http11=request.environ.get("SERVER_PROTOCOL") == "HTTP/1.1",
        stall_s=host.settings.client_stall_s,
        on_done=host.gate.leave,
        fault=job.fault,
    )
    return exchange.respond(work)


async def _answer(host: Host, job: Job, transcript: Transcript | None, reply: Reply) -> None:
    """Runs on the loop: the pipeline's answer in the client's format, counted and logged however it ends."""
    pipeline = host.pipeline
    current = asyncio.current_task()
    assert current is not None
    host.track(current)
    name = job.choice.name
    label = host.metrics.adapter(name)
    account = Account(job.task.request_id, name, label, job.route, session_id=job.session_id, transcript=transcript)
    inflight = host.metrics.inflight.labels(account.label)
    inflight.inc()
    try:
        if job.streaming is not None:
            await _stream(host, job, job.streaming, account, reply)
        else:
            answers, version = await pipeline.whole(job.task, account)
            body, headers = job.whole(answers, account)
            reply.send(body, {**_headers(job, version), **headers})
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


async def _stream(host: Host, job: Job, streaming: Streaming, account: Account, reply: Reply) -> None:
    writer = streaming.writer(account)

    def open_(version: AdapterVersion | None) -> None:
        reply.plan = StreamPlan(streaming.content_type, _headers(job, version), writer.fail)

    events = host.pipeline.stream(job.task, account, open_)
    try:
        async for event in events:
            for part in writer.feed(event):
                await reply.send_event(part)
        for part in writer.finish():
            await reply.send_event(part)
    finally:
        await events.aclose()


def _headers(job: Job, version: AdapterVersion | None) -> dict[str, str]:
    """The answer's headers, with those that prove who answered."""
    rendered = attributes.render(job.choice.name, version.digest if version else None)
    headers = {CUSTOM_ATTRIBUTES: rendered, **(job.headers or {})}
    if job.choice.warnings:
        text = "; ".join(job.choice.warnings).encode("ascii", "backslashreplace").decode()
        headers[WARNING_HEADER] = text[:WARNING_CHARS]
    return headers
