"""Engines that take turns, with stand-ins for their processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.bench_rows import write

from lorahost.bench import chart, compare, rows, together_plan, together_report
from lorahost.bench.loads import Load
from lorahost.bench.point import Point, to_arguments
from lorahost.bench.rows import Row
from lorahost.bench.together import Outcome, Together, main, report
from lorahost.bench.together_options import Options
from lorahost.bench.together_plan import Job, Spec
from lorahost.cli import main as command_line

ROOT = Path(__file__).parents[2]
CLOSED, SOLO = Load(concurrency=16), Load(concurrency=1)
POINT = Point("ours", loads=(CLOSED,), repeats=1, benchmark="together", commit="abc1234")
NAMES = "base,stock:marlin,ours"
POINT_EXTRA = {"kv_cache_memory_bytes": 2_500_000_000, "gpu_memory_utilization": 0.2}


class Bench:
    """A run in a folder; what it says is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "rows.csv"
        self.said: list[str] = []
        self.started: list[str] = []

    def made(
        self, point: Point = POINT, clock: Callable[[], float] = time.monotonic, extra: Any = None, **more: Any
    ) -> Together:
        given: dict[str, Any] = {
            "paths": NAMES, "base_loads": "", "kv_bytes": 2.5e9, "utilization": 0.2, "start_limit": 300.0,
            "limit": 600.0, "logs": "", "probe": False, "reference": "stock:marlin", "alternations": 2,
            "out": self.out, "work": self.folder / "work",
            "extra_of": [f"{name}={json.dumps(value)}" for name, value in (extra or {}).items()], "slots_of": [],
            "spec_of": [],
        }  # fmt: skip
        return Together(point, Options.of({**given, **more}), self.said.append, clock)

    def run(self, point: Point = POINT, **more: Any) -> Outcome:
        return self.made(point, **more).run(self.command)

    def command(self, spec: Spec, folder: Path) -> list[str]:
        self.started.append(spec.name)
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.unit.bench_stand_in import main; main()"
        return [sys.executable, "-c", code, *to_arguments(spec.point), "--turns", str(folder)]

    @property
    def rows(self) -> list[Row]:
        return rows.read(self.out)

    def text(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def order(found: list[Row]) -> list[tuple[str, str, str]]:
    return [(row["alternation"], row["path"], row["load"]) for row in found]


def test_engines_are_measured_in_turn_and_every_second_round_backwards(bench: Bench) -> None:
    outcome = bench.run(replace(POINT, loads=(CLOSED, SOLO)))
    assert outcome.trouble == []
    assert order(bench.rows) == [
        ("1", "base", "closed:16"), ("1", "stock", "closed:16"), ("1", "ours", "closed:16"),
        ("1", "base", "closed:1"), ("1", "stock", "closed:1"), ("1", "ours", "closed:1"),
        ("2", "ours", "closed:16"), ("2", "stock", "closed:16"), ("2", "base", "closed:16"),
        ("2", "ours", "closed:1"), ("2", "stock", "closed:1"), ("2", "base", "closed:1"),
    ]  # fmt: skip
    assert {row["moe_backend"] for row in bench.rows} == {"auto", "marlin"}
    assert json.loads(bench.rows[0]["extra"]) == {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2500000000}
    assert (bench.folder / "work" / "logs" / "stock-marlin.log").read_text() == "stand-in starts\n"


def test_the_other_commands_take_the_rows(bench: Bench) -> None:
    bench.run()
    found = compare.compare(
        compare.chosen(bench.rows, ["path=stock"]), compare.chosen(bench.rows, ["path=ours"])
    )  # fmt: skip
    [ratios] = found.values()
    assert ratios[0].value == pytest.approx(151.5 / 101.5)
    assert "| LoRA, stock vLLM (marlin) | 101.5 (101.0 to 102.0) |" in chart.table(chart.selected(bench.rows, []))


def test_base_traffic_is_asked_of_lora_engines_once(bench: Bench) -> None:
    assert bench.run(alternations=1, base_loads="closed:16", paths="base,stock,ours,ours-tuned").trouble == []
    extra = [(row["path"], row["kernels"]) for row in bench.rows[4:]]
    assert extra == [("lora-base", "off"), ("lora-base", "on")]


def test_an_engine_that_dies_is_named_with_its_last_lines_and_the_others_go_on(bench: Bench) -> None:
    outcome = bench.run(extra={"ours": {"die": 2}})
    assert [row["path"] for row in bench.rows] == ["base", "stock", "ours", "stock", "base"]
    assert "engine ours ended with 9 while it was asked closed:16, round 2, repeat 1;" in bench.text()
    assert "stand-in: out of memory" in bench.text()
    assert outcome.trouble[-1].startswith("1 of 6 turns are missing")
    said: list[str] = []
    assert report(outcome, said.append) == 1
    assert said[-1].strip() == outcome.table


def test_an_engine_that_does_not_start_is_given_up(bench: Bench, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    late = {"never": True, "mark": str(mark)}

    def clock() -> float:
        # time passes when it is known of the others whether they are ready
        known = "base is ready" in bench.text() and "engine stock:marlin" in bench.text()
        return 500.0 if known and mark.exists() else 0.0

    outcome = bench.run(clock=clock, extra={"ours": late, "stock:marlin": {"fail": True}})
    assert {row["path"] for row in bench.rows} == {"base"}
    assert "engine stock:marlin ended with 1 while it started" in bench.text()
    assert "stand-in: no such GPU" in bench.text()
    assert "engine ours is not ready after 500 s" in bench.text()
    assert outcome.trouble


def test_when_time_is_up_rows_are_kept_and_nothing_runs_on(bench: Bench, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    stuck = {"hang": 2, "mark": str(mark)}
    outcome = bench.run(clock=lambda: 601.0 if mark.exists() else 0.0, extra={"stock:marlin": stuck})
    assert [row["path"] for row in bench.rows] == ["base", "stock", "ours", "ours"]
    assert outcome.trouble[0].startswith("time is up while stock:marlin is asked closed:16, round 2")
    assert outcome.trouble[1].startswith("2 of 6 turns are missing")
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(mark) not in running


def test_failed_requests_are_kept_in_the_row_and_said(bench: Bench) -> None:
    outcome = bench.run(alternations=1, extra={"ours": {"errors": 3}})
    assert outcome.trouble == ["round 1, closed:16, ours: 3 of 4 requests failed: OSError x 3"]
    assert [row["errors"] for row in bench.rows] == ["0", "0", "3"]


def test_turns_in_the_file_are_not_repeated(bench: Bench) -> None:
    # all six of both rounds, but for ours in the second
    specs = together_plan.specs(replace(POINT, extra=POINT_EXTRA), NAMES, {})
    every = together_plan.turns(specs, [Job(CLOSED)], 2)
    left = [turn for turn in every if turn.round == 2 and turn.spec.name == "ours"]
    for turn in every:
        if turn not in left:
            write(bench.out, (turn.point, [1.0], turn.spec.name))
    assert bench.run().trouble == []
    assert bench.started == ["ours"]
    assert order(bench.rows)[5:] == [("2", "ours", "closed:16")]
    assert "5 of 6 turns are in" in bench.said[0]
    bench.started.clear()
    assert bench.run().trouble == []
    assert bench.started == []
    # another revision is another benchmark
    assert bench.run(replace(POINT, commit="def5678"), alternations=1).trouble == []
    assert len(bench.started) == 3


def test_a_turn_whose_repeats_are_not_all_there_leaves_no_rows(bench: Bench) -> None:
    bench.run(replace(POINT, repeats=2), alternations=1, extra={"ours": {"die": 2}})
    assert [(row["path"], row["repeat"]) for row in bench.rows] == [
        ("base", "1"), ("base", "2"), ("stock", "1"), ("stock", "2"),
    ]  # fmt: skip


def test_answers_are_compared_with_the_reference(bench: Bench) -> None:
    extra = {"ours": {"token": 9}, "base": {"token": 8, "shift": 0.02}}
    outcome = bench.run(probe=True, extra=extra, alternations=1)
    near = "base against stock:marlin: 1 answers, 0 equal, 1 near ties (gap <= 0.1), 0 differ"
    assert f"{near}; worst log-probability difference 0.0200 (3/base/alone, token 1); 1 asked" in bench.text()
    assert "ours against stock:marlin: 2 answers, 0 equal, 0 near ties (gap <= 0.1), 2 differ" in bench.text()
    assert "3/a0/alone: token 1 is 9 instead of 7, 2.000 below it in the reference" in bench.text()
    assert [text.split()[0] for text in outcome.trouble] == ["ours"]
    assert json.loads((bench.folder / "work" / "logs" / "probe.json").read_text()).keys() == {*NAMES.split(",")}
    assert len(bench.rows) == 3


def test_without_the_reference_s_answers_none_are_compared(bench: Bench) -> None:
    outcome = bench.run(probe=True, extra={"stock:marlin": {"fail": True}}, alternations=1)
    assert any("none of the reference stock:marlin" in text for text in outcome.trouble)


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


@pytest.mark.parametrize(
    ("paths", "extras", "message"),
    [
        ("base,lora-base", {}, r"paths 'lora-base': must be \[NAME=\]PATH"),
        ("base,../x=ours", {}, r"paths '../x=ours': must be"),
        ("ours,ours", {}, "'ours' is there twice"),
        ("ours,again=ours", {}, "nothing in their rows would tell 'ours' and 'again' apart"),
        ("ours", {"stock": {}}, "extra-of 'stock': no engine of this name; there are ours"),
    ],
)
def test_impossible_engines_are_refused(paths: str, extras: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        together_plan.specs(POINT, paths, extras)


def test_engines_have_names_backends_and_arguments_of_their_own() -> None:
    point = replace(POINT, moe_backend="triton_unfused", extra={"a": 1})
    found = together_plan.specs(point, "stock:marlin, graphs=ours,ours", {"graphs": {"jit_monitor_mode": "error"}})
    assert [(s.name, s.point.path, s.point.moe_backend, s.point.extra) for s in found] == [
        ("stock:marlin", "stock", "marlin", {"a": 1}),
        ("graphs", "ours", "triton_unfused", {"a": 1, "jit_monitor_mode": "error"}),
        ("ours", "ours", "triton_unfused", {"a": 1}),
    ]


def test_engines_may_be_behind_the_server_with_slots_and_speculation_of_their_own() -> None:
    paths = "stock:marlin@http,few=ours@http,ours,spec=ours"
    found = together_plan.specs(POINT, paths, {}, {"few": 4}, {"spec": "synthetic", "stock:marlin@http": "ngram"})
    assert [(s.name, s.file_name, s.point.path, s.point.moe_backend, s.point.via, s.point.slots) for s in found] == [
        ("stock:marlin@http", "stock-marlin-http", "stock", "marlin", "http", 0),
        ("few", "few", "ours", "auto", "http", 4),
        ("ours", "ours", "ours", "auto", "engine", 0),
        ("spec", "spec", "ours", "auto", "engine", 0),
    ]
    assert [(s.point.spec, s.point.alphabet) for s in found] == [
        ("ngram", 0), ("none", 0), ("none", 0), ("synthetic", 64),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="slots-of 'many': no engine of this name"):
        together_plan.specs(POINT, "ours", {}, {"many": 4})
    with pytest.raises(ValueError, match="spec-of 'many': no engine of this name"):
        together_plan.specs(POINT, "ours", {}, {}, {"many": "ngram"})


def test_an_engine_behind_the_server_is_measured_but_not_probed(bench: Bench) -> None:
    outcome = bench.run(
        paths="base,ours,door=ours@http", base_loads="closed:16", alternations=1, probe=True, reference="ours"
    )
    assert outcome.trouble == []
    assert [(row["path"], row["via"], row["load"]) for row in bench.rows] == [
        ("base", "engine", "closed:16"), ("ours", "engine", "closed:16"), ("ours", "http", "closed:16"),
        ("lora-base", "engine", "closed:16"), ("lora-base", "http", "closed:16"),
    ]  # fmt: skip
    assert "door: answers through the server are not compared" in bench.text()
    assert "base against ours: 1 answers, 1 equal" in bench.text()
    # what the front door costs is the ratio to the same engine in its process
    [line] = [line for line in outcome.table.split("base traffic")[0].splitlines() if line.startswith("| door |")]
    assert "| 0.751 (0.751 to 0.751) | 1.000 (1.000 to 1.000) |" in line
    with pytest.raises(ValueError, match="reference 'door': must be one of the engines base, ours"):
        bench.run(paths="base,ours,door=ours@http", probe=True, reference="door")


def test_engines_that_start_together_share_no_files(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    run = bench.made(paths="ours,ours@http,few=ours@http", slots_of=["few=4"])
    starts = run._starts(bench.folder, run.command)
    caches = {name: start.environ["VLLM_CACHE_ROOT"] for name, start in starts.items()}
    assert caches == {
        name: str(bench.folder / "work" / "caches" / file)
        for name, file in (("ours", "ours"), ("ours@http", "ours-http"), ("few", "few"))
    }
    logs = [option_of(list(start.line), "--server-log") for start in starts.values()]
    own = bench.folder / "work" / "logs"
    assert logs == [None, str(own / "ours-http-server.log"), str(own / "few-server.log")]
    assert option_of(list(starts["few"].line), "--slots") == "4"


def option_of(line: list[str], flag: str) -> str | None:
    return line[line.index(flag) + 1] if flag in line else None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--slots-of", "few=0"], "slots-of 'few=0': must be NAME=N with N >= 1"),
        (["--slots-of", "8"], "slots-of '8': must be NAME=N"),
        (
            ["--spec-of", "ours=eagle"],
            "spec-of 'ours=eagle': must be NAME=METHOD with a method of none, ngram, synthetic",
        ),
        (["--probe", "--spec-of", "ours=synthetic"], "probe: synthetic acceptance makes up its answers"),
        (["--extra-of", "ours"], "extra-of 'ours': must be NAME=JSON"),
        (["--extra-of", "ours={1}"], "extra-of 'ours={1}': must be NAME=JSON"),
        (["--limit", "0"], "limit 0.0: must be above 0"),
        (["--utilization", "2"], "utilization 2.0: must be above 0 and at most 1"),
        (["--base-loads", "closed:0"], "load 'closed:0': must be closed:N"),
        (["--probe", "--reference", "mine"], "reference 'mine': must be one of the engines"),
        (["--probe", "--spec", "synthetic"], "probe: synthetic acceptance makes up its answers"),
    ],
)
def test_impossible_options_are_refused_by_both_command_lines(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(line)
    assert message in capsys.readouterr().err
    ran = CliRunner().invoke(command_line, ["bench", "retention", "--together", *line])
    assert ran.exit_code == 1
    assert f"error: {message}" in ran.output


def test_options_of_the_other_way_are_refused() -> None:
    ran = CliRunner().invoke(command_line, ["bench", "retention", "--probe"])
    assert "--probe is only for --together" in ran.output
    ran = CliRunner().invoke(command_line, ["bench", "retention", "--together", "--variants", "base"])
    assert "--variants is not for --together" in ran.output


def test_both_command_lines_plan_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[list[str]]] = []

    def run(self: Together) -> Outcome:
        seen.append([self.command(spec, Path("/turns")) for spec in self._specs])
        return Outcome()

    monkeypatch.setattr(Together, "run", run)
    line = ["--paths", "stock:marlin,ours", "--requests", "16", "--extra", '{"a": 1}', "--commit", "c"]
    assert main(line) == 0
    assert CliRunner().invoke(command_line, ["bench", "retention", "--together", *line]).exit_code == 0
    assert seen[0] == seen[1]
    assert seen[0][0][3:5] == ["--path", "stock"]


def test_the_bare_command_imports_nothing_but_the_standard_library() -> None:
    code = "import lorahost.bench.together, sys; print([n for n in sys.argv[1:] if n in sys.modules])"
    heavy = ["vllm", "torch", "click", "pydantic", "aiohttp", "numpy", "flask", "matplotlib"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
