"""The LMI and TGI schema: `inputs` and `parameters` to OpenAI calls, and whole answers back.

Token ids, texts and log-probabilities come from vLLM's own answer (`return_token_ids`, `logprobs`), so that
no tokenizer is needed here. `lmi_stream` converts streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lorahost.core import Api, Json
from lorahost.errors import EngineFailedError
from lorahost.requests import lmi_parameters
from lorahost.requests.lmi_parameters import Parameters
from lorahost.requests.problems import invalid, shown

_TOP_LEVEL = frozenset(
    {"inputs", "parameters", "stream", "model", "adapters", "adapter_id", "deadline_s", "request_id"}
)


@dataclass(frozen=True, slots=True)
class LmiPlan:
    """What the way back needs to know of the request.

    Attributes:
        api: "chat" when `inputs` are conversations.
        inputs: One entry for each prompt: its text, or its messages.
        batch: Whether `inputs` was a list of prompts, so that the answer is a list.
        as_list: TGI's form: a list also for one prompt.
        sequences: Sequences for each prompt.
        parameters: As read.
    """

    api: Api
    inputs: tuple[Any, ...]
    batch: bool
    as_list: bool
    sequences: int
    parameters: Parameters

    def prefix(self, prompt: int) -> str:
        """What stands before the generated text: the prompt for `return_full_text`."""
        return str(self.inputs[prompt]) if self.parameters.return_full_text else ""


@dataclass(frozen=True, slots=True)
class Token:
    """One token; `logprob` is a natural logarithm, None where the engine gave none."""

    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[str, float | None], ...] = ()

    def json(self) -> Json:
        """TGI calls the field `logprob`, LMI's documentation `log_prob`; clients of both exist."""
        return {"id": self.id, "text": self.text, "logprob": self.logprob, "log_prob": self.logprob}


def calls(
    data: Json, *, stream: bool, deadline: bool, default_max_new_tokens: int, max_inputs: int, tgi_compat: bool
) -> tuple[list[Json], LmiPlan]:
    """The OpenAI bodies for an LMI request, and the plan for the way back.

    With a `deadline` the engine streams also for a whole answer, so that there is something to answer with.

    A list of texts is one completions body with a list as its prompt; each conversation is a chat body.

    Raises:
        InvalidRequestError: unknown fields, wrong types or ranges, or a combination that can't be answered.
    """
    for name in data:
        if name not in _TOP_LEVEL:
            where = "; it belongs in parameters" if name in Parameters.model_fields else ""
            accepted = ", ".join(sorted(_TOP_LEVEL))
            raise invalid(
                f"{shown(name)} is not a field of an inputs request{where}; accepted are {accepted}",
                param=name[:80],
                code="unknown_parameter",
            )
    parameters = lmi_parameters.read(data.get("parameters"))
    api, inputs, batch = _inputs(data["inputs"], max_inputs)
    plan = LmiPlan(api, inputs, batch, tgi_compat, parameters.sequences, parameters)
    _check(plan, stream, deadline)
    shared = parameters.fields(default_max_new_tokens) | {"stream": stream}
    if api == "completions":
        return [{"prompt": list(inputs) if batch else inputs[0]} | shared | _completion_details(plan, stream)], plan
    return [{"messages": messages} | shared | _chat_details(plan, stream) for messages in inputs], plan


def answer(plan: LmiPlan, responses: Sequence[Json]) -> Json | list[Json]:
    """The LMI answer from the OpenAI responses, one for each call, in order.

    Sequences after the first are in `details.best_of_sequences`, TGI's place for them.

    Raises:
        EngineFailedError: the responses do not have the number of choices that was asked for.
    """
    choices = [(choice, response) for response in responses for choice in response["choices"]]
    expected = len(plan.inputs) * plan.sequences
    if len(choices) != expected:
        raise EngineFailedError(f"the engine answered {len(choices)} sequences of {expected}")
    results = []
    for prompt in range(len(plan.inputs)):
        first, *rest = (
            _result(plan, prompt, choice, response)
            for choice, response in choices[prompt * plan.sequences : (prompt + 1) * plan.sequences]
        )
        if rest:
            first["details"]["best_of_sequences"] = [
                {"generated_text": one["generated_text"]} | one["details"] for one in rest
            ]
        results.append(first)
    return results if plan.batch or plan.as_list else results[0]


def tokens(plan: LmiPlan, choice: Json) -> list[Token]:
    """The tokens of a choice, of an answer or of a chunk; empty when `return_token_ids` was not asked for."""
    ids = choice.get("token_ids") or []
    logprobs = choice.get("logprobs") or {}
    if plan.api == "chat":
        entries = [
            (
                one["token"],
                one["logprob"],
                [(top["token"], top["logprob"]) for top in one.get("top_logprobs") or []],
            )
            for one in logprobs.get("content") or []
        ]
    else:
        tops = logprobs.get("top_logprobs") or []
        entries = [
            (text, logprob, list((top or {}).items()))
            for text, logprob, top in zip(
                logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], tops, strict=True
            )
        ]
    if len(ids) != len(entries):
        raise EngineFailedError(f"the engine answered {len(ids)} token ids with {len(entries)} log-probabilities")
    return [
        Token(token_id, text, _finite(logprob), tuple((other, _finite(value)) for other, value in top))
        for token_id, (text, logprob, top) in zip(ids, entries, strict=True)
    ]


