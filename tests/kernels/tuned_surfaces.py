"""Simulated GPUs whose surfaces have minima that one pass of the tuner ends in."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Sequence

from tests.kernels.tuned_simulated import SHAPE, Clock, Simulated, doublings, tuner

from lorahost_kernels.configs import Config
from lorahost_kernels.tune import plan
from lorahost_kernels.tune.known import Choice, Key
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.space import Pair, Space
from lorahost_kernels.tune.writer import Result

SIZES = (1, 4, 16, 64, 256, 1024, 8192)
POINTS = plan.places(SHAPE, SIZES, ("moe_fused", "dense"))


def text(config: Config) -> str:
    """A half of a candidate without switches that the tuner never moves: a new one must not change the surface."""
    switches = ("masks", "specialize", "fused_add")
    shown = ", ".join(f"{name}={value!r}" for name, value in vars(config).items() if name not in switches)
    return f"{type(config).__name__}({shown})"


class Rugged(Simulated):
    """Each candidate is up to a tenth slower than its distance from the best says; 1 % noise."""

    surface = ""

    def __init__(self, place: Place, spaces: dict[str, Space], clock: Clock, seed: int = 0) -> None:
        super().__init__(place, spaces, clock, 0.01)
        self.random = random.Random(f"{seed} {place}")
        self.target = functools.cache(super().target)  # type: ignore[method-assign]

    def exact(self, name: str, pair: Pair) -> float:
        way = pair[0].block_m if pair[0].mode == "list" else None
        far = sum(doublings(a, b) for a, b in zip(pair, self.target(name, way), strict=True))
        rough = zlib.crc32(f"{self.surface}{name} ({text(pair[0])}, {text(pair[1])})".encode()) / 2**32
        return 10 * (1 + 0.1 * far) * (1 + 0.1 * rough) * (1.0 if way == self.best_way else 1.2)

    def cost(self, name: str, pair: Pair) -> float:
        return self.exact(name, pair) * (1 + self.noise * self.random.uniform(-1, 1))

    def true(self, choice: Choice) -> float:
        """The family's time without noise."""
        shrink = next(iter(choice.values()))[0]
        listed = self.list_time(shrink.block_m if shrink.mode == "list" else None)
        return listed + sum(self.exact(name, pair) for name, pair in choice.items())


class Lying(Rugged):
    """Single candidates' times are up to a third off; only the turns are true."""

    def cost(self, name: str, pair: Pair) -> float:
        return self.exact(name, pair)

    def measure(self, work: Sequence[tuple[Key, Pair]], until: float) -> list[float]:
        return [t * self.random.uniform(0.67, 1.33) for t in super().measure(work, until)]


class Trap(Simulated):
    """Slower with each step away from the default, but for some candidates: `deep`, a fifth faster."""

    def __init__(self, place: Place, spaces: dict[str, Space], clock: Clock) -> None:
        super().__init__(place, spaces, clock)
        self.deep: dict[str, Pair] = {}

    def cost(self, name: str, pair: Pair) -> float:
        base = self.spaces[name].default(pair[0].block_m if pair[0].mode == "list" else None)
        far = sum(doublings(a, b) for a, b in zip(pair, base, strict=True))
        return 8.0 if pair == self.deep.get(name) else 10 * (1 + 0.2 * far)


def tuned_by(
    todo: Sequence[Place], bench: Callable[[Place], Simulated], clock: Clock, deadline: float = 1e9
) -> tuple[list[Result], list[str]]:
    """(all results in the order of their coming, lines said) of a run that leaves no point."""
    results: list[Result] = []
    tuned, said = tuner(clock)
    assert tuned.tune(todo, bench, deadline, results.append) == []
    return results, said
