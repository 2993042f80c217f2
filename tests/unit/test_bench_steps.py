from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.bench_rows import write, written

from lorahost.bench import retention, rows, steps, tables
from lorahost.bench.loads import Load
from lorahost.bench.point import Point, add_arguments, from_arguments, to_arguments
from lorahost.bench.together import Outcome, Together
from lorahost.bench.together import main as together_main
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
    lines = tables.report(rows.read(out)).splitlines()
    [stock] = [line for line in lines if line.startswith("| stock |")]
    assert "| 3 | 100.0 (100.0 to 100.0) |" in stock
    assert "| 0.500 (0.500 to 0.500) | 2.000 (2.000 to 2.000) | 0 |" in stock
    assert any(line.startswith("| ours:http |") for line in lines)


STALLED = [20.0, 200.0, 202.0, 204.0]


def together(path: Path, *sides: tuple[Point, list[float]]) -> Path:
    for number in range(4):
        for place, (point, values) in enumerate(sides):
            write(path, (replace(point, alternation=number + 1), [values[number]], f"r{place}"))
    return path


def test_one_stalled_round_of_four_moves_no_share_but_is_seen(tmp_path: Path) -> None:
    ours = [150.0, 150.0, 152.0, 152.0]
    found = rows.read(together(tmp_path / "rows.csv", (Point("base"), STALLED), (Point("ours"), ours)))
    report = tables.report(found)
    assert "| base | 1 | 201.0 (20.0 to 204.0) |" in report
    assert "| 0.751 (0.745 to 7.500) |" in report
    summary = tables.summary(found)
    assert "| no LoRA | 201.0 (20.0 to 204.0) | 100 % |" in summary
    assert "| lorahost, built-in tiles | 151.0 (150.0 to 152.0) | 75 % |" in summary
    assert "rounds 4" in summary


def test_a_summary_tells_engines_of_one_path_apart(tmp_path: Path) -> None:
    other = replace(Point("base"), moe_backend="triton_unfused")
    strict = Point("ours", extra={"jit_monitor_mode": "error"})
    few = Point("stock", slots=4)
    bare = [Point("lora-base", kernels="off"), Point("lora-base"), Point("ours"), strict, few, Point("stock")]
    sides = [(point, [100.0 + 10 * place] * 4) for place, point in enumerate([other, Point("base"), *bare])]
    text = tables.summary(rows.read(together(tmp_path / "rows.csv", *sides)))
    # of the engine without LoRA on vLLM's own choice of backend: 110
    assert [line.split(" | ")[0].strip("| ") + ": " + line.split(" | ")[2] for line in text.splitlines()[4:]] == [
        "no LoRA, triton_unfused: 91 %", "no LoRA: 100 %", "without an adapter: vLLM: 109 %",
        "without an adapter: lorahost: 118 %", "lorahost, built-in tiles: 127 %",
        'lorahost, built-in tiles, jit_monitor_mode="error": 136 %', "vLLM, 4 slots: 145 %", "vLLM, 8 slots: 155 %",
    ]  # fmt: skip
    report = tables.report(rows.read(tmp_path / "rows.csv"))
    assert "| lora-base kernels off | 1 | 120.0 (120.0 to 120.0) |" in report
    assert "| lora-base kernels on | 1 | 130.0 (130.0 to 130.0) |" in report


def test_without_an_engine_without_lora_the_server_is_compared_with_the_same_engine_alone(tmp_path: Path) -> None:
    sides = ((Point("ours"), [100.0] * 4), (Point("ours", via="http"), [98.0] * 4), (Point("stock"), [50.0] * 4))
    text = tables.summary(rows.read(together(tmp_path / "rows.csv", *sides)))
    assert "| engine | OTPS | of the engine alone |" in text
    assert "| lorahost, built-in tiles through HTTP | 98.0 (98.0 to 98.0) | 98 % |" in text


ROOT = Path(__file__).parents[2]
ONE_EXTRA = 'extra={"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 1800000000}'


@pytest.mark.parametrize(
    ("name", "conditions"),
    [
        ("retention_spread", []),
        ("retention_collapsed", [ONE_EXTRA]),
        ("retention_dense", []),
        ("front_door", []),
        ("ttft", []),
        ("benchmark_point", []),
        ("backends", []),
        ("one_request", []),
        ("experts_alone", []),
        ("untouched_engine", []),
        ("untouched_modules", []),
        ("untouched_spread", []),
        ("as_shipped", []),
        ("dense", []),
    ],
)
def test_the_pages_tables_are_those_of_the_rows(
    name: str, conditions: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    where = [part for condition in conditions for part in ("--where", condition)]
    assert tables.main([str(ROOT / "bench" / "results" / f"{name}.csv"), *where]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) > 4
    for page in ["docs/measured.md", *(["README.md"] if name == "as_shipped" else [])]:
        written = (ROOT / page).read_text().splitlines()
        assert [line for line in lines if line not in written] == [], page


@pytest.mark.parametrize(("page", "least"), [("docs/measured.md", 4), ("docs/benchmarks.md", 3)])
def test_documented_commands_of_engines_together_are_accepted(
    page: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Together] = []

    def run(self: Together) -> Outcome:
        ran.append(self)
        return Outcome()

    monkeypatch.setattr(Together, "run", run)
    text = (ROOT / page).read_text().replace("\\\n", " ")
    start = "python3 -m lorahost.bench.together "
    lines = [shlex.split(line.removeprefix(start)) for line in text.splitlines() if line.startswith(start)]
    for line in lines:
        assert together_main(line) == 0, line
    assert len(ran) == len(lines) >= least


def test_a_file_of_other_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tables.main([str(tmp_path / "none.csv")])
    assert "none.csv: No such file" in capsys.readouterr().err


def test_the_command_prints_what_is_left_without_running_it(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    line = ["bench", "retention", "--plan", "--variants", "base,stock", "--alternations", "2", "--out", str(out)]
    ran = CliRunner().invoke(main, line)
    assert ran.exit_code == 0, ran.output
    assert ran.output.count("lorahost.bench.engine_point --path") == 4
    assert not out.exists()
