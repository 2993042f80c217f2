"""An engine that is measured in turn with others on its GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorahost.bench import turns
from lorahost.bench.answers import LENGTHS, TOKENS, TOP, Token
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.prompts import random_ids
from lorahost.bench.vllm_026.engine import Engine, Known, WrongEngineError, checked, to_row

# others warm up at the same time; kernels and graphs don't depend on how long an answer is
WARM_TOKENS = 64
MIXED = 4  # adapters in the mixed batch of a probe


async def take_turns(point: Point, work: Path, folder: Path, where: Mapping[str, str]) -> None:
    """Starts, checks and warms the engine, then answers asks in `folder`; see `turns`.

    Args:
        point: The engine, and in `loads` all that it will be asked.
        work: Folder of the model and the adapters.
        folder: Where the parent asks.
        where: The rows' provenance.

    Raises:
        WrongEngineError: as in `checked`, or all requests of a repeat failed.
    """
    async with checked(point, work) as (engine, known):
        for load in point.loads:
            many = load.concurrency or 4
            for warm in range(point.warmup):
                for names in [None, [""]] if point.lora else [None]:
                    output = min(point.output, WARM_TOKENS)
                    await engine.round(Load(many), many, -1 - warm, names=names, output=output)

        async def act(ask: turns.Ask) -> turns.Json:
            if ask["what"] == "probe":
                return {"answers": await probe(point, engine)}
            return {"row": {**await _repeat(point, engine, known, ask), **where}}

        await turns.serve(folder, {"gpu": known["gpu"], "start_s": known["start_s"]}, act)


def requests_of(point: Point, load: Load) -> int:
    """Requests of a repeat: those that were asked for are the widest closed loop's, narrower ones get their share."""
    if not point.requests or not load.concurrency:
        return point.requests_of(load)
    widest = max(one.concurrency for one in point.loads)
    return max(2, point.requests * load.concurrency // widest)


async def _repeat(point: Point, engine: Engine, known: Known, ask: turns.Ask) -> dict[str, object]:
    load = Load.parse(ask["load"])
    # every engine gets the same prompts in a round
    seed = 1000 * ask["alternation"] + ask["repeat"]
    records = await engine.round(load, requests_of(point, load), seed, names=[""] if ask["base"] else None)
    mine = turns.row_point(point, ask["base"], ask["alternation"])
    row = to_row(mine, load, ask["repeat"], known, records)
    if all(record.error for record in records):
        raise WrongEngineError(f"all {len(records)} requests failed: {row['error_kinds']}")
    return row


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
