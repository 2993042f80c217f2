"""The tuner on simulated GPUs: finds the floor of known cost surfaces, keeps to its budget, goes on after a stop."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lorahost_kernels.configs import PROGRAMS, Config
from lorahost_kernels.tune import estimate, plan, search, space, writer
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.run import Choice, Key, Tuner, distance, summary
from lorahost_kernels.tune.space import Pair, Space
from lorahost_kernels.tune.state import State, StateError
from lorahost_kernels.tune.writer import Result
from lorahost_kernels.tuned import legal
from lorahost_kernels.tuned.lines import ConfigError
from lorahost_kernels.tuned.schema import read
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


@pytest.mark.parametrize("family", ["moe", "dense"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 1024, 8192])
def test_the_optimum_is_found(family: str, tokens: int) -> None:
    place, clock = Place(family, tokens), Clock()
    bench = Simulated(place, spaces_of(place), clock)
    first = next(iter(bench.spaces.values()))
    bench.best_way = space.groupings(first.pairs, first.groups, 32)[-1]
    result, _ = tuner(clock)[0].tune_place(place, bench, 1e9)
    assert result is not None
    assert result.block_m == bench.best_way
    # the floor is 10 us a product; a hundredth is the step that the search takes for noise
    floor = 10 * len(bench.spaces) + bench.list_time(bench.best_way)
    assert floor <= result.after_us <= 1.03 * floor < result.before_us
    assert len(bench.measured) < 120 * len(bench.spaces)


def test_noise_alone_changes_nothing() -> None:
    place, clock = Place("moe", 16), Clock()

    class Flat(Simulated):
        def cost(self, name: str, pair: Pair) -> float:
            return 10 * (1 + 0.03 * self.random.uniform(-1, 1))

    bench = Flat(place, spaces_of(place), clock)
    result, _ = tuner(clock)[0].tune_place(place, bench, 1e9)
    assert result is not None
    assert result.after_us == result.before_us
    assert {op: row.config for (_, op), row in result.rows.items()} == {
        f"{name}_{half}": config
        for name, s in bench.spaces.items()
        for half, config in space.halves_of(s.default(None))
    }
    assert all(row.before_us == row.after_us for row in result.rows.values())


def test_a_choice_that_is_wrong_at_the_full_batch_is_not_taken() -> None:
    place, clock = Place("moe", 16), Clock()

    class Wrong(Simulated):
        def right(self, choice: Choice) -> bool:
            return False

    tuned, said = tuner(clock)
    result, _ = tuned.tune_place(place, Wrong(place, spaces_of(place), clock), 1e9)
    assert result is not None
    assert result.after_us == result.before_us
    assert any("wrong at the full batch size" in line for line in said)


def test_candidates_that_do_not_run_are_passed_over() -> None:
    place, clock = Place("moe", 16), Clock()
    bench = Simulated(place, spaces_of(place), clock)
    bench.wrong = {bench.target("down", None)}
    result, _ = tuner(clock)[0].tune_place(place, bench, 1e9)
    assert result is not None
    assert result.after_us < result.before_us
    bench.wrong = {s.default(None) for s in bench.spaces.values()}
    tuned, said = tuner(clock)
    assert tuned.tune_place(place, bench, 1e9) == (None, 0)
    assert "the defaults don't run here" in said[-1]


def test_the_budget_is_kept_and_every_begun_point_has_a_result() -> None:
    clock = Clock()
    todo = plan.places(SHAPE, plan.SIZES, ("moe", "dense"))
    done: list[Result] = []
    tuned, said = tuner(clock)
    left = tuned.tune(todo, lambda p: Simulated(p, spaces_of(p), clock), 100.0, done.append)
    assert 60 < clock.now < 100
    assert len(done) + len(left) == len(todo)
    assert done[0].tokens == 16
    assert left == todo[len(done) :]
    assert len(said) == len(done)
    assert "s left" in said[0]
    assert max(map(len, said)) < 120


def test_without_time_for_the_defaults_a_point_has_no_row() -> None:
    clock = Clock()
    place = Place("moe", 16)
    tuned, said = tuner(clock)
    clock.now = 10.0
    assert tuned.tune_place(place, Simulated(place, spaces_of(place), clock), 5.0, 9.0) == (None, 0)
    assert said == ["moe 8x32 M=16: no time for the defaults, no row"]


def test_a_round_that_is_cut_gives_a_row_of_what_was_measured() -> None:
    clock = Clock()
    place = Place("moe", 2048)
    bench = Simulated(place, spaces_of(place), clock)
    result, count = tuner(clock)[0].tune_place(place, bench, 1.2)
    assert result is not None
    assert count == len(bench.measured) < 15
    chosen = [tuple(result.rows["", f"{n}_{half}"].config for half in ("shrink", "expand")) for n in bench.spaces]
    assert set(chosen) <= set(bench.measured)


def test_a_point_begins_from_the_best_of_the_nearest_one() -> None:
    clock = Clock()
    tuned = tuner(clock)[0]
    here = Place("moe", 16, 8, 32)
    far, near = Place("moe", 64, 8, 32), Place("moe", 16, 4, 32)
    assert distance(near, here) < distance(Place("moe", 16, 8, 16), here) < distance(far, here)
    done: dict[Place, Result] = {}
    benches = {p: Simulated(p, spaces_of(p), clock) for p in (far, near, here)}
    assert tuned.tune([*benches], benches.__getitem__, 1e9, lambda r: done.update({r.place: r})) == []
    rows = done[near].rows
    assert benches[here].measured[1] == (rows["", "gate_up_shrink"].config, rows["", "gate_up_expand"].config)


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    key = {"gpu": "g", "rank": 32}
    state = State(tmp_path / "x.state", key)
    clock = Clock()
    todo = [Place("moe", 16), Place("dense", 16), Place("moe", 32)]

    def stopping(result: Result) -> None:
        state.add(result)
        if len(state.results) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner(clock)[0].tune(todo, lambda p: Simulated(p, spaces_of(p), clock), 1e9, stopping)
    again = State(tmp_path / "x.state", key)
    assert again.results == state.results
    missing = [p for p in todo if not again.has(p)]
    assert missing == [Place("moe", 32)]
    # what was found before is where the neighbour begins
    tuned = tuner(clock)[0]
    for result in again.results:
        tuned.learn(result)
    bench = Simulated(missing[0], spaces_of(missing[0]), clock)
    assert tuned.tune(missing, lambda _: bench, 1e9, again.add) == []
    old = again.results[0].rows
    assert bench.measured[1] == (old["", "gate_up_shrink"].config, old["", "gate_up_expand"].config)
    again.finish()
    assert State(tmp_path / "x.state", key).results == []


def test_another_runs_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    clock = Clock()
    place = Place("moe", 16)
    result, _ = tuner(clock)[0].tune_place(place, Simulated(place, spaces_of(place), clock), 1e9)
    assert result is not None
    State(path, {"gpu": "a", "rank": 32}).add(result)
    with pytest.raises(StateError, match=r"x\.state is of a run with rank=32, not 16; remove .* to begin anew"):
        State(path, {"gpu": "a", "rank": 16})
    for text in ("", "[]", '{"key": {}, "results": [{}]}', '{"results": []}'):
        path.write_text(text)
        with pytest.raises(StateError, match="is no state of the tuner"):
            State(path, {"gpu": "a"})


def results() -> list[Result]:
    clock = Clock()
    out = []
    for place in (Place("moe", 16), Place("moe", 1024), Place("dense", 16), Place("dense", 1024)):
        result, _ = tuner(clock)[0].tune_place(place, Simulated(place, spaces_of(place), clock), 1e9)
        assert result is not None
        out.append(result)
    return out


def test_what_is_written_passes_the_schema_and_a_second_run_adds(tmp_path: Path) -> None:
    path = tmp_path / "GPU" / "m.json"
    run = {"driver": "1", "torch": "2", "triton": "3", "git_revision": "a", "date": "2026-11-29", "mix": "m"}
    found = results()
    writer.write(path, SHAPE, "GPU", run, found[:2])
    assert [p.tokens for p in read(path).moe] == [16, 1024]
    again = writer.results_of(read(path))
    assert [r.rows["", "down_shrink"].config for r in again] == [r.rows["", "down_shrink"].config for r in found[:2]]
    later = {**run, "git_revision": "b"}
    newer = replace(found[0], after_us=found[0].after_us / 2)
    writer.write(path, SHAPE, "GPU", later, [newer, *found[2:], replace(found[0], rank=16)])
    file = read(path)
    assert [(p.rank, p.tokens, file.runs[p.run].git_revision) for p in file.moe] == [
        (16, 16, "b"), (32, 16, "b"), (32, 1024, "a"),
    ]  # fmt: skip
    assert file.moe[1].after_us == round(newer.after_us, 2)
    assert [p.tokens for p in file.dense] == [16, 1024]
    # when the last point of a run is replaced, the run goes
    writer.write(path, SHAPE, "GPU", later, [found[1]])
    assert [r.git_revision for r in read(path).runs] == ["b"]
    assert len(path.read_text().splitlines()) < 80
    with pytest.raises(ConfigError, match="of another gpu: 'GPU', not 'other'"):
        writer.write(path, SHAPE, "other", run, found)
    with pytest.raises(ConfigError, match="of another experts"):
        writer.write(path, KNOWN["gpt-oss-120b"], "GPU", run, found)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="Field required"):
        writer.write(path, SHAPE, "GPU", run, found)


def test_estimate_and_summary_say_before_and_after() -> None:
    found = results()
    text = estimate.table(SHAPE, found, 4.3e12)
    assert len(text.splitlines()) == 3
    assert "(one family only)" in estimate.table(SHAPE, found[:1], 4.3e12)
    # GPT-OSS-20B at 16 tokens: nearly all experts, 11 GB of MXFP4 at most
    assert 9e9 < estimate.base_bytes(SHAPE, 16) < 13.5e9
    assert estimate.base_bytes(SHAPE, 1) < 4e9
    assert f"{found[0].before_us:.1f} -> {found[0].after_us:.1f} us" in summary(found[0])


@pytest.mark.parametrize("rank", [8, 32, 64, 256])
@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_candidates_are_legal_and_steps_change_one_field(rank: int, tokens: int) -> None:
    for s in plan.spaces(SHAPE, Place("moe", tokens, 8, rank), SHARED, PROGRAMS).values():
        for way in space.groupings(s.pairs, s.groups, rank):
            base = s.default(way)
            for name, moved in s.neighbours(base):
                assert sum(len(space.difference(a, b)) for a, b in zip(base, moved, strict=True)) == 1, name
                assert not any(legal.problem(c, rank, way, SHARED) for c in moved)
                assert {c.mode for c in moved} == {base[0].mode}


def test_a_smaller_gpu_has_fewer_candidates() -> None:
    def steps(shared: int) -> int:
        s = Space(8192 * 4, 256, 64, 2880, (5760,), shared)
        return len(list(s.neighbours(s.default(32))))

    assert steps(48 * 1024) < steps(SHARED)


def test_every_descent_ends() -> None:
    """On any surface, a rough one too."""
    s = Space(64, 256, 32, 2880, (5760,))
    for seed in range(20):
        noise = random.Random(seed)

        def rough(work: Sequence[tuple[str, Pair]], noise: random.Random = noise) -> list[float]:
            return [noise.uniform(5, 10) for _ in work]

        descent = search.Descent([s.default(None)], lambda pair: list(s.neighbours(pair)), space.merged, s.allowed)
        count = search.run({"x": descent}, rough, lambda: False)
        assert len(descent.times) == count < 1500
        assert descent.best_time == min(descent.times.values())


def test_plan_begins_with_what_is_worth_most() -> None:
    order = plan.places(SHAPE, (1, 2, 16, 3, 8192), ("moe", "dense"))
    assert [p.tokens for p in order] == [16, 16, 1, 1, 8192, 8192, 2, 2, 3, 3]
    both = plan.places(SHAPE, (16, 1), ("moe", "dense"), (8, 1), (32, 16))
    assert [str(p) for p in both[:5]] == ["moe 8x32 M=16", "moe 8x16 M=16", "moe 1x32 M=16", "moe 1x16 M=16",
                                          "dense 8x32 M=16"]  # fmt: skip
    assert len(set(both)) == 16
    assert plan.places(KNOWN["qwen3-32b"], (1,), ("moe",)) == []
    assert sum(plan.allowance(100, n) for n in (1, 2)) == 150
