from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.bench_rows import write, written

from lorahost.bench import retention, rows, slots, steps
from lorahost.bench.loads import Load
from lorahost.bench.point import Point, add_arguments, from_arguments, to_arguments
from lorahost.cli import main

BASE = Point("ours", repeats=2)
OTPS = {"base": 200.0, "stock": 100.0, "ours": 150.0, "ours-tuned": 160.0, "lora-base": 180.0}


def parsed(line: list[str]) -> Point:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(line))


class Recorder:
    """Stands in for engine starts: writes the rows that they would, or fails."""

    def __init__(self, fail_at: int = 0, rows_of: Callable[[Point], int] = lambda point: point.repeats) -> None:
        self.ran: list[Point] = []
        self._fail_at = fail_at
        self._rows_of = rows_of

    def __call__(self, line: list[str]) -> int:
        out = Path(line[line.index("--out") + 1])
        point = parsed(line[3:])
        self.ran.append(point)
        if len(self.ran) == self._fail_at:
            return 7
        rows.append(out, written(point, [OTPS[point.path]] * self._rows_of(point), f"run{len(self.ran)}"))
        return 0


def test_a_plan_alternates_and_every_step_is_run_once(tmp_path: Path) -> None:
    plan = retention.plan(BASE, ["base", "stock", "ours:http"], 3, {"stock": "triton_unfused"})
    order = [(p.alternation, p.path, p.via, p.moe_backend) for p in plan[:4]]
    assert order == [
        (1, "base", "engine", "auto"), (1, "stock", "engine", "triton_unfused"), (1, "ours", "http", "auto"),
        (2, "base", "engine", "auto"),
    ]  # fmt: skip
    step, out = Recorder(), tmp_path / "rows.csv"
    assert steps.run(plan, out, step=step, say=lambda _: None) == []
    assert step.ran == plan
    again = Recorder()
    assert steps.run(plan, out, step=again, say=lambda _: None) == []
    assert again.ran == []


def test_a_failed_step_stops_the_plan_and_the_next_call_goes_on(tmp_path: Path) -> None:
    plan, out = retention.plan(BASE, ["base", "stock"], 2, {}), tmp_path / "rows.csv"
    with pytest.raises(steps.StepFailedError, match=r"step 2 base closed:16 ended with 7"):
        steps.run(plan, out, step=Recorder(fail_at=3), say=lambda _: None)
    assert len(rows.read(out)) == 2 * BASE.repeats
    step = Recorder()
    steps.run(plan, out, step=step, say=lambda _: None)
    assert step.ran == plan[2:]


def test_a_limit_leaves_the_rest(tmp_path: Path) -> None:
    plan, out = retention.plan(BASE, ["base", "stock"], 2, {}), tmp_path / "rows.csv"
    assert steps.run(plan, out, most=1, step=Recorder(), say=lambda _: None) == plan[1:]
    assert steps.run(plan, out, most=9, step=Recorder(), say=lambda _: None) == []


def test_a_step_that_wrote_too_little_is_no_success(tmp_path: Path) -> None:
    short = Recorder(rows_of=lambda point: point.repeats - 1)
    with pytest.raises(steps.StepFailedError, match="its rows are not in"):
        steps.run([BASE], tmp_path / "rows.csv", step=short, say=lambda _: None)


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, path="stock"), replace(BASE, via="http"), replace(BASE, alternation=2), replace(BASE, rank=16),
        replace(BASE, slots=4), replace(BASE, moe_backend="marlin"), replace(BASE, extra={"x": 1}),
        replace(BASE, loads=(Load(concurrency=1),)), replace(BASE, spec="ngram"), replace(BASE, repeats=3),
        replace(BASE, weights="collapsed"), replace(BASE, kernels="off"),
    ],
)  # fmt: skip
def test_rows_of_another_step_do_not_count(tmp_path: Path, other: Point) -> None:
    found = rows.read(write(tmp_path / "rows.csv", (BASE, [1.0, 2.0], "r")))
    assert steps.done(BASE, found)
    assert not steps.done(other, found)


def test_repeats_of_two_starts_are_not_one_step(tmp_path: Path) -> None:
    found = rows.read(write(tmp_path / "rows.csv", (BASE, [1.0], "r1"), (BASE, [2.0], "r2")))
    assert not steps.done(BASE, found)


