"""More adapters than slots, a step at a time, and what is made of the rows."""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.bench_rows import write, written

from lorahost.bench import rows, slots, steps
from lorahost.bench.point import Point, add_arguments, from_arguments
from lorahost.cli import main


def test_slots_take_the_rate_from_the_calibration(tmp_path: Path) -> None:
    point = Point("ours", adapters=16, repeats=1)
    first = slots.calibration(point)
    assert (first.slots, first.via, [str(load) for load in first.loads]) == (16, "http", ["closed:4"])
    found = rows.read(write(tmp_path / "rows.csv", (first, [100.0], "r")))
    suggested = slots.suggested_rate(found)
    assert suggested == pytest.approx(4 / 6.0, rel=0.01)
    with pytest.raises(ValueError, match="calibration with closed:N"):
        slots.suggested_rate([])
    second = slots.calibration(point, suggested)
    assert replace(second, loads=first.loads) == first
    assert [str(load) for load in second.loads] == ["poisson:0.667"]
    assert not steps.done(second, found)
    with pytest.raises(ValueError, match="calibration with poisson:N"):
        slots.rate_of(found)
    rows.append(tmp_path / "rows.csv", written(second, [100.0], "r", latency_mean_ms=8000.0))
    found = rows.read(tmp_path / "rows.csv")
    # what the closed loop suggests stays, so that the next call finds its step done
    assert (slots.suggested_rate(found), slots.rate_of(found)) == (suggested, 0.5)
    assert steps.done(second, found)
    plan = slots.plan(point, 8, 0.5, 2)
    assert [(p.alternation, p.slots) for p in plan] == [(1, 16), (1, 8), (2, 16), (2, 8)]
    assert {tuple(map(str, p.loads)) for p in plan} == {("poisson:0.5", "closed:16")}
    with pytest.raises(ValueError, match="slots 16: must be between 1 and 15"):
        slots.plan(point, 16, 0.5, 1)


def test_slots_are_measured_after_two_calibrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Point] = []

    def start(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        ran.append(point := from_arguments(parser.parse_args(line[3:])))
        figures = {"latency_mean_ms": 5000.0, "in_flight": 3.8 if point.slots == 16 else 4.3}
        rows.append(Path(line[line.index("--out") + 1]), written(point, [100.0], f"run{len(ran)}", **figures))
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(subprocess, "run", start)
    line = ["bench", "slots", "--repeats", "1", "--alternations", "1", "--out", str(tmp_path / "rows.csv")]
    found = CliRunner().invoke(main, line)
    assert found.exit_code == 0, found.output
    assert [(p.benchmark, p.slots, " ".join(map(str, p.loads))) for p in ran] == [
        ("slots-rate", 16, "closed:4"), ("slots-rate", 16, "poisson:0.667"),
        ("slots", 16, "poisson:0.8 closed:16"), ("slots", 8, "poisson:0.8 closed:16"),
    ]  # fmt: skip
    assert "open loop: in flight on average 3.8 on 16 slots, 4.3 on 8 slots; meant are 4 on 16" in found.output
    assert CliRunner().invoke(main, line).exit_code == 0
    assert len(ran) == 4
    # another order of adapters in the same file has a calibration and claims of its own
    assert CliRunner().invoke(main, [*line, "--choice", "zipf"]).exit_code == 0
    assert [(p.choice, p.benchmark, p.slots) for p in ran[4:]] == [
        ("zipf", "slots-rate", 16), ("zipf", "slots-rate", 16), ("zipf", "slots", 16), ("zipf", "slots", 8),
    ]  # fmt: skip


def test_rows_without_the_number_in_flight_are_reported_without_it(tmp_path: Path) -> None:
    assert all(claims_with(tmp_path / "rows.csv"))
    text = slots.in_flight(rows.read(tmp_path / "rows.csv"), 16, 8)
    assert text == "open loop: in flight on average - on 16 slots, - on 8 slots; meant are 4 on 16"


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
