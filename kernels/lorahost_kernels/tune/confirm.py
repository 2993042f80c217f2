"""A second process times changed points again: with other addresses and inputs not every gain of the first one holds.

It is spawned, so that it has a CUDA context of its own, sends what it finds point by point, and ends with its parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from lorahost_kernels.tune.known import Choice, choice_of, rows_of
from lorahost_kernels.tune.plan import SECONDS_TO_CONFIRM, SECONDS_TO_START, Place, operations
from lorahost_kernels.tune.run import Bench, Tuner
from lorahost_kernels.tune.search import FAILED
from lorahost_kernels.tune.space import Space, halves_of
from lorahost_kernels.tune.writer import Result, Row

Say = Callable[[str], None]
Opener = Callable[[Say], Callable[[Place], Bench]]  # called in the second process, which it must be picklable for
Spaces = Callable[[Place], dict[str, Space]]


class ConfirmError(RuntimeError):
    """The second process can't start or has died; the message says why, `candidate` which tiles broke the device."""

    def __init__(self, reason: str, candidate: str = "") -> None:
        super().__init__(reason)
        self.candidate = candidate


@dataclass(frozen=True)
class Task:
    """A point to confirm: what an engine would take at it now, if anything, and what the first process chose."""

    place: Place
    used: Choice | None
    choice: Choice


@dataclass(frozen=True)
class Outcome:
    """What the second process found at a point.

    times: microseconds of the defaults, of what is in use (None: nothing) and of the first process's choice, in the
    same turns; infinite where it doesn't run.
    """

    result: Result
    times: tuple[float, float | None, float]


@dataclass(frozen=True)
class Failure:
    """Why the second process ends before its time; candidate: which broke its CUDA context, if one did."""

    reason: str
    candidate: str


@dataclass
class Report:
    """What became of the changed points.

    without: whose defaults don't run in the second process; given_up: whose tiles broke its CUDA context, so that it
    has the defaults; failure: the error of the second process, if it failed.
    """

    confirmed: list[Place] = field(default_factory=list)
    taken_back: list[Outcome] = field(default_factory=list)
    missing: list[Place] = field(default_factory=list)
    without: list[Place] = field(default_factory=list)
    given_up: Place | None = None
    failure: ConfirmError | None = None

    def __str__(self) -> str:
        if not (self.confirmed or self.taken_back or self.missing or self.without or self.given_up):
            return "no point changed, nothing to confirm in a second process"
        back = ", ".join(f"{o.result.place} ({times_text(o.times)})" for o in self.taken_back)
        counts = f"{len(self.confirmed)} points confirmed, {len(self.taken_back)} taken back{back and f': {back}'}"
        why = "" if self.failure or not self.missing else " for want of time, as the first process found them"
        places = ", ".join(map(str, self.without))
        without = f"; left as they are, since their defaults don't run there: {places}" if places else ""
        return f"second process: {counts}; {len(self.missing)} not confirmed{why}{without}"


def confirm(
    tuner: Tuner, todo: Sequence[Place], opener: Opener, seconds: float, done: Callable[[Result], None]
) -> Report:
    """Confirms changed points in a second process, in order; those that no time is left for stay as they are.

    Args:
        tuner: Holds the points; its `spaces` must be picklable. Its points get what the second process found.
        todo: The points, the most valuable first.
        opener: Opens benches there.
        seconds: Until the budget's end, when the second process is stopped.
        done: Takes each point's result.

    A second process that can't start or dies is in the report.
    """
    tasks, report = changed(tuner, todo), Report()
    if not tasks:
        return report

    def take(task: Task, outcome: Outcome | None) -> None:
        if outcome is None:
            report.without.append(task.place)
            return
        result = replace(outcome.result, passes=tuner.known.held[task.place].passes, confirmed=True)
        tuner.known.held[task.place] = result
        done(result)
        if choice_of(result) == task.choice:
            report.confirmed.append(task.place)
        else:
            report.taken_back.append(outcome)

    if seconds >= SECONDS_TO_START + SECONDS_TO_CONFIRM:
        try:
            in_second_process(tasks, tuner.spaces, opener, seconds, take, tuner.say)
        except ConfirmError as error:
            report.failure = error
    seen = {*report.confirmed, *report.without, *(o.result.place for o in report.taken_back)}
    missing = [task for task in tasks if task.place not in seen]
    if report.failure and missing:
        # the one that it was at: no file may have tiles that break an engine
        place, candidate = missing[0].place, report.failure.candidate
        if has(missing[0].choice, candidate) and not has(tuner.default(place), candidate):
            report.given_up = missing.pop(0).place
            result = tuner.known.held[place] = with_defaults(tuner, tuner.known.held[place])
            done(result)
    report.missing = [task.place for task in missing]
    return report


def has(choice: Choice, candidate: str) -> bool:
    """Whether a choice has the candidate of a `gpu.DeviceLostError`."""
    return candidate in [f"{name} {pair}" for name, pair in choice.items()]


