from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lorahost.admission import Admission, Occupancy
from lorahost.core import AdapterVersion, Json
from lorahost.engine.fake import FakeHost
from lorahost.errors import (
    AdapterConflictError,
    AdapterNotFoundError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
)
from lorahost.metrics import Metrics
from lorahost.pipeline import CLIENT_GONE_STATUS, Account, Pipeline, Task

IDLE = Occupancy(running=0, queued=0, slots_held=0, slots_closed=0)


@dataclass
class HandLease:
    """A lease that the test revokes."""

    version: AdapterVersion
    revoked: bool = False
    released: int = 0
    callbacks: list[Callable[[], Any]] = field(default_factory=list)

    def on_revoke(self, callback: Callable[[], Any]) -> None:
        self.callbacks.append(callback)

    def release(self) -> None:
        self.released += 1

    def revoke(self) -> None:
        self.revoked = True
        for callback in self.callbacks:
            callback()


class World:
    def __init__(self, path: Path, *, slots: int = 2, max_running: int = 8, step_s: float = 0.002) -> None:
        self.engine = FakeHost(step_s=step_s)
        self.registry = CollectorRegistry()
        self.metrics = Metrics(8, self.registry)
        self.admission = Admission(slots=slots, max_running=max_running, max_queued=8)
        self.pipeline = Pipeline(self.engine, self, self.admission, self.metrics)
        self.version = AdapterVersion("poet", "ab" * 32, 1, path, 8, frozenset())
        self.leases: list[HandLease] = []
        self.opened: list[AdapterVersion | None] = []

    async def acquire(self, name: str) -> HandLease:
        if name != "poet":
            raise AdapterNotFoundError(f"no adapter {name!r}")
        self.leases.append(HandLease(self.version))
        return self.leases[-1]

    async def whole(self, task: Task) -> tuple[list[Json], AdapterVersion | None, Account]:
        account = accounted(task)
        answers, version = await self.pipeline.whole(task, account)
        return answers, version, account

    def stream(self, task: Task, account: Account | None = None) -> AsyncGenerator[str, None]:
        return self.pipeline.stream(task, account or accounted(task), self.opened.append)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def accounted(task: Task) -> Account:
    return Account(task.request_id, task.adapter, task.adapter or "base", "/invocations")


def task(*calls: Json, adapter: str | None = None, deadline_s: float | None = None, api: Any = "completions") -> Task:
    bodies = calls or ({"prompt": "a b", "max_tokens": 3},)
    return Task(tuple((api, body) for body in bodies), adapter, adapter or "base", "r1", deadline_s)


def endless(**more: Any) -> Json:
    return {"prompt": "a", "max_tokens": 4000, **more}


Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def run_(scenario: Scenario, **options: Any) -> None:
        async def whole() -> None:
            world = World(tmp_path, **options)
            await world.engine.start()
            await world.engine.load(world.version)
            await asyncio.wait_for(scenario(world), 20)
            assert world.admission.occupancy() == IDLE
            assert [lease.released for lease in world.leases] == [1] * len(world.leases)
            assert world.engine.running == {}
            await world.engine.stop()

        asyncio.run(whole())

    return run_


def parsed(events: list[str]) -> list[Json]:
    return [json.loads(event[6:]) for event in events if event.startswith("data: {")]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


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


def test_cancelling_aborts_the_engines_request(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        running = asyncio.create_task(world.whole(task(endless(), adapter="poet")))
        await until(lambda: bool(world.engine.running))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert world.engine.aborted == ["r1"]

    run(scenario)


def test_leaving_a_stream_aborts_the_engines_request(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        stream = world.stream(task(endless(), adapter="poet"))
        await anext(stream)
        await stream.aclose()
        assert world.engine.aborted == ["r1"]

    run(scenario)


def test_a_removed_adapter_ends_its_running_requests_with_a_reason(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        running = asyncio.create_task(world.whole(task(endless(), adapter="poet")))
        await until(lambda: bool(world.engine.running))
        world.leases[0].revoke()
        with pytest.raises(AdapterConflictError, match="'poet' was removed"):
            await running

    run(scenario)


def test_a_removed_adapter_ends_its_queued_requests_with_a_reason(run: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.whole(task(endless())))
        await until(lambda: bool(world.engine.running))
        queued = asyncio.create_task(world.whole(task(adapter="poet")))
        await until(lambda: world.admission.occupancy().queued == 1)
        world.leases[0].revoke()
        with pytest.raises(AdapterConflictError, match="'poet' was removed"):
            await queued
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(scenario, max_running=1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_is_an_error_and_frees_everything(run: Callable[..., None], stream: bool) -> None:
    async def scenario(world: World) -> None:
        async def read() -> None:
            if stream:
                async for _ in world.stream(task(endless(), adapter="poet")):
                    pass
            else:
                await world.whole(task(endless(), adapter="poet"))

        running = asyncio.create_task(read())
        await until(lambda: bool(world.engine.running))
        world.engine.dead = True
        with pytest.raises(EngineFailedError):
            await running

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
