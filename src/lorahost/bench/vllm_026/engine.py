"""One engine in this process's children, its loads and their figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import lorahost
from lorahost.bench import loads
from lorahost.bench.answers import Token
from lorahost.bench.decode_profile import Profile
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.prompts import random_ids
from lorahost.bench.shapes import write_config
from lorahost.bench.timings import Record, error_kinds, summary
from lorahost.bench.vllm_026.adapters import make_adapters

Known = dict[str, object]
PROBE = "lorahost.bench.vllm_026.probe.Probe"


class WrongEngineError(RuntimeError):
    """The engine is not what the step is to measure, so there are no rows."""


def engine_arguments(point: Point, model: Path) -> dict[str, Any]:
    """vLLM's arguments; `extra` comes last and may replace any."""
    length = point.input + point.output
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max(4096, -(-length // 1024) * 1024),
        "max_num_seqs": point.seats,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.85,
        "seed": point.seed,
        "disable_log_stats": True,
        "moe_backend": point.moe_backend,
        "worker_extension_cls": PROBE,
        # part of the compile cache's key: graphs compiled with other kernels are not reused
        "additional_config": {"lorahost": lorahost.__version__, "kernels": point.uses_kernels, "commit": point.commit},
    }
    if point.lora:
        arguments |= {
            "enable_lora": True,
            "max_loras": point.slot_count,
            "max_lora_rank": point.rank,
            "max_cpu_loras": max(point.adapters, point.slot_count),
        }
    if speculative := point.speculative_config():
        arguments["speculative_config"] = speculative
    return {**arguments, **point.engine_extra}


class Engine:
    """vLLM's asynchronous engine with the step's adapters loaded."""

    def __init__(self, point: Point, engine: Any, adapters: dict[str, Any]) -> None:
        self._point = point
        self._engine = engine
        self._adapters = adapters
        self._prompts: dict[int, list[int]] = {}
        self._output = point.output

    def sampling(self, tokens: int, **more: Any) -> Any:
        """Greedy, `tokens` tokens whatever they are, one output per step."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        if self._point.spec == "synthetic":
            ids = random_ids(self._point.shape.vocab, self._point.alphabet, self._point.alphabet, self._point.seed)
            more["allowed_token_ids"] = sorted(set(ids))
        return SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False,
            output_kind=RequestOutputKind.DELTA, **more,
        )  # fmt: skip

    async def send(self, n: int, adapter: str) -> Record:
        """One request; its prompt was made before."""
        record = Record(adapter, time.perf_counter(), prompt_tokens=self._point.input)
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": self._prompts[n]},
                self.sampling(self._output),
                request_id=uuid.uuid4().hex,
                lora_request=self._adapters.get(adapter),
            ):
                count = len(output.outputs[0].token_ids)
                if count:
                    record.at.append(time.perf_counter())
                    record.tokens += count
        except Exception as error:  # counted in the row, the other requests go on
            record.error = f"{type(error).__name__}: {error}"
        if not record.error and record.tokens != self._output:
            record.error = f"{record.tokens} tokens instead of {self._output}"
        return record

    async def round(
        self, load: Load, requests: int, seed: int, *, names: list[str] | None = None, output: int = 0
    ) -> list[Record]:
        """Requests of one repeat, with prompts of their own.

        Args:
            load: How they arrive.
            requests: How many.
            seed: Decides on their prompts.
            names: Who is asked, "" for the base model; the point's adapters if None.
            output: Tokens of an answer; 0 for the point's.
        """
        point = self._point
        self._output = output or point.output
        self._prompts = {
            n: random_ids(point.shape.vocab, point.input, point.alphabet, point.seed, seed, n) for n in range(requests)
        }
        rng = random.Random(f"{point.seed} {seed}")
        chosen = loads.choose(names or point.names, point.choice, rng)
        return await loads.run(load, requests, chosen, self.send, rng)

    async def check(self) -> None:
        """Asks four prompts of everyone: finite log-probabilities, and not one answer to all.

        Raises:
            WrongEngineError: NaN or infinite values, or every prompt gets the same tokens.
        """
        answers = set()
        for n in range(4):
            ids = random_ids(self._point.shape.vocab, 64, self._point.alphabet, -1, n)
            answer = await self.top(ids, self._point.names[n % len(self._point.names)], 8, 0)
            for token, found in answer:
                if not math.isfinite(found[token]):
                    raise WrongEngineError(f"token {token} has log-probability {found[token]}")
            answers.add(tuple(token for token, _ in answer))
        if len(answers) == 1 and self._point.weights == "spread":
            raise WrongEngineError(f"four different prompts are all answered {answers.pop()}")

    async def top(self, ids: list[int], adapter: str, tokens: int, count: int) -> list[Token]:
        """A greedy answer's tokens, each with the `count` highest log-probabilities by token id and its own."""
        found: list[Token] = []
        sampling = self.sampling(tokens, logprobs=count)
        async for output in self._engine.generate(
            {"prompt_token_ids": ids}, sampling, request_id=uuid.uuid4().hex, lora_request=self._adapters.get(adapter)
        ):
            for token, near in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
                found.append((token, {int(i): value.logprob for i, value in near.items()}))
        return found

    async def probe(self) -> dict[str, Any]:
        """What runs in the first worker; see `Probe`.

        Raises:
            WrongEngineError: the LoRA kernels are not the path's.
        """
        report: dict[str, Any] = (await self._engine.collective_rpc("lorahost_bench_probe"))[0]
        wanted = "lorahost_kernels." if self._point.uses_kernels else "vllm." if self._point.lora else ""
        if not report["wrapper"].startswith(wanted) or bool(report["wrapper"]) != self._point.lora:
            raise WrongEngineError(f"path {self._point.path} wants {wanted}*, the worker runs {report['wrapper']!r}")
        return report

    async def profile(self, seconds: float) -> Profile:
        """Where a step's time goes in the first worker, over the next `seconds` of whatever it is doing."""
        await self._engine.collective_rpc("lorahost_bench_profile_start")
        await asyncio.sleep(seconds)
        profile: Profile = (await self._engine.collective_rpc("lorahost_bench_profile_stop"))[0]
        return profile


@contextlib.asynccontextmanager
async def running(point: Point, work: Path) -> AsyncIterator[Engine]:
    """Starts the engine, loads the adapters and stops it at the end."""
    from vllm import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    model = work / f"{point.model}-{point.layer_count}"
    write_config(point.shape, point.layer_count, model)
    adapters = {}
    if point.lora:
        found = make_adapters(work, point.shape, point.layer_count, point.rank, point.target_names, point.adapters)
        adapters = {p.name: LoRARequest(p.name, i, str(p)) for i, p in enumerate(found, 1)}
    engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(point, model)))
    try:
        for request in adapters.values():
            await engine.add_lora(request)
        yield Engine(point, engine, adapters)
    finally:
        engine.shutdown()


