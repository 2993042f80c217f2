"""LMI requests against vLLM's own request classes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.vllm_answers import MESSAGES, ask
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from lorahost.errors import InvalidRequestError
from lorahost.requests.invocation import Invocation, RequestSettings, parse
from lorahost.requests.lmi_parameters import PASSED_ON, REFUSED, Parameters


def refusal(inputs: Any = "Once", stream: bool = False, **params: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        ask(inputs, stream=stream, **params)
    assert caught.value.status == 400
    return caught.value


def sampling(invocation: Invocation) -> Any:
    """What vLLM makes of the one call: its request class, then its SamplingParams, both with their checks."""
    (call,) = invocation.calls
    cls = CompletionRequest if call.api == "completions" else ChatCompletionRequest
    request = cls.model_validate(call.body)
    assert not request.model_extra, "vLLM ignores fields that it does not know"
    return request.to_sampling_params(call.body["max_tokens"], {})


def test_every_field_of_vllm_is_passed_on_or_refused_or_translated() -> None:
    translated = {"n", "stop", "logprobs"}
    assert set(CompletionRequest.model_fields) == PASSED_ON | set(REFUSED) | translated
    assert set(ChatCompletionRequest.model_fields) >= PASSED_ON
    assert set(Parameters.model_fields) >= PASSED_ON | translated
    assert not set(REFUSED) & set(Parameters.model_fields)


def test_defaults() -> None:
    params = sampling(ask())
    assert (params.max_tokens, params.n, params.logprobs, params.temperature) == (30, 1, None, 1.0)
    own = parse(b'{"inputs": "x"}', None, None, {}, RequestSettings(default_max_new_tokens=99))
    assert sampling(own).max_tokens == 99


@pytest.mark.parametrize(
    ("given_params", "expected"),
    [
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
        ({"temperature": 0.5, "do_sample": True}, {"temperature": 0.5}),
        ({"temperature": 0.5, "do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        (
            {"presence_penalty": -2, "frequency_penalty": 2},
            {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        ),
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"stop_sequences": ["a", "b"], "stop": ["b", "c"]}, {"stop": ["b", "c", "a"]}),
        ({"seed": -5}, {"seed": -5}),
        ({"ignore_eos_token": True}, {"ignore_eos": True}),
        ({"n": 3}, {"n": 3}),
        ({"top_n_tokens": 2, "n": 2}, {"n": 2}),
        ({"logprobs": 4}, {"logprobs": 4}),
        ({"details": True}, {"logprobs": 0}),
        ({"details": True, "decoder_input_details": True}, {"prompt_logprobs": 0}),
        (
            {"min_tokens": 2, "min_p": 0.1, "bad_words": ["x"]},
            {"min_tokens": 2, "min_p": 0.1, "bad_words": ["x"]},
        ),
        (
            {"stop_token_ids": [5], "skip_special_tokens": False},
            {"stop_token_ids": [5], "skip_special_tokens": False},
        ),
        ({"watermark": True, "typical_p": 1.0, "best_of": 1, "num_beams": 1, "early_stopping": False}, {}),
        (dict.fromkeys(Parameters.model_fields), {"max_tokens": 30}),
    ],
)
def test_parameters_reach_vllm(given_params: dict[str, Any], expected: dict[str, Any]) -> None:
    for inputs in ("Once", MESSAGES):
        params = sampling(ask(inputs, **given_params))
        assert {name: getattr(params, name) for name in expected} == expected


def test_truncate_keeps_the_end_of_the_prompt_unless_told_otherwise() -> None:
    body = ask(truncate=5).calls[0].body
    assert (body["truncate_prompt_tokens"], body["truncation_side"]) == (5, "left")
    assert ask(truncate=5, truncation_side="right").calls[0].body["truncation_side"] == "right"
    assert sampling(ask(truncate=5))


def test_inputs() -> None:
    assert ask("a").calls[0].body["prompt"] == "a"
    assert ask(["a"]).calls[0].body["prompt"] == ["a"]
    assert sampling(ask(["a", "b"]))
    chats = ask([MESSAGES, MESSAGES])
    assert [(call.api, call.body["messages"]) for call in chats.calls] == [("chat", MESSAGES)] * 2


@pytest.mark.parametrize(
    "inputs", ["", [], [""], ["a", 5], [["a"]], [[]], [{"content": "x"}], {}, 5, None, ["a", MESSAGES]]
)
def test_bad_inputs(inputs: Any) -> None:
    assert (refusal(inputs).param or "").startswith("inputs")


def test_too_many_inputs() -> None:
    with pytest.raises(InvalidRequestError, match="3 prompts; the limit is 2"):
        parse(b'{"inputs": ["a", "b", "c"]}', None, None, {}, RequestSettings(max_inputs=2))
    # Our default is vLLM's limit; what one request may take of the engine is less.
    assert RequestSettings().max_inputs == 1024
    sampling(ask(["a"] * RequestSettings().max_sequences))


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        ({"max_new_tokens": 0}, "greater than or equal to 1"),
        ({"max_new_tokens": 5.5}, "integer"),
        ({"max_new_tokens": "5"}, "integer"),
        ({"max_new_tokens": True}, "integer"),
        ({"temperature": 2.1}, "less than or equal to 2"),
        ({"temperature": -0.1}, "greater than or equal to 0"),
        ({"top_p": 0}, "greater than 0"),
        ({"top_p": 1.5}, "less than or equal to 1"),
        ({"top_k": -2}, "greater than or equal to -1"),
        ({"repetition_penalty": 0}, "greater than 0"),
        ({"presence_penalty": 3}, "less than or equal to 2"),
        ({"frequency_penalty": -3}, "greater than or equal to -2"),
        ({"typical_p": 0.9}, "does not have it"),
        ({"best_of": 2}, "does not have it"),
        ({"num_beams": 4}, "does not have it"),
        ({"early_stopping": True}, "does not have it"),
        ({"do_sample": "false"}, "boolean"),
        ({"details": 1}, "boolean"),
        ({"stop": 5}, "string"),
        ({"stop": [""]}, "at least 1 character"),
        ({"stop_sequences": [5]}, "string"),
        ({"seed": 2**63}, "less than or equal to"),
        ({"truncate": 0}, "greater than or equal to 1"),
        ({"n": 0}, "greater than or equal to 1"),
        ({"n": 129}, "less than or equal to 128"),
        ({"logprobs": -1}, "greater than or equal to 0"),
        ({"stop_token_ids": [-1]}, "greater than or equal to 0"),
        ({"decoder_input_details": True}, "needs details=true"),
        ({"truncation_side": "middle"}, "'left' or 'right'"),
    ],
)
def test_wrong_types_and_ranges_name_field_value_and_limit(params: dict[str, Any], limit: str) -> None:
    error = refusal(**params)
    ((name, value),) = params.items()
    assert (error.param or "").startswith(f"parameters.{name}")
    assert f"parameters.{name}" in error.message
    assert repr(value[0] if isinstance(value, list) else value)[:40] in error.message
    assert limit in error.message


def test_combinations_that_cannot_be_answered() -> None:
    assert refusal(n=2, do_sample=False).param == "parameters.n"
    assert refusal(n=2, temperature=0).param == "parameters.n"
    assert refusal(n=2, top_n_tokens=3).param == "parameters.top_n_tokens"
    assert refusal(stream=True, details=True, decoder_input_details=True).param == "parameters.decoder_input_details"
    assert refusal(stream=True, use_beam_search=True).param == "parameters.use_beam_search"
    for details in ({"details": True, "decoder_input_details": True}, {"use_beam_search": True}):
        body = {"inputs": "x", "parameters": details, "deadline_s": 5}
        with pytest.raises(InvalidRequestError, match="leave out deadline_s"):
            parse(json.dumps(body).encode(), None, None, {}, RequestSettings())
    assert refusal(MESSAGES, return_full_text=True).param == "parameters.return_full_text"
    assert refusal([MESSAGES, MESSAGES], stream=True).param == "inputs"


@pytest.mark.parametrize("name", ["grammar", "max_length", "Temperature", "", *REFUSED])
def test_unknown_and_refused_parameters_are_named(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(json.dumps({"inputs": "x", "parameters": {name: 1}}).encode(), None, None, {}, RequestSettings())
    error = caught.value
    assert (error.code, error.param) == ("unknown_parameter", f"parameters.{name}")
    assert f"parameters.{name}" in error.message
    assert REFUSED.get(name, "not a generation parameter") in error.message


def test_unknown_top_level_fields_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"'max_new_tokens' is not a field .* belongs in parameters"):
        parse(b'{"inputs": "x", "max_new_tokens": 5}', None, None, {}, RequestSettings())
    for bad in (b'{"inputs": "x", "parameters": []}', b'{"inputs": "x", "parameters": "x"}'):
        with pytest.raises(InvalidRequestError, match="must be an object"):
            parse(bad, None, None, {}, RequestSettings())
