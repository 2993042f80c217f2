"""The LMI schema against vLLM's own request classes and answer builders, and against TGI's client types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from lorahost.errors import EngineFailedError, InvalidRequestError
from lorahost.requests.invocation import Invocation, RequestSettings, parse
from lorahost.requests.lmi import answer
from lorahost.requests.lmi_parameters import PASSED_ON, REFUSED, Parameters
from lorahost.requests.streams import writer

PROMPT_IDS = [11, 12, 13]
MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(
    inputs: Any = "Once", accept: str | None = None, tgi: bool = False, stream: bool = False, **params: Any
) -> Invocation:
    body = {"inputs": inputs, "parameters": params, "stream": stream}
    return parse(json.dumps(body).encode(), None, accept, {}, RequestSettings(tgi_compat=tgi))


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
    # Our default is vLLM's limit.
    sampling(ask(["a"] * RequestSettings().max_inputs))


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


def serving() -> OpenAIServingCompletion:
    """vLLM's completion serving with nothing of an engine: enough to build answers and chunks."""
    made: Any = object.__new__(OpenAIServingCompletion)
    made.enable_force_include_usage = made.enable_prompt_tokens_details = False
    made.enable_per_request_metrics = made.return_tokens_as_token_ids = False
    made.system_fingerprint = None
    return made  # type: ignore[no-any-return]


def output(
    index: int, steps: list[tuple[int, str]], text: str, finish: str | None, stop: Any = None
) -> CompletionOutput:
    logprobs = [
        {token_id: Logprob(-0.5, 1, piece), token_id + 100: Logprob(-2.0, 2, "alt" + piece)}
        for token_id, piece in steps
    ]
    return CompletionOutput(index, text, [token_id for token_id, _ in steps], None, logprobs, None, finish, stop)


def request_output(outputs: list[CompletionOutput], prompt_logprobs: Any = None) -> RequestOutput:
    return RequestOutput("r", "Once", PROMPT_IDS, prompt_logprobs, outputs, True)


def whole(invocation: Invocation, results: list[RequestOutput]) -> dict[str, Any]:
    request = CompletionRequest.model_validate(invocation.calls[0].body)
    metadata = RequestResponseMetadata(request_id="r")
    response = serving().request_output_to_completion_response(results, request, "r", 0, "m", None, metadata)
    return json.loads(response.model_dump_json())  # type: ignore[no-any-return]


def chunks(invocation: Invocation, steps: list[tuple[int, CompletionOutput | Exception]]) -> list[str]:
    """vLLM's SSE events when the engine gives `steps`, each for one prompt."""
    request = CompletionRequest.model_validate(invocation.calls[0].body)

    async def engine() -> AsyncIterator[tuple[int, RequestOutput]]:
        for prompt, step in steps:
            if isinstance(step, Exception):
                raise step
            yield prompt, request_output([step])

    async def collect() -> list[str]:
        stream = serving().completion_stream_generator(
            request, [{}] * 2, engine(), "r", 0, "m", 2, None, RequestResponseMetadata(request_id="r")
        )
        return [event async for event in stream]

    return asyncio.run(collect())


def test_plain_answers() -> None:
    done = [request_output([output(0, [(1, " a")], " a", "length")])]
    for tgi, full, expected in (
        (False, False, {"generated_text": " a"}),
        (False, True, {"generated_text": "Once a"}),
        (True, False, [{"generated_text": " a"}]),
    ):
        invocation = ask(tgi=tgi, return_full_text=full)
        assert invocation.lmi is not None
        assert answer(invocation.lmi, [whole(invocation, done)]) == expected


def test_a_list_of_inputs_gives_a_list_in_order() -> None:
    invocation = ask(["A", "B"], return_full_text=True)
    done = [request_output([output(0, [(1, f" {t}")], f" {t}", "length")]) for t in ("x", "y")]
    assert invocation.lmi is not None
    assert answer(invocation.lmi, [whole(invocation, done)]) == [
        {"generated_text": "A x"},
        {"generated_text": "B y"},
    ]


