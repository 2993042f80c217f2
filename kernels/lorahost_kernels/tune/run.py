"""Tunes one point after the other within a budget; who measures is given, so that a simulation can."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Protocol

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.tune import search
from lorahost_kernels.tune.plan import Place, allowance, operations
from lorahost_kernels.tune.search import FAILED, Descent
from lorahost_kernels.tune.space import Pair, Space, groupings, halves_of, merged
from lorahost_kernels.tune.writer import Result, Row

GAIN = 0.01  # share that a point must gain over the defaults, besides the noise
WORTH = 1.35  # a grouping whose first candidates take longer than this times the best one's isn't searched
SECONDS_A_POINT = 6.0  # with less time left no new point is begun
SECONDS_OF_VERDICT = 3.0  # kept of the budget for the last turns
Key = tuple[str, int | None]  # product, rows per tile
Choice = Mapping[str, Pair]


class Bench(Protocol):
    """Measures at one point; all times in microseconds."""

    def measure(self, work: Sequence[tuple[Key, Pair]], until: float) -> list[float]:
        """Time of each product with its candidate; infinite where it doesn't run, or when the clock is past `until`."""

    def list_time(self, block_m: int | None) -> float:
        """Time that grouping the rows costs each layer."""

    def turns(self, choices: Sequence[Choice]) -> list[list[float]]:
        """Several times of the whole family for each choice, measured in turn."""

    def halves(self, name: str, pair: Pair) -> tuple[float, float]:
        """Time of a product's shrink alone and of its expand alone."""

    def right(self, choice: Choice) -> bool:
        """Whether the outputs at the full batch size are right."""


