"""Reading and completing the engine's own SSE events."""

from __future__ import annotations

import json

from lorahost.core import Api, Json

DONE_EVENT = "data: [DONE]\n\n"
USAGE_MARK = '"choices":[]'


def _compact(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def usage_of(event: str) -> Json | None:
    """The usage of a stream's last chunk, if `event` is that chunk."""
    if USAGE_MARK not in event:
        return None
    usage = json.loads(event.removeprefix("data: ")).get("usage")
    return usage if isinstance(usage, dict) else None


def finish(last: Json, api: Api, reason: str) -> str:
    """A closing chunk with `reason`, in the shape of the chunk `last`."""
    empty: Json = {"delta": {}} if api == "chat" else {"text": ""}
    choice = {"index": 0, **empty, "logprobs": None, "finish_reason": reason}
    shell = {k: last[k] for k in ("id", "object", "created", "model") if k in last}
    return f"data: {_compact(shell | {'choices': [choice]})}\n\n"


class Assembly:
    """Puts a stream's chunks together to the whole answer, as far as it has come."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._shell: Json = {}
        self._choices: dict[int, Json] = {}
        self.usage: Json | None = None

    def add(self, event: str) -> None:
        """Takes one SSE event."""
        if event == DONE_EVENT:
            return
        chunk = json.loads(event.removeprefix("data: "))
        self._shell = self._shell or {k: chunk[k] for k in ("id", "created", "model") if k in chunk}
        self.usage = chunk.get("usage") or self.usage
        for part in chunk.get("choices", []):
            choice = self._choices.setdefault(part["index"], {"index": part["index"], "finish_reason": None})
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            if self._api == "chat":
                self._add_message(
                    choice.setdefault("message", {"role": "assistant", "content": ""}),
                    part.get("delta") or {},
                )
            else:
                choice["text"] = choice.get("text", "") + (part.get("text") or "")

    @staticmethod
    def _add_message(message: Json, delta: Json) -> None:
        for key in ("content", "reasoning", "reasoning_content"):
            if delta.get(key):
                message[key] = (message.get(key) or "") + delta[key]
        for call in delta.get("tool_calls") or []:
            calls = message.setdefault("tool_calls", [])
            while len(calls) <= call["index"]:
                calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            target = calls[call["index"]]
            target["id"] = call.get("id") or target["id"]
            function = call.get("function") or {}
            target["function"]["name"] += function.get("name") or ""
            target["function"]["arguments"] += function.get("arguments") or ""

    def whole(self, reason: str) -> Json:
        """The answer; choices that have not ended end with `reason`."""
        kind = "chat.completion" if self._api == "chat" else "text_completion"
        empty: Json = {"message": {"role": "assistant", "content": ""}} if self._api == "chat" else {"text": ""}
        choices = [
            empty | c | {"finish_reason": c["finish_reason"] or reason} for _, c in sorted(self._choices.items())
        ]
        if not choices:
            choices = [{"index": 0, **empty, "finish_reason": reason}]
        return self._shell | {"object": kind, "choices": choices, "usage": self.usage}
