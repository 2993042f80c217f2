"""`make demo-aws` with the real engine: an endpoint's whole life against the local account."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]


def test_the_whole_story() -> None:
    command = [sys.executable, str(ROOT / "examples" / "aws_demo.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert ", 0 wrong" in done.stdout
    assert "has no capacity" in done.stdout
    assert "Arr" in done.stdout.split("Tell me about the sea.")[1]
    assert "objects left in the bucket: 0" in done.stdout
