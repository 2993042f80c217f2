"""Points that a second process confirms or takes back, and a second process that ends before its time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.kernels import tuned_second_alone
from tests.kernels.tuned_second import Fixed, Point, Second, Times, found
from tests.kernels.tuned_simulated import SHAPE, Clock, Simulated, spaces_of, tuner

from lorahost_kernels.configs import PROGRAMS
from lorahost_kernels.tune import confirm, plan
from lorahost_kernels.tune.confirm import Task, outcome_of
from lorahost_kernels.tune.known import choice_of
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.state import State
from lorahost_kernels.tune.writer import Result

ROOT = Path(__file__).parents[2]
A, B, C, D = (Place("moe", m) for m in (16, 1, 8, 32))
WIN: Times = (32.0, 30.0, 28.0)  # what the first process sees
MINUTE = 60.0


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = multiprocessing.active_children()  # other tests' workers may still be ending
    yield
    assert set(multiprocessing.active_children()) <= {*before}


@pytest.mark.parametrize(
    ("second", "kept", "after"),
    [
        ((32.0, 30.1, 31.2), "used", 30.1),
        ((32.0, 30.0, 29.9), "used", 30.0),
        ((30.0, 30.1, 30.2), "default", 30.0),
        ((30.0, 31.0, 29.0), "new", 29.0),
        ((32.5, 30.5, 28.5), "new", 28.5),
    ],
)
def test_the_second_processs_times_decide(second: Times, kept: str, after: float) -> None:
    tuned, _ = found({A: WIN}, [A])
    assert choice_of(tuned.known.held[A]) == Point(A).new
    [task] = confirm.changed(tuned, [A])
    outcome = outcome_of(tuned, Fixed(A, second), task)
    assert outcome.times == second
    assert choice_of(outcome.result) == getattr(Point(A), kept)
    assert (outcome.result.before_us, outcome.result.after_us) == (second[0], after)


@pytest.mark.parametrize("wrong", ["small batch", "full batch"])
def test_an_output_that_is_wrong_there_is_taken_back(wrong: str) -> None:
    tuned, said = found({A: WIN}, [A])
    outcome = outcome_of(tuned, Fixed(A, WIN, wrong), confirm.changed(tuned, [A])[0])
    assert choice_of(outcome.result) == Point(A).used
    assert outcome.times == (32.0, 30.0, float("inf") if wrong == "small batch" else 28.0)
    assert any("wrong at the full batch size" in line for line in said) == (wrong == "full batch")
    assert "new fails" in confirm.times_text((32.0, None, float("inf")))


def test_what_is_in_use_and_does_not_run_there_is_left_out() -> None:
    point = Point(A)
    bench = Fixed(A, WIN)
    bench.measure = lambda work, until: [  # type: ignore[method-assign]
        float("inf") if pair in point.used.values() else 1.0 for _, pair in work
    ]
    outcome = outcome_of(tuner(Clock())[0], bench, Task(A, point.used, point.new))
    assert (outcome.times, choice_of(outcome.result)) == ((32.0, float("inf"), 28.0), point.new)
    bench.measure = lambda work, until: [float("inf")] * len(work)  # type: ignore[method-assign]
    assert outcome_of(tuner(Clock())[0], bench, Task(A, point.used, point.new)) is None


def test_a_point_that_went_from_what_is_in_use_to_the_defaults_is_confirmed_too() -> None:
    slow: Times = (30.0, 31.0, 32.0)
    tuned, _ = found({A: slow}, [A])
    [task] = confirm.changed(tuned, [A])
    assert task.choice == Point(A).default
    assert choice_of(outcome_of(tuned, Fixed(A, slow), task).result) == Point(A).default
    back = outcome_of(tuned, Fixed(A, (30.0, 28.0, 32.0)), task)
    assert (choice_of(back.result), back.times) == (Point(A).used, (30.0, 28.0, 30.0))


def test_a_spawned_process_confirms_and_takes_back_in_the_order_of_value(tmp_path: Path) -> None:
    tuned, said = found(dict.fromkeys((D, C, B, A), WIN), [A, B])
    tuned.known.held[B] = replace(tuned.known.held[B], passes=3)
    times: dict[Place, Times] = {A: (31.0, 29.0, 27.0), B: (32.0, 30.1, 31.2), C: (30.0, 0.0, 30.0), D: WIN}
    state = State(tmp_path / "x.state", {})
    done: list[Result] = []

    def keep(result: Result) -> None:
        state.add(result)
        done.append(result)

    pid_file = tmp_path / "pid"
    report = confirm.confirm(tuned, [A, B, C, D], Second(times, pid_file=pid_file), MINUTE, keep)
    assert [r.place for r in done] == [A, B, C, D]
    assert int(pid_file.read_text()) != os.getpid()
    assert [choice_of(r) for r in done] == [Point(A).new, Point(B).used, Point(C).default, Point(D).new]
    assert [(r.before_us, r.after_us) for r in done] == [(31.0, 27.0), (32.0, 30.1), (30.0, 30.0), (32.0, 28.0)]
    assert [(r.passes, r.confirmed) for r in done] == [(1, True), (3, True), (1, True), (1, True)]
    assert [tuned.known.held[p] for p in (A, B, C, D)] == done
    assert said == ["opened"]
    assert str(report) == (
        "second process: 2 points confirmed, "
        "2 taken back: moe 8x32 M=1 (defaults 32.0 us, in use 30.1 us, new 31.2 us), "
        "moe 8x32 M=8 (defaults 30.0 us, in use none, new 30.0 us); 0 not confirmed"
    )
    # a run that goes on from the state has nothing more to confirm
    again = State(tmp_path / "x.state", {})
    assert again.results == done
    later, _ = tuner(Clock())
    later.known.used = dict(tuned.known.used)
    for result in again.results:
        later.resume(result)
    assert confirm.changed(later, [A, B, C, D]) == []
    # but for a point that a further pass gives other tiles
    later.resume(tuned.decide(B, Fixed(B, WIN), Point(B).used, [Point(B).new])[0])
    assert [task.place for task in confirm.changed(later, [A, B, C, D])] == [B]


def test_a_run_that_is_stopped_while_it_confirms_goes_on(tmp_path: Path) -> None:
    tuned, _ = found({A: WIN, B: WIN}, [])
    state = State(tmp_path / "x.state", {})
    for result in tuned.known.held.values():
        state.add(result)

    def stop(result: Result) -> None:
        state.add(result)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        confirm.confirm(tuned, [A, B], Second({A: WIN, B: WIN}), MINUTE, stop)
    later, _ = tuner(Clock())
    for result in State(tmp_path / "x.state", {}).results:
        later.resume(result)
    assert [task.place for task in confirm.changed(later, [A, B])] == [B]


def test_what_was_in_use_when_a_run_began_stays_in_its_state(tmp_path: Path) -> None:
    tuned, _ = found({A: WIN, B: WIN}, [])
    state = State(tmp_path / "x.state", {})
    assert state.starts is None
    state.starts = [tuned.known.held[B]]
    state.add(tuned.known.held[A])
    assert State(tmp_path / "x.state", {}).starts == [tuned.known.held[B]]


@pytest.mark.parametrize(
    ("end", "reason", "candidate"),
    [
        ("exit", "it died, exit code 7", ""),
        ("raise", "MemoryError: no memory for the weights", ""),
        ("break", "RuntimeError: down tiles: illegal memory access", "down tiles"),
    ],
)
def test_a_process_that_ends_before_its_time_is_said_and_points_stay(end: str, reason: str, candidate: str) -> None:
    tuned, _ = found(dict.fromkeys((A, B, C), WIN), [])
    before, done = dict(tuned.known.held), list[Result]()
    opener = Second({A: (30.0, 0.0, 30.0)}, ends={B: end})
    report = confirm.confirm(tuned, [A, B, C], opener, MINUTE, done.append)
    assert report.failure is not None
    assert (str(report.failure), report.failure.candidate) == (reason, candidate)
    assert [r.place for r in done] == [A]
    assert (report.missing, len(report.taken_back)) == ([B, C], 1)
    assert [tuned.known.held[p] for p in (B, C)] == [before[p] for p in (B, C)]
    assert str(report).endswith("2 not confirmed")


def test_a_process_that_can_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, _ = found({A: WIN}, [])
    report = confirm.confirm(tuned, [A], Second({}, refuses=True), MINUTE, pytest.fail)
    assert str(report.failure) == "RuntimeError: CUDA error: all devices are busy"
    assert report.missing == [A]

    def refuse(self: object) -> None:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", refuse)
    report = confirm.confirm(tuned, [A], Second({}), MINUTE, pytest.fail)
    assert str(report.failure) == "it can't start: Resource temporarily unavailable"


def test_without_time_points_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, _ = found({A: WIN, B: WIN}, [])
    before = dict(tuned.known.held)
    report = confirm.confirm(tuned, [A, B], Second({}, refuses=True), 11.0, pytest.fail)
    assert (report.missing, report.failure, tuned.known.held) == ([A, B], None, before)
    text = "0 points confirmed, 0 taken back; 2 not confirmed for want of time, as the first process found them"
    assert str(report) == f"second process: {text}"
    # and where the time ends before all are done
    clock = Clock()
    monkeypatch.setattr(confirm, "time", SimpleNamespace(monotonic=clock))

    def late(result: Result) -> None:
        clock.now = MINUTE

    report = confirm.confirm(tuned, [A, B], Second({A: WIN}, ends={B: "hang"}), MINUTE, late)
    assert (report.confirmed, report.missing, report.failure) == ([A], [B], None)
    assert tuned.known.held[B] == before[B]


def test_nothing_changed_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirm, "in_second_process", pytest.fail)
    tuned, _ = found({A: (32.0, 30.0, 30.0), B: (30.0, 0.0, 30.0)}, [A])
    assert choice_of(tuned.known.held[A]) == Point(A).used
    report = confirm.confirm(tuned, [A, B, C], Second({}), MINUTE, pytest.fail)
    assert str(report) == "no point changed, nothing to confirm in a second process"


def test_what_a_whole_run_found_is_confirmed() -> None:
    clock, results = Clock(), list[Result]()
    tuned, _ = tuner(clock)
    tuned.tune([A, B], lambda p: Simulated(p, spaces_of(p), clock), 300.0, results.append)
    assert [(t.place, t.choice) for t in confirm.changed(tuned, [A, B])] == [
        (p, choice_of(tuned.known.held[p])) for p in (A, B)
    ]
    report = confirm.confirm(tuned, [A, B], same_surface, MINUTE, results.append)
    assert report.confirmed == [A, B]
    assert all(r.confirmed for r in results[-2:])


def same_surface(say: Callable[[str], None]) -> Callable[[Place], Simulated]:
    return lambda place: Simulated(place, spaces_of(place), Clock())


@pytest.mark.parametrize(
    ("budget", "points", "seconds"),
    [(59.0, 5, 0.0), (60.0, 1, 11.5), (60.0, 56, 12.0), (300.0, 4, 16.0), (480.0, 56, 94.0), (480.0, 112, 96.0)],
)
def test_how_much_of_a_budget_is_kept(budget: float, points: int, seconds: float) -> None:
    assert plan.kept(budget, points) == pytest.approx(seconds)
    if seconds:
        assert seconds >= plan.SECONDS_TO_START + plan.SECONDS_TO_CONFIRM


def test_the_plan_says_what_is_kept() -> None:
    made = (plan.places(SHAPE, (1, 16), ("moe", "dense")),)
    last = plan.describe(SHAPE, *made, 90.0, 227 * 1024, PROGRAMS).splitlines()[-1]
    assert last.endswith(" ms each; up to 16 s at the end are kept to confirm changed points in a second process")
    last = plan.describe(SHAPE, *made, 30.0, 227 * 1024, PROGRAMS).splitlines()[-1]
    assert last.endswith(" ms each; no time kept to confirm points")


@pytest.mark.parametrize("ending", ["killed", "interrupted", "interrupted with its child"])
def test_a_second_process_ends_with_its_parent(ending: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", tuned_second_alone.__name__, str(pid_file)]
    parent = subprocess.Popen(command, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
        child = int(pid_file.read_text())
        assert runs(child)
        if ending == "killed":
            parent.kill()
        elif ending == "interrupted":
            parent.send_signal(signal.SIGINT)
        else:
            os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=MINUTE)
        assert parent.returncode == (-signal.SIGKILL if ending == "killed" else -signal.SIGINT)
        # one traceback, the parent's
        assert errors.count("Traceback") == (ending != "killed")
        wait_for(lambda: not runs(child))
    finally:
        parent.kill()


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + MINUTE
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_points_are_sent_to_a_process_that_knows_nothing_of_the_first() -> None:
    """The rule there needs the candidates only."""
    outcome = outcome_of(tuner(Clock())[0], Fixed(A, WIN), Task(A, None, Point(A).new))
    assert (choice_of(outcome.result), outcome.times) == (Point(A).new, (32.0, None, 28.0))
