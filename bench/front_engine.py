"""The engine stand-in of the front-door benchmark: steps on time, builds chat chunks with vLLM's own classes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.engine.protocol import DeltaMessage

from lorahost.core import AdapterVersion, EngineCall, EngineHealth, EngineInfo, Json

DONE_EVENT = "data: [DONE]\n\n"


class Stream:
    """One request's mailbox, as vLLM keeps one per request: the step fills it, the request's task empties it."""

    def __init__(self) -> None:
        self.step_ns = 0
        self.ready = asyncio.Event()


class StepEngine:
    """Steps every `step_s` seconds; each running stream gets one token per step.

    A chunk's content is `sequence step_ns built_ns`: when its step ended, and when its chunk was complete.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.streams: set[Stream] = set()

    async def run(self) -> None:
        """Steps on an absolute grid, so that a late step does not delay the next."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            now = time.monotonic_ns()
            for stream in self.streams:
                stream.step_ns = now
                stream.ready.set()

    async def events(self, request_id: str, tokens: int) -> AsyncIterator[str]:
        """SSE events of one chat stream."""
        stream = Stream()
        self.streams.add(stream)
        created = int(time.time())
        try:
            for sequence in range(tokens):
                await stream.ready.wait()
                stream.ready.clear()
                yield self._event(request_id, created, sequence, stream.step_ns, last=sequence == tokens - 1)
            yield DONE_EVENT
        finally:
            self.streams.discard(stream)

    @staticmethod
    def _event(request_id: str, created: int, sequence: int, step_ns: int, *, last: bool) -> str:
        delta = DeltaMessage(content=f"{sequence} {step_ns} @")
        choice = ChatCompletionResponseStreamChoice(
            index=0, delta=delta, logprobs=None, finish_reason="length" if last else None
        )
        chunk = ChatCompletionStreamResponse(
            id=request_id, object="chat.completion.chunk", created=created, choices=[choice], model="base"
        )
        data = chunk.model_dump_json(exclude_unset=True)
        return f"data: {data}\n\n".replace("@", str(time.monotonic_ns()), 1)


class StepHost:
    """`EngineHost` around the stand-in, for our own server."""

    def __init__(self, step_s: float) -> None:
        self._engine = StepEngine(step_s)
        self._task: asyncio.Task[None] | None = None
        self._count = 0

    async def start(self) -> EngineInfo:
        """Starts stepping."""
        self._task = asyncio.ensure_future(self._engine.run())
        return EngineInfo("stand-in", "none", "base", 1 << 20, 8, 64, 64)

    async def generate(self, call: EngineCall) -> Json | AsyncIterator[str]:
        """Streams only."""
        return self._engine.events(f"chatcmpl-{call.request_id}", call.body["max_tokens"])

    async def load(self, version: AdapterVersion) -> frozenset[str]:
        """Takes anything."""
        return version.modules

    async def unload(self, engine_id: int) -> None:
        """Nothing to do."""

    async def loaded(self) -> frozenset[int]:
        """Nothing is kept."""
        return frozenset()

    async def probe(self, version: AdapterVersion | None) -> tuple[float, ...]:
        """No model to probe."""
        return ()

    def health(self) -> EngineHealth:
        """Always well."""
        self._count += 1
        return EngineHealth(True, len(self._engine.streams), self._count)

    async def stop(self) -> None:
        """Stops stepping."""
        if self._task is not None:
            self._task.cancel()
