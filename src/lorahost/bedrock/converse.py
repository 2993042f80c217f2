"""From a Converse request to the OpenAI chat body that answers it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lorahost.bedrock import pointers, shapes
from lorahost.bedrock.shapes import ContentBlock, ConverseRequest, Message, OutputConfig, SystemBlock, ToolConfig
from lorahost.core import Json
from lorahost.errors import InvalidRequestError
from lorahost.requests.events import dumps
from lorahost.requests.jsonbody import read_object
from lorahost.requests.problems import invalid, shown

# The host's own; the engine must not see them.
OWN_FIELDS = frozenset({"model", "adapters", "adapter_id", "deadline_s"})
# The Converse request has its own place for them, or its answer none.
FIXED_FIELDS = frozenset({"messages", "stream", "stream_options", "n", "request_id", "parameters", "prompt"})
SERVED_CONTENT = "text, toolUse, toolResult, reasoningContent and guardContent with text"
ERROR_MARK = "error: "


@dataclass(frozen=True, slots=True)
class Conversation:
    """A Converse request that was read and found well-formed.

    Attributes:
        body: OpenAI chat request, without `model` and `stream`.
        own: The host's own fields among `additionalModelRequestFields`.
        paths: JSON pointers into the OpenAI answer, for `additionalModelResponseFields`.
        max_tokens: The request's own limit of the answer, or None.
        echoed: Members of the answer that say how the request was served, if it asked.
    """

    body: Json
    own: Json
    paths: tuple[str, ...]
    max_tokens: int | None
    echoed: Json


def parse(body: bytes, content_type: str | None, *, stream: bool) -> Conversation:
    """Reads one request of Converse, or of ConverseStream if `stream`.

    Raises:
        InvalidRequestError: it is not as Bedrock's service model has it, or asks for what this server can't do; the
            message names the member.
    """
    data = read_object(body, content_type)
    asked = shapes.read(ConverseRequest, data)
    for member, value in (("guardrailConfig", asked.guardrail_config), ("promptVariables", asked.prompt_variables)):
        if value is not None:
            raise invalid(f"{member} is not served here; leave it out", param=member, code="unsupported_field")
    paths = tuple(asked.additional_model_response_field_paths or ())
    for index, path in enumerate(paths):
        pointers.check(path, f"additionalModelResponseFieldPaths.{index}")
    chat: Json = {"messages": list(_messages(asked)), **_sampling(asked), **_tools(asked.tool_config)}
    chat |= _output(asked.output_config)
    additional = asked.additional_model_request_fields or {}
    _check_additional(additional, chat)
    own = {name: value for name, value in additional.items() if name in OWN_FIELDS}
    chat |= {name: value for name, value in additional.items() if name not in OWN_FIELDS}
    if stream:
        # a deadline may end the stream after any chunk: each must know the counts
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": "deadline_s" in own}
    limit = chat.get("max_completion_tokens") or chat.get("max_tokens")
    return Conversation(chat, own, paths, limit if isinstance(limit, int) else None, _echoed(asked))


def _echoed(asked: ConverseRequest) -> Json:
    """This server has one latency class and one tier; a request that asks for another is told which it got."""
    echoed: Json = {}
    if asked.performance_config is not None:
        echoed["performanceConfig"] = {"latency": "standard"}
    if asked.service_tier is not None:
        echoed["serviceTier"] = {"type": "default"}
    return echoed


def _check_additional(additional: Json, chat: Json) -> None:
    for name in additional:
        field = f"additionalModelRequestFields.{name}"
        if name in chat:
            raise invalid(f"{field} sets what another member sets, too", param=field, code="conflicting_field")
        if name in FIXED_FIELDS:
            raise invalid(f"{field} can't be set through the Converse API", param=field, code="unsupported_field")


def _sampling(asked: ConverseRequest) -> Json:
    config = asked.inference_config
    if config is None:
        return {}
    fields = {
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "stop": config.stop_sequences or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tools(config: ToolConfig | None) -> Json:
    if config is None:
        return {}
    tools: list[Json] = []
    for index, tool in enumerate(config.tools):
        if tool.system_tool is not None:
            field = f"toolConfig.tools.{index}.systemTool"
            raise invalid(f"{field} is not served here; give a toolSpec", param=field, code="unsupported_tool")
        if (spec := tool.tool_spec) is not None:
            function: Json = {"name": spec.name, "parameters": spec.input_schema.json_}
            function |= {} if spec.description is None else {"description": spec.description}
            function |= {} if spec.strict is None else {"strict": spec.strict}
            tools.append({"type": "function", "function": function})
    if not tools:
        raise invalid("toolConfig.tools has no toolSpec", param="toolConfig.tools", code="invalid_field")
    body: Json = {"tools": tools}
    if (choice := config.tool_choice) is None:
        return body
    if choice.tool is not None:
        name = choice.tool.name
        if name not in (known := [tool["function"]["name"] for tool in tools]):
            raise invalid(
                f"toolConfig.toolChoice.tool.name is {shown(name)}; the tools are {shown(known)}",
                param="toolConfig.toolChoice.tool.name",
                code="unknown_tool",
            )
        return body | {"tool_choice": {"type": "function", "function": {"name": name}}}
    return body | {"tool_choice": "auto" if choice.auto is not None else "required"}


def _output(config: OutputConfig | None) -> Json:
    body: Json = {}
    if config is None:
        return body
    if config.effort is not None:
        body["reasoning_effort"] = config.effort
    if config.text_format is not None:
        wanted = config.text_format.structure.json_schema
        assert wanted is not None
        field = "outputConfig.textFormat.structure.jsonSchema.schema"
        try:
            schema = read_object(wanted.schema_.encode(), None)
        except InvalidRequestError as error:
            raise invalid(
                f"{field} is not a JSON schema as text: {error.message}", param=field, code="invalid_field"
            ) from None
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": wanted.name or "answer", "schema": schema}
            | ({} if wanted.description is None else {"description": wanted.description}),
        }
    return body


def _messages(asked: ConverseRequest) -> Iterator[Json]:
    if texts := [text for i, block in enumerate(asked.system or ()) if (text := _system_text(block, i)) is not None]:
        yield {"role": "system", "content": _content(texts)}
    for index, message in enumerate(asked.messages):
        field = f"messages.{index}.content"
        if message.role == "assistant":
            yield _assistant(message, field)
        else:
            yield from _from_user(message, field)


def _system_text(block: SystemBlock, index: int) -> str | None:
    if block.guard_content is not None:
        if block.guard_content.text is None:
            raise _not_served(f"system.{index}.guardContent", "image")
        return block.guard_content.text.text
    return block.text


def _from_user(message: Message, field: str) -> Iterator[Json]:
    """OpenAI has a message for each tool result, and one for the texts between them."""
    texts: list[str] = []
    for index, block in enumerate(message.content):
        if block.tool_result is not None and message.role == "user":
            if texts:
                yield {"role": message.role, "content": _content(texts)}
                texts = []
            yield _tool_message(block.tool_result, f"{field}.{index}.toolResult")
        elif (text := _text(block, f"{field}.{index}", message.role)) is not None:
            texts.append(text)
    if texts:
        yield {"role": message.role, "content": _content(texts)}
    elif all(block.cache_point is not None for block in message.content):
        raise invalid(f"{field} has nothing but cache points", param=field, code="invalid_field")


def _assistant(message: Message, field: str) -> Json:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(message.content):
        where = f"{field}.{index}"
        if (use := block.tool_use) is not None:
            function = {"name": use.name, "arguments": dumps(use.input)}
            calls.append({"id": use.tool_use_id, "type": "function", "function": function})
        elif (thought := block.reasoning_content) is not None:
            if thought.reasoning_text is None:
                raise _not_served(f"{where}.reasoningContent", "redactedContent")
            reasoning.append(thought.reasoning_text.text)
        elif (text := _text(block, where, message.role)) is not None:
            texts.append(text)
    answer: Json = {"role": "assistant", "content": _content(texts) if texts else ""}
    if reasoning:
        answer["reasoning"] = "".join(reasoning)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _text(block: ContentBlock, field: str, role: str) -> str | None:
    """The block's text; None for a cache point, which says nothing: prefixes are cached without being asked."""
    if block.text is not None:
        return block.text
    if block.cache_point is not None:
        return None
    if (guarded := block.guard_content) is not None:
        if guarded.text is None:
            raise _not_served(f"{field}.guardContent", "image")
        return guarded.text.text
    if (member := block.member) in ("toolUse", "toolResult", "reasoningContent"):
        raise invalid(f"{field} is {member}, which has no place in a {role} message", param=field, code="invalid_field")
    raise _not_served(field, member)


def _tool_message(result: shapes.ToolResult, field: str) -> Json:
    """OpenAI's tool messages have no status: an error is marked in the text, so that the model knows."""
    texts = []
    for index, part in enumerate(result.content):
        if part.text is not None:
            texts.append(part.text)
        elif part.member == "json":
            texts.append(dumps(part.json_))
        else:
            raise _not_served(f"{field}.content.{index}", part.member)
    mark = ERROR_MARK if result.status == "error" else ""
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": mark + "\n".join(texts)}


def _content(texts: list[str]) -> str | list[Json]:
    """One text as it is; several as parts, which the engine joins as its chat template wants them."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _not_served(field: str, member: str) -> Any:
    return invalid(
        f"{field} is {member} content, which this server can't take; it takes {SERVED_CONTENT}",
        param=field,
        code="unsupported_content",
    )
