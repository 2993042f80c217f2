"""Engines that take turns, with stand-ins for their processes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.bench_rows import write
from tests.unit.bench_together_run import CLOSED, NAMES, POINT, SOLO, Bench

from lorahost.bench import chart, compare, together_plan
from lorahost.bench.loads import Load
from lorahost.bench.rows import Row
from lorahost.bench.together import report
from lorahost.bench.together_plan import Job

POINT_EXTRA = {"kv_cache_memory_bytes": 2_500_000_000, "gpu_memory_utilization": 0.2}


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


def test_after_measuring_each_engine_says_where_a_step_s_time_goes(bench: Bench) -> None:
    point = replace(POINT, loads=(Load(rate=2.0), CLOSED, SOLO))
    outcome = bench.run(point, paths="base,ours,door=ours@http", alternations=1, profile=True)
    assert outcome.trouble == []
    assert "door: an engine behind the server is not profiled" in bench.text()
    [shown] = [text for text in bench.said if "| a step | base | ours |" in text]
    assert "a decode step under closed:16" in shown
    assert "| span, us | 200.0 | 150.0 |" in shown
    assert "| kernel of closed:16 | 200.0 (1) | 150.0 (1) |" in shown
    assert bench.said.index(shown) > max(n for n, text in enumerate(bench.said) if "otps_p50" in text)
    found = json.loads((bench.folder / "work" / "logs" / "profile.json").read_text())
    assert {name: one["span_us"] for name, one in found.items()} == {"base": 200.0, "ours": 150.0}
    # all rows are there: engines start for the profile only, and none that is not asked
    bench.started.clear()
    assert bench.run(point, paths="base,ours,door=ours@http", alternations=1, profile=True).trouble == []
    assert bench.started == ["base", "ours"]
    assert len(bench.rows) == 9


def test_an_engine_that_dies_is_missing_in_the_profile(bench: Bench) -> None:
    outcome = bench.run(alternations=1, profile=True, extra={"ours": {"die": 2}})
    assert "engine ours ended with 9 while it was asked a profile under closed:16;" in outcome.trouble[0]
    assert any("| a step | base | stock:marlin |" in text for text in bench.said)
    outcome = bench.run(paths="ours", alternations=1, profile=True, extra={"ours": {"fail": True}})
    assert "no profile: there is no engine that could be asked" in outcome.trouble
    assert (bench.folder / "work" / "logs" / "profile.json").read_text() == "{}"


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
