"""Load over HTTP: prompts of a length, adapters in turn, repeats as rows."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from lorahost.bench import http_client, loads, prompts
from lorahost.bench.http_client import Prompt, ServerError, Target
from lorahost.bench.loads import Choice, Load
from lorahost.bench.timings import Record, error_kinds, summary

TOLERANCE = 0.02  # of the wanted number of prompt tokens
TRIES = 8


@dataclass(frozen=True)
class Plan:
    """Everything of a run but the server. `adapters` may hold "" for the base model; lengths in tokens."""

    adapters: Sequence[str]
    input: int
    load: Load
    requests: int
    repeats: int = 3
    warmup: int = 1
    choice: Choice = "round-robin"
    zipf: float = 1.0
    text: Path | None = None
    vocab: int = 30000
    alphabet: int = 0
    seed: int = 0


Prompts = Callable[[int, int], Prompt]


async def prompts_for(http: aiohttp.ClientSession, target: Target, plan: Plan) -> Prompts:
    """A function of repeat and request number: random ids where the API takes ids and no text is given, else text.

    Text is as long as makes the server count `plan.input` tokens, within 2 %.

    Raises:
        ServerError: the server does not say how many tokens a prompt has, or no length fits.
        ValueError: the text can't be used.
    """
    if plan.text is None and target.style != "chat":
        return lambda repeat, n: prompts.random_ids(plan.vocab, plan.input, plan.alphabet, plan.seed, repeat, n)
    words = prompts.words_of(plan.text) if plan.text else prompts.random_words()
    count, found = max(1, plan.input // 2), 0
    for _ in range(TRIES):
        sizes = [
            await http_client.prompt_tokens(
                http, target, prompts.passage(words, count, plan.seed, -9, n), plan.adapters[0]
            )
            for n in range(4)
        ]
        found = round(sum(sizes) / len(sizes))
        if abs(found - plan.input) <= max(1, TOLERANCE * plan.input):
            return lambda repeat, n: prompts.passage(words, count, plan.seed, repeat, n)
        count = max(1, round(count * plan.input / found))
    raise ServerError(f"no length of text has {plan.input} tokens at this server; {count} words have {found}")


async def send_round(
    http: aiohttp.ClientSession, target: Target, plan: Plan, prompt_of: Prompts, load: Load, requests: int, number: int
) -> list[Record]:
    """Requests of one round; its number decides on their prompts, which are made before the first is sent."""
    ready = [prompt_of(number, n) for n in range(requests)]

    async def send(n: int, adapter: str) -> Record:
        return await http_client.send(http, target, ready[n], adapter)

    rng = random.Random(f"{plan.seed} {number}")
    names = loads.choose(plan.adapters, plan.choice, rng, plan.zipf)
    return await loads.run(load, requests, names, send, rng)


async def run(target: Target, plan: Plan, report: Callable[[str], None] = print) -> list[dict[str, object]]:
    """Warm-up, then the repeats; one dictionary of figures each, with `repeat`, `run` and `error_kinds`.

    Raises:
        ServerError: see `prompts_for`.
    """
    found: list[dict[str, object]] = []
    async with http_client.session() as http:
        prompt_of = await prompts_for(http, target, plan)
        width = plan.load.concurrency or 4
        for warm in range(plan.warmup):
            # every adapter is asked at least once, so that its load is not in the figures
            many = max(width, len(plan.adapters))
            await send_round(http, target, plan, prompt_of, Load(concurrency=width), many, -1 - warm)
        start = uuid.uuid4().hex[:8]
        for repeat in range(1, plan.repeats + 1):
            records = await send_round(http, target, plan, prompt_of, plan.load, plan.requests, repeat)
            for error in sorted({r.error for r in records if r.error}):
                report(f"error: {error}")
            figures = summary(records, loads.seconds(records))
            found.append({**figures, "repeat": repeat, "run": start, "error_kinds": error_kinds(records)})
    return found
