"""Coordinate descent in batches: many descents share one round of measuring, so compilers and GPU stay busy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)
FAILED = float("inf")
# A step must gain this share, or the descent ends: less is noise.
STEP_GAIN = 0.01


@dataclass
class Descent(Generic[C]):
    """One search, from the best of `starts` to where no step of one coordinate gains STEP_GAIN.

    neighbours: (coordinate, candidate) of each step; merge: several steps from one base in one candidate;
    known: times from before, which are walked over but not measured again.
    """

    starts: Sequence[C]
    neighbours: Callable[[C], Sequence[tuple[str, C]]]
    merge: Callable[[C, list[C]], C]
    allowed: Callable[[C], bool]
    known: Mapping[C, float] = field(default_factory=dict)
    times: dict[C, float] = field(default_factory=dict)
    _stage: str = "start"
    _reached: float = FAILED

    def __post_init__(self) -> None:
        self._base = self.starts[0]

    @property
    def best(self) -> C:
        """The fastest candidate so far; before any measurement the first start."""
        return min(self.times, key=self.times.__getitem__) if self.times else self.starts[0]

    @property
    def best_time(self) -> float:
        """Its time; infinite before any measurement, and where nothing ran."""
        return min(self.times.values(), default=FAILED)

    def ask(self) -> list[C]:
        """The candidates to measure next; none: the search is over."""
        while self._stage != "done":
            candidates = dict.fromkeys(self._wanted())
            self.times.update({c: self.known[c] for c in candidates if c in self.known and c not in self.times})
            wanted = [c for c in candidates if c not in self.times]
            if wanted:
                return wanted
            self._advance()
        return []

    def tell(self, times: Mapping[C, float]) -> None:
        """The times of what was asked for; a failed candidate has an infinite time."""
        self.times.update(times)
        self._advance()

    def _wanted(self) -> list[C]:
        if self._stage == "start":
            return list(self.starts)
        if self._stage == "steps":
            return [c for _, c in self.neighbours(self._base)]
        return self._merged()

    def _advance(self) -> None:
        if self._stage == "steps":
            self._stage = "merge"
            return
        # a round is over: go on only from a better place
        if self.best_time < self._reached * (1 - STEP_GAIN):
            self._reached, self._base, self._stage = self.best_time, self.best, "steps"
        else:
            self._stage = "done"

    def _merged(self) -> list[C]:
        """The best step of each coordinate that gained, put together one by one."""
        base = self.times[self._base]
        gains: dict[str, tuple[float, C]] = {}
        for name, candidate in self.neighbours(self._base):
            time = self.times.get(candidate, FAILED)
            if time < base and time < gains.get(name, (FAILED, candidate))[0]:
                gains[name] = (time, candidate)
        steps = [c for _, c in sorted(gains.values(), key=lambda g: g[0])]
        found = (self.merge(self._base, steps[: n + 1]) for n in range(1, len(steps)))
        return [c for c in found if self.allowed(c)][:3]


K = TypeVar("K", bound=Hashable)


def run(
    descents: Mapping[K, Descent[C]],
    measure: Callable[[Sequence[tuple[K, C]]], Sequence[float]],
    spent: Callable[[], bool],
    rounds: int | None = None,
) -> int:
    """Runs all descents together, `rounds` rounds or until each is over, or until `spent` says so between two rounds.

    Returns the number of measurements.
    """
    count = 0
    while rounds != 0 and not spent():
        asked = {key: descent.ask() for key, descent in descents.items()}
        work = [(key, c) for key, candidates in asked.items() for c in candidates]
        if not work:
            break
        times = dict(zip(work, measure(work), strict=True))
        for key, candidates in asked.items():
            if candidates:
                descents[key].tell({c: times[key, c] for c in candidates})
        count += len(work)
        rounds = None if rounds is None else rounds - 1
    return count
