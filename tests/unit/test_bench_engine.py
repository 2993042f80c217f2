"""An engine step without an engine: what it refuses, and the arguments that it passes on."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorahost.bench import http_server
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.vllm_026.engine import Engine, WrongEngineError, engine_arguments
from lorahost.bench.vllm_026.probe import Probe


def test_points_know_who_is_asked() -> None:
    assert Point("base").names == Point("lora-base").names == [""]
    assert Point("stock", adapters=2).names == ["a0", "a1"]


class StandIn:
    """The calls of vLLM's engine that a step makes: one token an output, log-probability and class as told."""

    def __init__(self, wrapper: str = "", logprob: float = -1.0, same: bool = False, tokens: int = 0) -> None:
        self._wrapper = wrapper
        self._logprob = logprob
        self._same = same
        self._tokens = tokens
        self.worker = Probe()

    async def collective_rpc(self, method: str) -> list[Any]:
        if method != "lorahost_bench_probe":
            return [getattr(self.worker, method)(), "another worker's"]
        return [{"gpu": "none", "experts": [], "wrapper": self._wrapper, "operations": {}}]

    async def generate(self, prompt: dict[str, list[int]], sampling: int, **_: Any) -> AsyncIterator[Any]:
        token = 1 if self._same else prompt["prompt_token_ids"][0]
        for _i in range(self._tokens or sampling):
            logprobs = [{token: SimpleNamespace(logprob=self._logprob)}]
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token], logprobs=logprobs)])


def engine_of(point: Point, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(Engine, "sampling", lambda self, tokens, **_: tokens)
    return Engine(point, stand_in, {})


OURS, STOCK = "lorahost_kernels.vllm_026.gpu_punica.GpuPunicaWrapper", "vllm.lora.punica_wrapper.punica_gpu.X"


@pytest.mark.parametrize(
    ("path", "kernels", "wrapper", "right"),
    [
        ("base", "", "", True), ("base", "", STOCK, False), ("stock", "", STOCK, True), ("stock", "", OURS, False),
        ("stock", "", "", False), ("ours", "", OURS, True), ("ours", "", STOCK, False), ("ours-tuned", "", "", False),
        ("lora-base", "", OURS, True), ("lora-base", "off", STOCK, True), ("lora-base", "off", OURS, False),
    ],
)  # fmt: skip
def test_a_step_refuses_an_engine_that_runs_something_else(
    path: Any, kernels: Any, wrapper: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(Point(path, kernels=kernels), StandIn(wrapper), monkeypatch)
    if right:
        assert asyncio.run(engine.probe())["wrapper"] == wrapper
    else:
        with pytest.raises(WrongEngineError, match=f"path {path} wants"):
            asyncio.run(engine.probe())


def test_a_step_refuses_dead_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(engine_of(Point("base"), StandIn(), monkeypatch).check())
    for value in (float("nan"), float("-inf")):
        with pytest.raises(WrongEngineError, match="has log-probability"):
            asyncio.run(engine_of(Point("base"), StandIn(logprob=value), monkeypatch).check())
    with pytest.raises(WrongEngineError, match="four different prompts are all answered"):
        asyncio.run(engine_of(Point("base"), StandIn(same=True), monkeypatch).check())
    asyncio.run(engine_of(Point("base", weights="collapsed"), StandIn(same=True), monkeypatch).check())


def test_a_request_of_another_length_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point("base", input=4, output=6)
    [record] = asyncio.run(engine_of(point, StandIn(), monkeypatch).round(Load(concurrency=1), 1, 0))
    assert (record.tokens, len(record.at), record.error, record.prompt_tokens) == (6, 6, "", 4)
    [short] = asyncio.run(engine_of(point, StandIn(tokens=5), monkeypatch).round(Load(concurrency=1), 1, 0))
    assert short.error == "5 tokens instead of 6"


class Profiler:
    """Stands in for torch's: two steps of two kernels, if it ran for a while."""

    def __init__(self, activities: list[torch.profiler.ProfilerActivity]) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        self._times: list[float] = []

    def start(self) -> None:
        self._times.append(time.perf_counter())

    def stop(self) -> None:
        self._times.append(time.perf_counter())

    def export_chrome_trace(self, path: str) -> None:
        started, stopped = self._times
        assert stopped - started >= 0.05
        kernels = [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10 * n, "dur": 4, "args": {"correlation": n // 2}}
            for n in range(6)
        ]
        Path(path).write_text(json.dumps({"traceEvents": kernels}))


def test_a_profile_is_the_first_worker_s_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stand_in = StandIn()
    for _ in range(2):
        found = asyncio.run(Engine(Point("base"), stand_in, {}).profile(0.05))
        assert (found["steps"], found["span_us"], found["by_name"]) == (1, 20.0, {"gemm": {"count": 2.0, "us": 8.0}})
    assert list(tmp_path.iterdir()) == [], "traces are large"


def test_a_profile_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="a profile needs a GPU"):
        asyncio.run(Engine(Point("base"), StandIn(), {}).profile(0.05))


def test_the_server_gets_the_same_engine_arguments() -> None:
    point = Point("ours", slots=4, extra={"enforce_eager": True, "lora_target_modules": ["q_proj"]}, spec="ngram")
    server = http_server.server_environment(point, Path("/m"), 1, Path("/w"))
    own = engine_arguments(point, Path("/m"))
    names = ("load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "seed")
    for name in (*names, "moe_backend", "max_loras", "max_lora_rank", "speculative_config"):
        value = own[name] if isinstance(own[name], str) else json.dumps(own[name])
        assert server["SM_VLLM_" + name.upper()] == value, name
    assert own["enable_prefix_caching"] is False
    assert server["SM_VLLM_NO_ENABLE_PREFIX_CACHING"] == server["SM_VLLM_ENFORCE_EAGER"] == "true"
    assert server["SM_VLLM_LORA_TARGET_MODULES"] == '["q_proj"]'
    switched = Point("ours", extra={"LORAHOST_SKIP_UNTOUCHED": "on", "enforce_eager": True})
    assert http_server.server_environment(switched, Path("/m"), 1, Path("/w"))["LORAHOST_SKIP_UNTOUCHED"] == "on"
    assert not [name for name in engine_arguments(switched, Path("/m")) if name.startswith("LORAHOST_")]
    assert "LORAHOST_SKIP_UNTOUCHED" in str(switched.row()["extra"]), "two engines must differ in their rows"
    with pytest.raises(ValueError, match="extra async_scheduling: false"):
        http_server.server_environment(Point("ours", extra={"async_scheduling": False}), Path("/m"), 1, Path("/w"))
    assert "SM_VLLM_MAX_LORAS" not in http_server.server_environment(Point("base"), Path("/m"), 1, Path("/w"))