@pytest.mark.parametrize(
    "point",
    [
        BASE,
        Point("base", model="qwen3-32b", layers=3, input=7, output=9, loads=(Load(rate=0.5), Load(concurrency=2))),
        Point("ours-tuned", spec="synthetic", accept=1.5, alphabet=64, extra={"a": [1]}, targets=("attention",)),
        Point("lora-base", kernels="off", via="http", config_dir="x", commit="c", benchmark="b", alternation=4),
    ],
)
def test_a_step_s_command_line_means_the_same_step(point: Point) -> None:
    assert parsed(to_arguments(point)) == point


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": "base", "kernels": "on"}, "kernels on: path base"),
        ({"path": "ours", "model": "gpt-9"}, "model 'gpt-9': must be one of"),
        ({"path": "ours", "spec": "synthetic", "accept": 9.0}, "accept 9.0: must be between 1 and 4"),
        ({"path": "ours", "output": 0}, "output 0: must be at least 1"),
    ],
)
def test_impossible_steps_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Point(**values)  # type: ignore[arg-type]


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(ValueError, match="variant 'ours:tcp'"):
        retention.plan(BASE, ["ours:tcp"], 1, {})


def test_the_report_gives_shares_of_the_engine_without_lora(tmp_path: Path) -> None:
    plan, out = retention.plan(BASE, ["base", "stock", "ours", "ours:http"], 3, {}), tmp_path / "rows.csv"
    steps.run(plan, out, step=Recorder(), say=lambda _: None)
    lines = retention.report(rows.read(out)).splitlines()
    [stock] = [line for line in lines if line.startswith("| stock |")]
    assert "| 3 | 100.0 |" in stock
    assert "| 0.500 (0.500 to 0.500) | 2.000 (2.000 to 2.000) | 0 |" in stock
    assert any(line.startswith("| ours:http |") for line in lines)


def test_the_command_prints_what_is_left_without_running_it(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    line = ["bench", "retention", "--plan", "--variants", "base,stock", "--alternations", "2", "--out", str(out)]
    ran = CliRunner().invoke(main, line)
    assert ran.exit_code == 0, ran.output
    assert ran.output.count("lorahost.bench.engine_point --path") == 4
    assert not out.exists()


def test_slots_take_the_rate_from_the_calibration(tmp_path: Path) -> None:
    point = Point("ours", adapters=16, repeats=1)
    first = slots.calibration(point)
    assert (first.slots, first.via, [str(load) for load in first.loads]) == (16, "http", ["closed:4"])
    found = rows.read(write(tmp_path / "rows.csv", (first, [100.0], "r")))
    assert slots.rate_of(found) == pytest.approx(4 / 6.0, rel=0.01)
    with pytest.raises(ValueError, match="calibration"):
        slots.rate_of([])
    plan = slots.plan(point, 8, 0.5, 2)
    assert [(p.alternation, p.slots) for p in plan] == [(1, 16), (1, 8), (2, 16), (2, 8)]
    assert {tuple(map(str, p.loads)) for p in plan} == {("poisson:0.5", "closed:16")}
    with pytest.raises(ValueError, match="slots 16: must be between 1 and 15"):
        slots.plan(point, 16, 0.5, 1)


def claims_with(path: Path, **few: float) -> list[bool]:
    point = Point("ours", adapters=16, repeats=1)
    for step in slots.plan(point, 8, 0.5, 1):
        rows.append(path, written(step, [100.0], f"r{step.slots}", **(few if step.slots == 8 else {})))
    return [claim.holds for claim in slots.claims(rows.read(path), 16, 8)]


def test_claims_hold_for_equal_sides_and_fail_one_by_one(tmp_path: Path) -> None:
    assert claims_with(tmp_path / "same.csv") == [True] * 4
    assert claims_with(tmp_path / "ttft.csv", ttft_p50_ms=1400.0) == [False, True, True, True]
    assert claims_with(tmp_path / "p99.csv", ttft_p99_ms=7000.0) == [True, False, True, True]
    assert claims_with(tmp_path / "tput.csv", throughput=1300.0) == [True, True, False, True]
    assert claims_with(tmp_path / "wait.csv", ttft_max_ms=13000.0) == [True, True, True, False]
    assert claims_with(tmp_path / "nan.csv", ttft_max_ms=float("nan"))[3] is False
