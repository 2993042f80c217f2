"""Further passes of the tuner over its points, on simulated GPUs whose surfaces have minima that one pass ends in."""

from __future__ import annotations

import functools
import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.kernels.tuned_simulated import SHAPE, Clock, Simulated, doublings, spaces_of, tuner

from lorahost_kernels.configs import Config
from lorahost_kernels.tune import plan, run
from lorahost_kernels.tune.known import Choice, Key, Record, choice_of
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.search import STEP_GAIN
from lorahost_kernels.tune.space import Pair, Space, groupings, merged, two_steps
from lorahost_kernels.tune.state import State
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


def test_two_steps_at_once_leave_a_minimum_that_single_steps_end_in() -> None:
    place, clock = Place("moe", 16), Clock()
    bench = Trap(place, spaces_of(place), clock)
    for name, s in bench.spaces.items():
        # both ways to get there are over slower candidates
        moves = two_steps(s, s.default(None), lambda pair: bench.cost(name, pair))  # noqa: B023
        bench.deep[name] = moves[-1]
        singles = [pair for _, pair in s.neighbours(s.default(None))]
        assert not {*moves} & {s.default(None), *singles}
        assert min(bench.cost(name, pair) for pair in singles) > 10
    results, said = tuned_by([place], lambda _: bench, clock)
    first, second, *others = results
    assert (first.passes, first.before_us, first.after_us) == (1, 20.0, 20.0)
    assert (second.passes, second.before_us, second.after_us) == (2, 20.0, 16.0)
    assert choice_of(second) == bench.deep
    assert [r.rows for r in others] == [second.rows] * len(others)
    assert said[0].startswith("[pass 1, 1/1] moe 8x32 M=16: 20.0 -> 20.0 us, 1.00 x, no list, ")
    assert said[1].startswith("[pass 2, 1/1] moe 8x32 M=16: 20.0 -> 16.0 us, 1.25 x, no list, ")
    assert [line[:26] for line in said[2:]] == ["[pass 3, 1/1] moe 8x32 M=1"] * len(others)


@pytest.mark.parametrize("other", [Place("moe", 32), Place("moe", 16, 8, 16), Place("moe", 16, 1, 32)])
def test_a_point_takes_what_a_later_one_found(other: Place) -> None:
    here, clock = Place("moe", 16), Clock()
    bench, smooth = Trap(here, spaces_of(here), clock), Simulated(other, spaces_of(other), clock)
    # four steps away, where only the other point's surface leads
    for name, s in bench.spaces.items():
        base = s.default(None)
        bench.deep[name] = merged(base, [*dict(s.neighbours(base)).values()][:4])
        assert s.allowed(bench.deep[name])
        assert smooth.spaces[name].allowed(bench.deep[name])
        assert bench.deep[name] not in two_steps(s, base, lambda _: 0.0)
    smooth.target = lambda name, _: bench.deep[name]  # type: ignore[method-assign]
    seen: list[int] = []

    def opening(place: Place) -> Simulated:
        if place == here:
            seen.append(len(bench.measured))
        return bench if place == here else smooth

    results, _ = tuned_by([here, other], opening, clock)
    assert results[0].after_us == 20.0
    second = next(r for r in results if (r.place, r.passes) == (here, 2))
    assert (second.after_us, choice_of(second)) == (16.0, bench.deep)
    # right behind what is timed again, before any step
    assert {*bench.deep.values()} <= {*bench.measured[seen[1] : seen[1] + 8]}


def test_a_further_pass_makes_no_point_slower() -> None:
    replaced = 0
    for seed in range(4):
        clock = Clock()
        held: dict[Place, float] = {}

        def bench(place: Place, seed: int = seed, clock: Clock = clock) -> Lying:
            return Lying(place, spaces_of(place), clock, seed)

        results, _ = tuned_by(POINTS[:8], bench, clock)
        for result in results:
            spaces, now = spaces_of(result.place), bench(result.place).true(choice_of(result))
            first = next(iter(spaces.values()))
            way = groupings(first.pairs, first.groups, result.rank)[0]
            assert now <= bench(result.place).true({name: s.default(way) for name, s in spaces.items()})
            if result.passes > 1:
                assert now <= held[result.place]
                replaced += now < held[result.place]
            held[result.place] = now
    # and not because nothing was
    assert replaced > 4


