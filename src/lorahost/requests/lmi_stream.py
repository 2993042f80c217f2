"""vLLM's stream of OpenAI chunks as LMI lines: one for each token, the last of a sequence with its text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lorahost.core import Json
from lorahost.errors import EngineFailedError, HostError
from lorahost.requests.events import CUT_SHORT, DONE, dumps, event_data
from lorahost.requests.lmi import LmiPlan, Token, finish_reason, tokens, top_tokens

# LMI's token for a line that has none.
_NO_TOKEN_ID = -1


@dataclass(slots=True)
class _Sequence:
    texts: list[str] = field(default_factory=list)
    generated: int = 0
    input_length: int | None = None
    done: bool = False


class LmiStream:
    """Converts one stream.

    A line is `{"index", "token": {"id", "text", "logprob", "log_prob"}, "generated_text", "details"}`; the
    last two are null until the sequence's last line. The `text`s of a sequence joined are its generated
    text. `index` counts sequences, prompt by prompt.

    Args:
        plan: From the request.
        sse: Lines as SSE events instead of JSON lines. As in TGI there is no `[DONE]`: its clients parse
            every event.
    """

    def __init__(self, plan: LmiPlan, sse: bool) -> None:
        self._plan = plan
        self._sse = sse
        self._sequences = [_Sequence() for _ in range(len(plan.inputs) * plan.sequences)]

    def feed(self, event: str) -> list[str]:
        data = event_data(event)
        if data == DONE:
            return self.finish()
        chunk = json.loads(data)
        if "error" in chunk:
            return self._end_all(chunk["error"])
        lines = []
        for choice in chunk["choices"]:
            lines += self._choice(choice, chunk)
        return lines

    def fail(self, error: HostError) -> list[str]:
        return self._end_all(error.body()["error"])

    def finish(self) -> list[str]:
        return self.fail(EngineFailedError(CUT_SHORT))

    def _choice(self, choice: Json, chunk: Json) -> list[str]:
        index = choice["index"]
        sequence = self._sequences[index]
        if sequence.done:
            return []
        prompt_ids = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
        if prompt_ids is not None:
            sequence.input_length = len(prompt_ids)
        text = (choice["delta"].get("content") or "") if self._plan.api == "chat" else choice["text"]
        found = tokens(self._plan, choice)
        sequence.generated += len(found)
        sequence.texts.append(text)
        lines = [self._token_line(index, token, part) for token, part in _spread(found, text)]
        if choice.get("finish_reason") is not None:
            sequence.done = True
            last = lines.pop() if lines else _line(index, _token(text))
            last["generated_text"] = self._text(index)
            last["details"] = self._details(index, finish_reason(self._plan, choice))
            lines.append(last)
        elif text and not lines:
            lines.append(_line(index, _token(text)))
        return [self._framed(line) for line in lines]

    def _token_line(self, index: int, token: Token, text: str) -> Json:
        line = _line(index, token.json() | {"text": text})
        if self._plan.parameters.logprobs:
            line["top_tokens"] = next(top_tokens([token]))
        return line

    def _end_all(self, error: Any) -> list[str]:
        """A last line with `finish_reason` "error" for each sequence that has not ended."""
        lines = []
        for index, sequence in enumerate(self._sequences):
            if not sequence.done:
                sequence.done = True
                line = _line(index, _token(""))
                line["generated_text"] = self._text(index)
                line["details"] = self._details(index, "error")
                line["error"] = error
                lines.append(self._framed(line))
        return lines

    def _text(self, index: int) -> str:
        return self._plan.prefix(index // self._plan.sequences) + "".join(self._sequences[index].texts)

    def _details(self, index: int, reason: str) -> Json:
        sequence = self._sequences[index]
        details: Json = {
            "finish_reason": reason,
            "generated_tokens": sequence.generated,
            "seed": self._plan.parameters.seed,
            "input_length": sequence.input_length,
        }
        if self._plan.parameters.details:
            details["inputs"] = self._plan.inputs[index // self._plan.sequences]
        return details

    def _framed(self, line: Json) -> str:
        text = dumps(line)
        return f"data: {text}\n\n" if self._sse else text + "\n"


def _line(index: int, token: Json) -> Json:
    return {"index": index, "token": token, "generated_text": None, "details": None}


def _token(text: str) -> Json:
    return Token(_NO_TOKEN_ID, text, None).json()


def _spread(found: list[Token], text: str) -> list[tuple[Token, str]]:
    """Each token with its part of `text`.

    Several tokens come in one chunk when the reader lags. Their own texts are used if they add up; they do
    not where a character spans tokens or a stop string is held back, and then the last one has it all.
    """
    if len(found) > 1 and "".join(token.text for token in found) == text:
        return [(token, token.text) for token in found]
    return [(token, text if position == len(found) - 1 else "") for position, token in enumerate(found)]
