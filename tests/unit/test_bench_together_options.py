"""The two command lines of engines that take turns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lorahost.bench.together import Outcome, Together, main
from lorahost.cli import main as command_line


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
        (["--profile", "--loads", "poisson:2"], "profile: needs a closed load in --loads"),
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
    for flag in ("--probe", "--profile"):
        ran = CliRunner().invoke(command_line, ["bench", "retention", flag])
        assert f"{flag} is only for --together" in ran.output
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