def finish_reason(plan: LmiPlan, choice: Json) -> str:
    """LMI's word for how a choice ended: length, eos_token, stop_sequence or error.

    `repetition` is vLLM's own, for those who set `repetition_detection`.
    """
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason in ("stop", "tool_calls"):
        # An integer is a token id: the caller's own, or one of the model's further end tokens.
        own_token = isinstance(stop, int) and stop in (plan.parameters.stop_token_ids or [])
        return "stop_sequence" if own_token or isinstance(stop, str) else "eos_token"
    return reason if reason in ("length", "repetition") else "error"


def top_tokens(found: Sequence[Token]) -> Iterator[list[Json]]:
    """For each token the likeliest alternatives, for `logprobs` above 0.

    vLLM's completions key them by text: of several with one text (pieces of a character, as a rule) one is left.
    """
    for token in found:
        yield [{"text": text, "logprob": value, "log_prob": value} for text, value in token.top]


def _inputs(value: Any, max_inputs: int) -> tuple[Api, tuple[Any, ...], bool]:
    if isinstance(value, str):
        return "completions", (_prompt(value, "inputs"),), False
    if not isinstance(value, list) or not value:
        raise invalid(
            f"inputs is {shown(value)}; it must be a text, a non-empty list of texts, or a list of messages",
            param="inputs",
            code="invalid_type",
        )
    if isinstance(value[0], dict):
        return "chat", (_messages(value, "inputs"),), False
    if len(value) > max_inputs:
        raise invalid(
            f"inputs has {len(value)} prompts; the limit is {max_inputs}",
            param="inputs",
            code="too_many_inputs",
        )
    if isinstance(value[0], list):
        return "chat", tuple(_messages(one, f"inputs[{i}]") for i, one in enumerate(value)), True
    return "completions", tuple(_prompt(one, f"inputs[{i}]") for i, one in enumerate(value)), True


def _prompt(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(f"{field} is {shown(value)}; it must be a non-empty text", param=field, code="invalid_type")
    return value


def _messages(value: Any, field: str) -> list[Json]:
    is_chat = isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value)
    if not is_chat:
        raise invalid(
            f"{field} is {shown(value)}; it must be a non-empty list of messages with role and content",
            param=field,
            code="invalid_type",
        )
    return list(value)


def _check(plan: LmiPlan, stream: bool, deadline: bool) -> None:
    parameters = plan.parameters
    streamed_for = "stream" if stream else "deadline_s" if deadline else None
    if streamed_for and parameters.decoder_input_details:
        raise _excluded("decoder_input_details", f"a stream has no prompt tokens; leave out {streamed_for}")
    if streamed_for and parameters.use_beam_search:
        raise _excluded("use_beam_search", f"beams can't be streamed; leave out {streamed_for}")
    if stream and len(plan.inputs) > 1 and plan.api == "chat":
        raise invalid(
            f"inputs has {len(plan.inputs)} conversations; a stream takes one",
            param="inputs",
            code="too_many_inputs",
        )
    if plan.api == "chat" and parameters.return_full_text:
        raise _excluded("return_full_text", "a conversation has no one text before the answer")


def _excluded(name: str, reason: str) -> Exception:
    return invalid(f"parameters.{name} is true: {reason}", param=f"parameters.{name}", code="invalid_parameter")


def _completion_details(plan: LmiPlan, stream: bool) -> Json:
    parameters = plan.parameters
    if not stream and not parameters.token_details:
        return {}
    details: Json = {"logprobs": parameters.logprobs or 0, "return_token_ids": True}
    # 0: only the prompt's own tokens, no alternatives.
    return details | ({"prompt_logprobs": 0} if parameters.decoder_input_details else {})


def _chat_details(plan: LmiPlan, stream: bool) -> Json:
    details = _completion_details(plan, stream)
    if details:
        details["top_logprobs"] = details["logprobs"]
        details["logprobs"] = True
    return details


def _result(plan: LmiPlan, prompt: int, choice: Json, response: Json) -> Json:
    text = choice["message"].get("content") or "" if plan.api == "chat" else choice["text"]
    result: Json = {"generated_text": plan.prefix(prompt) + text}
    if not plan.parameters.token_details:
        return result
    found = tokens(plan, choice)
    result["details"] = {
        "finish_reason": finish_reason(plan, choice),
        "generated_tokens": len(found),
        "seed": plan.parameters.seed,
        "inputs": plan.inputs[prompt],
        "prefill": _prefill(choice.get("prompt_logprobs") or response.get("prompt_logprobs") or []),
        "tokens": [token.json() for token in found],
    }
    if plan.parameters.logprobs:
        result["details"]["top_tokens"] = list(top_tokens(found))
    return result


def _prefill(prompt_logprobs: Sequence[Any]) -> list[Json]:
    """The prompt's tokens from the second on: nothing is known of the first but its id."""
    found = []
    for entry in prompt_logprobs:
        if entry:
            token_id, fact = next(iter(entry.items()))
            text = fact.get("decoded_token") or ""
            found.append(Token(int(token_id), text, _finite(fact["logprob"])).json())
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
