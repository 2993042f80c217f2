"""A further search at a point: from what the other points found since, and over what one step at a time can't leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lorahost_kernels.tune import search
from lorahost_kernels.tune.known import CLOSE, GAIN, WORTH, Choice, Key, Known, Record, choice_of
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.search import FAILED, Descent
from lorahost_kernels.tune.space import Pair, Space, merged, two_steps

Measure = Callable[[Sequence[tuple[Key, Pair]], float], list[float]]


@dataclass
class Again:
    """One point's further search.

    Args:
        known: What the run knows; the search adds to the point's record and bests.
        place: The point, which holds a result.
        spaces: Its candidates by product.
        measure: Times of candidates, see `run.Bench`.
        clock: Seconds, monotonic.
    """

    known: Known
    place: Place
    spaces: Mapping[str, Space]
    measure: Measure
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.record = self.known.records.setdefault(self.place, Record())
        self.held: Choice = choice_of(self.known.held[self.place])
        self.held_way = self.known.held[self.place].block_m
        self.anchors: dict[Key, Pair] = {}
        self.found: dict[Key, dict[Pair, float]] = {}  # new times

    @property
    def count(self) -> int:
        """Candidates timed that were not timed before."""
        return sum(time < FAILED for times in self.found.values() for time in times.values())

    def choices(self, lists: Mapping[int | None, float], until: float, last: float) -> list[Choice]:
        """What may be better than what the point holds; nothing where that was not timed before `last`, or fails.

        lists: groupings and their time; until: no candidate is begun after it but those that the search goes on from.
        """
        self.record.lists = dict(lists)
        if not self._time_anchors(last):
            return []
        near = {key: self.known.untried(self.place, key, self.spaces[key[0]]) for key in self.anchors}
        self._search({key: starts for key, starts in near.items() if starts}, until)
        close = {*self._within(CLOSE), self.held_way}
        steps = {key: self._steps(key) for key in self.anchors if key[1] in close and not self._gained(key)}
        # with the anchor, so that the search goes on only from what is better
        cut = self._search({key: [self.anchors[key], *pairs] for key, pairs in steps.items() if pairs}, until)
        for key in steps if not cut else ():
            self.record.walked.setdefault(key, set()).add(self.anchors[key])
        for key in self.anchors:
            best = self.record.best(key)
            if best is not None:
                self.known.keep(self.place, key, best)
        ways = sorted(self._within(CLOSE), key=lambda way: self.record.total(way, self.spaces))
        first = next(filter(None, map(self._choice, ways)), None)
        own = self._choice(self.held_way)
        return [choice for choice in (first, own if own != first else None) if choice]

    def _time_anchors(self, last: float) -> bool:
        """Times what is known again, since this visit's calls have other inputs; whether all that is held ran."""
        ways = [*self.record.lists]
        # nothing is known of a point that an earlier run left: all its groupings are new
        worth = {*self.record.within(WORTH, ways, [*self.spaces]), self.held_way} if self.record.times else {*ways}
        for key in ((name, way) for way in ways if way in worth for name in self.spaces):
            known = self.known.anchor(self.place, key)
            self.anchors[key] = known if known is not None else self.spaces[key[0]].default(key[1])
        times = dict(zip(self.anchors, self.measure([*self.anchors.items()], last), strict=True))
        for key, time in times.items():
            if time < FAILED or self.clock() <= last:
                self.record.again(key, self.anchors[key], time)
        return all(times.get((name, self.held_way), FAILED) < FAILED for name in self.held)

    def _search(self, starts: Mapping[Key, list[Pair]], until: float) -> bool:
        """Runs a descent from the best of each key's starts, one that doesn't time again; whether the time cut it."""
        descents = {key: self._descent(key, pairs) for key, pairs in starts.items()}

        def measure(work: Sequence[tuple[Key, Pair]]) -> list[float]:
            times = self.measure(work, until)
            cut = self.clock() > until
            for (key, pair), time in zip(work, times, strict=True):
                self.record.add(key, {pair: time}, cut)
                self.found.setdefault(key, {})[pair] = time
            return times

        def spent() -> bool:
            return self.clock() > until

        search.run(descents, measure, spent, rounds=1)
        going = self._within(WORTH)
        search.run({key: d for key, d in descents.items() if key[1] in going}, measure, spent)
        return spent()

    def _descent(self, key: Key, starts: list[Pair]) -> Descent[Pair]:
        space = self.spaces[key[0]]
        return Descent(
            starts, lambda pair: list(space.neighbours(pair)), merged, space.allowed, self.record.times.get(key, {})
        )

    def _steps(self, key: Key) -> list[Pair]:
        """Moves of two steps that were not timed, those over a faster first step first."""
        tried = self.record.times.get(key, {})
        found = two_steps(self.spaces[key[0]], self.anchors[key], lambda pair: tried.get(pair, FAILED))
        return [pair for pair in found if pair not in tried]

    def _within(self, factor: float) -> list[int | None]:
        ways = dict.fromkeys(way for _, way in self.anchors)
        return self.record.within(factor, [*ways], [*self.spaces])

    def _best(self, key: Key) -> Pair:
        """The fastest of what is new, or the anchor where that is about as fast."""
        new, anchor = self.found.get(key, {}), self.anchors[key]
        pair = min(new, key=new.__getitem__, default=anchor)
        limit = self.record.times[key].get(anchor, FAILED)
        return pair if new.get(pair, FAILED) < limit * (1 - GAIN) else anchor

    def _gained(self, key: Key) -> bool:
        return self._best(key) != self.anchors[key]

    def _choice(self, way: int | None) -> Choice | None:
        """A grouping's best of each product, where any of them is new."""
        keys = [(name, way) for name in self.spaces]
        return {key[0]: self._best(key) for key in keys} if any(map(self._gained, keys)) else None