def test_details() -> None:
    invocation = ask(details=True, decoder_input_details=True, seed=4)
    prompt_logprobs = [None, {12: Logprob(-1.0, 3, "n")}, {13: Logprob(float("-inf"), 3, "ce")}]
    done = output(0, [(1, " a"), (2, "</s>")], " a", "stop")
    assert invocation.lmi is not None
    found = answer(invocation.lmi, [whole(invocation, [request_output([done], prompt_logprobs)])])
    assert isinstance(found, dict)
    assert found["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 2,
        "seed": 4,
        "inputs": "Once",
        "prefill": [
            {"id": 12, "text": "n", "logprob": -1.0, "log_prob": -1.0},
            {"id": 13, "text": "ce", "logprob": -9999.0, "log_prob": -9999.0},
        ],
        "tokens": [
            {"id": 1, "text": " a", "logprob": -0.5, "log_prob": -0.5},
            {"id": 2, "text": "</s>", "logprob": -0.5, "log_prob": -0.5},
        ],
    }
    json.dumps(found, allow_nan=False)
    parsed = TextGenerationOutput.parse_obj_as_instance(found)
    assert parsed.details is not None
    assert [(token.id, token.text, token.logprob) for token in parsed.details.tokens] == [
        (1, " a", -0.5),
        (2, "</s>", -0.5),
    ]


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        ("length", None, "length"),
        ("stop", None, "eos_token"),
        ("stop", "###", "stop_sequence"),
        ("stop", 77, "stop_sequence"),
        ("stop", 151645, "eos_token"),
        ("repetition", "r", "repetition"),
        ("abort", None, "error"),
    ],
)
def test_finish_reasons(finish: str, stop: Any, expected: str) -> None:
    invocation = ask(details=True, stop_token_ids=[77])
    done = [request_output([output(0, [(1, "a")], "a", finish, stop)])]
    assert invocation.lmi is not None
    found = answer(invocation.lmi, [whole(invocation, done)])
    assert isinstance(found, dict)
    assert found["details"]["finish_reason"] == expected


def test_further_sequences_and_alternatives_are_in_details() -> None:
    invocation = ask(["A", "B"], n=2, logprobs=1)
    done = [request_output([output(i, [(p * 2 + i, "t")], f"t{p}{i}", "length") for i in range(2)]) for p in range(2)]
    assert invocation.lmi is not None
    found = answer(invocation.lmi, [whole(invocation, done)])
    assert [one["generated_text"] for one in found] == ["t00", "t10"]
    assert [one["details"]["best_of_sequences"][0]["generated_text"] for one in found] == ["t01", "t11"]
    assert found[1]["details"]["tokens"][0]["id"] == 2
    assert [top["text"] for top in found[0]["details"]["top_tokens"][0]] == ["t", "altt"]
    with pytest.raises(EngineFailedError, match="2 sequences of 4"):
        answer(invocation.lmi, [whole(invocation, done[:1])])


def test_chat_answers() -> None:
    content = [{"token": "Ha", "logprob": -0.1, "bytes": None, "top_logprobs": []}]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Ha"},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [9],
    }
    invocation = ask([MESSAGES, MESSAGES], details=True)
    assert invocation.lmi is not None
    found = answer(invocation.lmi, [{"choices": [choice]}] * 2)
    assert len(found) == 2
    assert found[0]["generated_text"] == "Ha"
    assert found[0]["details"]["tokens"] == [{"id": 9, "text": "Ha", "logprob": -0.1, "log_prob": -0.1}]
    refused = choice | {"message": {"role": "assistant", "content": None}, "token_ids": [], "logprobs": None}
    plain = ask(MESSAGES)
    assert plain.lmi is not None
    assert answer(plain.lmi, [{"choices": [refused]}]) == {"generated_text": ""}


def converted(invocation: Invocation, events: list[str]) -> list[dict[str, Any]]:
    stream = writer(invocation)
    parts = [part for event in events for part in stream.feed(event)]
    assert stream.finish() == []
    start, end = ("data: ", "\n\n") if invocation.format == "sse" else ("", "\n")
    for part in parts:
        assert part.startswith(start)
        assert part.endswith(end)
        assert len(part.splitlines()) == len(end)
    return [json.loads(part.removeprefix(start)) for part in parts]