def test_a_further_pass_takes_nothing_that_is_wrong() -> None:
    place, clock = Place("moe", 16), Clock()

    class Wrong(Trap):
        def right(self, choice: Choice) -> bool:
            return not {*choice.values()} & {*self.deep.values()}

    bench = Wrong(place, spaces_of(place), clock)
    bench.deep = {n: two_steps(s, s.default(None), lambda _: 0.0)[0] for n, s in bench.spaces.items()}
    results, said = tuned_by([place], lambda _: bench, clock)
    assert [r.after_us for r in results] == [20.0] * len(results)
    assert {*bench.deep.values()} <= {*bench.measured}
    assert any("wrong at the full batch size" in line for line in said)


def test_passes_end_when_nothing_is_new() -> None:
    clock = Clock()
    timed: Counter[tuple[Place, Key, Pair]] = Counter()

    class Counting(Simulated):
        def measure(self, work: Sequence[tuple[Key, Pair]], until: float) -> list[float]:
            timed.update((self.place, *w) for w in work)
            return super().measure(work, until)

    benches = {p: Counting(p, spaces_of(p), clock) for p in POINTS}
    results, said = tuned_by(POINTS, benches.__getitem__, clock, 5000.0)
    assert clock.now < 1000
    assert len(said) == len(results)
    visits = Counter(r.place for r in results)
    assert max(visits.values()) <= 4
    # the last pass found nothing, and whoever had no news in the one before was not in it
    last = max(r.passes for r in results)
    found = {r.place: r for r in results if r.passes < last}
    assert all(r.after_us == found[r.place].after_us for r in results if r.passes == last)
    # what was timed once is timed again only to go on from
    again = Counter((place, key) for (place, key, _), n in timed.items() for _ in range(n - 1))
    assert again
    assert all(n < visits[place] for (place, _), n in again.items())


def test_a_surface_without_steps_is_left_after_two_passes() -> None:
    clock = Clock()
    todo = [Place("moe", m) for m in (16, 1, 8)]

    class Flat(Simulated):
        def cost(self, name: str, pair: Pair) -> float:
            return 10.0

    results, _ = tuned_by(todo, lambda p: Flat(p, spaces_of(p), clock), clock)
    assert [(r.place, r.passes) for r in results] == [(p, n) for n in (1, 2) for p in todo]


def test_points_about_which_nothing_is_new_are_not_visited_again() -> None:
    clock = Clock()
    still, moving = [Place("moe", 16), Place("moe", 32), Place("moe", 8)], Place("dense", 16)
    bench = Trap(moving, spaces_of(moving), clock)
    bench.deep = {n: two_steps(s, s.default(None), lambda _: 0.0)[-1] for n, s in bench.spaces.items()}
    todo = [*still[:2], moving, still[2]]
    results, _ = tuned_by(todo, lambda p: bench if p == moving else Trap(p, spaces_of(p), clock), clock)
    assert [r.place for r in results if r.passes <= 2] == [*todo, *todo]
    # the family that found something goes on from there
    assert {r.place for r in results if r.passes > 2} == {moving}


def apart() -> tuple[float, float]:
    """How many times one run's time is the other's at the worst point, after the first pass and at the end."""
    runs = []
    for seed, todo in ((1, POINTS), (2, POINTS[::-1])):
        clock = Clock()

        def bench(place: Place, seed: int = seed, clock: Clock = clock) -> Rugged:
            return Rugged(place, spaces_of(place), clock, seed)

        results, _ = tuned_by(todo, bench, clock)
        times = [(r.place, bench(r.place).true(choice_of(r)), r.passes) for r in results]
        runs.append(({p: t for p, t, n in times if n == 1}, {p: t for p, t, _ in times}))
    (first, all_of_first), (second, all_of_second) = runs
    one, more = (
        max(max(a[p] / b[p], b[p] / a[p]) for p in POINTS) for a, b in ((first, second), (all_of_first, all_of_second))
    )
    return one, more


def test_two_runs_end_at_the_same_times() -> None:
    """Other noise and another order of the points: 3 % apart at most with further passes, not with one."""
    one, more = apart()
    assert one > 1.03
    assert more <= 1.03


@pytest.mark.parametrize("surface", ["1 ", "2 ", "3 "])
def test_two_runs_end_at_the_same_times_on_other_surfaces(monkeypatch: pytest.MonkeyPatch, surface: str) -> None:
    monkeypatch.setattr(Rugged, "surface", surface)
    assert apart()[1] <= 1.03


