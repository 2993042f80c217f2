"""Clients of the front-door benchmark.

During a load a client only cuts what it read into HTTP chunks and notes when each was complete: the same work for every
route. The chunks are taken apart afterwards.
"""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from botocore.eventstream import EventStreamBuffer

WARM_TOKENS = 50
CONTENT = re.compile(rb'"(?:content|text)":"(\d+) (\d+) (\d+)"')
# An HTTP chunk's events, each without its framing.
Splitter = Callable[[bytes], list[bytes]]


def sse_events(chunk: bytes) -> list[bytes]:
    """The server-sent events of one chunk."""
    return [event for event in chunk.split(b"\n\n") if event]


class FrameSplitter:
    """The payloads of AWS event-stream messages; botocore checks lengths and checksums.

    Raises:
        RuntimeError: a message is an exception.
    """

    def __init__(self) -> None:
        self._buffer: Any = EventStreamBuffer()

    def __call__(self, chunk: bytes) -> list[bytes]:
        self._buffer.add_data(chunk)
        return [self._payload(message) for message in self._buffer]

    @staticmethod
    def _payload(message: Any) -> bytes:
        if message.headers[":message-type"] != "event":
            raise RuntimeError(message.payload.decode())
        if message.headers[":event-type"] == "chunk":
            return base64.b64decode(json.loads(message.payload)["bytes"])
        return bytes(message.payload)


@dataclass(frozen=True)
class Route:
    """One way to ask for a stream."""

    path: str
    body: Callable[[int], dict[str, Any]]
    splitter: Callable[[], Splitter]

    def request(self, tokens: int) -> bytes:
        """The HTTP request for a stream of so many tokens."""
        body = json.dumps(self.body(tokens)).encode()
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        return head % (self.path.encode(), len(body)) + body


def _openai(tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}


def _converse(tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"text": "hi"}]}], "inferenceConfig": {"maxTokens": tokens}}


INVOCATIONS = Route("/invocations", lambda tokens: {**_openai(tokens), "stream": True}, lambda: sse_events)
CONVERSE_STREAM = Route("/model/base/converse-stream", _converse, FrameSplitter)
INVOKE_STREAM = Route("/model/base/invoke-with-response-stream", _openai, FrameSplitter)


@dataclass
class Client:
    """One stream as its client sees it; `chunks` holds HTTP chunks with their arrival times in ns."""

    sock: socket.socket
    buffer: bytes = b""
    head_done: bool = False
    done: bool = False
    chunks: list[tuple[bytes, int]] = field(default_factory=list)

    def feed(self, data: bytes, now: int) -> None:
        """Takes what one read returned."""
        self.buffer += data
        if not self.head_done:
            head, split, rest = self.buffer.partition(b"\r\n\r\n")
            if not split:
                return
            if b"200" not in head.split(b"\r\n", 1)[0]:
                raise RuntimeError(self.buffer.decode(errors="replace"))
            self.buffer, self.head_done = rest, True
        while True:
            size_text, split, rest = self.buffer.partition(b"\r\n")
            if not split:
                return
            size = int(size_text, 16)
            if len(rest) < size + 2:
                return
            self.buffer = rest[size + 2 :]
            if size == 0:
                self.done = True
                return
            self.chunks.append((rest[:size], now))


@dataclass
class Seen:
    """What arrived in one stream; `joined` counts events that share an HTTP chunk."""

    tokens: int = 0
    lost: int = 0
    joined: int = 0
    late_ns: list[int] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)


def seen(client: Client, split: Splitter) -> Seen:
    """Takes a client's chunks apart."""
    found = Seen()
    for chunk, now in client.chunks:
        events = split(chunk)
        found.joined += max(0, len(events) - 1)
        for event in events:
            for sequence, step, built in (map(int, match.groups()) for match in CONTENT.finditer(event)):
                found.lost += sequence - found.tokens
                found.tokens = sequence + 1
                if sequence >= WARM_TOKENS:
                    found.late_ns.append(now - built)
                    found.step_ns.append(now - step)
    return found
