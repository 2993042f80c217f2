"""From vLLM's SSE events to the bytes that a client gets; each string returned is one whole event or line."""

from __future__ import annotations

from typing import Protocol

from lorahost.errors import EngineFailedError, HostError
from lorahost.requests.events import CUT_SHORT, DONE, dumps, event_data
from lorahost.requests.invocation import Invocation
from lorahost.requests.lmi_stream import LmiStream


class StreamWriter(Protocol):
    """Converts one stream. Write each returned string with one write: naive clients need whole events."""

    def feed(self, event: str) -> list[str]:
        """What one event of the engine becomes; may be nothing."""

    def fail(self, error: HostError) -> list[str]:
        """An error after the first byte, in-band, and the end of the stream; nothing after an end."""

    def finish(self) -> list[str]:
        """Call when the engine's iterator ended; an end without [DONE] is an error, and is said so."""


def writer(invocation: Invocation) -> StreamWriter:
    """The writer for a streaming invocation.

    Raises:
        ValueError: the invocation does not stream.
    """
    if not invocation.stream:
        raise ValueError("the invocation does not stream")
    if invocation.lmi is not None:
        return LmiStream(invocation.lmi, sse=invocation.format == "sse")
    return OpenAiSse() if invocation.format == "sse" else OpenAiLines()


class OpenAiSse:
    """vLLM's events as they are, ended by `data: [DONE]` once."""

    def __init__(self) -> None:
        self._ended = False

    def feed(self, event: str) -> list[str]:
        if self._ended:
            return []
        self._ended = event_data(event) == DONE
        return [event.rstrip("\n") + "\n\n"]

    def fail(self, error: HostError) -> list[str]:
        if self._ended:
            return []
        self._ended = True
        return [f"data: {dumps(error.body())}\n\n", f"data: {DONE}\n\n"]

    def finish(self) -> list[str]:
        return self.fail(EngineFailedError(CUT_SHORT))


class OpenAiLines:
    """The same objects as JSON lines; the end of the body is the end of the stream."""

    def __init__(self) -> None:
        self._ended = False

    def feed(self, event: str) -> list[str]:
        data = event_data(event)
        self._ended = self._ended or data == DONE
        return [] if self._ended else [data + "\n"]

    def fail(self, error: HostError) -> list[str]:
        if self._ended:
            return []
        self._ended = True
        return [dumps(error.body()) + "\n"]

    def finish(self) -> list[str]:
        return self.fail(EngineFailedError(CUT_SHORT))
