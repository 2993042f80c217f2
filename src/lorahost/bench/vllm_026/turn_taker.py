"""An engine in this process's children that is measured in turn with others on its GPU."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorahost.bench import turn_side, turns
from lorahost.bench.answers import LENGTHS, TOKENS, TOP, Token
from lorahost.bench.decode_profile import Profile
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.prompts import random_ids
from lorahost.bench.timings import Record, error_kinds
from lorahost.bench.vllm_026.engine import WrongEngineError, checked

MIXED = 4  # adapters in the mixed batch of a probe
PROFILE_SEED = -500  # no other round has its prompts
PROFILE_SECONDS = 0.25  # at most


async def take_turns(point: Point, work: Path, folder: Path, where: Mapping[str, str]) -> None:
    """Starts, checks and warms the engine, then answers asks in `folder`; see `turns`.

    Args:
        point: The engine, and in `loads` all that it will be asked.
        work: Folder of the model and the adapters.
        folder: Where the parent asks.
        where: The rows' provenance.

    Raises:
        WrongEngineError: as in `checked`, or all requests of a repeat or one of a profile failed.
    """
    async with checked(point, work) as (engine, known):
        await turn_side.answer(
            point, engine, known, folder, where, lambda: probe(point, engine), lambda load: profile(point, engine, load)
        )


async def probe(point: Point, engine: Any) -> dict[str, list[Token]]:
    """Greedy answers: prompts of several lengths, the base model and adapters, one at a time and all together.

    Returns:
        Answers by `LENGTH/WHO/alone` and `LENGTH/WHO/mixed`.
    """
    adapters = [f"a{i}" for i in range(point.adapters)] if point.lora else []
    longest = max(4096, point.input + point.output) - TOKENS
    prompts = {n: random_ids(point.shape.vocab, n, point.alphabet, -2, n) for n in LENGTHS if n <= longest}
    found: dict[str, list[Token]] = {}

    async def ask(length: int, who: str, how: str) -> None:
        found[f"{length}/{who or 'base'}/{how}"] = await engine.top(prompts[length], who, TOKENS, TOP)

    for length in prompts:
        for who in ["", *dict.fromkeys([*adapters[:1], *adapters[-1:]])]:
            await ask(length, who, "alone")
    await asyncio.gather(*(ask(n, who, "mixed") for n in prompts for who in ["", *adapters[:MIXED]]))
    return found


async def profile(point: Point, engine: Any, load: Load) -> Profile:
    """Where a decode step's time goes while as many requests run as a closed load has in flight.

    A first round says how long they take. In the second the profiler runs from the middle on, when all have their first
    token and none has its last.

    Raises:
        WrongEngineError: a request failed.
    """
    requests = min(load.concurrency, turns.requests_of(point, load))
    latency = _latency(await engine.round(load, requests, PROFILE_SEED))
    second = asyncio.create_task(engine.round(load, requests, PROFILE_SEED))
    try:
        await asyncio.sleep(latency / 2)
        found: Profile = await engine.profile(min(PROFILE_SECONDS, latency / 5))
    finally:
        records = await second
    _latency(records)
    return found


def _latency(records: Sequence[Record]) -> float:
    """Mean seconds of a request, of which none may have failed."""
    if errors := error_kinds(records):
        raise WrongEngineError(f"requests of a profile failed: {errors}")
    return statistics.fmean(record.latency for record in records)
