"""The Converse operations' request, as far as this server takes it; field names as in Bedrock's service model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from lorahost.core import Json
from lorahost.errors import InvalidRequestError
from lorahost.requests.problems import invalid, shown

MAX_STOP_SEQUENCES = 2500
MAX_FIELD_PATHS = 10
MAX_PATH_CHARS = 256
NonEmpty = Annotated[str, Field(min_length=1)]
ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
ToolUseId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.:-]+$")]


class Shape(BaseModel):
    """A structure: unknown members are refused, values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


class Union(Shape):
    """A structure of which exactly one member is given."""

    @model_validator(mode="after")
    def _one_member(self) -> Union:
        if len(given := self.given()) != 1:
            names = ", ".join(type(self).model_fields[name].alias or name for name in given) or "none"
            raise ValueError(f"exactly one member must be given, but there is {names}")
        return self

    def given(self) -> list[str]:
        """Names of the members that are there; one, once it is checked."""
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    @property
    def member(self) -> str:
        """The member's name as in the request."""
        [name] = self.given()
        return type(self).model_fields[name].alias or name


class CachePoint(Shape):
    type: Literal["default"]
    ttl: Literal["5m", "1h"] | None = None


class ToolUse(Shape):
    tool_use_id: ToolUseId
    name: ToolName
    input: Any
    type: Literal["server_tool_use"] | None = None


class ToolResultContent(Union):
    json_: Any = Field(None, alias="json")
    text: str | None = None
    image: Any = None
    document: Any = None
    video: Any = None
    search_result: Any = None


class ToolResult(Shape):
    tool_use_id: ToolUseId
    content: list[ToolResultContent]
    status: Literal["success", "error"] | None = None
    type: str | None = None


class GuardText(Shape):
    text: str
    qualifiers: list[Literal["grounding_source", "query", "guard_content"]] | None = None


class GuardContent(Union):
    text: GuardText | None = None
    image: Any = None


class ReasoningText(Shape):
    text: str
    signature: str | None = None


class ReasoningContent(Union):
    reasoning_text: ReasoningText | None = None
    redacted_content: str | None = None


class ContentBlock(Union):
    text: str | None = None
    tool_use: ToolUse | None = None
    tool_result: ToolResult | None = None
    reasoning_content: ReasoningContent | None = None
    guard_content: GuardContent | None = None
    cache_point: CachePoint | None = None
    image: Any = None
    document: Any = None
    video: Any = None
    audio: Any = None
    citations_content: Any = None
    search_result: Any = None
    tool_addition: Any = None
    tool_removal: Any = None


class SystemBlock(Union):
    text: NonEmpty | None = None
    guard_content: GuardContent | None = None
    cache_point: CachePoint | None = None


class Message(Shape):
    role: Literal["user", "assistant", "system"]
    content: list[ContentBlock] = Field(min_length=1)


class InferenceConfig(Shape):
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    stop_sequences: list[NonEmpty] | None = Field(None, max_length=MAX_STOP_SEQUENCES)


class InputSchema(Union):
    json_: Json | None = Field(None, alias="json")


class ToolSpec(Shape):
    name: ToolName
    description: NonEmpty | None = None
    input_schema: InputSchema
    strict: bool | None = None


class Tool(Union):
    tool_spec: ToolSpec | None = None
    system_tool: Any = None
    cache_point: CachePoint | None = None


class Empty(Shape):
    """`{}`"""


class NamedTool(Shape):
    name: ToolName


class ToolChoice(Union):
    auto: Empty | None = None
    any: Empty | None = None
    tool: NamedTool | None = None


class ToolConfig(Shape):
    tools: list[Tool] = Field(min_length=1)
    tool_choice: ToolChoice | None = None


class JsonSchema(Shape):
    schema_: str = Field(alias="schema")
    name: str | None = None
    description: str | None = None


class FormatStructure(Union):
    json_schema: JsonSchema | None = None


class TextFormat(Shape):
    type: Literal["json_schema"]
    structure: FormatStructure


class OutputConfig(Shape):
    text_format: TextFormat | None = None
    effort: str | None = Field(None, max_length=16)


class PerformanceConfig(Shape):
    latency: Literal["standard", "optimized"] | None = None


class ServiceTier(Shape):
    type: Literal["priority", "default", "flex", "reserved"]


class ConverseRequest(Shape):
    """Both Converse operations' body. What has no effect here is checked all the same."""

    messages: list[Message] = Field(min_length=1)
    system: list[SystemBlock] | None = None
    inference_config: InferenceConfig | None = None
    tool_config: ToolConfig | None = None
    additional_model_request_fields: Json | None = None
    additional_model_response_field_paths: (
        list[Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]] | None
    ) = Field(None, max_length=MAX_FIELD_PATHS)
    output_config: OutputConfig | None = None
    performance_config: PerformanceConfig | None = None
    service_tier: ServiceTier | None = None
    request_metadata: dict[str, str] | None = None
    project_identifier: str | None = None
    guardrail_config: Any = None
    prompt_variables: Any = None


S = TypeVar("S", bound=Shape)


def read(kind: type[S], data: Json) -> S:
    """`data` as `kind`.

    Raises:
        InvalidRequestError: the first fault: its path, the value and what is allowed.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> InvalidRequestError:
    found = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in found["loc"])
    if found["type"] == "missing":
        message = f"{path} is missing"
    elif found["type"] == "extra_forbidden":
        message = f"{path} is not a field that this server knows"
    else:
        reason = found["msg"].removeprefix("Value error, ")
        message = f"{path or 'the body'} is {shown(found['input'])}: {reason[:1].lower()}{reason[1:]}"
    return invalid(message, param=path or None, code="invalid_field")
