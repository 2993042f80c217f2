"""An engine's side of taking turns, with a stand-in for the engine, and the comparison of answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.bench_stand_in import profile as stand_in_profile

from lorahost.bench import answers, rows, turn_side, turns
from lorahost.bench.decode_profile import Profile
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.timings import Record
from lorahost.bench.vllm_026 import turn_taker
from lorahost.bench.vllm_026.engine import WrongEngineError


class Asked:
    """Stands in for `Engine` inside its own process: notes what it is asked; `error` fails every request."""

    def __init__(self, error: str = "") -> None:
        self.rounds: list[tuple[str, int, Any, int]] = []
        self.tops: list[tuple[int, str]] = []
        self.most = self._running = 0
        self._error = error

    async def round(self, load: Load, requests: int, seed: int, *, names: Any = None, output: int = 0) -> list[Record]:
        self.rounds.append((str(load), requests, names, output))
        return [Record("", 1.0, [2.0, 3.0], 2, 4, error=self._error) for _ in range(requests)]

    async def top(self, ids: list[int], adapter: str, tokens: int, count: int) -> list[answers.Token]:
        self._running += 1
        self.most = max(self.most, self._running)
        self.tops.append((len(ids), adapter))
        await asyncio.sleep(0)
        self._running -= 1
        return [(1, {1: -0.5})] * tokens


def asked(folder: Path, point: Point, engine: Asked, monkeypatch: pytest.MonkeyPatch, *asks: turns.Ask) -> list[Any]:
    """The answers of an engine's side to asks that lie there before it is ready."""

    @contextlib.asynccontextmanager
    async def checked(point: Point, work: Path) -> AsyncIterator[tuple[Asked, dict[str, object]]]:
        yield engine, {"run": "r1", "gpu": "none", "start_s": 1.0, "operations": ""}
        (folder / "closed").touch()

    monkeypatch.setattr(turn_taker, "checked", checked)
    for n, ask in enumerate(asks):
        (folder / f"ask-{n}.json").write_text(json.dumps(ask))
    (folder / "stop").touch()
    asyncio.run(turn_taker.take_turns(point, folder, folder, {"commit": "c"}))
    assert (folder / "closed").exists()
    assert (folder / "ready.json").exists()
    return [json.loads((folder / f"answer-{n}.json").read_text()) for n in range(len(asks))]


def ask_of(base: bool, number: int) -> turns.Ask:
    return {"what": "load", "load": "closed:2", "base": base, "alternation": number, "repeat": 1}


def test_an_engine_warms_up_and_answers_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point, engine = Point("stock", loads=(Load(concurrency=2),), warmup=1, requests=3, output=600), Asked()
    first, second = asked(tmp_path, point, engine, monkeypatch, ask_of(False, 1), ask_of(True, 2))
    # warm: adapters' and base traffic, with short answers, after narrower bursts
    assert engine.rounds[:2] == [("closed:1", 1, None, 4), ("closed:1", 1, [""], 4)]
    assert engine.rounds[2:4] == [("closed:2", 2, None, 64), ("closed:2", 2, [""], 64)]
    assert engine.rounds[4:] == [("closed:2", 3, None, 0), ("closed:2", 3, [""], 0)]
    rows.append(tmp_path / "rows.csv", [first["row"], second["row"]])
    found = rows.read(tmp_path / "rows.csv")
    assert [(r["path"], r["kernels"], r["alternation"]) for r in found] == [
        ("stock", "off", "1"),
        ("lora-base", "off", "2"),
    ]
    assert {(r["run"], r["commit"], r["otps_p50"], r["load"]) for r in found} == {("r1", "c", "1", "closed:2")}


@pytest.mark.parametrize(
    ("widest", "bursts"),
    [(1, []), (4, [1, 2, 3]), (16, [*range(1, 16)]), (64, [*range(1, 64, 4)]), (65, [*range(1, 65, 5)])],
)
def test_bursts_of_many_widths_come_before_the_warm_up(
    widest: int, bursts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = (Load(concurrency=1), Load(concurrency=widest))
    for warmup in (0, 1):
        engine = Asked()
        asked(tmp_path, Point("base", loads=loads, warmup=warmup), engine, monkeypatch)
        assert [width for _, width, _, output in engine.rounds if output == 4] == bursts * warmup
    assert [width for _, width, _, output in engine.rounds if output == 64] == [1, widest]


def test_an_engine_without_a_good_request_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongEngineError, match="all 4 requests failed: EngineDeadError x 4"):
        asked(
            tmp_path,
            Point("base"),
            Asked("EngineDeadError: gone"),
            monkeypatch,
            ask_of(False, 1) | {"load": "closed:1"},
        )


def test_the_probe_asks_alone_and_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Asked()
    [answer] = asked(tmp_path, Point("ours", adapters=8, warmup=0), engine, monkeypatch, turns.PROBE)
    found = answers.read(answer["answers"])
    assert {"3/base/alone", "1600/a0/alone", "700/a7/alone", "17/base/mixed", "100/a3/mixed"} < found.keys()
    assert len(found) == len(engine.tops) == 5 * 3 + 5 * 5
    assert engine.most == 25
    assert found["3/a0/alone"] == [(1, {1: -0.5})] * answers.TOKENS
    alone = Asked()
    [answer] = asked(tmp_path, Point("base", warmup=0), alone, monkeypatch, turns.PROBE)
    assert {tag.split("/")[1] for tag in answer["answers"]} == {"base"}


