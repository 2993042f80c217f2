"""One HTTP request between its gunicorn thread and the engine's loop.

The thread starts the work on the loop and sleeps. The loop answers once: a whole body, which the thread sends, or
the head of a stream with its first event. In the latter case the thread sends head and event, hands the socket to
the loop, and wakes again when the stream is complete.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import queue
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from flask import Response

from lorahost.account import CLIENT_GONE_STATUS
from lorahost.engine.loop import EngineLoop
from lorahost.errors import EngineFailedError, HostError, UnavailableError
from lorahost.http.client_socket import ClientGoneError, ClientSocket

log = logging.getLogger(__name__)
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Head:
    """What the HTTP thread sends first: a whole body, or the first event of a stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: bool = False


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How a stream looks: its head, and the events that say an error inside it."""

    content_type: str
    headers: Mapping[str, str]
    error_events: Callable[[HostError], Iterable[bytes]]


def json_bytes(body: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def error_head(error: HostError) -> Head:
    """The head and body of an error answer."""
    headers = {"Content-Type": "application/json"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return Head(error.status, headers, json_bytes(error.body()))


class Reply:
    """The loop's side of one exchange."""

    def __init__(
        self, head: Future[Head], client: ClientSocket | QueuedStream, fault: Callable[[HostError], Head]
    ) -> None:
        self._head = head
        self._client = client
        self._fault = fault
        self.plan: StreamPlan | None = None
        self.status: int | None = None

    def send(self, body: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
        """Answers with one JSON body."""
        self._open(Head(status, {"Content-Type": "application/json", **(headers or {})}, json_bytes(body)))

    def fail(self, error: HostError) -> None:
        """Answers with an error: as the whole answer, or as the last event of a stream that has begun."""
        if self.status is None:
            self._open(self._fault(error))
        elif self.plan is not None:
            for event in self.plan.error_events(error):
                self._client.send(event)

    async def send_event(self, event: bytes) -> None:
        """Sends one event of the stream described by `plan`; the first one opens it.

        Raises:
            ClientGoneError: nobody reads any more.
        """
        if self.status is None:
            assert self.plan is not None
            headers = {"Content-Type": self.plan.content_type, **STREAM_HEADERS, **self.plan.headers}
            self._open(Head(200, headers, event, stream=True))
        else:
            self._client.send(event)
            await self._client.room()

    def _open(self, head: Head) -> None:
        self.status = head.status
        if not head.stream:
            self._client.release()
        if not self._head.cancelled():
            self._head.set_result(head)

    @property
    def client_gone(self) -> bool:
        """Whether the client is known to have left."""
        return self._client.gone


class QueuedStream:
    """Stands in for `ClientSocket` where the HTTP server shows no socket: events pass through a queue."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.gone = False

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Nothing to watch."""

    def send(self, event: bytes) -> None:
        """Queues one event."""
        self.events.put(event)

    async def room(self) -> None:
        """There is always room."""

    async def flushed(self) -> None:
        """The thread drains the queue by itself."""

    def attach(self) -> None:
        """Nothing to hand over."""

    def release(self) -> None:
        """Tells the thread that the stream is complete."""
        self.events.put(None)


Work = Callable[[Reply], Coroutine[Any, Any, None]]


class Exchange:
    """The HTTP thread's side. Create one per request and call `respond`.

    Args:
        loop: The engine's loop.
        sock: The client's connection, if the HTTP server shows it.
        http11: Whether the client speaks HTTP/1.1 and so takes chunks.
        on_done: Called once, from the HTTP thread, when the answer has been sent.
        fault: How an error looks as a whole answer.
    """

    def __init__(
        self,
        loop: EngineLoop,
        sock: socket.socket | None,
        *,
        http11: bool,
        stall_s: float,
        on_done: Callable[[], None],
        fault: Callable[[HostError], Head] = error_head,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._http11 = http11
        self._stall_s = stall_s
        self._on_done = on_done
        self._fault = fault
        self._client: ClientSocket | QueuedStream | None = None
        self._task: asyncio.Task[None] | None = None

    def respond(self, work: Work) -> Response:
        """Runs `work` on the loop and answers with what it says."""
        head: Future[Head] = Future()
        done = self._loop.submit(self._serve(work, head))
        first = head.result()
        if first.stream:
            response = Response(self._stream(first, done), status=first.status, headers=dict(first.headers))
        else:
            done.result()
            response = Response(first.body, status=first.status, headers=dict(first.headers))
        response.call_on_close(lambda: self._close(done))
        return response

    async def _serve(self, work: Work, head: Future[Head]) -> None:
        client: ClientSocket | QueuedStream
        client = (
            QueuedStream()
            if self._sock is None
            else ClientSocket(self._sock, chunked=self._http11, stall_s=self._stall_s)
        )
        self._client = client
        reply = Reply(head, client, self._fault)
        self._task = asyncio.ensure_future(work(reply))
        try:
            client.watch(self._task.cancel)
            await self._task
            await client.flushed()
        except (asyncio.CancelledError, ClientGoneError):
            if not client.gone:
                self._fail(
                    reply,
                    UnavailableError("the server is shutting down", code="server_draining", retry_after_s=10),
                )
                await client.flushed()
            elif reply.status is None:
                head.set_result(Head(CLIENT_GONE_STATUS, {"Content-Type": "application/json"}, b""))
        except HostError as error:
            self._fail(reply, error)
            await client.flushed()
        except Exception as error:
            log.exception("request failed")
            self._fail(reply, EngineFailedError(f"internal error: {type(error).__name__}", code="internal_error"))
            await client.flushed()
        finally:
            client.release()

    @staticmethod
    def _fail(reply: Reply, error: HostError) -> None:
        try:
            reply.fail(error)
        except ClientGoneError:
            log.info("client left before its error could be sent: %s", error.message)

    def _stream(self, first: Head, done: Future[None]) -> Iterator[bytes]:
        """Yields the first event; the loop writes the rest."""
        yield first.body
        client = self._client
        if isinstance(client, QueuedStream):
            while (event := client.events.get()) is not None:
                yield event
            done.result()
            return
        assert client is not None
        self._loop.soon(client.attach)
        done.result()
        if client.gone:
            # gunicorn's last chunk would make a stream that was cut look complete
            raise BrokenPipeError(errno.EPIPE, "the client left its stream")

    def _close(self, done: Future[None]) -> None:
        """Runs when the answer is complete or can't be sent; the loop must have let go of the socket after it."""
        if not done.done() and self._task is not None:
            self._loop.soon(self._task.cancel)
        done.result()
        self._on_done()