def with_defaults(tuner: Tuner, held: Result) -> Result:
    """A point with its defaults, and their times of the first process."""
    tiles, rows = choice_of(held), dict[tuple[str, str], Row]()
    for name, pair in tuner.default(held.place).items():
        module = name if held.family == "dense" else ""
        found, names = (operations(held.family, name, shrink.mode) for shrink, _ in (tiles[name], pair))
        for old, op, (_, config) in zip(found, names, halves_of(pair), strict=True):
            before = held.rows[module, old].before_us
            rows[module, op] = Row(config, before, before)
    return replace(held, after_us=held.before_us, rows=rows)


def changed(tuner: Tuner, todo: Sequence[Place]) -> list[Task]:
    """The points that hold other tiles than an engine would take now, and that no second process has timed yet.

    Those of `todo` come first, then others that a stopped run left: its state ends with this run.
    """
    tasks = []
    for place in dict.fromkeys([*todo, *tuner.known.held]):
        held, used = tuner.known.held.get(place), tuner.in_use(place)
        if held and not held.confirmed and choice_of(held) != (used or tuner.default(place)):
            tasks.append(Task(place, used, choice_of(held)))
    return tasks


def in_second_process(
    tasks: Sequence[Task],
    spaces: Spaces,
    opener: Opener,
    seconds: float,
    take: Callable[[Task, Outcome | None], None],
    say: Say,
) -> None:
    """Runs `serve` in a process of its own until all is done or `seconds` are over. Raises ConfirmError."""
    until = time.monotonic() + seconds
    # spawn: a CUDA context does not survive a fork
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # without the tasks: to start a process that doesn't read would wait for ever where they don't fit a pipe
    process = context.Process(target=serve, args=(theirs, spaces, opener, len(tasks)), daemon=True)
    try:
        process.start()
    except OSError as error:
        raise ConfirmError(f"it can't start: {error}") from error
    theirs.close()
    try:
        for task in tasks:
            # where it is gone, what it said before comes next
            with suppress(OSError):
                ours.send(task)
            message: Outcome | str | None = ""
            while isinstance(message, str):
                if not ours.poll(max(0.0, until - time.monotonic())):
                    return
                message = received(ours, process)
                if isinstance(message, str):
                    say(message)
            take(task, message)
    finally:
        process.kill()
        process.join()
        ours.close()


def received(pipe: Connection, process: BaseProcess) -> Outcome | str | None:
    """What `outcome_of` found, or a line of progress. Raises ConfirmError where the process failed or is gone."""
    try:
        message = pipe.recv()
    except (EOFError, OSError):
        process.join()
        raise ConfirmError(f"it died, exit code {process.exitcode}") from None
    if isinstance(message, Failure):
        raise ConfirmError(message.reason, message.candidate)
    assert isinstance(message, Outcome | str | None)
    return message


def serve(pipe: Connection, spaces: Spaces, opener: Opener, tasks: int) -> None:
    """The second process: takes tasks, sends an outcome for each, lines of progress, and a Failure at an error."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    # Ctrl-C reaches both; the parent ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        tuner = Tuner(spaces, time.monotonic, pipe.send)
        open_bench = opener(pipe.send)
        for _ in range(tasks):
            task = pipe.recv()
            pipe.send(outcome_of(tuner, open_bench(task.place), task))
    except Exception as error:  # whatever it is, the parent says it
        pipe.send(Failure(f"{type(error).__name__}: {error}", getattr(error, "candidate", "")))


def end_with_parent() -> None:
    """Ends this process when its parent has ended, however that was."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def outcome_of(tuner: Tuner, bench: Bench, task: Task) -> Outcome | None:
    """One point, by the tuner's own rule; None where its defaults don't run."""
    default = tuner.default(task.place)
    given = [default, *([task.used] if task.used else []), task.choice]
    pairs = dict.fromkeys(((name, rows_of(pair)), pair) for choice in given for name, pair in choice.items())
    # each is checked, too, before all are timed in turns
    times = dict(zip(pairs, bench.measure([*pairs], FAILED), strict=True))
    ran: list[Choice] = []
    for choice in given:
        runs = all(times[(name, rows_of(pair)), pair] < FAILED for name, pair in choice.items())
        if runs and choice not in ran:
            ran.append(choice)
    if default not in ran:
        return None
    used = task.used if task.used in ran else None
    result, each = tuner.decide(task.place, bench, used, [task.choice] if task.choice in ran else [])

    def time_of(choice: Choice) -> float:
        return each[ran.index(choice)] if choice in ran else FAILED

    return Outcome(result, (time_of(default), time_of(task.used) if task.used else None, time_of(task.choice)))


def times_text(times: tuple[float, float | None, float]) -> str:
    """The three times of an outcome."""
    shown = ["none" if t is None else "fails" if t == FAILED else f"{t:.1f} us" for t in times]
    return f"defaults {shown[0]}, in use {shown[1]}, new {shown[2]}"