class Watched(Asked):
    """A second round lasts until it was profiled; `errors` fail the requests of a round, `broken` the profile."""

    def __init__(self, latency: float, errors: tuple[str, str] = ("", ""), broken: bool = False) -> None:
        super().__init__()
        self.profiled: list[tuple[float, int]] = []
        self.seeds: list[int] = []
        self.running = 0
        self._seen = asyncio.Event()
        self._latency, self._errors, self._broken = latency, errors, broken

    async def round(self, load: Load, requests: int, seed: int, *, names: Any = None, output: int = 0) -> list[Record]:
        self.rounds.append((str(load), requests, names, output))
        self.seeds.append(seed)
        self.running += requests
        if second := len(self.rounds) > 1:
            async with asyncio.timeout(60):
                await self._seen.wait()
                # goes on after the profile, for longer than the loop runs on by itself
                for _ in range(9):
                    await asyncio.sleep(0)
        self.running -= requests
        return [Record("", 1.0, [1.0 + self._latency], error=self._errors[second]) for _ in range(requests)]

    async def profile(self, seconds: float) -> Profile:
        self.profiled.append((seconds, self.running))
        self._seen.set()
        if self._broken:
            raise RuntimeError("a profile needs a GPU")
        return stand_in_profile(150.0, "closed:4")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited, in no time."""
    real, found = asyncio.sleep, list[float]()

    async def sleep(seconds: float) -> None:
        found.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


@pytest.mark.parametrize(("latency", "window"), [(0.5, 0.1), (4.0, 0.25)])
def test_a_profile_is_of_the_middle_of_a_round(
    latency: float, window: float, slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched(latency)
    point = Point("ours", loads=(Load(concurrency=4),), warmup=0)
    [answer] = asked(tmp_path, point, engine, monkeypatch, turns.profile_of(Load(concurrency=4)))
    assert answer == {"profile": stand_in_profile(150.0, "closed:4")}
    assert engine.rounds == [("closed:4", 4, None, 0)] * 2
    assert engine.profiled == [(pytest.approx(window), 4)]
    assert slept.count(latency / 2) == 1
    # rounds of the measurement have seeds above 0, the warm-up -1 and below, or -1000 and below
    assert set(engine.seeds) == {-500}


@pytest.mark.parametrize("errors", [("OSError: gone", ""), ("", "OSError: gone")])
def test_a_profile_without_all_requests_is_none(
    errors: tuple[str, str], slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WrongEngineError, match="requests of a profile failed: OSError x 2"):
        asked(tmp_path, Point("ours", warmup=0), Watched(1.0, errors), monkeypatch, turns.profile_of(Load(2)))


def test_a_profile_that_fails_leaves_no_request_behind(
    slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched(1.0, broken=True)
    with pytest.raises(RuntimeError, match="a profile needs a GPU"):
        asked(tmp_path, Point("ours", warmup=0), engine, monkeypatch, turns.profile_of(Load(2)))
    assert engine.profiled == [(0.2, 2)]
    assert engine.running == 0


@pytest.mark.parametrize(
    ("ask", "message"), [(turns.PROBE, "can't be probed"), (turns.profile_of(Load(2)), "can't be profiled")]
)
def test_an_engine_behind_http_gives_rows_only(ask: turns.Ask, message: str, tmp_path: Path) -> None:
    (tmp_path / "ask-0.json").write_text(json.dumps(ask))
    answering = turn_side.answer(Point("ours", warmup=0), Asked(), {"gpu": "none", "start_s": 1.0}, tmp_path, {})
    with pytest.raises(ValueError, match=message):
        asyncio.run(answering)


def test_an_engine_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    turn = "import asyncio, sys; from pathlib import Path; from lorahost.bench.turns import serve; "
    child = turn + "asyncio.run(serve(Path(sys.argv[1]), {}, None)); (Path(sys.argv[1]) / 'over').touch()"
    # the process between starts it and ends as soon as it is ready
    parent = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])\n"
        "while not (Path(sys.argv[2]) / 'ready.json').exists(): time.sleep(0.02)"
    )
    subprocess.run([sys.executable, "-c", parent, child, str(tmp_path)], check=True, env=dict(os.environ), timeout=120)
    deadline = time.monotonic() + 120
    while not (tmp_path / "over").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_requests_are_the_widest_load_s() -> None:
    point = Point("ours", loads=(Load(concurrency=16), Load(concurrency=1), Load(concurrency=8)), requests=24)
    assert [turns.requests_of(point, load) for load in point.loads] == [24, 2, 12]
    assert [turns.requests_of(replace(point, requests=0), load) for load in point.loads] == [32, 4, 16]


def test_answers_apart_up_to_the_first_other_token() -> None:
    a = {"q": [(1, {1: -0.1, 2: -3.0}), (2, {2: -0.5, 3: -0.55}), (5, {5: -0.1})]}
    same = answers.difference(a, a)
    assert (same.questions, same.equal, same.worst, same.differing) == (1, 1, 0.0, [])
    b = {"q": [(1, {1: -0.13, 2: -3.0}), (3, {2: -0.56, 3: -0.5}), (8, {5: -9.0, 8: -0.1})]}
    tie = answers.difference(a, b)
    assert (tie.equal, tie.ties, tie.differing) == (0, 1, [])
    assert tie.worst == pytest.approx(0.06)
    assert answers.difference(a, {"q": [(1, {1: math.nan})] * 3}).worst == math.inf
    assert answers.difference(a, {"q": [(4, {4: -0.1})]}).worst == math.inf
    [short] = answers.difference(a, {"q": a["q"][:2]}).differing
    assert short == "q: 2 tokens instead of 3"
