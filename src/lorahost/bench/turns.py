"""How several engines take turns: a folder for each, in which the parent asks and the engine's process answers.

`ready.json` appears when the engine is warm. `ask-N.json` is answered by `answer-N.json`, then comes N + 1; a file
`stop` ends it. Standard library only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from lorahost.bench.files import write_whole
from lorahost.bench.loads import Load
from lorahost.bench.point import Point

POLL_SECONDS = 0.05
Json = dict[str, Any]


class Ask(TypedDict):
    """One repeat of a load, the probe or a profile; `base` asks the base model although there are adapters."""

    what: Literal["load", "probe", "profile"]
    load: str
    base: bool
    alternation: int
    repeat: int


def words(ask: Ask) -> str:
    """An ask for messages."""
    if ask["what"] == "probe":
        return "the probe"
    if ask["what"] == "profile":
        return f"a profile under {ask['load']}"
    base = ", base traffic" if ask["base"] else ""
    return f"{ask['load']}{base}, round {ask['alternation']}, repeat {ask['repeat']}"


PROBE: Ask = {"what": "probe", "load": "", "base": False, "alternation": 0, "repeat": 0}


def profile_of(load: Load) -> Ask:
    """Asks for a profile of decode steps under a closed load."""
    return {"what": "profile", "load": str(load), "base": False, "alternation": 0, "repeat": 0}


def row_point(point: Point, base: bool, alternation: int) -> Point:
    """What a row of this engine says that it is; traffic without adapters on a LoRA engine is `lora-base`."""
    if not base or not point.lora:
        return replace(point, alternation=alternation)
    kernels: Literal["", "off"] = "" if point.uses_kernels else "off"
    return replace(point, path="lora-base", kernels=kernels, alternation=alternation)


def requests_of(point: Point, load: Load) -> int:
    """Requests of a repeat: those that were asked for are the widest closed loop's, narrower ones get their share."""
    if not point.requests or not load.concurrency:
        return point.requests_of(load)
    widest = max(one.concurrency for one in point.loads)
    return max(2, point.requests * load.concurrency // widest)


async def serve(folder: Path, ready: Json, act: Callable[[Ask], Awaitable[Json]]) -> None:
    """The engine's side: says that it is ready and answers until it is told to stop or the parent is gone."""
    parent = os.getppid()
    write_whole(folder / "ready.json", json.dumps(ready))
    for n in itertools.count():
        ask = folder / f"ask-{n}.json"
        while not ask.exists():
            if (folder / "stop").exists() or os.getppid() != parent:
                return
            await asyncio.sleep(POLL_SECONDS)
        write_whole(folder / f"answer-{n}.json", json.dumps(await act(json.loads(ask.read_text()))))
