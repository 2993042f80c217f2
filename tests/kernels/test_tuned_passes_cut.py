"""Passes of the tuner that a stop or the end of the budget cuts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.kernels.tuned_simulated import Clock, Simulated, spaces_of, tuner
from tests.kernels.tuned_surfaces import POINTS, Rugged, tuned_by

from lorahost_kernels.tune import confirm, plan, run
from lorahost_kernels.tune.known import Choice, Key, choice_of
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.search import STEP_GAIN
from lorahost_kernels.tune.space import Pair
from lorahost_kernels.tune.state import State
from lorahost_kernels.tune.writer import Result


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


@pytest.mark.parametrize("budget", [70.0, 210.0, 300.0, 380.0])
def test_what_is_kept_to_confirm_grows_with_what_has_changed(budget: float) -> None:
    clock, results = Clock(), list[Result]()
    tuned, _ = tuner(clock)

    def kept() -> float:
        return plan.kept(budget, len(confirm.changed(tuned, POINTS)) + 1)

    tuned.tune(POINTS, lambda p: Rugged(p, spaces_of(p), clock), budget, results.append, kept)
    tasks = len(confirm.changed(tuned, POINTS))
    assert 0 < tasks <= len({r.place for r in results})
    assert clock.now <= budget - plan.kept(budget, tasks)
    assert clock.now > budget - plan.kept(budget, tasks + 1) - run.SECONDS_A_POINT - 0.1
