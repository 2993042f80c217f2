"""Reading and completing the engine's own SSE events."""

from __future__ import annotations

import json

from lorahost.core import Api, Json

DONE_EVENT = "data: [DONE]\n\n"
SHELL_KEYS = ("id", "created", "model", "system_fingerprint")
USAGE_MARK = '"choices":[]'


def _compact(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def usage_of(event: str) -> Json | None:
    """The usage of a stream's last chunk, if `event` is that chunk."""
    if USAGE_MARK not in event:
        return None
    usage = json.loads(event.removeprefix("data: ")).get("usage")
    return usage if isinstance(usage, dict) else None


class Assembly:
    """Puts a stream's chunks together to the whole answer, as far as it has come.

    Args:
        api: Of the request.
        shell: `id`, `created` and `model` for an answer that ends before its first chunk.
    """

    def __init__(self, api: Api, shell: Json | None = None) -> None:
        self._api = api
        self._shell: Json = dict(shell or {})
        self._begun = False
        self._choices: dict[int, Json] = {}
        self.usage: Json | None = None

    def add(self, event: str) -> None:
        """Takes one SSE event."""
        if event == DONE_EVENT:
            return
        chunk = json.loads(event.removeprefix("data: "))
        if not self._begun:
            self._begun = True
            self._shell |= {k: chunk[k] for k in SHELL_KEYS if k in chunk}
        self.usage = chunk.get("usage") or self.usage
        for part in chunk.get("choices", []):
            choice = self._choices.setdefault(part["index"], {"index": part["index"], "finish_reason": None})
            for key in ("finish_reason", "stop_reason"):
                if part.get(key) is not None:
                    choice[key] = part[key]
            _append_lists(choice, "logprobs", part.get("logprobs"))
            if part.get("token_ids"):
                choice["token_ids"] = (choice.get("token_ids") or []) + part["token_ids"]
            if self._api == "chat":
                _add_message(
                    choice.setdefault("message", {"role": "assistant", "content": ""}), part.get("delta") or {}
                )
            else:
                choice["text"] = choice.get("text", "") + (part.get("text") or "")

    def whole(self, reason: str) -> Json:
        """The answer; choices that have not ended end with `reason`."""
        kind = "chat.completion" if self._api == "chat" else "text_completion"
        empty: Json = {"message": {"role": "assistant", "content": ""}} if self._api == "chat" else {"text": ""}
        choices = [
            empty | {"logprobs": None} | c | {"finish_reason": c["finish_reason"] or reason}
            for _, c in sorted(self._choices.items())
        ]
        if not choices:
            choices = [{"index": 0, **empty, "logprobs": None, "finish_reason": reason}]
        return self._shell | {"object": kind, "choices": choices, "usage": self.usage}

    def closing(self, model: str, reason: str) -> str:
        """A last chunk that ends with `reason` what has not ended; empty when nothing is open."""
        open_ = [index for index, c in sorted(self._choices.items()) if c["finish_reason"] is None]
        if not open_ and self._choices:
            return ""
        kind = "chat.completion.chunk" if self._api == "chat" else "text_completion"
        empty: Json = {"delta": {}} if self._api == "chat" else {"text": ""}
        ends = [{"index": index, **empty, "logprobs": None, "finish_reason": reason} for index in open_ or [0]]
        body = {"model": model} | self._shell | {"object": kind, "choices": ends}
        return f"data: {_compact(body)}\n\n"


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


def _append_lists(choice: Json, key: str, part: Json | None) -> None:
    """Chat's `logprobs.content` and the lists of completions' `logprobs` grow chunk by chunk."""
    if part:
        known = choice.setdefault(key, {})
        for name, values in part.items():
            known[name] = (known.get(name) or []) + values if isinstance(values, list) else known.get(name)
