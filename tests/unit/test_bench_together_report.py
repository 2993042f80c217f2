"""Ratios of engines that took turns."""

from __future__ import annotations

from pathlib import Path

from tests.unit.bench_rows import write
from tests.unit.bench_together_run import CLOSED, POINT

from lorahost.bench import rows, together_plan, together_report
from lorahost.bench.together_plan import Job


def test_ratios_are_of_rounds_that_both_have(tmp_path: Path) -> None:
    specs = together_plan.specs(POINT, "base,stock,ours", {})
    values = {"base": [200.0, 220.0], "stock": [100.0, 100.0, 400.0], "ours": [150.0, 180.0]}
    jobs = [Job(CLOSED), Job(CLOSED, base=True)]
    for turn in together_plan.turns(specs, jobs, 3):
        mine = values[turn.spec.name]
        if turn.round <= len(mine):
            write(tmp_path / "rows.csv", (turn.point, [mine[turn.round - 1] - 50 * turn.job.base], turn.spec.name))
    text = together_report.table(specs, jobs, rows.read(tmp_path / "rows.csv"))
    first, second = text.split("closed:16, base traffic")
    [ours] = [line for line in first.splitlines() if line.startswith("| ours |")]
    assert ours.startswith("| ours | 2 | 165.0 (150.0 to 180.0) |")
    # 330 / 420 and, without stock's third round, 330 / 200
    assert "| 0.786 (0.750 to 0.818) | 1.650 (1.500 to 1.800) |" in ours
    [stock] = [line for line in first.splitlines() if line.startswith("| stock |")]
    assert stock.startswith("| stock | 3 | 100.0 (100.0 to 400.0) |")
    # base traffic is compared with the engine without LoRA
    [ours] = [line for line in second.splitlines() if line.startswith("| ours |")]
    assert "| 0.548 (0.500 to 0.591) |" in ours
    assert together_report.table(specs, jobs, []) == "no rows"


def test_a_stalled_round_moves_no_ratio_but_is_seen_in_brackets(tmp_path: Path) -> None:
    specs = together_plan.specs(POINT, "base,ours", {})
    values = {"base": [20.0, 200.0, 202.0, 204.0], "ours": [150.0, 150.0, 152.0, 152.0]}
    for turn in together_plan.turns(specs, [Job(CLOSED)], 4):
        write(tmp_path / "rows.csv", (turn.point, [values[turn.spec.name][turn.round - 1]], turn.spec.name))
    lines = together_report.table(specs, [Job(CLOSED)], rows.read(tmp_path / "rows.csv")).splitlines()
    [base] = [line for line in lines if line.startswith("| base |")]
    assert base.startswith("| base | 4 | 201.0 (20.0 to 204.0) |")
    [ours] = [line for line in lines if line.startswith("| ours |")]
    # 151 / 201; 152 / 204 to 150 / 20
    assert "| 0.751 (0.745 to 7.500) |" in ours
