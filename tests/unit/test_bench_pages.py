"""The pages about benchmarks name the files of rows, and `lorahost bench tables` prints their tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.bench_rows import write

from lorahost.bench import tables
from lorahost.bench.point import Point
from lorahost.cli import main

ROOT = Path(__file__).parents[2]
RESULTS = {path.name for path in (ROOT / "bench" / "results").iterdir()}


def section(page: str, title: str) -> str:
    """A page's text from a heading to the next of its level."""
    return (ROOT / page).read_text().split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_list_of_files_has_each_file_of_rows_once_and_no_other() -> None:
    lines = [line for line in section("docs/benchmarks.md", "Every file of rows").splitlines() if line[:1] == "|"]
    named = [name for line in lines for name in re.findall(r"`([\w.]+)`", line.split(" | ")[-1])]
    assert sorted(named) == sorted(RESULTS)


def test_documented_commands_write_the_files_that_are_there() -> None:
    text = section("docs/measured.md", "How it was measured")
    named = re.findall(r"--out (\S+\.csv)", text.split("```")[1])
    assert len(named) > 10
    assert set(named) <= RESULTS
    # slots.csv has two mixes of adapters; any other file is one command's
    assert sorted({name for name in named if named.count(name) > 1}) == ["slots.csv"]


@pytest.mark.parametrize("where", [[], ["--where", "path=stock"]])
def test_the_command_prints_what_the_module_prints(
    tmp_path: Path, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write(tmp_path / "rows.csv", (Point("base"), [200.0], "a"), (Point("stock"), [100.0], "b")))
    ran = CliRunner().invoke(main, ["bench", "tables", file, *where])
    assert ran.exit_code == 0, ran.output
    assert "| vLLM | 100.0 (100.0 to 100.0) |" in ran.output
    assert ("| no LoRA |" in ran.output) == (not where)
    assert tables.main([file, *where]) == 0
    assert capsys.readouterr().out == ran.output


def test_the_command_refuses_other_files_and_conditions(tmp_path: Path) -> None:
    file = str(write(tmp_path / "rows.csv", (Point("base"), [200.0], "a")))
    for line, message in (
        ([str(tmp_path / "none.csv")], "error: "), ([file, "--where", "speed=1"], "COLUMN=VALUE"),
    ):  # fmt: skip
        ran = CliRunner().invoke(main, ["bench", "tables", *line])
        assert ran.exit_code == 1
        assert message in ran.output
