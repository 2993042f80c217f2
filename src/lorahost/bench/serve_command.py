"""`lorahost bench serve`: from its options to rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lorahost.bench import http_client, rows, serve
from lorahost.bench.http_client import Models, ServerError, Target
from lorahost.bench.loads import Load

Row = dict[str, object]


def run(options: Mapping[str, Any], say: Callable[[str], None]) -> list[Row]:
    """Measures and returns one row a repeat.

    Raises:
        ServerError: the server can't be measured.
        ValueError: an option is impossible; the message names it.
    """
    import uvloop

    return uvloop.run(_measure(options, say))


async def _measure(o: Mapping[str, Any], say: Callable[[str], None]) -> list[Row]:
    body = json.loads(o["body"])
    if not isinstance(body, dict):
        raise ValueError(f"body {o['body']!r}: must be a JSON object")
    load = Load(rate=o["rate"]) if o["rate"] else Load(concurrency=o["concurrency"])
    base, adapters = await _who(o)
    target = Target(o["url"].rstrip("/"), o["api"], base, o["output"], o["adapter_by"], o["timeout"], body)
    plan = serve.Plan(
        adapters, o["input_"], load, o["requests"] or max(4, 2 * load.concurrency or 64), o["repeats"], o["warmup"],
        o["choice"], o["zipf"], o["text"], o["vocab"], 0, o["seed"],
    )  # fmt: skip
    say(f"{target.url}: {load}, {plan.requests} requests a repeat, adapters {', '.join(a or base for a in adapters)}")
    figures = await serve.run(target, plan, say)
    known = {
        "benchmark": "serve", "path": o["label"], "via": o["api"], "alternation": 1, "model": base, "layers": "",
        "input": plan.input, "output": target.tokens, "load": str(load), "rank": "", "targets": "",
        "adapters": len([a for a in adapters if a]), "weights": "", "spec": "", "gpu": o["gpu"],
        "choice": plan.choice if plan.choice == "round-robin" else f"zipf:{plan.zipf:g}",
        **rows.provenance(),
    }  # fmt: skip
    return [{**known, **found} for found in figures]


async def _who(o: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The base model's name and the adapters to ask."""
    named = list(o["named"])
    found = Models("", [])
    if o["base"] is None or (not named and o["count"]):
        async with http_client.session() as http:
            found = await http_client.discover(http, o["url"].rstrip("/"))
    base = found.base if o["base"] is None else o["base"]
    if named or not o["count"]:
        return base, named or [""]
    if len(found.adapters) < o["count"]:
        raise ServerError(
            f"adapters {o['count']}: the server lists {len(found.adapters)}; see --adapters and --adapter"
        )
    return base, found.adapters[: o["count"]]
