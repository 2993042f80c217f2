"""The tuner on simulated GPUs: finds the floor of known cost surfaces and keeps to its budget."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.kernels.tuned_simulated import SHAPE, SHARED, Clock, Simulated, spaces_of, tuner

from lorahost_kernels import configs
from lorahost_kernels.configs import PROGRAMS
from lorahost_kernels.tune import plan, search, space
from lorahost_kernels.tune.known import Choice, distance
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.space import Pair, Space
from lorahost_kernels.tune.writer import Result
from lorahost_kernels.tuned import legal
from lorahost_kernels.tuned.shape import KNOWN


@pytest.mark.parametrize("family", ["moe", "moe_fused", "dense"])
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
    todo = plan.places(SHAPE, plan.VALUE, ("moe", "dense"))
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


@pytest.mark.parametrize("family", ["moe", "moe_fused"])
@pytest.mark.parametrize("rank", [8, 32, 64, 256])
@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_candidates_are_legal_and_steps_change_one_field(rank: int, tokens: int, family: str) -> None:
    for s in plan.spaces(SHAPE, Place(family, tokens, 8, rank), SHARED, PROGRAMS).values():
        for way in space.groupings(s.pairs, s.groups, rank):
            base = s.default(way)
            for name, moved in s.neighbours(base):
                assert sum(len(space.difference(a, b)) for a, b in zip(base, moved, strict=True)) == 1, name
                assert not any(legal.problem(c, rank, way, SHARED) for c in moved)
                assert {c.mode for c in moved} == {base[0].mode}


@pytest.mark.parametrize("rank", [8, 32, 64, 256])
def test_expands_without_a_list_that_take_over_a_step_keep_to_their_launchers(rank: int) -> None:
    spaces = plan.spaces(SHAPE, Place("moe_fused", 4, 8, rank), SHARED, PROGRAMS)
    for name, s in spaces.items():
        base = s.default(None)
        assert base[1] == (
            configs.swiglu_config(16, 256, rank, 5760, None) if name == "gate_up" else configs.topk_sum_config(4, rank)
        )
        found = {base, *(pair for _, pair in s.neighbours(base))}
        # two steps from the default as well
        found |= {pair for once in [*found] for _, pair in s.neighbours(once)}
        assert {e.steps for _, e in found} == {1}
        assert len({e.num_warps for _, e in found}) > 1
        if name == "gate_up":
            assert min(e.block_n for _, e in found) >= 32
        else:
            assert [e for _, e in found if legal.topk_sum_problem(e, 4, rank)] == []
            assert max(e.block_n for _, e in found) == max(16, min(128, 8192 // (4 * configs.block_r(rank))))


def test_a_fused_point_names_what_runs() -> None:
    clock = Clock()
    tuned = tuner(clock)[0]
    place = Place("moe_fused", 64)
    bench = Simulated(place, spaces_of(place), clock)
    first = ["gate_up_shrink", "expand_swiglu", "down_shrink"]
    for way, last in ((None, "expand_topk_sum"), (16, "down_expand")):
        bench.best_way = way
        result, _ = tuned.tune_place(place, bench, 1e9)
        assert result is not None
        assert result.block_m == way
        assert [op for _, op in result.rows] == [*first, last]
        # an earlier run's result is where the next one begins
        again = tuner(clock)[0]
        again.learn(result)
        near = Simulated(Place("moe_fused", 128), spaces_of(Place("moe_fused", 128)), clock)
        assert again.tune([near.place], lambda _, near=near: near, 1e9, lambda _: None) == []
        row = result.rows
        assert (row["", "gate_up_shrink"].config, row["", "expand_swiglu"].config) in near.measured[:6]
        assert (row["", "down_shrink"].config, row["", last].config) in near.measured[:6]


def test_which_families_a_model_has() -> None:
    assert plan.families_of(SHAPE) == ("moe_fused", "dense")
    assert plan.families_of(KNOWN["gpt-oss-120b"]) == ("moe_fused", "dense")
    assert plan.families_of(KNOWN["qwen3-30b-a3b"]) == ("moe", "dense")
    all_of_them = ("moe", "dense", "moe_fused")
    assert [p.family for p in plan.places(SHAPE, (1,), all_of_them)] == ["moe", "dense", "moe_fused"]
    assert [p.family for p in plan.places(KNOWN["qwen3-30b-a3b"], (1,), all_of_them)] == ["moe", "dense"]
    assert [p.family for p in plan.places(KNOWN["qwen3-32b"], (1,), all_of_them)] == ["dense"]


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
