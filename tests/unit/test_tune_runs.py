"""Whole runs of `lorahost tune` on a simulated GPU: stopped, out of time, with several ranks, with a bad candidate."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.tune_command import run

from lorahost_kernels.tune import command, confirm
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.run import Tuner
from lorahost_kernels.tuned.schema import read


class FakeBench:
    """Everything but the defaults is a tenth faster."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.defaults: dict[str, Any] = {}

    def measure(self, work: Sequence[Any], until: float) -> list[float]:
        times = []
        for key, pair in work:
            self.defaults.setdefault(str(key), pair)
            times.append(10.0 if self.defaults[str(key)] == pair else 9.0)
        return times

    def list_time(self, block_m: int | None) -> float:
        return 0.0

    def turns(self, choices: Sequence[Any]) -> list[list[float]]:
        return [[20.0 - 2.0 * (i > 0)] * 5 for i in range(len(choices))]

    def halves(self, name: str, pair: Any) -> tuple[float, float]:
        return 4.0, 5.0

    def right(self, choice: Any) -> bool:
        return True


def in_this_process(tasks: Any, spaces: Any, opener: Any, seconds: float, take: Any, say: Any) -> None:
    """Stands in for the second process, which has no GPU here."""
    assert 0 < seconds <= 480
    spaces, _ = pickle.loads(pickle.dumps((spaces, opener)))
    for task in tasks:
        take(task, confirm.outcome_of(Tuner(spaces, lambda: 0.0, say), FakeBench(task.place), task))


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """A GPU that isn't there; the points that it was asked for."""
    gpu = pytest.importorskip("lorahost_kernels.tune.gpu")
    asked: list[Place] = []

    class Lab:
        def __init__(self, *args: Any) -> None:
            pass

        def open(self, place: Place) -> FakeBench:
            asked.append(place)
            if len(asked) == stop_at:
                raise KeyboardInterrupt
            return FakeBench(place)

        def close(self) -> None:
            pass

    stop_at = 3
    device = gpu.Gpu("NVIDIA Test", 227 * 1024, 60 * 2**20, 800, 90, 4e12)
    monkeypatch.setattr(gpu, "this_gpu", lambda: device)
    monkeypatch.setattr(gpu, "Lab", Lab)
    monkeypatch.setattr(gpu, "current_device", lambda: 0)
    monkeypatch.setattr(confirm, "in_second_process", in_this_process)
    monkeypatch.setattr(gpu, "provenance", lambda revision: {
        "driver": "1", "torch": "2", "triton": "3", "git_revision": revision or "r", "date": "2026-11-29", "mix": "m",
    })  # fmt: skip
    return asked


def test_a_run_is_stopped_goes_on_and_its_file_is_good(tmp_path: Path, simulated: list[Place]) -> None:
    out = tmp_path / "NVIDIA_Test" / "gpt-oss-20b.json"
    arguments = ["--model", "gpt-oss-20b", "--sizes", "1,16", "--jobs", "0", "--out", str(out), "--rev", "abc"]
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    assert simulated == [Place("moe_fused", 16), Place("dense", 16), Place("moe_fused", 1)]
    file = read(out)
    assert ([p.tokens for p in file.moe_fused], [p.tokens for p in file.dense]) == ([16], [16])
    state = out.with_name("gpt-oss-20b.json.8x32.state")
    assert state.exists()
    code, text = run(*arguments)
    assert code == 0, text
    todo = [Place("moe_fused", 16), Place("dense", 16), Place("moe_fused", 1), Place("dense", 1)]
    # a further pass finds nothing
    assert simulated[3:] == [*todo[2:], *todo]
    assert "4 points done, 0 left" in text
    assert "2 points are done by an earlier run" in text
    assert "moe_fused 8x32 M=1: 20.0 -> 18.0 us, 1.11 x, no list" in text
    assert "moe_fused (whole)      1.111 x" in text
    assert "step floor gains at most" in text
    assert "second process: 4 points confirmed, 0 taken back; 0 not confirmed\n" in text
    assert not state.exists()
    file = read(out)
    assert ([p.tokens for p in file.moe_fused], [p.tokens for p in file.dense]) == ([1, 16], [1, 16])
    assert file.gpu == "NVIDIA Test"
    assert file.runs[0].git_revision == "abc"


