"""InvokeModel's bodies: OpenAI chat, OpenAI completions, and Bedrock's completion; each is answered in kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lorahost.core import Api, Json
from lorahost.requests import invocation
from lorahost.requests.headers import header
from lorahost.requests.jsonbody import read_object
from lorahost.requests.problems import invalid, shown

Form = Literal["chat", "completions", "bedrock"]
ACCEPTED = (
    "messages (OpenAI chat completions)",
    "prompt (OpenAI completions)",
    "prompt with max_gen_len (Bedrock completion)",
)
TOKEN_HEADERS = {
    "X-Amzn-Bedrock-Input-Token-Count": "prompt_tokens",
    "X-Amzn-Bedrock-Output-Token-Count": "completion_tokens",
}
GUARDRAIL_HEADER = "X-Amzn-Bedrock-GuardrailIdentifier"
MEDIA_TYPES = ("application/json", "application/*", "*/*")


@dataclass(frozen=True, slots=True)
class Invoke:
    """A request that was read and found well-formed.

    Attributes:
        form: Of the body, and so of the answer.
        data: As sent.
        body: OpenAI request, without `model`.
        usage_asked: Whether an OpenAI stream's client wants the last chunk with the token counts.
    """

    form: Form
    data: Json
    body: Json
    usage_asked: bool = False

    @property
    def api(self) -> Api:
        """Which OpenAI body `body` is."""
        return "chat" if self.form == "chat" else "completions"


def parse(body: bytes, content_type: str | None, *, stream: bool) -> Invoke:
    """Reads one request of InvokeModel, or of InvokeModelWithResponseStream if `stream`.

    Raises:
        InvalidRequestError: no known form, fields of two of them, or a `stream` that says otherwise than the operation.
    """
    data = read_object(body, content_type)
    form = _form(data)
    said = data.get("stream")
    if said is not None and said is not stream:
        operation = "InvokeModelWithResponseStream" if stream else "InvokeModel"
        raise invalid(f"stream is {shown(said)}, but the operation is {operation}", param="stream")
    openai = invocation.openai_body(data, stream)
    usage_asked = False
    if form == "bedrock":
        openai = _from_bedrock(openai)
    if stream:
        options = openai.get("stream_options") or {}
        openai["stream_options"] = {**options, "include_usage": True}
        if form == "bedrock":
            openai["stream_options"]["continuous_usage_stats"] = True
        else:
            usage_asked = options.get("include_usage") is True
    return Invoke(form, data, openai, usage_asked)


def check_headers(headers: Mapping[str, str], accept: str | None) -> None:
    """Refuses what this server can't do: guardrails, and answers that are not JSON.

    Raises:
        InvalidRequestError: names the header.
    """
    if guardrail := header(headers, GUARDRAIL_HEADER):
        raise invalid(
            f"{GUARDRAIL_HEADER} is {shown(guardrail)}; guardrails are not served here", param=GUARDRAIL_HEADER
        )
    wanted = [part.partition(";")[0].strip().lower() for part in (accept or "").split(",")]
    if any(wanted) and not any(one in MEDIA_TYPES for one in wanted):
        raise invalid(f"Accept is {shown(accept)}; answers are application/json", param="Accept")


def _form(data: Json) -> Form:
    markers = [name for name in ("messages", "prompt") if name in data]
    if len(markers) > 1:
        raise invalid("the body has messages and prompt; send one of them", param="prompt", code="ambiguous_schema")
    if not markers:
        fields = ", ".join(sorted(shown(name) for name in data)[:8]) or "none"
        raise invalid(
            f"the body's fields are {fields}; a body has {'; or '.join(ACCEPTED)}",
            code="unknown_schema",
            accepted=list(ACCEPTED),
        )
    if markers == ["messages"]:
        return "chat"
    return "bedrock" if "max_gen_len" in data else "completions"


def _from_bedrock(body: Json) -> Json:
    """Bedrock's completion as OpenAI's: one prompt, `max_gen_len` for `max_tokens`."""
    if "max_tokens" in body:
        raise invalid("the body has max_gen_len and max_tokens; send one of them", param="max_tokens")
    if not isinstance(body["prompt"], str):
        raise invalid(f"prompt is {shown(body['prompt'])}; beside max_gen_len it must be a string", param="prompt")
    if body.get("n") not in (None, 1):
        raise invalid(f"n is {shown(body['n'])}; beside max_gen_len it can only be 1", param="n")
    openai = {name: value for name, value in body.items() if name != "max_gen_len"}
    if body["max_gen_len"] is not None:
        limit = body["max_gen_len"]
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise invalid(
                f"max_gen_len is {shown(limit)}; it must be a whole number of at least 1", param="max_gen_len"
            )
        openai["max_tokens"] = limit
    return openai


def answer(asked: Invoke, openai: Json) -> Json:
    """The engine's answer in the request's form."""
    return openai if asked.form != "bedrock" else bedrock_part(openai, openai["choices"][0])


def bedrock_part(openai: Json, choice: Json) -> Json:
    """A completion, or a chunk of one, in Bedrock's form; counts are null where a chunk has none."""
    usage = openai.get("usage") or {}
    part: Json = {
        "generation": choice.get("text") or "",
        "prompt_token_count": usage.get("prompt_tokens"),
        "generation_token_count": usage.get("completion_tokens"),
        "stop_reason": choice.get("finish_reason"),
    }
    return part if choice.get("logprobs") is None else part | {"logprobs": choice["logprobs"]}


def token_headers(openai: Json, latency_ms: int) -> dict[str, str]:
    """Bedrock's headers with token counts and latency."""
    usage = openai.get("usage") or {}
    counts = {name: str(usage[key]) for name, key in TOKEN_HEADERS.items() if usage.get(key) is not None}
    return counts | {"X-Amzn-Bedrock-Invocation-Latency": str(latency_ms)}
