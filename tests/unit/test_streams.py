"""Streams, from vLLM's own events to the lines that clients read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from huggingface_hub import TextGenerationStreamOutput
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.vllm_answers import MESSAGES, PROMPT_IDS, ask, chunks, output

from lorahost.errors import EngineFailedError
from lorahost.requests.invocation import Invocation, RequestSettings, parse
from lorahost.requests.streams import StreamWriter, writer

BAD_ENDS: tuple[Callable[[StreamWriter], list[str]], ...] = (
    lambda stream: stream.fail(EngineFailedError("it died")),
    lambda stream: stream.finish(),
)


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
    for end in BAD_ENDS:
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
    for end in BAD_ENDS:
        stream = writer(openai(accept))
        parts = end(stream)
        assert len(parts) == count
        assert json.loads(parts[0].removeprefix("data: "))["error"]["type"] == "engine_error"
        assert parts[1:] == ["data: [DONE]\n\n"][: count - 1]
        assert stream.finish() == stream.feed("data: {}\n\n") == []


def test_only_streams_have_a_writer() -> None:
    with pytest.raises(ValueError, match="does not stream"):
        writer(ask())
