"""Points that can't run or break the CUDA context in a second process, and those that a stopped run left."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.kernels.tuned_second import Fixed, Point, Second, Times, found
from tests.kernels.tuned_simulated import Clock, Simulated, spaces_of, tuner

from lorahost_kernels.tune import confirm
from lorahost_kernels.tune.confirm import ConfirmError, Task
from lorahost_kernels.tune.known import Choice, choice_of
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.writer import Result

A, B, C = (Place("moe", m) for m in (16, 1, 8))
WIN: Times = (32.0, 30.0, 28.0)  # what the first process sees
MINUTE = 60.0


def test_a_point_whose_defaults_do_not_run_there_costs_no_other_its_turn() -> None:
    tuned, _ = found(dict.fromkeys((A, B), WIN), [])
    before = tuned.known.held[A]
    opener = Second({A: WIN, B: WIN}, ends={A: "no defaults"})
    report = confirm.confirm(tuned, [A, B], opener, MINUTE, lambda result: None)
    assert (report.without, report.confirmed, report.missing, report.failure) == ([A], [B], [], None)
    assert tuned.known.held[A] == before
    end = "0 not confirmed; left as they are, since their defaults don't run there: moe 8x32 M=16"
    assert str(report) == f"second process: 1 points confirmed, 0 taken back; {end}"


@pytest.mark.parametrize("family", ["moe", "moe_fused", "dense"])
@pytest.mark.parametrize("which", ["new", "used", "default"])
def test_tiles_that_break_the_device_there_do_not_stay(
    family: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = Place(family, 16), Place(family, 1)
    tuned, _ = found({place: WIN, other: WIN}, [place])
    before, done = dict(tuned.known.held), list[Result]()
    name, pair = next(iter(getattr(Point(place), which).items()))

    def breaks(*args: object) -> None:
        raise ConfirmError("an illegal memory access", f"{name} {pair}")

    monkeypatch.setattr(confirm, "in_second_process", breaks)
    report = confirm.confirm(tuned, [place, other], Second({}), MINUTE, done.append)
    assert tuned.known.held[other] == before[other]
    if which != "new":
        assert (report.given_up, report.missing, done) == (None, [place, other], [])
        return
    assert (report.given_up, report.missing, done) == (place, [other], [tuned.known.held[place]])
    assert choice_of(done[0]) == Point(place).default
    assert (done[0].before_us, done[0].after_us, done[0].confirmed) == (32.0, 32.0, False)
    assert done[0].rows.keys() == before[place].rows.keys()
    for key, row in done[0].rows.items():
        assert (row.before_us, row.after_us) == (before[place].rows[key].before_us,) * 2
    # the same command has to find out whether what was in use is better
    assert confirm.changed(tuned, [place])[0].choice == Point(place).default


class Listed(Simulated):
    """The defaults with a work list are faster."""

    def turns(self, choices: Sequence[Choice]) -> list[list[float]]:
        listed = [next(iter(choice.values()))[0].mode == "list" for choice in choices]
        return [[20.0 if found else 30.0] * 5 for found in listed]


def test_defaults_without_a_list_take_the_rows_of_tiles_with_one() -> None:
    """The expand of down has another name then."""
    place, tuned = Place("moe_fused", 16), tuner(Clock())[0]
    spaces = spaces_of(place)
    bench = Listed(place, spaces, Clock())
    held, _ = tuned.decide(place, bench, None, [{name: s.default(16) for name, s in spaces.items()}])
    assert (held.block_m, ("", "down_expand") in held.rows) == (16, True)
    got = confirm.with_defaults(tuned, held)
    want, _ = tuned.decide(place, bench, None, [])
    assert got == want
    assert ("", "expand_topk_sum") in got.rows


@pytest.mark.timeout(120)
def test_a_process_that_dies_before_it_reads_a_large_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = "import os, sys\nif '--multiprocessing-fork' in sys.orig_argv: os._exit(3)\n"
    (tmp_path / "sitecustomize.py").write_text(ends)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tasks = [Task(Place(f"{i:01000}", 16), None, Point(A).new) for i in range(300)]
    assert len(pickle.dumps(tasks)) > 4 * 2**16
    with pytest.raises(ConfirmError, match="it died, exit code 3"):
        confirm.in_second_process(tasks, spaces_of, Second({}), MINUTE, pytest.fail, print)


def test_a_result_that_does_not_fit_the_pipe_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    task = Task(A, None, Point(A).new)
    confirm.in_second_process([task], spaces_of, talks, MINUTE, lambda *found: None, said.append)
    assert [len(line) for line in said] == [2**22]


def talks(say: Callable[[str], None]) -> Callable[[Place], Fixed]:
    say("x" * 2**22)
    return lambda place: Fixed(place, WIN)


def test_points_that_a_stopped_run_of_other_sizes_left_are_confirmed_last() -> None:
    """The state that says so ends with this run."""
    tuned, _ = found(dict.fromkeys((C, A, B), WIN), [])
    assert [task.place for task in confirm.changed(tuned, [A, B])] == [A, B, C]
    done = list[Result]()
    confirm.confirm(tuned, [B], Second({**dict.fromkeys((A, B), WIN), C: (30.0, 0.0, 30.0)}), MINUTE, done.append)
    assert [r.place for r in done] == [B, C, A]
    assert choice_of(done[1]) == Point(C).default
