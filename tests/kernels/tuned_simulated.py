"""Simulated GPUs for the tuner: cost surfaces with a known floor, and time that passes when something is measured."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from lorahost_kernels.configs import PROGRAMS, Config
from lorahost_kernels.tune import plan
from lorahost_kernels.tune.known import Choice, Key
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.run import Tuner
from lorahost_kernels.tune.space import Pair, Space
from lorahost_kernels.tuned.shape import KNOWN

SHAPE = KNOWN["gpt-oss-20b"]
SHARED = 227 * 1024
FIELDS = ("block_k", "split_k", "ranks", "block_n", "steps", "num_warps", "num_stages")


def doublings(config: Config, target: Config) -> float:
    """How many doublings of its fields a configuration is away from another."""
    names = [n for n in FIELDS if hasattr(config, n)]
    return sum(abs(math.log2(max(getattr(config, n), 1) / max(getattr(target, n), 1))) for n in names)


class Clock:
    """Time that passes when something is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Simulated:
    """A `run.Bench` whose optimum is known; a fifth of the time for each doubling away from it."""

    def __init__(self, place: Place, spaces: dict[str, Space], clock: Clock, noise: float = 0.0) -> None:
        self.place, self.spaces, self.clock, self.noise = place, spaces, clock, noise
        self.random = random.Random(place.tokens)
        self.best_way: int | None = None
        self.measured: list[Pair] = []
        self.wrong: set[Pair] = set()

    def target(self, name: str, way: int | None) -> Pair:
        """The best candidate: some steps from the default."""
        s = self.spaces[name]
        pair = s.default(way)
        for _ in range(3):
            moves = sorted(s.neighbours(pair), key=lambda m: repr(m))
            pair = moves[len(name) % len(moves)][1]
        return pair

    def cost(self, name: str, pair: Pair) -> float:
        way = pair[0].block_m if pair[0].mode == "list" else None
        target = self.target(name, way)
        factor = 1 + 0.2 * sum(doublings(a, b) for a, b in zip(pair, target, strict=True))
        return 10 * factor * (1.0 if way == self.best_way else 1.2) * (1 + self.noise * self.random.uniform(-1, 1))

    def measure(self, work: Sequence[tuple[Key, Pair]], until: float) -> list[float]:
        times = [math.inf] * len(work)
        for i, (key, pair) in enumerate(work):
            space = self.spaces[key[0]]
            assert space.allowed(pair) or pair == space.default(pair[0].block_m)
            if self.clock.now > until:
                break
            self.clock.now += 0.1
            self.measured.append(pair)
            times[i] = math.inf if pair in self.wrong else self.cost(key[0], pair)
        return times

    def list_time(self, block_m: int | None) -> float:
        return 0.0 if block_m is None else 3.0

    def turns(self, choices: Sequence[Choice]) -> list[list[float]]:
        def whole(choice: Choice) -> float:
            shrink = next(iter(choice.values()))[0]
            listed = self.list_time(shrink.block_m if shrink.mode == "list" else None)
            return listed + sum(self.cost(n, p) for n, p in choice.items())

        return [[whole(c) for _ in range(5)] for c in choices]

    def halves(self, name: str, pair: Pair) -> tuple[float, float]:
        return self.cost(name, pair) * 0.4, self.cost(name, pair) * 0.6

    def right(self, choice: Choice) -> bool:
        return not any(p in self.wrong for p in choice.values())


def spaces_of(place: Place) -> dict[str, Space]:
    return plan.spaces(SHAPE, place, SHARED, PROGRAMS)


def tuner(clock: Clock) -> tuple[Tuner, list[str]]:
    said: list[str] = []
    return Tuner(spaces_of, clock, said.append), said
