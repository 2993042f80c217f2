"""Requests with a deadline: what is answered when it passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.pipeline_world import World, endless, parsed, runner, task, until

from lorahost.errors import OverloadedError


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    return runner(tmp_path)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_whole_answer_ends_at_its_deadline_with_what_there_is(run: Callable[..., None], api: str) -> None:
    async def scenario(world: World) -> None:
        body = endless(messages=[{"role": "user", "content": "a"}])
        clock = asyncio.get_running_loop().time
        began = clock()
        [answer], _, account = await world.whole(task(body, adapter="poet", deadline_s=0.2, api=api))
        assert 0.15 < clock() - began < 2
        [choice] = answer["choices"]
        text = choice["message"]["content"] if api == "chat" else choice["text"]
        words = text.split()
        assert set(words) == {"poet@abababababab"}
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == len(words) == account.output_tokens
        assert answer["model"] == "poet"
        assert world.engine.aborted == ["r1"]

    run(scenario)


def test_a_stream_ends_at_its_deadline(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        events = [event async for event in world.stream(task(endless(), deadline_s=0.1))]
        assert events[-1] == "data: [DONE]\n\n"
        chunks = parsed(events)
        assert len(chunks) > 2
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["length"]
        assert chunks[-1]["id"] == chunks[0]["id"]
        assert world.engine.aborted == ["r1"]

    run(scenario)


def test_an_answer_before_its_deadline_is_the_usual_one(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        [plain], _, _ = await world.whole(task())
        [answer], _, _ = await world.whole(task(deadline_s=30.0))
        assert {**answer, "created": 0} == {**plain, "created": 0}
        events = [event async for event in world.stream(task(deadline_s=30.0))]
        assert [chunk["choices"][0]["finish_reason"] for chunk in parsed(events)] == [None, None, "length"]

    run(scenario)


def test_a_slow_reader_past_the_deadline_does_not_break_a_complete_stream(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        events = []
        async for event in world.stream(task(deadline_s=0.1)):
            events.append(event)
            if event.startswith("data: [DONE]"):
                await asyncio.sleep(0.15)
        assert events.count("data: [DONE]\n\n") == 1
        assert len(parsed(events)) == 3

    run(scenario)


def test_a_deadline_that_has_passed_leaves_no_request_behind(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        [answer], _, _ = await world.whole(task(endless(), deadline_s=1e-9))
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
        # the engine has seen the request and its end
        assert world.engine.aborted == ["r1"]

    run(scenario)


def test_a_deadline_counts_from_the_arrival_not_from_the_admission(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.whole(task(endless())))
        await until(lambda: bool(world.engine.running))
        with pytest.raises(OverloadedError) as refused:
            await world.whole(task(adapter="poet", deadline_s=0.05))
        assert refused.value.code == "deadline_in_queue"
        assert refused.value.retry_after_s is not None
        assert "0.05" in refused.value.message
        assert world.admission.occupancy().queued == 0
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(scenario, max_running=1)
