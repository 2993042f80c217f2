"""What an engine that is measured in turn does, in its own process and behind HTTP alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from lorahost.bench import turns
from lorahost.bench.answers import Token
from lorahost.bench.decode_profile import Profile
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.timings import Record
from lorahost.bench.vllm_026.engine import Known, WrongEngineError, to_row

# others warm up at the same time; kernels and graphs don't depend on how long an answer is
WARM_TOKENS = 64
WARM_WIDTH = 4  # of an open loop's warm-up
BURSTS, BURST_TOKENS = 16, 4  # at most so many bursts before it, and their answers' length
Probe = Callable[[], Awaitable[dict[str, list[Token]]]]
Profiled = Callable[[Load], Awaitable[Profile]]


class Measured(Protocol):
    """An engine with a step's adapters; see `Engine.round`."""

    async def round(
        self, load: Load, requests: int, seed: int, *, names: list[str] | None = None, output: int = 0
    ) -> list[Record]: ...


async def answer(
    point: Point,
    engine: Measured,
    known: Known,
    folder: Path,
    where: Mapping[str, str],
    probe: Probe | None = None,
    profile: Profiled | None = None,
) -> None:
    """Warms an engine, then answers asks in `folder`; see `turns`.

    Args:
        point: The engine, and in `loads` all closed loops that it will be asked.
        engine: What is asked.
        known: What the rows say of its start.
        folder: Where the parent asks.
        where: The rows' provenance.
        probe: Greedy answers, where it can give them.
        profile: Where a decode step's time goes under a load, where it can say so.

    Raises:
        WrongEngineError: all requests of a repeat failed.
    """
    if point.warmup:
        await _warm(point, engine)

    async def act(ask: turns.Ask) -> turns.Json:
        if ask["what"] == "probe":
            if probe is None:
                raise ValueError("this engine can't be probed")
            return {"answers": await probe()}
        if ask["what"] == "profile":
            if profile is None:
                raise ValueError("this engine can't be profiled")
            return {"profile": await profile(Load.parse(ask["load"]))}
        return {"row": {**await _repeat(point, engine, known, ask), **where}}

    await turns.serve(folder, {"gpu": known["gpu"], "start_s": known["start_s"]}, act)


async def _warm(point: Point, engine: Measured) -> None:
    traffic = [None, [""]] if point.lora else [None]
    widest = max(load.concurrency or WARM_WIDTH for load in point.loads)
    # each width makes other batch sizes, for which vLLM compiles routing kernels of its own
    for width in range(1, widest, -(-widest // BURSTS)):
        for names in traffic:
            output = min(point.output, BURST_TOKENS)
            await engine.round(Load(width), width, -1000 - width, names=names, output=output)
    for load in point.loads:
        many = load.concurrency or WARM_WIDTH
        for warm in range(point.warmup):
            for names in traffic:
                output = min(point.output, WARM_TOKENS)
                await engine.round(Load(many), many, -1 - warm, names=names, output=output)


async def _repeat(point: Point, engine: Measured, known: Known, ask: turns.Ask) -> dict[str, object]:
    load = Load.parse(ask["load"])
    # every engine gets the same prompts in a round
    seed = 1000 * ask["alternation"] + ask["repeat"]
    records = await engine.round(load, turns.requests_of(point, load), seed, names=[""] if ask["base"] else None)
    mine = turns.row_point(point, ask["base"], ask["alternation"])
    row = to_row(mine, load, ask["repeat"], known, records)
    if all(record.error for record in records):
        raise WrongEngineError(f"all {len(records)} requests failed: {row['error_kinds']}")
    return row
