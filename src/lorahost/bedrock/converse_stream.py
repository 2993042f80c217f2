"""From the engine's SSE events to ConverseStream's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from lorahost.bedrock import answers, errors, frames, pointers
from lorahost.bedrock.converse import Conversation
from lorahost.core import Json
from lorahost.errors import EngineFailedError, HostError
from lorahost.formats import Assembly
from lorahost.requests.events import CUT_SHORT, DONE, dumps, event_data

TEXT, REASONING = "text", "reasoningContent"
# A chunk with one more piece of text and nothing else; the piece, a JSON string, can stay as it is.
PLAIN_TEXT = re.compile(
    r'"choices":\[\{"index":0,"delta":\{"content":("(?:[^"\\]|\\.)+")\},(?:"logprobs":null,)?"finish_reason":null'
    r'(?:,"stop_reason":null)?(?:,"token_ids":null)?\}\]\}\Z'
)


class ConverseStream:
    """Converts one stream; each message returned is to be written with one write.

    Args:
        asked: The request.
        context: Tokens that the model takes, prompt and answer together.
        elapsed_ms: Milliseconds since the request came in.
    """

    def __init__(self, asked: Conversation, context: int | None, elapsed_ms: Callable[[], int]) -> None:
        self._asked = asked
        self._context = context
        self._elapsed_ms = elapsed_ms
        self._assembly = Assembly("chat") if asked.paths else None
        self._begun = self._ended = False
        self._blocks = 0
        self._open: str | int | None = None  # kind of the open block; for a tool, its index among the calls
        self._inputs: dict[int, str] = {}
        self._finish: str | None = None
        self._matched: object = None
        self._usage: Json | None = None

    def feed(self, event: str) -> list[bytes]:
        """The messages that one event of the engine becomes."""
        if self._ended:
            return []
        data = event_data(event)
        if data == DONE:
            return self._end()
        if self._open == TEXT and self._assembly is None and (plain := PLAIN_TEXT.search(data)):
            return [self._text(plain[1])]
        chunk = json.loads(data)
        if self._assembly is not None:
            self._assembly.add(event)
        self._usage = chunk.get("usage") or self._usage
        messages = [] if self._begun else [frames.event("messageStart", b'{"role":"assistant"}')]
        self._begun = True
        for choice in chunk["choices"]:
            messages += self._delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._finish, self._matched = choice["finish_reason"], choice.get("stop_reason")
        return messages

    def fail(self, error: HostError) -> list[bytes]:
        """An exception inside the stream, and its end; nothing after an end."""
        if self._ended:
            return []
        self._ended = True
        return [errors.exception_frame(error, "ConverseStream")]

    def finish(self) -> list[bytes]:
        """Call when the engine's iterator ended; an end without [DONE] is an error."""
        return self.fail(EngineFailedError(CUT_SHORT))

    def _delta(self, delta: Json) -> list[bytes]:
        messages: list[bytes] = []
        if reasoning := answers.reasoning_of(delta):
            messages += self._turn_to(REASONING)
            messages.append(self._block({REASONING: {"text": reasoning}}))
        if text := delta.get("content"):
            messages += self._turn_to(TEXT)
            messages.append(self._block({TEXT: text}))
        for call in delta.get("tool_calls") or ():
            messages += self._call(call)
        return messages

    def _call(self, call: Json) -> list[bytes]:
        function = call.get("function") or {}
        messages = self._turn_to(call["index"], {"toolUseId": call.get("id") or "", "name": function.get("name") or ""})
        if arguments := function.get("arguments"):
            self._inputs[call["index"]] += arguments
            messages.append(self._block({"toolUse": {"input": arguments}}))
        return messages

    def _turn_to(self, kind: str | int, tool: Json | None = None) -> list[bytes]:
        """Closes the open block unless it is of this kind, and opens one; only a tool's has a start of its own."""
        if self._open == kind:
            return []
        messages = self._close()
        self._open = kind
        if isinstance(kind, int):
            self._inputs[kind] = ""
            start = {"start": {"toolUse": tool}, "contentBlockIndex": self._blocks}
            messages.append(frames.event("contentBlockStart", dumps(start).encode()))
        return messages

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        messages = []
        if isinstance(self._open, int) and not self._inputs[self._open]:
            # clients put the pieces together and parse them
            messages.append(self._block({"toolUse": {"input": "{}"}}))
        messages.append(frames.event("contentBlockStop", b'{"contentBlockIndex":%d}' % self._blocks))
        self._blocks += 1
        self._open = None
        return messages

    def _text(self, literal: str) -> bytes:
        payload = f'{{"delta":{{"text":{literal}}},"contentBlockIndex":{self._blocks}}}'
        return frames.event("contentBlockDelta", payload.encode())

    def _block(self, delta: Json) -> bytes:
        return frames.event("contentBlockDelta", dumps({"delta": delta, "contentBlockIndex": self._blocks}).encode())

    def _end(self) -> list[bytes]:
        messages = self._close()
        well_formed = all(answers.tool_input(text)[1] for text in self._inputs.values())
        reason = answers.stop_reason(self._finish, self._matched, bool(self._inputs), well_formed)
        counts = answers.usage(self._usage)
        stop: Json = {"stopReason": answers.in_context(reason, counts, self._asked.max_tokens, self._context)}
        if self._assembly is not None:
            whole = self._assembly.whole("length")
            stop["additionalModelResponseFields"] = pointers.pick(whole, self._asked.paths)
        metadata = {"usage": counts, "metrics": {"latencyMs": self._elapsed_ms()}} | self._asked.echoed
        messages.append(frames.event("messageStop", dumps(stop).encode()))
        messages.append(frames.event("metadata", dumps(metadata).encode()))
        self._ended = True
        return messages
