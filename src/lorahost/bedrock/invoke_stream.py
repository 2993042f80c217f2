"""From the engine's SSE events to InvokeModelWithResponseStream's messages."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable

from lorahost.bedrock import errors, frames
from lorahost.bedrock.invoke import Invoke, bedrock_part
from lorahost.core import Json
from lorahost.errors import EngineFailedError, HostError
from lorahost.formats import usage_of
from lorahost.requests.events import CUT_SHORT, DONE, dumps, event_data

# Inside of strings the quotes would be escaped.
FINISH_MARK = '"finish_reason":"'
METRICS_KEY = "amazon-bedrock-invocationMetrics"


class InvokeStream:
    """Converts one stream; each message returned is to be written with one write.

    The last chunk carries Bedrock's invocation metrics, so a chunk that ends a choice is held back until the token
    counts are there: the engine sends both at once.

    Args:
        asked: The request.
        elapsed_ms: Milliseconds since the request came in.
    """

    def __init__(self, asked: Invoke, elapsed_ms: Callable[[], int]) -> None:
        self._asked = asked
        self._elapsed_ms = elapsed_ms
        self._first_ms: int | None = None
        self._held: str | None = None
        self._usage: Json | None = None
        self._ended = False

    def feed(self, event: str) -> list[bytes]:
        """The messages that one event of the engine becomes."""
        if self._ended:
            return []
        if self._first_ms is None:
            self._first_ms = self._elapsed_ms()
        data = event_data(event)
        if data == DONE:
            return self._end()
        if (usage := usage_of(event)) is not None:
            self._usage = usage
            if not self._asked.usage_asked:
                return []
        if self._usage is not None or FINISH_MARK in data:
            return self._hold(data)
        return [*self._release(), self._chunk(data)]

    def fail(self, error: HostError) -> list[bytes]:
        """An exception inside the stream, and its end; nothing after an end."""
        if self._ended:
            return []
        self._ended = True
        return [*self._release(), errors.exception_frame(error, "InvokeModelWithResponseStream")]

    def finish(self) -> list[bytes]:
        """Call when the engine's iterator ended; an end without [DONE] is an error."""
        return self.fail(EngineFailedError(CUT_SHORT))

    def _hold(self, data: str) -> list[bytes]:
        before = self._release()
        self._held = data
        return before

    def _release(self) -> list[bytes]:
        held, self._held = self._held, None
        return [] if held is None else [self._chunk(held)]

    def _chunk(self, data: str) -> bytes:
        if self._asked.form == "bedrock":
            data = dumps(self._bedrock(data))
        return _framed(data)

    @staticmethod
    def _bedrock(data: str) -> Json:
        chunk = json.loads(data)
        return bedrock_part(chunk, chunk["choices"][0])

    def _end(self) -> list[bytes]:
        self._ended = True
        metrics = {"invocationLatency": self._elapsed_ms(), "firstByteLatency": self._first_ms}
        if self._usage is not None:
            metrics |= {
                "inputTokenCount": self._usage.get("prompt_tokens"),
                "outputTokenCount": self._usage.get("completion_tokens"),
            }
        if self._held is None:
            return []
        last = self._bedrock(self._held) if self._asked.form == "bedrock" else json.loads(self._held)
        return [_framed(dumps(last | {METRICS_KEY: metrics}))]


def _framed(data: str) -> bytes:
    return frames.event("chunk", b'{"bytes":"%b"}' % b64encode(data.encode()))