@pytest.mark.parametrize("accept", ["text/event-stream", "application/jsonlines"])
def test_stream_lines(accept: str) -> None:
    invocation = ask("Once", accept, stream=True, details=True, return_full_text=True, seed=3)
    steps = [
        (0, output(0, [(1, " é")], " é", None)),
        (0, output(0, [(2, "\u2028"), (3, "\n")], "\u2028\n", None)),
        (0, output(0, [(4, "</s>")], "", "stop")),
    ]
    lines = converted(invocation, chunks(invocation, steps))
    assert [(line["token"]["id"], line["token"]["text"]) for line in lines] == [
        (1, " é"),
        (2, "\u2028"),
        (3, "\n"),
        (4, ""),
    ]
    assert all(line["token"]["logprob"] == line["token"]["log_prob"] == -0.5 for line in lines)
    assert [line["generated_text"] for line in lines] == [None, None, None, "Once é\u2028\n"]
    assert [line["details"] for line in lines[:3]] == [None] * 3
    assert lines[3]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "seed": 3,
        "input_length": 3,
        "inputs": "Once",
    }
    parsed = [TextGenerationStreamOutput.parse_obj_as_instance(line) for line in lines]
    assert parsed[-1].details is not None
    assert parsed[-1].details.generated_tokens == 4


def test_text_that_does_not_belong_to_one_token_goes_to_the_last() -> None:
    invocation = ask(stream=True)
    held_back = output(0, [(1, "\ufffd"), (2, "\ufffd")], "€", None)
    flushed = output(0, [], "!", None)
    end = output(0, [], "", "abort")
    lines = converted(invocation, chunks(invocation, [(0, held_back), (0, flushed), (0, end)]))
    assert [(line["token"]["id"], line["token"]["text"]) for line in lines] == [
        (1, ""),
        (2, "€"),
        (-1, "!"),
        (-1, ""),
    ]
    assert lines[-1]["generated_text"] == "€!"
    assert lines[-1]["details"]["finish_reason"] == "error"


def test_streams_of_several_prompts_and_sequences_keep_their_index() -> None:
    invocation = ask(["A", "B"], stream=True, n=2, logprobs=1, return_full_text=True)
    order = [(1, 0), (0, 1), (0, 0), (1, 1)]
    steps = [(p, output(i, [(p * 2 + i, "t")], f"t{p}{i}", finish)) for finish in (None, "length") for p, i in order]
    lines = converted(invocation, chunks(invocation, steps))
    assert [line["index"] for line in lines] == [2, 1, 0, 3] * 2
    assert {line["index"]: line["generated_text"] for line in lines[4:]} == {
        0: "At00t00",
        1: "At01t01",
        2: "Bt10t10",
        3: "Bt11t11",
    }
    assert [top["text"] for top in lines[0]["top_tokens"]] == ["t", "altt"]
    assert all(line["details"]["generated_tokens"] == 2 for line in lines[4:])


def test_an_error_of_the_engine_ends_every_open_sequence_in_band() -> None:
    invocation = ask(["A", "B"], stream=True)
    steps = [
        (0, output(0, [(1, "a")], "a", "length")),
        (1, output(0, [(2, "b")], "b", None)),
        (1, ValueError("broken")),
    ]
    lines = converted(invocation, chunks(invocation, steps))
    assert [line["index"] for line in lines] == [0, 1, 1]
    assert "error" not in lines[0]
    assert lines[2]["token"] == {"id": -1, "text": "", "logprob": None, "log_prob": None}
    assert (lines[2]["generated_text"], lines[2]["details"]["finish_reason"]) == ("b", "error")
    assert "broken" in lines[2]["error"]["message"]


def test_our_own_error_and_a_stream_cut_short() -> None:
    for end in (lambda s: s.fail(EngineFailedError("it died")), lambda s: s.finish()):
        stream = writer(ask(stream=True))
        first = chunks(ask(stream=True), [(0, output(0, [(1, "a")], "a", None))])[0]
        assert len(stream.feed(first)) == 1
        (last,) = end(stream)
        line = json.loads(last)
        assert (line["details"]["finish_reason"], line["error"]["type"]) == ("error", "engine_error")
        assert stream.fail(EngineFailedError("again")) == stream.finish() == stream.feed(first) == []


