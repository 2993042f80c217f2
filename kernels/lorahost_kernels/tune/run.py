"""Tunes point after point within a budget, and again; who measures is given, so that a simulation can."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from lorahost_kernels.tune import search
from lorahost_kernels.tune.again import Again
from lorahost_kernels.tune.known import GAIN, WORTH, Choice, Key, Known, Record, choice_of, rows_of
from lorahost_kernels.tune.plan import Place, allowance, operations
from lorahost_kernels.tune.search import FAILED, Descent
from lorahost_kernels.tune.space import Pair, Space, groupings, halves_of, merged
from lorahost_kernels.tune.writer import Result, Row

SECONDS_A_POINT = 6.0  # with less time left no new point is begun
SECONDS_OF_VERDICT = 3.0  # kept of the budget for the last turns


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
        self.known = Known()
        self._without: set[Place] = set()  # points whose defaults don't run

    def learn(self, result: Result, other: bool = False) -> None:
        """Takes a result of an earlier run as a start for its neighbours; other: of another model."""
        self.known.learn(result, other)
        if not other:
            # as an engine keeps the first file's point
            self.known.used.setdefault(result.place, choice_of(result))

    def resume(self, result: Result) -> None:
        """Takes a result of this run, as a stopped run left it: its point is done."""
        self.known.learn(result)
        self.known.held[result.place] = result

    def tune(
        self,
        todo: Sequence[Place],
        open_bench: Callable[[Place], Bench],
        deadline: float,
        done: Callable[[Result], None],
        kept: Callable[[], float] = lambda: 0.0,
    ) -> list[Place]:
        """Tunes the places in order, then passes over them again while that finds anything.

        Each result goes to `done`, a later one of a place in place of its earlier one; `kept` says before each point
        how many seconds before the deadline the passes must end. Returns the places that no time was left for.
        """
        held = self.known.held
        for number in itertools.count(1):
            # a pass that an earlier run began may have found something there
            whole = all(held[p].passes < number for p in todo if p in held)
            wanted = [p for p in todo if self._wants(p, number)]
            found = self._pass(number, wanted, open_bench, lambda: deadline - kept(), done)
            if found is None or (number > 1 and whole and not found):
                break
        return [p for p in todo if p not in held and p not in self._without]

    def _wants(self, place: Place, number: int) -> bool:
        """Whether a pass visits a point."""
        held = self.known.held.get(place)
        if held is None or number == 1:
            return held is None and number == 1
        return held.passes < number and self.known.news(place, self.spaces(place), self._ways(place))

    def _pass(
        self,
        number: int,
        wanted: Sequence[Place],
        open_bench: Callable[[Place], Bench],
        end: Callable[[], float],
        done: Callable[[Result], None],
    ) -> bool | None:
        """One pass over the points; whether it found anything, None when the time is over."""
        found = False
        for i, place in enumerate(wanted):
            began, deadline = self.clock(), end()
            left, last = deadline - began, deadline - SECONDS_OF_VERDICT
            if left < SECONDS_A_POINT:
                return None
            until = min(began + allowance(left, len(wanted) - i), last)
            visit = self.tune_place if number == 1 else self.tune_again
            result, count = visit(place, open_bench(place), until, last)
            now = result or self.known.held.get(place)
            if now is None:
                if self.clock() > last:
                    return None
                self._without.add(place)
                continue
            found = found or result is not None
            self.known.held[place] = now = replace(now, passes=number)
            done(now)
            news = summary(now) if result else f"{now.after_us:.1f} us, nothing faster"
            spent = f"{count} candidates, {self.clock() - began:.1f} of {left:.0f} s left"
            self.say(f"[pass {number}, {i + 1}/{len(wanted)}] {place}: {news}, {spent}")
        return found

    def _ways(self, place: Place) -> list[int | None]:
        """Groupings of a point's rows, the default first."""
        first = next(iter(self.spaces(place).values()))
        return groupings(first.pairs, first.groups, place.rank)

    def tune_place(self, place: Place, bench: Bench, until: float, last: float = math.inf) -> tuple[Result | None, int]:
        """(one point's result, candidates timed); no result where the defaults don't run, or not before `last`."""
        spaces = self.spaces(place)
        ways = self._ways(place)
        grouping = {way: bench.list_time(way) for way in ways}
        descents = {(n, w): self._descent(place, n, s, w) for n, s in spaces.items() for w in ways}

        def total(way: int | None) -> float:
            return grouping[way] + sum(descents[name, way].best_time for name in spaces)

        # the defaults and the neighbours' best are measured even where that takes more than the point's share
        search.run(descents, lambda work: bench.measure(work, last), lambda: False, rounds=1)
        default = self.default(place)
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
        record = self.known.records[place] = Record(lists=grouping)
        for key, descent in descents.items():
            record.add(key, descent.times, self.clock() > until)
            if descent.best_time < FAILED:
                self.known.keep(place, key, descent.best)
        best = min(going, key=total, default=ways[0])
        # without the change of grouping, in case that the whole layer says otherwise than its products
        choices = [self._choice(spaces, descents, way, ways[0]) for way in dict.fromkeys([best, ways[0]])]
        count = sum(time < FAILED for descent in descents.values() for time in descent.times.values())
        return self.decide(place, bench, self._used(place, descents), choices)[0], count

    def tune_again(self, place: Place, bench: Bench, until: float, last: float = math.inf) -> tuple[Result | None, int]:
        """(a result that is better than what the point holds, new candidates timed); no result where none is."""
        spaces, ways = self.spaces(place), self._ways(place)
        lists = {way: bench.list_time(way) for way in ways}
        again = Again(self.known, place, spaces, bench.measure, self.clock)
        choices = again.choices(lists, until, last)
        default = self.default(place)
        holds = [default, again.held] if again.held != default else [default]
        choices = [c for c in choices if c not in holds]
        if not choices:
            return None, again.count
        taken, times, _ = self._verdict(place, bench, holds, choices)
        if taken is None:
            return None, again.count
        return self._result(place, bench, default, taken, times), again.count

    def default(self, place: Place) -> Choice:
        """The built-in tiles of a point."""
        way = self._ways(place)[0]
        return {name: space.default(way) for name, space in self.spaces(place).items()}

    def in_use(self, place: Place) -> Choice | None:
        """What an engine would take at this point now, if it is among the candidates."""
        found, spaces, ways = self.known.used.get(place, {}), self.spaces(place), self._ways(place)
        if found.keys() != spaces.keys() or any(rows_of(pair) not in ways for pair in found.values()):
            return None
        fits = (spaces[n].allowed(p) or p == spaces[n].default(rows_of(p)) for n, p in found.items())
        return found if all(fits) else None

    def decide(
        self, place: Place, bench: Bench, used: Choice | None, choices: Sequence[Choice]
    ) -> tuple[Result, list[float]]:
        """(what a point gets, microseconds of what was timed in turns).

        Timed are the defaults, `used` and `choices`, each once; whatever is given must run. A choice must gain over the
        defaults and `used`, which else stays if it gains over the defaults.
        """
        default = self.default(place)
        holds = [default, used] if used and used != default else [default]
        choices = [c for c in choices if c not in holds]
        taken, times, each = self._verdict(place, bench, holds, choices)
        # what is in use may be no better than the defaults, or wrong
        for found in (holds[1:], choices):
            if taken is None and len(holds) > 1:
                taken, times, _ = self._verdict(place, bench, [default], found)
        return self._result(place, bench, default, taken or default, times), each

    def _descent(self, place: Place, name: str, space: Space, way: int | None) -> Descent[Pair]:
        near = (
            *self.known.near(place, (name, way), space, 2),
            *self.known.near(place, (name, way), space, 1, other=True),
        )
        starts = dict.fromkeys([space.default(way), *near])
        return Descent(list(starts), lambda pair: list(space.neighbours(pair)), merged, space.allowed)

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

    def _used(self, place: Place, descents: Mapping[Key, Descent[Pair]]) -> Choice | None:
        """What is in use, if it ran here."""
        found = self.in_use(place) or {}
        runs = all(descents[name, rows_of(pair)].times.get(pair, FAILED) < FAILED for name, pair in found.items())
        return found if found and runs else None

    def _verdict(
        self, place: Place, bench: Bench, holds: Sequence[Choice], choices: Sequence[Choice]
    ) -> tuple[Choice | None, tuple[float, float], list[float]]:
        """Times choices in turn with what they must beat: the defaults, and what the point holds or held before.

        Returns the best choice that is right and gains beyond the noise, if any; the defaults' time and its time, or
        the defaults' again; and the times of all.
        """
        times = bench.turns([*holds, *choices])
        limit = min(map(limit_of, times[: len(holds)]))
        middle = [median(t) for t in times]
        for choice, found in sorted(zip(choices, middle[len(holds) :], strict=True), key=lambda c: c[1]):
            if found < limit:
                if bench.right(choice):
                    return choice, (middle[0], found), middle
                self.say(f"{place}: wrong at the full batch size, dropped: {choice}")
        return None, (middle[0], middle[0]), middle

    def _result(self, place: Place, bench: Bench, default: Choice, taken: Choice, times: tuple[float, float]) -> Result:
        """The result with the times of each operation alone."""
        rows: dict[tuple[str, str], Row] = {}
        for name, pair in taken.items():
            old = bench.halves(name, default[name])
            new = old if pair == default[name] else bench.halves(name, pair)
            names = operations(place.family, name, pair[0].mode)
            for op, (_, config), was, now in zip(names, halves_of(pair), old, new, strict=True):
                rows[name if place.family == "dense" else "", op] = Row(config, was, now)
        return Result(place.family, place.adapters, place.rank, place.tokens, *times, rows)


def limit_of(times: Sequence[float]) -> float:
    """What another choice must be faster than, to be faster beyond the noise."""
    return median(times) * (1 - max(GAIN, noise(times)))


def noise(times: Sequence[float]) -> float:
    """Half the spread of a choice's turns, as a share."""
    return (max(times) - min(times)) / 2 / median(times)


def summary(result: Result) -> str:
    """Before and after of the whole family."""
    way = "no list" if result.block_m is None else f"tiles of {result.block_m}"
    gain = result.before_us / result.after_us
    return f"{result.before_us:.1f} -> {result.after_us:.1f} us, {gain:.2f} x, {way}"