def test_several_adapters_and_ranks_go_into_one_file(tmp_path: Path, simulated: list[Place]) -> None:
    out = tmp_path / "x.json"
    common = ("--model", "gpt-oss-20b", "--jobs", "0", "--out", str(out))
    assert run(*common, "--sizes", "16", "--adapters", "1", "--families", "moe_fused")[0] == 0
    assert simulated == [Place("moe_fused", 16, 1)] * 2
    simulated.append(Place("moe_fused", 16))  # the third one would be stopped
    code, text = run(*common, "--sizes", "16,1", "--adapters", "8,1", "--rank", "32,16")
    assert code == 0, text
    sizes = ("8x32 M=16", "8x16 M=16", "1x32 M=16", "1x16 M=16")
    assert [str(p) for p in simulated[3:7]] == [f"moe_fused {size}" for size in sizes]
    assert "gpt-oss-20b: 16 points into" in text
    assert "1 adapters, rank 16:\n" in text
    file = read(out)
    assert [(p.adapters, p.rank, p.tokens) for p in file.moe_fused] == [
        (a, r, m) for a in (1, 8) for r in (16, 32) for m in (1, 16)
    ]
    assert len(file.dense) == 8
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_file_of_plain_experts_takes_fused_ones_too(tmp_path: Path, simulated: list[Place]) -> None:
    out = tmp_path / "x.json"
    common = ("--model", "gpt-oss-20b", "--jobs", "0", "--out", str(out), "--sizes", "16")
    assert run(*common, "--families", "moe")[0] == 0
    assert "moe_fused" not in out.read_text()
    before = read(out).moe
    simulated.append(Place("moe_fused", 16))  # the third one would be stopped
    assert run(*common)[0] == 0
    file = read(out)
    assert file.moe == before
    assert [len(p.rows()) for p in (*file.moe_fused, *file.dense)] == [4, 4]
    code, text = run(*common, "--families", "moe", "moe_fused")
    assert code == 0, text
    # a step has one of them: 24 layers of 20 us before and 18 us after
    assert "16     0.480 ->   0.432" in text


