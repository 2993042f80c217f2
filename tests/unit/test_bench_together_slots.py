"""Two servers with other numbers of slots that take turns, with stand-ins for their processes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from tests.unit import bench_stand_in
from tests.unit.bench_rows import write

from lorahost.bench import rows, slots, turns
from lorahost.bench.point import Point, to_arguments
from lorahost.bench.rows import Row
from lorahost.bench.together import Outcome
from lorahost.bench.together_options import OPTIONS, Options
from lorahost.bench.together_plan import Spec
from lorahost.bench.together_slots import SlotsTogether
from lorahost.cli import main

ROOT = Path(__file__).parents[2]
NAME = "tests.unit.test_bench_together_slots"
POINT = Point("ours", adapters=16, repeats=1, commit="abc1234")


class Slower(bench_stand_in.StandIn):
    """A request takes 5 s on average, longer than the closed loop's median says."""

    async def act(self, ask: turns.Ask) -> dict[str, Any]:
        row = (await super().act(ask))["row"]
        # the row is that of an engine that does not misbehave
        extra = {key: value for key, value in self._point.extra.items() if key != "die"}
        mine = {"latency_mean_ms": 5000.0, "in_flight": 3.9 if row["slots"] == 16 else 4.2}
        return {"row": {**row, **mine, "extra": replace(self._point, extra=extra).row()["extra"]}}


def stand_in() -> None:
    """Runs in the stand-in's process."""
    with mock.patch.object(bench_stand_in, "StandIn", Slower):
        bench_stand_in.main()


