"""What one request asked and was answered, for its log line: made only while LORAHOST_LOG_PROMPTS is on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from lorahost.core import Json
from lorahost.formats import DONE_EVENT

MAX_CHARS = 100_000
# members of the bodies that hold what is asked
ASKED = ("messages", "prompt", "inputs")


class Transcript:
    """The prompt of one request and the answer as far as it has come.

    Args:
        body: As the client sent it; a Converse request as the chat that it became.
        max_chars: Of the prompt, and of all choices' texts together; what is beyond is dropped as it comes.
    """

    def __init__(self, body: Mapping[str, Any], max_chars: int = MAX_CHARS) -> None:
        prompt = _prompt(body)
        self._prompt, self._prompt_cut = prompt[:max_chars], len(prompt) > max_chars
        self._left, self._answer_cut = max_chars, False
        self._choices: dict[int, list[str]] = {}

    def add_event(self, event: str) -> None:
        """Takes one of the engine's SSE events."""
        if event == DONE_EVENT:
            return
        for part in json.loads(event.removeprefix("data: ")).get("choices") or ():
            self._add(part["index"], _text(part, "delta"))

    def add_answers(self, answers: Iterable[Json]) -> None:
        """Takes whole answers, one a call; their choices are numbered on."""
        for answer in answers:
            first = len(self._choices)
            for place, choice in enumerate(answer.get("choices") or ()):
                self._add(first + place, _text(choice, "message"))

    def _add(self, index: int, text: str) -> None:
        parts = self._choices.setdefault(index, [])
        if len(text) > self._left:
            text, self._answer_cut = text[: self._left], True
        if text:
            self._left -= len(text)
            parts.append(text)

    def fields(self) -> Json:
        """`prompt` (a text; what is none as JSON), `answer` (a text a choice), and `..._cut` where it was cut."""
        return {
            "prompt": self._prompt,
            "prompt_cut": self._prompt_cut or None,
            "answer": ["".join(parts) for _, parts in sorted(self._choices.items())],
            "answer_cut": self._answer_cut or None,
        }


def _prompt(body: Mapping[str, Any]) -> str:
    found = {name: body[name] for name in ASKED if body.get(name) is not None}
    asked = next(iter(found.values())) if len(found) == 1 else found
    return asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False, separators=(",", ":"))


def _text(choice: Json, message: str) -> str:
    """What a choice, or a chunk of one, says in the order of its making: reasoning, text, tool calls."""
    said = choice.get(message)
    if not isinstance(said, dict):
        return choice.get("text") or ""
    calls = [call.get("function") or {} for call in said.get("tool_calls") or ()]
    parts = [said.get("reasoning") or said.get("reasoning_content"), said.get("content")]
    parts += [function.get(key) for function in calls for key in ("name", "arguments")]
    return "".join(part for part in parts if isinstance(part, str))
