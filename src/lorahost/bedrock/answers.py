"""From the engine's OpenAI chat answer to Converse's, and the parts that its stream shares."""

from __future__ import annotations

import json
from typing import Any

from lorahost.bedrock import pointers
from lorahost.bedrock.converse import Conversation
from lorahost.core import Json

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "content_filtered",
    "repetition": "malformed_model_output",
}


def answer(asked: Conversation, chat: Json, *, latency_ms: int, context: int | None) -> Json:
    """Converse's answer.

    Args:
        asked: The request.
        chat: The engine's answer.
        latency_ms: Since the request came in.
        context: Tokens that the model takes, prompt and answer together.
    """
    choice = chat["choices"][0]
    message = choice["message"]
    content: list[Json] = []
    if reasoning := reasoning_of(message):
        content.append({"reasoningContent": {"reasoningText": {"text": reasoning}}})
    if text := message.get("content"):
        content.append({"text": text})
    calls = message.get("tool_calls") or []
    well_formed = True
    for call in calls:
        arguments, is_object = tool_input(call["function"].get("arguments"))
        well_formed = well_formed and is_object
        content.append({"toolUse": {"toolUseId": call["id"], "name": call["function"]["name"], "input": arguments}})
    counts = usage(chat.get("usage"))
    reason = stop_reason(choice.get("finish_reason"), choice.get("stop_reason"), bool(calls), well_formed)
    body: Json = {
        "output": {"message": {"role": "assistant", "content": content or [{"text": ""}]}},
        "stopReason": in_context(reason, counts, asked.max_tokens, context),
        "usage": counts,
        "metrics": {"latencyMs": latency_ms},
    }
    if asked.paths:
        body["additionalModelResponseFields"] = pointers.pick(chat, asked.paths)
    return body | asked.echoed


def reasoning_of(message: Json) -> str:
    """The reasoning in a message or delta; empty unless the model's parser tells it apart."""
    text: str = message.get("reasoning") or message.get("reasoning_content") or ""
    return text


def tool_input(arguments: str | None) -> tuple[Any, bool]:
    """A tool's input, and whether it is an object; what is no JSON, as after a cut, stays the text that it is."""
    if not arguments:
        return {}, True
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments, False
    return parsed, isinstance(parsed, dict)


def stop_reason(finish: str | None, matched: Any, called: bool, well_formed: bool) -> str:
    """Converse's stop reason.

    Args:
        finish: OpenAI's finish reason.
        matched: What ended the answer: a stop sequence, or a token's id or None.
        called: Whether a tool is called; the engine says "stop" for a tool that the request named.
        well_formed: Whether every call's input is a JSON object.
    """
    if called and finish in ("stop", "tool_calls"):
        return "tool_use" if well_formed else "malformed_tool_use"
    if finish == "stop" and isinstance(matched, str):
        return "stop_sequence"
    return STOP_REASONS.get(finish or "", "end_turn")


def in_context(reason: str, counts: Json, max_tokens: int | None, context: int | None) -> str:
    """An answer may be cut by the request's limit or by the model's; Converse tells the two apart."""
    within = max_tokens is not None and counts["outputTokens"] >= max_tokens
    if reason == "max_tokens" and not within and context is not None and counts["totalTokens"] >= context:
        return "model_context_window_exceeded"
    return reason


def usage(openai: Json | None) -> Json:
    """Token counts. As in Bedrock, `inputTokens` leaves out what was read from the cache, where that is known."""
    openai = openai or {}
    prompt, output = openai.get("prompt_tokens") or 0, openai.get("completion_tokens") or 0
    cached = (openai.get("prompt_tokens_details") or {}).get("cached_tokens")
    counts = {"inputTokens": prompt - (cached or 0), "outputTokens": output, "totalTokens": prompt + output}
    return counts if cached is None else counts | {"cacheReadInputTokens": cached}
