"""LMI answers, from vLLM's own answers, and against TGI's client types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import TextGenerationOutput
from tests.unit.vllm_answers import MESSAGES, ask, output, request_output, whole
from vllm.logprobs import Logprob

from lorahost.errors import EngineFailedError
from lorahost.requests import lmi
from lorahost.requests.invocation import Invocation


def answer(invocation: Invocation, responses: list[dict[str, Any]]) -> Any:
    assert invocation.lmi is not None
    return lmi.answer(invocation.lmi, responses)


def test_plain_answers() -> None:
    done = [request_output([output(0, [(1, " a")], " a", "length")])]
    for tgi, full, expected in (
        (False, False, {"generated_text": " a"}),
        (False, True, {"generated_text": "Once a"}),
        (True, False, [{"generated_text": " a"}]),
    ):
        invocation = ask(tgi=tgi, return_full_text=full)
        assert answer(invocation, [whole(invocation, done)]) == expected


def test_a_list_of_inputs_gives_a_list_in_order() -> None:
    invocation = ask(["A", "B"], return_full_text=True)
    done = [request_output([output(0, [(1, f" {t}")], f" {t}", "length")]) for t in ("x", "y")]
    assert answer(invocation, [whole(invocation, done)]) == [
        {"generated_text": "A x"},
        {"generated_text": "B y"},
    ]


def test_details() -> None:
    invocation = ask(details=True, decoder_input_details=True, seed=4)
    prompt_logprobs = [None, {12: Logprob(-1.0, 3, "n")}, {13: Logprob(float("-inf"), 3, "ce")}]
    done = output(0, [(1, " a"), (2, "</s>")], " a", "stop")
    found = answer(invocation, [whole(invocation, [request_output([done], prompt_logprobs)])])
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
    found = answer(invocation, [whole(invocation, done)])
    assert found["details"]["finish_reason"] == expected


def test_further_sequences_and_alternatives_are_in_details() -> None:
    invocation = ask(["A", "B"], n=2, logprobs=1)
    done = [request_output([output(i, [(p * 2 + i, "t")], f"t{p}{i}", "length") for i in range(2)]) for p in range(2)]
    found = answer(invocation, [whole(invocation, done)])
    assert [one["generated_text"] for one in found] == ["t00", "t10"]
    assert [one["details"]["best_of_sequences"][0]["generated_text"] for one in found] == ["t01", "t11"]
    assert found[1]["details"]["tokens"][0]["id"] == 2
    assert [top["text"] for top in found[0]["details"]["top_tokens"][0]] == ["t", "altt"]
    with pytest.raises(EngineFailedError, match="2 sequences of 4"):
        answer(invocation, [whole(invocation, done[:1])])


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
    found = answer(invocation, [{"choices": [choice]}] * 2)
    assert len(found) == 2
    assert found[0]["generated_text"] == "Ha"
    assert found[0]["details"]["tokens"] == [{"id": 9, "text": "Ha", "logprob": -0.1, "log_prob": -0.1}]
    refused = choice | {"message": {"role": "assistant", "content": None}, "token_ids": [], "logprobs": None}
    plain = ask(MESSAGES)
    assert answer(plain, [{"choices": [refused]}]) == {"generated_text": ""}
