"""`lorahost tune` as tests call it."""

from __future__ import annotations

from click.testing import CliRunner

from lorahost.cli import main as lorahost


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(lorahost, ["tune", *arguments])
    return result.exit_code, result.output