class Bench:
    """Runs in a folder; what they say is kept. `bad` is the stand-in's misbehaviour by engine."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "rows.csv"
        self.folder = folder
        self.said: list[str] = []
        self.started: list[str] = []
        self.bad: dict[str, dict[str, Any]] = {}

    def run(self, few: int = 8, rounds: int = 2) -> Outcome:
        given = {option.name.replace("-", "_"): option.default for option in OPTIONS}
        given |= {"alternations": rounds, "out": self.out, "work": self.folder / "work"}
        return SlotsTogether(POINT, few, Options.of(given), self.said.append).run(self.command)

    def command(self, spec: Spec, folder: Path) -> list[str]:
        self.started.append(spec.name)
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {NAME} import stand_in; stand_in()"
        point = replace(spec.point, extra={**spec.point.extra, **self.bad.get(spec.name, {})})
        return [sys.executable, "-c", code, *to_arguments(point), "--turns", str(folder)]

    @property
    def rows(self) -> list[Row]:
        return rows.read(self.out)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_rate_comes_from_a_calibration_and_both_loads_are_measured_in_turn(bench: Bench) -> None:
    outcome = bench.run()
    assert bench.started == ["many", "few"]
    # the closed loop takes 6e5 / 151 ms a request: 4 in flight are 1.01 requests a second; the open one takes 5 s
    assert [(r["benchmark"], r["alternation"], r["slots"], r["load"], r["via"]) for r in bench.rows] == [
        ("slots-rate", "1", "16", "closed:4", "http"), ("slots-rate", "1", "16", "poisson:1.01", "http"),
        ("slots", "1", "16", "poisson:0.8", "http"), ("slots", "1", "8", "poisson:0.8", "http"),
        ("slots", "1", "16", "closed:16", "http"), ("slots", "1", "8", "closed:16", "http"),
        ("slots", "2", "8", "poisson:0.8", "http"), ("slots", "2", "16", "poisson:0.8", "http"),
        ("slots", "2", "8", "closed:16", "http"), ("slots", "2", "16", "closed:16", "http"),
    ]  # fmt: skip
    assert outcome.trouble == []
    assert "| closed loop at 16: throughput, 8 slots / 16 | 1 | >= 0.85 | yes |" in outcome.table
    # the other way of measuring reads the same rows
    assert all(claim.holds for claim in slots.claims(bench.rows, 16, 8))
    assert (slots.suggested_rate(bench.rows), slots.rate_of(bench.rows)) == (1.01, 0.8)
    assert "open loop: in flight on average 3.9 on 16 slots, 4.2 on 8 slots; meant are 4 on 16" in outcome.table


def test_rows_in_the_file_are_not_measured_again(bench: Bench) -> None:
    bench.run()
    whole = bench.out.read_text().splitlines(keepends=True)
    bench.started.clear()
    assert bench.run().trouble == []
    assert bench.started == []
    # the last turn is that of the engine with more slots; the calibrations are kept
    bench.out.write_text("".join(whole[:-1]))
    assert bench.run().trouble == []
    assert bench.started == ["many"]
    assert [row["benchmark"] for row in bench.rows].count("slots-rate") == 2
    assert len(bench.rows) == 10


def test_a_file_with_the_closed_loop_only_gets_the_open_calibration_and_its_loop(bench: Bench) -> None:
    bench.run(rounds=1)
    whole = bench.rows
    bench.out.unlink()
    rows.append(bench.out, kept := [row for row in whole if row["load"].startswith("closed:")])
    bench.started.clear()
    assert bench.run(rounds=1).trouble == []
    assert bench.started == ["many", "few"]
    assert bench.rows[: len(kept)] == kept
    assert [(r["benchmark"], r["slots"], r["load"]) for r in bench.rows[len(kept) :]] == [
        ("slots-rate", "16", "poisson:1.01"), ("slots", "16", "poisson:0.8"), ("slots", "8", "poisson:0.8"),
    ]  # fmt: skip


def test_a_claim_that_does_not_hold_is_said(bench: Bench) -> None:
    bench.run(rounds=1)
    found = bench.rows
    slow = [{**r, "throughput": "100"} if (r["slots"], r["load"]) == ("8", "closed:16") else r for r in found]
    bench.out.unlink()
    rows.append(bench.out, slow)
    outcome = bench.run(rounds=1)
    assert outcome.trouble == ["claim does not hold: closed loop at 16: throughput, 8 slots / 16"]


@pytest.mark.parametrize("ask", [1, 2])
def test_without_a_calibration_there_is_no_open_loop_and_no_claim(bench: Bench, ask: int) -> None:
    bench.bad = {"many": {"die": ask}}
    outcome = bench.run(rounds=1)
    assert [(r["benchmark"], r["load"]) for r in bench.rows] == [
        *[("slots-rate", "closed:4")] * (ask - 1), ("slots", "closed:16"),
    ]  # fmt: skip
    assert any(text.startswith("3 of 4 turns are missing") for text in outcome.trouble)
    assert any(text.startswith("the open loop is not measured") for text in outcome.trouble)
    assert any(text.startswith("no claims: ") for text in outcome.trouble)
    # the next run starts both again and adds what is missing
    bench.bad, bench.started = {}, []
    assert bench.run(rounds=1).trouble == []
    assert bench.started == ["many", "few"]
    assert sorted((r["benchmark"], r["slots"], r["load"]) for r in bench.rows) == [
        ("slots", "16", "closed:16"), ("slots", "16", "poisson:0.8"), ("slots", "8", "closed:16"),
        ("slots", "8", "poisson:0.8"), ("slots-rate", "16", "closed:4"), ("slots-rate", "16", "poisson:1.01"),
    ]  # fmt: skip


def test_rows_of_another_run_are_not_taken(bench: Bench) -> None:
    other = replace(POINT, benchmark="slots-rate", via="http", slots=16, loads=(slots.calibration(POINT).loads))
    write(bench.out, (other, [1.0], "r"))
    bench.run(rounds=1)
    # those have no KV cache in their arguments: the rate is measured anew
    assert [row["load"] for row in bench.rows if row["benchmark"] == "slots-rate"] == [
        "closed:4", "closed:4", "poisson:1.01",
    ]  # fmt: skip
    assert {row["load"] for row in bench.rows if row["benchmark"] == "slots"} == {"poisson:0.8", "closed:16"}


def test_as_many_slots_as_adapters_are_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="slots 16: must be between 1 and 15"):
        bench.run(few=16)


def test_the_command_line_plans_two_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Spec] = []
    monkeypatch.setattr(SlotsTogether, "run", lambda self: (seen.extend(self._specs), Outcome())[1])
    line = ["bench", "slots", "--together", "--adapters", "6", "--slots", "3", "--path", "stock", "--kv-bytes", "1e9"]
    ran = CliRunner().invoke(main, [*line, "--out", str(tmp_path / "rows.csv"), "--requests", "5", "--choice", "zipf"])
    assert ran.exit_code == 0, ran.output
    assert [(s.name, s.point.path, s.point.via, s.point.slot_count, s.point.requests) for s in seen] == [
        ("many", "stock", "http", 6, 5), ("few", "stock", "http", 3, 5),
    ]  # fmt: skip
    assert {spec.point.choice for spec in seen} == {"zipf"}
    assert {spec.point.extra["kv_cache_memory_bytes"] for spec in seen} == {1_000_000_000}
    stray = CliRunner().invoke(main, ["bench", "slots", "--kv-bytes", "1e9"])
    assert "--kv-bytes is only for --together" in stray.output
