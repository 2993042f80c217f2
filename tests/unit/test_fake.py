from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.virtual_time import run_virtual

from lorahost.core import AdapterVersion, EngineCall, Json
from lorahost.engine.fake import FAKE_MAX_MODEL_LEN, FakeHost, import_plain
from lorahost.errors import AdapterRejectedError, CapacityError, EngineFailedError, InvalidRequestError


def version(path: Path, number: int = 1) -> AdapterVersion:
    return AdapterVersion("poet", "ab" * 32, number, path, 8, frozenset({"m"}))


def call(body: Json, adapter: AdapterVersion | None = None, api: Any = "completions") -> EngineCall:
    return EngineCall(api, body, adapter, "shown", "r1")


def served(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)


async def started(**options: Any) -> FakeHost:
    host = FakeHost(step_s=0.01, **options)
    await host.start()
    return host


async def events_of(answer: Json | AsyncIterator[str]) -> list[str]:
    assert not isinstance(answer, dict)
    return [event async for event in answer]


def test_every_answer_names_the_weights_that_made_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = await started()
        poet = version(tmp_path)
        assert await host.load(poet) == poet.modules
        base = await host.generate(call({"prompt": "a b", "max_tokens": 2}))
        tuned = await host.generate(call({"messages": [{"role": "user", "content": "a b c"}]}, poet, "chat"))
        assert isinstance(base, dict)
        assert isinstance(tuned, dict)
        assert base["choices"][0]["text"] == "base base "
        assert base["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        assert tuned["choices"][0]["message"]["content"] == "poet@abababababab " * 16
        assert (tuned["model"], tuned["id"]) == ("shown", "chatcmpl-r1")
        await host.stop()

    served(scenario())


def test_a_stream_has_the_same_tokens_and_usage_when_asked() -> None:
    async def scenario() -> None:
        host = await started()
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": options}
        *chunks, last, done = await events_of(await host.generate(call(body)))
        assert done == "data: [DONE]\n\n"
        assert [json.loads(c[6:])["choices"][0]["text"] for c in chunks] == ["base "] * 3
        assert [json.loads(c[6:])["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3]
        assert json.loads(last[6:])["usage"]["completion_tokens"] == 3
        plain = await events_of(await host.generate(call({"prompt": "a", "max_tokens": 3, "stream": True})))
        assert len(plain) == 4
        await host.stop()

    served(scenario())


@pytest.mark.parametrize(
    ("api", "body", "message"),
    [
        ("completions", {"prompt": "a", "max_tokens": 0.5}, "max_tokens: must be an integer >= 1"),
        ("completions", {"prompt": "a", "max_tokens": FAKE_MAX_MODEL_LEN}, f"{FAKE_MAX_MODEL_LEN}"),
        ("chat", {"messages": []}, "messages: must be a non-empty list"),
    ],
)
def test_bad_bodies_are_refused(api: str, body: Json, message: str) -> None:
    async def scenario() -> None:
        host = await started()
        with pytest.raises(InvalidRequestError, match=message):
            await host.generate(call(body, api=api))
        await host.stop()

    served(scenario())


def test_closing_a_stream_aborts_it() -> None:
    async def scenario() -> None:
        host = await started()
        stream = await host.generate(call({"prompt": "a", "max_tokens": 100, "stream": True}))
        assert isinstance(stream, AsyncGenerator)
        await anext(stream)
        assert host.health().running == 1
        await stream.aclose()
        assert (host.health().running, host.aborted) == (0, ["r1"])
        await host.stop()

    served(scenario())


def test_weights_that_are_not_loaded_are_never_answered_by_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = await started()
        poet = version(tmp_path)
        with pytest.raises(EngineFailedError, match="poet@abababababab is not loaded"):
            await host.generate(call({"prompt": "a"}, poet))
        await host.load(poet)
        task = asyncio.create_task(host.generate(call({"prompt": "a"}, poet)))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        await host.unload(1)
        with pytest.raises(EngineFailedError, match="removed under a running request"):
            await task
        await host.stop()

    served(scenario())


def test_loads_are_limited_and_need_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = await started(max_cpu_loras=1)
        with pytest.raises(AdapterRejectedError, match="no adapter at"):
            await host.load(version(tmp_path / "missing"))
        await host.load(version(tmp_path, 1))
        with pytest.raises(CapacityError, match="holds 1 adapters"):
            await host.load(version(tmp_path, 2))
        assert await host.loaded() == {1}
        assert await host.probe(None) != await host.probe(version(tmp_path, 1))
        await host.unload(1)
        assert await host.loaded() == frozenset()
        await host.stop()

    served(scenario())


def test_a_dead_engine_fails_its_requests_and_a_hung_one_makes_no_progress() -> None:
    async def scenario() -> None:
        host = await started()
        task = asyncio.create_task(host.generate(call({"prompt": "a", "max_tokens": 1000})))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        before = host.health()
        assert (before.alive, before.running) == (True, 1)
        host.hung = True
        await asyncio.sleep(0.1)
        stuck = host.health().tokens
        await asyncio.sleep(0.1)
        assert host.health().tokens == stuck
        host.hung, host.dead = False, True
        with pytest.raises(EngineFailedError) as failed:
            await task
        assert failed.value.status == 503
        assert host.health().reason == "the engine process died"
        await host.stop()

    served(scenario())


@pytest.mark.parametrize("hung", [False, True])
def test_stop_ends_what_runs(hung: bool) -> None:
    async def scenario() -> None:
        host = await started()
        task = asyncio.create_task(host.generate(call({"prompt": "a", "max_tokens": 1000})))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        host.hung = hung
        await asyncio.sleep(0.1)
        await host.stop()
        with pytest.raises(EngineFailedError, match="stopped"):
            await task
        assert host.health().running == 0

    served(scenario())


def test_import_plain_copies_without_looking_at_tensors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "adapter_config.json").write_text('{"r": 4}')
    (source / "adapter_model.safetensors").write_bytes(b"12345")
    report = import_plain(source, tmp_path / "target")
    assert (report.rank, report.bytes) == (4, 5 + len('{"r": 4}'))
    assert (tmp_path / "target" / "adapter_model.safetensors").read_bytes() == b"12345"


@pytest.mark.parametrize("text", ["{}", "no json", '{"r": "many"}', None])
def test_import_plain_wants_a_rank(tmp_path: Path, text: str | None) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if text is not None:
        (source / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterRejectedError, match="has no rank r"):
        import_plain(source, tmp_path / "target")
