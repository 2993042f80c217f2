"""Requests on their way through the pipeline: answers, streams, accounts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.pipeline_world import World, accounted, endless, parsed, runner, task, until

from lorahost.account import CLIENT_GONE_STATUS, Account
from lorahost.errors import AdapterNotFoundError, InvalidRequestError


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    return runner(tmp_path)


def test_a_whole_answer_with_its_version_and_account(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        answers, version, account = await world.whole(task(adapter="poet"))
        assert answers[0]["choices"][0]["text"] == "poet@abababababab " * 3
        assert version is world.version
        assert (account.prompt_tokens, account.output_tokens, account.version) == (2, 3, "abababababab")
        assert account.queue_s is not None

    run(scenario)


def test_a_list_of_prompts_is_one_admission_and_many_answers(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        bodies = [{"prompt": "a", "max_tokens": n} for n in (1, 2, 3)]
        answers, _, account = await world.whole(task(*bodies))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [1, 2, 3]
        assert account.output_tokens == 6

    run(scenario, max_running=1)


def test_one_failing_prompt_of_a_list_stops_the_others(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            await world.whole(task(endless(), {"prompt": "a", "max_tokens": 0.5}))
        await until(lambda: not world.engine.running)

    run(scenario)


def test_usage_stays_out_of_a_stream_that_did_not_ask_for_it(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        account = accounted(task())
        events = [event async for event in world.stream(task(adapter="poet"), account)]
        assert events[-1] == "data: [DONE]\n\n"
        assert [c["choices"][0]["text"] for c in parsed(events)] == ["poet@abababababab "] * 3
        assert all("usage" not in chunk for chunk in parsed(events))
        assert (account.prompt_tokens, account.output_tokens) == (2, 3)
        assert account.first_token is not None
        assert world.opened == [world.version]
        body = {"prompt": "a", "max_tokens": 1, "stream_options": {"include_usage": True}}
        asked = parsed([event async for event in world.stream(task(body))])
        assert asked[-1]["usage"]["completion_tokens"] == 1

    run(scenario)


def test_an_unknown_adapter_is_never_answered(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(AdapterNotFoundError):
            await world.whole(task(adapter="nobody"))
        with pytest.raises(AdapterNotFoundError):
            await anext(world.stream(task(adapter="nobody")))
        assert world.opened == []

    run(scenario)


def test_finish_counts_and_logs_without_the_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path)
    account = Account("r1", "poet", "poet", "/invocations", session_id="s1", version="abababababab")
    account.take_usage({"prompt_tokens": 5, "completion_tokens": 7})
    account.take_usage(None)
    account.code = CLIENT_GONE_STATUS
    account.queue_s = 0.25
    account.first_token = account.started + 0.5
    with caplog.at_level(logging.INFO, "lorahost.request"):
        world.pipeline.finish(account)
    assert world.value("lorahost_requests_total", adapter="poet", code="499") == 1
    assert world.value("lorahost_tokens_total", adapter="poet", kind="prompt") == 5
    assert world.value("lorahost_tokens_total", adapter="poet", kind="output") == 7
    assert world.value("lorahost_aborted_total", adapter="poet") == 1
    [record] = caplog.records
    line = account.line()
    assert {k: v for k, v in line.items() if k not in ("total_ms", "error")} == {
        "request_id": "r1",
        "session_id": "s1",
        "route": "/invocations",
        "adapter": "poet",
        "version": "abababababab",
        "prompt_tokens": 5,
        "output_tokens": 7,
        "queue_ms": 250.0,
        "ttft_ms": 500.0,
        "code": CLIENT_GONE_STATUS,
        "aborted": True,
    }
    assert record.__dict__["request_id"] == "r1"