def test_a_run_that_is_stopped_in_a_further_pass_goes_on_there(tmp_path: Path) -> None:
    clock, todo = Clock(), POINTS[:6]
    path = tmp_path / "x.state"
    state = State(path, {})

    def bench(place: Place) -> Rugged:
        return Rugged(place, spaces_of(place), clock)

    def stopping(result: Result) -> None:
        state.add(result)
        if (result.place, result.passes) == (todo[2], 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner(clock)[0].tune(todo, bench, 1e9, stopping)
    again = State(path, {})
    assert again.results == state.results
    assert [(r.place, r.passes) for r in again.results] == [*zip(todo, (2, 2, 2, 1, 1, 1), strict=True)]
    before = {r.place: bench(r.place).true(choice_of(r)) for r in again.results}
    tuned, said = tuner(clock)
    for result in again.results:
        tuned.resume(result)
    later: list[Result] = []

    def keeping(result: Result) -> None:
        again.add(result)
        later.append(result)

    assert tuned.tune(todo, bench, 1e9, keeping) == []
    assert [(r.place, r.passes) for r in later[:3]] == [(p, 2) for p in todo[3:]]
    assert said[0].startswith(f"[pass 2, 1/3] {todo[3]}: ")
    # then the others too, since what was timed at them is forgotten
    third = [r.place for r in later if r.passes == 3]
    assert {*todo[:3]} <= {*third}
    assert third == [p for p in todo if p in third]
    assert [r.place for r in again.results] == todo
    for result in again.results:
        assert bench(result.place).true(choice_of(result)) <= before[result.place] * (1 + STEP_GAIN)


def test_a_state_from_before_further_passes_is_read(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "x.state"
    results, _ = tuned_by(POINTS[:1], lambda p: Simulated(p, spaces_of(p), clock), clock, 20.0)
    State(path, {}).add(results[0])
    old = json.loads(path.read_text())
    del old["results"][0]["passes"]
    path.write_text(json.dumps(old))
    state = State(path, {})
    assert [(r.place, r.passes, r.rows) for r in state.results] == [(POINTS[0], 1, results[0].rows)]


@pytest.mark.parametrize("budget", [70.0, 150.0, 175.5, 210.0, 300.0, 380.0])
def test_no_pass_goes_beyond_the_budget(budget: float) -> None:
    clock, todo = Clock(), POINTS
    last = budget - run.SECONDS_OF_VERDICT

    class Slow(Rugged):
        def measure(self, work: Sequence[tuple[Key, Pair]], until: float) -> list[float]:
            assert until <= last
            return super().measure(work, until)

        def turns(self, choices: Sequence[Choice]) -> list[list[float]]:
            assert len(choices) <= 4
            clock.now += 0.5 * len(choices)
            return super().turns(choices)

    results: list[Result] = []
    tuned, said = tuner(clock)
    left = tuned.tune(todo, lambda p: Slow(p, spaces_of(p), clock), budget, results.append)
    assert clock.now <= budget
    done = {r.place for r in results}
    assert left == [p for p in todo if p not in done]
    # a pass that is cut begins with the points that are worth most
    number = max(r.passes for r in results)
    places = [r.place for r in results if r.passes == number]
    assert places == [p for p in todo if p in places]
    assert all(f"[pass {r.passes}, " in line for r, line in zip(results, said, strict=True))
    assert max(map(len, said)) < 120
    # what is left of a budget is used
    assert clock.now > budget - run.SECONDS_A_POINT - 0.1


def test_what_was_timed_before_is_scaled_and_what_was_cut_is_forgotten() -> None:
    record, key = Record(), ("down", None)
    s = spaces_of(Place("moe", 16))["down"]
    a, b, c, d = (s.default(None), *[pair for _, pair in s.neighbours(s.default(None))][:3])
    record.add(key, {a: 10.0, b: 9.0, c: math.inf}, cut=False)
    record.add(key, {d: math.inf}, cut=True)
    assert record.times[key] == {a: 10.0, b: 9.0, c: math.inf}
    assert record.best(key) == b
    # this visit's calls take a tenth longer
    record.again(key, a, 11.0)
    assert record.times[key] == {a: 11.0, b: pytest.approx(9.9), c: math.inf}
    # and where it doesn't run any more the others keep their times
    record.again(key, a, math.inf)
    assert record.times[key] == {a: math.inf, b: pytest.approx(9.9), c: math.inf}