def test_a_candidate_that_breaks_the_gpu_is_left_out_by_the_next_run(
    tmp_path: Path, simulated: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lorahost_kernels.tune import gpu

    banned: list[list[str]] = []

    class Breaks(gpu.Lab):
        def __init__(self, *args: Any) -> None:
            banned.append([*args[-1]])

        def open(self, place: Place) -> Any:
            if place.tokens == 1 and not banned[-1]:
                raise gpu.DeviceLostError("down tiles", RuntimeError("CUDA error: an illegal memory access"))
            return FakeBench(place)

        def close(self) -> None:
            pass

    monkeypatch.setattr(gpu, "Lab", Breaks)
    out = tmp_path / "x.json"
    arguments = ["--model", "gpt-oss-20b", "--sizes", "1,16", "--jobs", "0", "--out", str(out)]
    code, text = run(*arguments)
    assert code == 3
    assert "the same command goes on without this candidate" in text
    assert [p.tokens for p in read(out).moe_fused] == [16]
    code, text = run(*arguments)
    assert code == 0, text
    assert banned == [[], ["down tiles"]]
    assert [p.tokens for p in read(out).moe_fused] == [1, 16]


def test_another_gpus_file_is_refused_before_any_work(tmp_path: Path, simulated: list[Place]) -> None:
    out = tmp_path / "x.json"
    out.write_text('{"format": 1}')
    code, text = run("--model", "gpt-oss-20b", "--out", str(out))
    assert code == 1
    assert f"{out}:1: gpu: Field required" in text
    assert simulated == []


def test_a_budget_that_is_too_short_says_what_is_left(tmp_path: Path, simulated: list[Place]) -> None:
    out = tmp_path / "x.json"
    code, text = run("--model", "gpt-oss-20b", "--sizes", "16", "--out", str(out), "--budget", "1s", "--jobs", "0")
    assert code == 0
    assert "no time for moe_fused 8x32 M=16, dense 8x32 M=16: the same command goes on from there" in text
    assert not out.exists()


@pytest.mark.parametrize(
    ("candidate", "status", "again"),
    [("", 4, "the same command confirms them"), ("down tiles", 3, "the same command goes on without this candidate")],
)
def test_a_second_process_that_dies_is_an_error_and_the_same_command_confirms(
    tmp_path: Path, simulated: list[Place], monkeypatch: pytest.MonkeyPatch, candidate: str, status: int, again: str
) -> None:
    def dies(*args: Any) -> None:
        raise confirm.ConfirmError("it died, exit code -9", candidate)

    out = tmp_path / "x.json"
    arguments = ["--model", "gpt-oss-20b", "--sizes", "16", "--jobs", "0", "--out", str(out)]
    simulated.extend([Place("dense", 1)] * 3)  # the third one would be stopped
    with monkeypatch.context() as patch:
        patch.setattr(confirm, "in_second_process", dies)
        code, text = run(*arguments)
    assert code == status
    assert "second process: 0 points confirmed, 0 taken back; 2 not confirmed\n" in text
    told = "2 points stay as the first one found them, unconfirmed"
    assert f"error: the second process failed: it died, exit code -9; {told}; {again}\n" in text
    assert [(p.before_us, p.after_us) for p in read(out).moe_fused] == [(20, 18)]
    # what the file has by now is not what the run began with
    code, text = run(*arguments)
    assert code == 0, text
    assert "second process: 2 points confirmed, 0 taken back; 0 not confirmed\n" in text


def test_the_file_does_not_keep_tiles_that_broke_the_second_process(
    tmp_path: Path, simulated: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(tasks: Any, *args: Any) -> None:
        name, pair = next(iter(tasks[0].choice.items()))
        raise confirm.ConfirmError("an illegal memory access", f"{name} {pair}")

    simulated.extend([Place("dense", 1)] * 3)  # the third one would be stopped
    monkeypatch.setattr(confirm, "in_second_process", breaks)
    out = tmp_path / "x.json"
    code, text = run("--model", "gpt-oss-20b", "--sizes", "16", "--jobs", "0", "--out", str(out))
    assert code == 3
    assert "moe_fused 8x32 M=16 has its defaults, 1 points stay as the first one found them, unconfirmed" in text
    file = read(out)
    assert [(p.before_us, p.after_us) for p in (*file.moe_fused, *file.dense)] == [(20, 20), (20, 18)]


@pytest.mark.parametrize(
    ("budget", "changed", "kept"),
    [("480s", 0, 11.5), ("480s", 9, 25.0), ("480s", 99, 96.0), ("50s", 9, 0), ("60s", 9, 12.0)],
)
def test_passes_end_where_the_second_processs_time_begins(
    tmp_path: Path, simulated: list[Place], monkeypatch: pytest.MonkeyPatch, budget: str, changed: int, kept: float
) -> None:
    ends: list[float] = []
    found: list[None] = []

    def tune(
        self: Tuner, todo: Any, open_bench: Any, deadline: float, done: Any, kept: Callable[[], float]
    ) -> list[Place]:
        # counted when it is asked
        found[:] = [None] * changed
        ends.append(deadline - kept())
        found.clear()
        return []

    monkeypatch.setattr(Tuner, "tune", tune)
    monkeypatch.setattr(confirm, "changed", lambda tuner, todo: found)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    common = ("--model", "gpt-oss-20b", "--sizes", "16", "--jobs", "0", "--out", str(tmp_path / "x.json"))
    code, text = run(*common, "--budget", budget)
    assert code == 0, text
    assert ends == [1000.0 + int(budget[:-1]) - kept]
    assert "nothing to confirm" in text
