"""A step through the front door: `lorahost serve` with the step's engine, loaded over HTTP by this process."""

from __future__ import annotations

import json
from pathlib import Path

from lorahost.bench import serve
from lorahost.bench.http_server import running, target_of
from lorahost.bench.point import Point


async def measure(point: Point, work: Path) -> list[dict[str, object]]:
    """One server start, then every load's repeats as rows.

    Raises:
        ServerEndedError: see `running`.
    """
    async with running(point, work) as (server, known):
        rows: list[dict[str, object]] = []
        target = target_of(point, server.url, point.output)
        for load in point.loads:
            plan = serve.Plan(
                point.names, point.input, load, point.requests_of(load), point.repeats, point.warmup, point.choice,
                vocab=point.shape.vocab, alphabet=point.alphabet, seed=point.seed,
            )  # fmt: skip
            for figures in await serve.run(target, plan):
                rows.append({**point.row(), "load": str(load), **figures, **known})
                print("REPEAT", json.dumps({"load": str(load), **figures}), flush=True)
        return rows