@contextlib.asynccontextmanager
async def checked(point: Point, work: Path) -> AsyncIterator[tuple[Engine, Known]]:
    """A running engine that is the path's and whose answers are sane, and what its rows say of this start.

    Raises:
        WrongEngineError: what runs is not the path that was asked for, or its answers are not sane.
    """
    started = time.perf_counter()
    async with running(point, work) as engine:
        start_s = time.perf_counter() - started
        report = await engine.probe()
        operations = [*report["experts"], report["wrapper"], *(f"{k}={v}" for k, v in report["operations"].items())]
        await engine.check()
        yield (
            engine,
            {
                "run": uuid.uuid4().hex[:8],
                "gpu": report["gpu"],
                "start_s": start_s,
                "operations": ",".join(operations),
            },
        )


def to_row(point: Point, load: Load, repeat: int, known: Known, records: list[Record]) -> dict[str, object]:
    """A repeat's row; its figures and errors are printed, too."""
    figures = summary(records, loads.seconds(records))
    for error in {r.error for r in records if r.error}:
        print("ERROR", error, flush=True)
    print("REPEAT", json.dumps({"load": str(load), "repeat": repeat, **figures}), flush=True)
    return {
        **point.row(), "load": str(load), "repeat": repeat, **known, "error_kinds": error_kinds(records), **figures,
    }  # fmt: skip


async def measure(point: Point, work: Path) -> list[dict[str, object]]:
    """One engine start: warm-up, check, then every load's repeats as rows.

    Raises:
        WrongEngineError: see `checked`.
    """
    rows: list[dict[str, object]] = []
    async with checked(point, work) as (engine, known):
        for load in point.loads:
            for warm in range(point.warmup):
                await engine.round(Load(load.concurrency or 4), load.concurrency or 4, -1 - warm)
            for repeat in range(1, point.repeats + 1):
                records = await engine.round(load, point.requests_of(load), repeat)
                rows.append(to_row(point, load, repeat, known, records))
    return rows
