"""What the request log gets of prompts and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.pipeline_world import World, accounted, endless, runner, task

from lorahost.formats import DONE_EVENT
from lorahost.transcript import Transcript


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n"


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "hi é", "max_tokens": 3}, "hi é"),
        ({"prompt": ["a", "b"]}, '["a","b"]'),
        ({"inputs": "once", "parameters": {}}, "once"),
        ({"messages": [{"role": "user", "content": "é"}], "prompt": None}, '[{"role":"user","content":"é"}]'),
        ({}, "{}"),
    ],
)
def test_the_prompt_is_what_the_client_sent(body: dict[str, Any], prompt: str) -> None:
    assert Transcript(body).fields() == {"prompt": prompt, "prompt_cut": None, "answer": [], "answer_cut": None}


def test_a_streams_choices_are_put_together() -> None:
    found = Transcript({})
    for index, text in ((1, "b1"), (0, "a1"), (1, " b2")):
        found.add_event(event(index=index, text=text))
    found.add_event(f"data: {json.dumps({'choices': [], 'usage': {}})}\n\n")
    found.add_event(DONE_EVENT)
    assert found.fields()["answer"] == ["a1", "b1 b2"]


def test_reasoning_and_tool_calls_belong_to_the_answer_streamed_or_not() -> None:
    function = {"name": "look", "arguments": '{"x":1}'}
    message = {"reasoning": "hm ", "content": "so ", "tool_calls": [{"index": 0, "function": function}]}
    streamed, whole = Transcript({}), Transcript({})
    streamed.add_event(event(delta={"role": "assistant", "reasoning": "hm "}))
    streamed.add_event(event(delta={"content": "so "}))
    streamed.add_event(event(delta={"tool_calls": [{"index": 0, "function": {"name": "look"}}]}))
    streamed.add_event(event(delta={"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]}))
    whole.add_answers([{"choices": [{"index": 0, "message": message}]}])
    assert streamed.fields()["answer"] == whole.fields()["answer"] == ['hm so look{"x":1}']


def test_all_choices_of_all_answers() -> None:
    found = Transcript({})
    found.add_answers([{"choices": [{"text": "a"}, {"text": "b"}]}, {"choices": [{"text": "c"}]}])
    assert found.fields()["answer"] == ["a", "b", "c"]


def test_what_is_too_long_is_cut_and_said_so() -> None:
    found = Transcript({"prompt": "12345"}, max_chars=4)
    for index, text in ((0, "abc"), (1, "de"), (0, "f")):
        found.add_event(event(index=index, text=text))
    assert found.fields() == {"prompt": "1234", "prompt_cut": True, "answer": ["abc", "d"], "answer_cut": True}
    exact = Transcript({"prompt": "1234"}, max_chars=4)
    exact.add_event(event(text="abcd"))
    assert exact.fields() == {"prompt": "1234", "prompt_cut": None, "answer": ["abcd"], "answer_cut": None}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    return runner(tmp_path)


def test_a_stream_that_is_left_has_what_came_until_then(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        account = accounted(task())
        account.transcript = Transcript({"prompt": "a"})
        events = world.stream(task(endless(), adapter="poet"), account)
        for _ in range(2):
            await anext(events)
        await events.aclose()
        assert account.line()["answer"] == ["poet@abababababab " * 2]

    run(scenario)


def test_a_whole_answer_and_one_that_a_deadline_ends(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        for deadline_s in (None, 30.0):
            asked = task({"prompt": "a", "max_tokens": 2}, deadline_s=deadline_s)
            account = accounted(asked)
            account.transcript = Transcript({"prompt": "a"})
            await world.pipeline.whole(asked, account)
            assert (account.line()["prompt"], account.line()["answer"]) == ("a", ["base base "])

    run(scenario)