def test_chat_streams() -> None:
    invocation = ask(MESSAGES, stream=True)

    def event(delta: dict[str, Any], ids: list[int] | None, finish: str | None = None, **more: Any) -> str:
        entries = [{"token": f"t{i}", "logprob": -0.1, "top_logprobs": []} for i in ids or []]
        logprobs = None if ids is None else {"content": entries}
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "token_ids": ids}
        return f"data: {json.dumps({'choices': [choice], **more})}\n\n"

    events = [
        event({"role": "assistant", "content": ""}, None, prompt_token_ids=PROMPT_IDS),
        event({"content": "Ha"}, [7]),
        event({}, [8], "stop"),
        f"data: {json.dumps({'choices': [], 'usage': {}})}\n\n",
        "data: [DONE]\n\n",
    ]
    lines = converted(invocation, events)
    assert [(line["token"]["id"], line["token"]["text"]) for line in lines] == [(7, "Ha"), (8, "")]
    assert lines[-1]["generated_text"] == "Ha"
    assert lines[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 2,
        "seed": None,
        "input_length": 3,
    }


@given(st.lists(st.lists(st.text(max_size=3), min_size=1, max_size=3), min_size=1, max_size=6), st.booleans())
def test_the_texts_of_a_stream_add_up_to_its_generated_text(groups: list[list[str]], sse: bool) -> None:
    invocation = ask("Once", "text/event-stream" if sse else None, stream=True)
    stream = writer(invocation)
    parts: list[str] = []
    for position, texts in enumerate(groups):
        logprobs = {"tokens": texts, "token_logprobs": [0.0] * len(texts), "top_logprobs": [{}] * len(texts)}
        finish = "length" if position == len(groups) - 1 else None
        choice = {"index": 0, "text": "".join(texts), "logprobs": logprobs, "finish_reason": finish}
        choice["token_ids"] = list(range(len(texts)))
        parts += stream.feed(f"data: {json.dumps({'choices': [choice]})}\n\n")
    lines = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert all(len(part.splitlines()) == (2 if sse else 1) for part in parts)
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]
    assert len(lines) == sum(map(len, groups))


def openai(accept: str | None) -> Invocation:
    return parse(b'{"prompt": "x", "stream": true}', None, accept, {}, RequestSettings())


def test_openai_sse_is_vllms_own() -> None:
    events = chunks(openai(None), [(0, output(0, [(1, "a")], "a", "length"))])
    assert events[-1] == "data: [DONE]\n\n"
    stream = writer(openai(None))
    assert [part for event in events for part in stream.feed(event)] == events
    assert stream.finish() == stream.fail(EngineFailedError("x")) == []


def test_openai_json_lines() -> None:
    events = chunks(openai(None), [(0, output(0, [(1, "a")], "a", "length"))])
    stream = writer(openai("application/jsonlines"))
    parts = [part for event in events for part in stream.feed(event)]
    assert [json.loads(part)["choices"][0]["text"] for part in parts] == ["a"]
    assert parts[0].endswith("}\n")
    assert stream.finish() == []


@pytest.mark.parametrize(("accept", "count"), [("text/event-stream", 2), ("application/jsonlines", 1)])
def test_openai_errors_are_in_band_once(accept: str, count: int) -> None:
    for end in (lambda s: s.fail(EngineFailedError("it died")), lambda s: s.finish()):
        stream = writer(openai(accept))
        parts = end(stream)
        assert len(parts) == count
        assert json.loads(parts[0].removeprefix("data: "))["error"]["type"] == "engine_error"
        assert parts[1:] == ["data: [DONE]\n\n"][: count - 1]
        assert stream.finish() == stream.feed("data: {}\n\n") == []


def test_only_streams_have_a_writer() -> None:
    with pytest.raises(ValueError, match="does not stream"):
        writer(ask())
