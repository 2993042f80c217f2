"""The `parameters` of an LMI or TGI request, and which vLLM request fields they become."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from lorahost.core import Json
from lorahost.requests.problems import from_validation, invalid, shown

_INT64 = 2**63
_Text = Annotated[str, StringConstraints(min_length=1)]
_TokenIds = list[Annotated[int, Field(ge=0)]]

# Handed to the engine under the same name, in completions and in chats.
PASSED_ON = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "min_tokens",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "add_special_tokens",
        "truncation_side",
        "allowed_token_ids",
        "bad_words",
        "logit_bias",
        "use_beam_search",
        "length_penalty",
        "response_format",
        "structured_outputs",
        "priority",
        "cache_salt",
        "vllm_xargs",
        "repetition_detection",
        "thinking_token_budget",
        "user",
    }
)
# vLLM request fields that would change what the answer's conversion relies on, each with the way to say it
# here.
REFUSED = {
    "model": "give model at the top level",
    "prompt": "use inputs",
    "prompt_embeds": "use inputs with text",
    "stream": "give stream at the top level",
    "stream_options": "streams have their own counts",
    "echo": "use return_full_text",
    "max_tokens": "use max_new_tokens",
    "ignore_eos": "use ignore_eos_token",
    "truncate_prompt_tokens": "use truncate",
    "prompt_logprobs": "use decoder_input_details",
    "return_token_ids": "use details",
    "return_tokens_as_token_ids": "use details",
    "return_token_offsets": "it is only known to vLLM's render routes",
    "logprob_token_ids": "send an OpenAI completions body",
    "request_id": "use the X-Amzn-SageMaker-Inference-Id header",
    "suffix": "the engine has no insertion",
    "kv_transfer_params": "send an OpenAI completions body",
    "ec_transfer_params": "send an OpenAI completions body",
}


class Parameters(BaseModel):
    """Generation parameters; null is the same as absent.

    `watermark` is accepted and ignored, as LMI does. `typical_p`, `best_of` and `num_beams` are accepted at
    the value that turns them off.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    max_new_tokens: int | None = Field(default=None, ge=1)
    do_sample: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: int | None = Field(default=None, ge=-1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    stop: _Text | list[_Text] | None = None
    stop_sequences: _Text | list[_Text] | None = None
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    details: bool | None = None
    decoder_input_details: bool | None = None
    return_full_text: bool | None = None
    truncate: int | None = Field(default=None, ge=1, le=_INT64 - 1)
    ignore_eos_token: bool | None = None
    watermark: bool | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    top_n_tokens: int | None = Field(default=None, ge=1, le=128)
    best_of: int | None = None
    num_beams: int | None = None
    early_stopping: bool | None = None
    logprobs: int | None = Field(default=None, ge=0)

    min_tokens: int | None = Field(default=None, ge=0)
    stop_token_ids: _TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: _TokenIds | None = None
    bad_words: list[_Text] | None = None
    logit_bias: dict[str, float] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    priority: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    cache_salt: _Text | None = None
    vllm_xargs: Json | None = None
    repetition_detection: Json | None = None
    thinking_token_budget: int | None = Field(default=None, ge=-1)
    user: str | None = None

    @field_validator("typical_p", "best_of", "num_beams", mode="after")
    @classmethod
    def _only_off(cls, value: float | None) -> float | None:
        if value not in (None, 1):
            raise ValueError("the engine does not have it; leave it out or set it to 1, which turns it off")
        return value

    @field_validator("early_stopping", mode="after")
    @classmethod
    def _no_early_stopping(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("the engine does not have it; leave it out or set it to false")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.n is not None and self.top_n_tokens is not None and self.n != self.top_n_tokens:
            raise _conflict("top_n_tokens", self.top_n_tokens, f"n is {self.n}, and both mean the number of sequences")
        if self.decoder_input_details and not self.details:
            raise _conflict("decoder_input_details", True, "it needs details=true")
        if self.sequences > 1 and self.greedy and not self.use_beam_search:
            raise _conflict("n", self.sequences, "greedy decoding gives 1 sequence; set a temperature above 0")
        return self

    @property
    def sequences(self) -> int:
        """Sequences for each prompt; LMI reads `top_n_tokens` as another name of `n`."""
        return self.n or self.top_n_tokens or 1

    @property
    def greedy(self) -> bool:
        """`do_sample` left out decides nothing; false is greedy whatever the temperature."""
        return self.do_sample is False or self.temperature == 0

    @property
    def token_details(self) -> bool:
        """Further sequences and log-probabilities have no other place than `details`."""
        return bool(self.details) or self.logprobs is not None or self.sequences > 1

    def fields(self, default_max_new_tokens: int) -> Json:
        """The request fields that completions and chats share."""
        result: Json = {name: getattr(self, name) for name in PASSED_ON if getattr(self, name) is not None}
        result["n"] = self.sequences
        if self.do_sample is False:
            result["temperature"] = 0.0
        if stop := _joined(self.stop, self.stop_sequences):
            result["stop"] = stop
        if self.ignore_eos_token:
            result["ignore_eos"] = True
        if self.truncate is not None:
            result["truncate_prompt_tokens"] = self.truncate
            # TGI keeps the end of the prompt; vLLM's own default is the tokenizer's.
            result.setdefault("truncation_side", "left")
        result["max_tokens"] = self.max_new_tokens or default_max_new_tokens
        return result


def read(value: Any) -> Parameters:
    """Reads `parameters`; None is all defaults, `adapter_id` is not looked at.

    Raises:
        InvalidRequestError: not an object, an unknown or refused field, or a wrong type or range.
    """
    if value is None:
        return Parameters()
    if not isinstance(value, dict):
        raise invalid(f"parameters is {shown(value)}; it must be an object", param="parameters", code="invalid_type")
    for name in value:
        if name != "adapter_id" and name not in Parameters.model_fields:
            reason = REFUSED.get(name, "it is not a generation parameter")
            field = f"parameters.{name[:80]}"
            raise invalid(f"{shown(field)} is not accepted: {reason}", param=field, code="unknown_parameter")
    try:
        return Parameters.model_validate({name: one for name, one in value.items() if name != "adapter_id"})
    except ValidationError as error:
        raise from_validation(error, "parameters") from None


def _conflict(name: str, value: Any, reason: str) -> Exception:
    return invalid(
        f"parameters.{name} is {shown(value)}: {reason}", param=f"parameters.{name}", code="invalid_parameter"
    )


def _joined(*sources: str | list[str] | None) -> list[str]:
    texts = [text for source in sources if source for text in ([source] if isinstance(source, str) else source)]
    return list(dict.fromkeys(texts))
