"""A second process of the tuner without a GPU: benches that can be sent there, and a tuner with points to confirm."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kernels.tuned_simulated import Clock, Simulated, spaces_of, tuner

from lorahost_kernels.tune.known import Choice, Key
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.run import Tuner
from lorahost_kernels.tune.space import Pair

Times = tuple[float, float, float]  # us of the defaults, what is in use and the new choice


@dataclass
class Point:
    """The three choices of a point: the defaults, and the first two steps away from them."""

    place: Place

    def __post_init__(self) -> None:
        spaces = spaces_of(self.place)
        self.default = {name: space.default(None) for name, space in spaces.items()}
        steps = {name: [pair for _, pair in s.neighbours(self.default[name])] for name, s in spaces.items()}
        self.used, self.new = ({name: pairs[i] for name, pairs in steps.items()} for i in (0, 1))


class Fixed(Simulated):
    """Takes given times for a point's three choices."""

    def __init__(self, place: Place, times: Times, wrong: str = "") -> None:
        super().__init__(place, spaces_of(place), Clock())
        self.point, self.us, self.bad = Point(place), times, wrong

    def measure(self, work: Sequence[tuple[Key, Pair]], until: float) -> list[float]:
        choice = {"small batch": self.point.new, "defaults": self.point.default}.get(self.bad, {})
        bad = [*choice.values()]
        return [float("inf") if pair in bad else 1.0 for _, pair in work]

    def turns(self, choices: Sequence[Choice]) -> list[list[float]]:
        known = [self.point.default, self.point.used, self.point.new]
        return [[self.us[known.index(dict(choice))]] * 5 for choice in choices]

    def right(self, choice: Choice) -> bool:
        return self.bad != "full batch" or choice != self.point.new


@dataclass(frozen=True)
class Second:
    """Opens benches in a second process.

    times: by point; wrong: where the new choice is wrong; ends: what happens instead at a point: "exit", "raise",
    "break", "hang" or "no defaults" (they don't run); refuses: whether no bench can be opened; pid_file: gets the
    process's id.
    """

    times: Mapping[Place, Times]
    wrong: str = ""
    ends: Mapping[Place, str] = field(default_factory=dict)
    refuses: bool = False
    pid_file: Path | None = None

    def __call__(self, say: Callable[[str], None]) -> Callable[[Place], Fixed]:
        if self.pid_file:
            self.pid_file.write_text(str(os.getpid()))
        if self.refuses:
            raise RuntimeError("CUDA error: all devices are busy")
        say("opened")
        return self.open

    def open(self, place: Place) -> Fixed:
        end = self.ends.get(place, "")
        if end == "exit":
            os._exit(7)
        if end == "raise":
            raise MemoryError("no memory for the weights")
        if end == "break":
            error = RuntimeError("down tiles: illegal memory access")
            error.candidate = "down tiles"  # type: ignore[attr-defined]
            raise error
        if end == "hang":
            time.sleep(120)
        return Fixed(place, self.times[place], "defaults" if end == "no defaults" else self.wrong)


def found(first: Mapping[Place, Times], in_use: Sequence[Place]) -> tuple[Tuner, list[str]]:
    """A tuner whose points hold what they get from the first process's times."""
    tuned, said = tuner(Clock())
    for place, times in first.items():
        point, used = Point(place), None
        if place in in_use:
            used = tuned.known.used[place] = point.used
        tuned.resume(tuned.decide(place, Fixed(place, times), used, [point.new])[0])
    return tuned, said