class Tuner:
    """Finds the tiles of a model's points.

    Args:
        spaces: The candidates of a point's products.
        clock: Seconds, monotonic.
        say: Takes a line of progress.
    """

    def __init__(
        self, spaces: Callable[[Place], dict[str, Space]], clock: Callable[[], float], say: Callable[[str], None]
    ) -> None:
        self.spaces, self.clock, self.say = spaces, clock, say
        self._bests: dict[tuple[str, str, int | None], dict[Place, Pair]] = {}

    def learn(self, result: Result) -> None:
        """Takes a result of an earlier run as a start for its neighbours."""
        shrinks = {product_of(key): row.config for key, row in result.rows.items() if key[1].endswith("shrink")}
        expands = {product_of(key): row.config for key, row in result.rows.items() if not key[1].endswith("shrink")}
        for name in shrinks.keys() & expands.keys():
            shrink, expand = shrinks[name], expands[name]
            if isinstance(shrink, ShrinkConfig) and isinstance(expand, ExpandConfig):
                self._keep(result.place, name, result.block_m, (shrink, expand))

    def tune(
        self,
        todo: Sequence[Place],
        open_bench: Callable[[Place], Bench],
        deadline: float,
        done: Callable[[Result], None],
    ) -> list[Place]:
        """Tunes the places in order, each result goes to `done`; returns those that no time was left for."""
        last = deadline - SECONDS_OF_VERDICT
        for i, place in enumerate(todo):
            began = self.clock()
            left = deadline - began
            if left < SECONDS_A_POINT:
                return [*todo[i:]]
            until = began + allowance(left, len(todo) - i)
            result, count = self.tune_place(place, open_bench(place), min(until, last), last)
            if result is not None:
                done(result)
                spent = f"{count} candidates, {self.clock() - began:.1f} of {left:.0f} s left"
                self.say(f"[{i + 1}/{len(todo)}] {place}: {summary(result)}, {spent}")
            elif self.clock() > last:
                return [*todo[i:]]
        return []

    def tune_place(self, place: Place, bench: Bench, until: float, last: float = math.inf) -> tuple[Result | None, int]:
        """(one point's result, candidates timed); no result where the defaults don't run, or not before `last`."""
        spaces = self.spaces(place)
        first = next(iter(spaces.values()))
        ways = groupings(first.pairs, first.groups, place.rank)
        grouping = {way: bench.list_time(way) for way in ways}
        descents = {(n, w): self._descent(place, n, s, w) for n, s in spaces.items() for w in ways}

        def total(way: int | None) -> float:
            return grouping[way] + sum(descents[name, way].best_time for name in spaces)

        # the defaults and the neighbours' best are measured even where that takes more than the point's share
        search.run(descents, lambda work: bench.measure(work, last), lambda: False, rounds=1)
        default = {name: space.default(ways[0]) for name, space in spaces.items()}
        if any(descents[name, ways[0]].times.get(pair, FAILED) == FAILED for name, pair in default.items()):
            why = "no time for the defaults" if self.clock() > last else "the defaults don't run here"
            self.say(f"{place}: {why}, no row")
            return None, 0
        fastest = min(map(total, ways))
        going = [way for way in ways if total(way) <= WORTH * fastest]
        search.run(
            {key: d for key, d in descents.items() if key[1] in going},
            lambda work: bench.measure(work, until),
            lambda: self.clock() > until,
        )
        for (name, way), descent in descents.items():
            if descent.best_time < FAILED:
                self._keep(place, name, way, descent.best)
        best = min(going, key=total, default=ways[0])
        # without the change of grouping, in case that the whole layer says otherwise than its products
        choices = [self._choice(spaces, descents, way, ways[0]) for way in dict.fromkeys([best, ways[0]])]
        count = sum(time < FAILED for descent in descents.values() for time in descent.times.values())
        return self._verdict(place, bench, default, [c for c in choices if c != default]), count

    def _descent(self, place: Place, name: str, space: Space, way: int | None) -> Descent[Pair]:
        known = self._bests.get((place.family, name, way), {})
        near = [pair for _, pair in sorted(known.items(), key=lambda item: distance(item[0], place))]
        allowed = [pair for pair in dict.fromkeys(near) if space.allowed(pair)][:2]
        starts = dict.fromkeys([space.default(way), *allowed])
        return Descent(list(starts), lambda pair: list(space.neighbours(pair)), merged, space.allowed)

    def _keep(self, place: Place, name: str, way: int | None, pair: Pair) -> None:
        self._bests.setdefault((place.family, name, way), {})[place] = pair

    def _choice(
        self, spaces: Mapping[str, Space], descents: Mapping[Key, Descent[Pair]], way: int | None, usual: int | None
    ) -> dict[str, Pair]:
        """The best of each product, or its default where that is as good: fewer kernels to compile."""
        choice = {}
        for name, space in spaces.items():
            descent, default = descents[name, way], space.default(way)
            same = way == usual and descent.best_time > descent.times.get(default, FAILED) * (1 - GAIN)
            choice[name] = default if same else descent.best
        return choice

    def _verdict(self, place: Place, bench: Bench, default: Choice, choices: list[dict[str, Pair]]) -> Result:
        """Times the choices against the defaults in turn; takes the best that is right and gains beyond the noise."""
        times = bench.turns([default, *choices])
        before = median(times[0])
        noise = (max(times[0]) - min(times[0])) / 2 / before
        taken, after = dict(default), before
        for choice, found in sorted(zip(choices, times[1:], strict=True), key=lambda c: median(c[1])):
            if median(found) < before * (1 - max(GAIN, noise)):
                if bench.right(choice):
                    taken, after = choice, median(found)
                    break
                self.say(f"{place}: wrong at the full batch size, dropped: {choice}")
        rows: dict[tuple[str, str], Row] = {}
        for name, pair in taken.items():
            old = bench.halves(name, default[name])
            new = old if pair == default[name] else bench.halves(name, pair)
            names = operations(place.family, name, pair[0].mode)
            for op, (_, config), was, now in zip(names, halves_of(pair), old, new, strict=True):
                rows[name if place.family == "dense" else "", op] = Row(config, was, now)
        return Result(place.family, place.adapters, place.rank, place.tokens, before, after, rows)


def distance(a: Place, b: Place) -> float:
    """Doublings between two points of a family; the rank shapes the tiles most, the number of adapters least."""
    tokens, rank, adapters = (abs(math.log2(getattr(a, n) / getattr(b, n))) for n in ("tokens", "rank", "adapters"))
    return tokens + 1.5 * rank + 0.5 * adapters


def product_of(key: tuple[str, str]) -> str:
    """The product of a row: its module, or the half of the experts."""
    fused = {"expand_swiglu": "gate_up", "expand_topk_sum": "down"}
    return key[0] or fused.get(key[1]) or key[1].rpartition("_")[0]


def summary(result: Result) -> str:
    """Before and after of the whole family."""
    way = "no list" if result.block_m is None else f"tiles of {result.block_m}"
    gain = result.before_us / result.after_us
    return f"{result.before_us:.1f} -> {result.after_us:.1f} us, {gain:.2f} x, {way}"
