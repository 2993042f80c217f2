"""What a run knows: the best of each product at each point, what the points hold, and what was timed at them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.search import FAILED
from lorahost_kernels.tune.space import Pair, Space
from lorahost_kernels.tune.writer import Result

NEAR = 6  # bests that a further pass tries: of two points on each side by tokens, of another rank, of other adapters
WORTH = 1.35  # a grouping whose first candidates take longer than this times the best one's isn't searched
CLOSE = 1.1  # the same after a search: no two steps make up for more
# Share that a point must gain over the defaults and what it holds, besides the noise, and a product over its old tiles.
# One, since a higher one of products loses gains that the point would take, and with a lower one a gain that the point
# refuses keeps a further pass from moves of two steps.
GAIN = 0.01
Key = tuple[str, int | None]  # product, rows per tile
Choice = Mapping[str, Pair]
Bests = dict[tuple[str, str, int | None], dict[Place, Pair]]


@dataclass
class Record:
    """What was timed at one point, microseconds as its last pass found them; infinite: doesn't run.

    times: of candidates, by product and grouping; lists: of grouping the rows; walked: candidates all of whose
    moves of two steps were timed.
    """

    times: dict[Key, dict[Pair, float]] = field(default_factory=dict)
    lists: dict[int | None, float] = field(default_factory=dict)
    walked: dict[Key, set[Pair]] = field(default_factory=dict)

    def add(self, key: Key, times: Mapping[Pair, float], cut: bool) -> None:
        """Takes times in; cut: the time was over, so that an infinite one says nothing."""
        here = self.times.setdefault(key, {})
        here.update({pair: time for pair, time in times.items() if time < FAILED or not cut})

    def again(self, key: Key, pair: Pair, time: float) -> None:
        """Another time of a candidate: what was timed before in other calls is scaled to it."""
        here = self.times.setdefault(key, {})
        before = here.get(pair, FAILED)
        if max(before, time) < FAILED:
            here.update({p: t * time / before for p, t in here.items()})
        here[pair] = time

    def best(self, key: Key) -> Pair | None:
        """The fastest candidate; None before any that runs."""
        here = self.times.get(key, {})
        pair = min(here, key=here.__getitem__, default=None)
        return None if pair is None or here[pair] == FAILED else pair

    def total(self, way: int | None, names: Iterable[str]) -> float:
        """Time of all products with a grouping at its best; infinite where nothing ran."""
        best = (min(self.times.get((name, way), {}).values(), default=FAILED) for name in names)
        return self.lists.get(way, FAILED) + sum(best)

    def within(self, factor: float, ways: Sequence[int | None], names: Sequence[str]) -> list[int | None]:
        """The groupings whose time is within a factor of the fastest one's."""
        fastest = min(self.total(way, names) for way in ways)
        return [way for way in ways if self.total(way, names) <= factor * fastest < FAILED]


class Known:
    """What a run knows of its points and of those that the file has."""

    def __init__(self) -> None:
        self.held: dict[Place, Result] = {}  # of this run
        self.records: dict[Place, Record] = {}
        self.used: dict[Place, Choice] = {}  # what an engine would take now, or else what the file held that is written
        self._bests: Bests = {}
        self._others: Bests = {}  # of other models

    def keep(self, place: Place, key: Key, pair: Pair, other: bool = False) -> None:
        """The best of a product at a point; other: of another model."""
        bests = self._others if other else self._bests
        bests.setdefault((place.family, *key), {})[place] = pair

    def learn(self, result: Result, other: bool = False) -> None:
        """The bests that a result holds; other: of another model, in place of an earlier one of such a point."""
        for name, pair in choice_of(result).items():
            self.keep(result.place, (name, result.block_m), pair, other)

    def near(self, place: Place, key: Key, space: Space, count: int, other: bool = False) -> list[Pair]:
        """The first `count` different bests of a product that may run here, the nearest point's first."""
        known = (self._others if other else self._bests).get((place.family, *key), {})
        pairs = [pair for _, pair in sorted(known.items(), key=lambda item: distance(item[0], place))]
        return [*islice(filter(space.allowed, dict.fromkeys(pairs)), count)]

    def untried(self, place: Place, key: Key, space: Space) -> list[Pair]:
        """Those of the nearest points that were not timed at this one."""
        tried = self.records[place].times.get(key, {}) if place in self.records else {}
        # the nearest one is its own
        return [pair for pair in self.near(place, key, space, 1 + NEAR) if pair not in tried]

    def anchor(self, place: Place, key: Key) -> Pair | None:
        """Where a further pass goes on: what the point holds, with another grouping the best that was timed."""
        held = self.held[place]
        if held.block_m == key[1]:
            return choice_of(held).get(key[0])
        return self.records[place].best(key) if place in self.records else None

    def news(self, place: Place, spaces: Mapping[str, Space], ways: Sequence[int | None]) -> bool:
        """Whether a further pass has anything to time at a point."""
        record = self.records.get(place)
        if record is None:
            return True
        worth = [(name, way) for way in record.within(WORTH, ways, [*spaces]) for name in spaces]
        if any(self.untried(place, key, spaces[key[0]]) for key in worth):
            return True
        close = {*record.within(CLOSE, ways, [*spaces]), self.held[place].block_m}
        keys = [(name, way) for way in close for name in spaces]
        return any(self.anchor(place, key) not in {None, *record.walked.get(key, ())} for key in keys)


def distance(a: Place, b: Place) -> float:
    """Doublings between two points of a family; the rank shapes the tiles most, the number of adapters least."""
    tokens, rank, adapters = (abs(math.log2(getattr(a, n) / getattr(b, n))) for n in ("tokens", "rank", "adapters"))
    return tokens + 1.5 * rank + 0.5 * adapters


def choice_of(result: Result) -> dict[str, Pair]:
    """The tiles of each product that a result holds."""
    shrinks = {product_of(key): row.config for key, row in result.rows.items() if key[1].endswith("shrink")}
    expands = {product_of(key): row.config for key, row in result.rows.items() if not key[1].endswith("shrink")}
    choice: dict[str, Pair] = {}
    for name, shrink in shrinks.items():
        expand = expands.get(name)
        if isinstance(shrink, ShrinkConfig) and isinstance(expand, ExpandConfig):
            choice[name] = shrink, expand
    return choice


def rows_of(pair: Pair) -> int | None:
    """Rows per tile of the work list that a candidate needs; None: no list."""
    return pair[0].block_m if pair[0].mode == "list" else None


def product_of(key: tuple[str, str]) -> str:
    """The product of a row: its module, or the half of the experts."""
    fused = {"expand_swiglu": "gate_up", "expand_topk_sum": "down"}
    return key[0] or fused.get(key[1]) or key[1].rpartition("_")[0]
